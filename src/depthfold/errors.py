"""Every error that depthfold raises on purpose.

One base class, so that `except DepthfoldError` catches all of them. A message says what was found, what was
expected and what to do next.
"""

from __future__ import annotations


class DepthfoldError(Exception):
    """The base of every error that depthfold raises on purpose."""


class InvalidValue(DepthfoldError, ValueError):
    """A noun was asked to hold a state that makes no sense, or a JSON document does not describe one."""


class TraceError(DepthfoldError):
    """The model's own forward cannot be traced, or its example inputs do not run."""


class InputSizeError(DepthfoldError, ValueError):
    """A network that was traced at one size pads differently at the size of this input."""


class PlanError(DepthfoldError, ValueError):
    """A plan does not fit the network that it is applied to."""


class VerificationError(DepthfoldError):
    """The merged network does not compute what the rewritten one computes."""


class TableError(DepthfoldError, ValueError):
    """A latency or importance table is incomplete, inconsistent, or belongs to something else."""


class BudgetError(DepthfoldError, ValueError):
    """A budget cannot be read, or no plan meets it. `fastest` is the share of the original's latency that the fastest
    plan takes of those that were timed, where any was."""

    def __init__(self, message: str, *, fastest: float | None = None) -> None:
        super().__init__(message)
        self.fastest = fastest


class MissingDependency(DepthfoldError, ImportError):
    """An optional package is needed and not installed."""


class BackendError(DepthfoldError, RuntimeError):
    """A runtime rejects a module, or cannot do what it is asked for. The reason fits on one line."""


class OutOfMemory(BackendError):
    """A module does not fit into the memory of the machine or of its accelerator."""


class SpoiledDevice(DepthfoldError, RuntimeError):
    """The device failed so that every later call to it fails, too, until a new process begins. So it says nothing
    about the module that was running, and is no BackendError."""


class NotFinite(DepthfoldError, ArithmeticError):
    """Numbers of a training left the finite ones. `step` and `lr` say where and how fast, as far as it is known."""

    def __init__(self, message: str, *, step: int | None = None, lr: float | None = None) -> None:
        super().__init__(message)
        self.step, self.lr = step, lr


class JournalError(DepthfoldError):
    """A journal cannot be read or written, is damaged, or is in use."""


class DataError(DepthfoldError, ValueError):
    """A dataset is missing, damaged, or not what the task or the model expects."""


class RunError(DepthfoldError):
    """A run folder cannot be used, is damaged, lacks what a command needs, or belongs to another network."""


class CheckpointError(DepthfoldError):
    """A checkpoint cannot be read or written, is damaged, is in use, or belongs to another training."""


class ResultError(DepthfoldError):
    """A saved result cannot be read or written, is damaged, or belongs to another model."""


_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "bad_alloc",
    "failed to allocate",
    "not enough memory",
    "alloc_failed",
    "allocation_failed",
    "unable to allocate",
    # Libraries that begin their work only now find no room for it; cuDNN, no room for any of its algorithms. Both texts
    # have other causes, too: tried again alone, what really cannot run fails again.
    "cublas_status_not_initialized",
    "cudnn_status_not_initialized",
    "unable to find an engine to execute this computation",
)


def lacks_memory(error: BaseException) -> bool:
    """Whether an error, of whatever library, says that memory ran out."""
    if isinstance(error, MemoryError | OutOfMemory):
        return True
    # PyTorch's own class by its name: this module must not import torch.
    named = any(cls.__name__ == "OutOfMemoryError" for cls in type(error).__mro__)
    return named or any(sign in str(error).lower() for sign in _MEMORY)


# PyTorch says "CUDA error" of everything; other runtimes give only the words of CUDA itself.
_SPOILS = (
    "cuda error",
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "device-side assert triggered",
)
# What CUDA refuses before anything runs: the device is as it was.
_REFUSALS = (
    "invalid configuration argument",
    "invalid argument",
    "invalid device function",
    "too many resources requested for launch",
    "no kernel image is available",
    "status_not_supported",
    "status_invalid_value",
    "stream is capturing",  # of CUDA graphs: nothing runs while one is recorded
    "during capture",
)


def spoils_device(error: BaseException) -> bool:
    """Whether every later call to the device fails in this process: after an illegal access, a failed assertion."""
    if isinstance(error, SpoiledDevice):
        return True
    text = str(error).lower()
    return any(sign in text for sign in _SPOILS) and not (
        lacks_memory(error) or any(sign in text for sign in _REFUSALS)
    )
