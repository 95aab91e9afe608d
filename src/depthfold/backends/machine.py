"""The machine and its devices, as an environment states them."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

import torch

from depthfold.backends.base import Inputs
from depthfold.core import Environment
from depthfold.errors import BackendError, InvalidValue

# Linux names ARM cores by number only (implementer 0x41). Those of today's servers and boards.
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
    """The processor and its number of cores.

    Not the host's name: a container has a new one at every start, and a table measured in it would then belong to no
    machine at all.
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
    """ "cpu", or the name of the GPU that PyTorch uses."""
    if device == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise BackendError(
            "PyTorch finds no CUDA device on this machine. Use device=cpu, or install a PyTorch that was built with "
            f"CUDA and a driver for it (this one is {torch.__version__})."
        )
    return gpu_name()


def gpu_name() -> str:
    """The GPU's name where PyTorch can tell it: another runtime may see one that PyTorch was built without."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cuda"


def environment_of(
    inputs: Inputs, *, device: str, runtime: str, version: str, precision: str, threads: int | None, machine: str = ""
) -> Environment:
    """An environment that states everything; the machine is this one unless said otherwise."""
    if not inputs or not inputs[0].dim():
        raise InvalidValue("An environment needs the inputs as the forward takes them: tensors with a batch in front.")
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
    """What was asked for, or PyTorch's own number: the same for all runtimes, so that they compare."""
    return torch.get_num_threads() if threads is None else threads
