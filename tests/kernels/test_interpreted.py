"""Run the tests of the folder `interpreted`, with Triton's interpreter in place of a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lacking import needs

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.slow
@needs("triton")
def test_kernels_in_the_interpreter():
    """In a process of its own: all kernels that are loaded after this variable is set are interpreted."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
