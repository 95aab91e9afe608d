"""Tests in Triton's interpreter, which must be turned on before Triton is imported.

tests/kernels/test_interpreted.py runs this folder in a process of its own. To run one of these tests, set
TRITON_INTERPRET=1. The interpreter computes products in bfloat16 incorrectly, so that all tests are in float32.
"""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    from triton.runtime import interpreter

    # It checks each addition of integers for an overflow, which takes half of the time.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Use tiles so small that even the maps of these tests take several programs, with several images each."""
    from depthfold.kernels import tiles

    norm, pointwise = tiles.NormTile(512, 1, 16), tiles.PointwiseTile(16, 16, 16, 1, 1)
    depthwise = tiles.DepthwiseTile(strip=2, strips=2, elements=32, warps=1, launched=1)
    for name, tile in dict(NORM=norm, POINTWISE_FORWARD=pointwise, POINTWISE_BACKWARD=pointwise).items():
        monkeypatch.setattr(tiles, name, (tile, tile))
    for name in ("DEPTHWISE_FORWARD", "DEPTHWISE_BACKWARD"):
        monkeypatch.setattr(tiles, name, (depthwise, depthwise))
