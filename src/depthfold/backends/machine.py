"""The names of the machine and its devices in an environment."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

import torch

from depthfold.backends.base import Inputs
from depthfold.core import Environment
from depthfold.errors import BackendError, InvalidValue

# Linux gives only the part numbers of ARM cores (implementer 0x41). These are common in servers and boards.
_ARM_CORES = {
    "0xd03": "Cortex-A53",
    "0xd08": "Cortex-A72",
    "0xd0b": "Cortex-A76",
    "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1",
    "0xd49": "Neoverse-N2",
    "0xd4f": "Neoverse-V2",
    "0xd8e": "Neoverse-N3",
}


@cache
def machine_name() -> str:
    """Return the processor and its number of cores.

    The host name is not used, because a container gets a new one at every start.
    """
    return f"{platform.system()} {platform.machine()}, {_processor()}, {os.cpu_count() or 1} cores"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor() or "unknown processor"
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    if "model name" in facts:
        return facts["model name"]
    part = facts.get("CPU part", "")
    if facts.get("CPU implementer") == "0x41" and part in _ARM_CORES:
        return _ARM_CORES[part]
    return f"processor {facts.get('CPU implementer', 'unknown')}/{part or 'unknown'}"


def device_name(device: str) -> str:
    """Return "cpu", or the name of the GPU that PyTorch uses. Raise BackendError if there is none."""
    if device == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise BackendError(
            f"PyTorch {torch.__version__} finds no CUDA device. Use device=cpu, or install a driver and a PyTorch that "
            "was built with CUDA."
        )
    return gpu_name()


def gpu_name() -> str:
    """Return the name of the GPU, or "cuda" if only another runtime can use it."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cuda"


def make_environment(
    inputs: Inputs, *, device: str, runtime: str, version: str, precision: str, threads: int | None, machine: str = ""
) -> Environment:
    """Return an environment with all fields set. `machine` defaults to this machine."""
    if not inputs or not inputs[0].dim():
        raise InvalidValue(
            "An environment needs the arguments of the forward: tensors whose first dimension is the batch."
        )
    return Environment(
        machine=machine or machine_name(),
        device=device,
        runtime=runtime,
        runtime_version=version,
        precision=precision,
        batch=inputs[0].shape[0],
        input_size=tuple(inputs[0].shape[1:]),
        threads=thread_count(threads),
    )


def thread_count(threads: int | None) -> int:
    """Return `threads`, or PyTorch's number, so that the latencies of all runtimes are comparable."""
    return torch.get_num_threads() if threads is None else threads
