"""The exceptions of depthfold. `except DepthfoldError` catches all of them."""

from __future__ import annotations


class DepthfoldError(Exception):
    """The base class of all exceptions of depthfold."""


class InvalidValue(DepthfoldError, ValueError):
    """An argument or a JSON document is invalid."""


class TraceError(DepthfoldError):
    """The forward of the model cannot be traced, or does not run on the example inputs."""


class InputSizeError(DepthfoldError, ValueError):
    """The padding at this input size differs from the padding at the traced size."""


class PlanError(DepthfoldError, ValueError):
    """A plan does not fit the network."""


class VerificationError(DepthfoldError):
    """The outputs of the merged network or of an exported file differ from those of the original."""


class TableError(DepthfoldError, ValueError):
    """A latency or importance table is incomplete, inconsistent, or belongs to another network or environment."""


class BudgetError(DepthfoldError, ValueError):
    """A budget is invalid, or no plan meets it.

    `fastest` is the latency of the fastest plan that was timed, as a share of the original's latency.
    """

    def __init__(self, message: str, *, fastest: float | None = None) -> None:
        super().__init__(message)
        self.fastest = fastest


class MissingDependency(DepthfoldError, ImportError):
    """An optional package is needed but not installed."""


class BackendError(DepthfoldError, RuntimeError):
    """A runtime rejects a module or a request. The message is one line."""


class OutOfMemory(BackendError):
    """A module does not fit into the memory of the machine or the accelerator."""


class SpoiledDevice(DepthfoldError, RuntimeError):
    """The device is unusable until a new process is started.

    It is not a BackendError, because it says nothing about the module that was running.
    """


class NotFinite(DepthfoldError, ArithmeticError):
    """A loss or score in training is not finite. `step` and `lr` are those of the failure, if known."""

    def __init__(self, message: str, *, step: int | None = None, lr: float | None = None) -> None:
        super().__init__(message)
        self.step, self.lr = step, lr


class JournalError(DepthfoldError):
    """A journal cannot be read or written, is damaged, or is in use."""


class DataError(DepthfoldError, ValueError):
    """A dataset is missing, damaged, or not what the task or the model expects."""


class RunError(DepthfoldError):
    """A run folder cannot be used, is damaged or incomplete, or belongs to another network."""


class CheckpointError(DepthfoldError):
    """A checkpoint cannot be read or written, is damaged, is in use, or belongs to another training run."""


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
    # Raised if there is no memory to initialise a library, or for any algorithm of cuDNN. They also have other causes;
    # the job is then retried alone and fails again.
    "cublas_status_not_initialized",
    "cudnn_status_not_initialized",
    "unable to find an engine to execute this computation",
)


def lacks_memory(error: BaseException) -> bool:
    """Return True if an error of any library means that memory ran out."""
    if isinstance(error, MemoryError | OutOfMemory):
        return True
    # PyTorch's class is recognised by name, because this module must not import torch.
    named = any(cls.__name__ == "OutOfMemoryError" for cls in type(error).__mro__)
    return named or any(sign in str(error).lower() for sign in _MEMORY)


# PyTorch's messages start with "CUDA error"; other runtimes have only the text of CUDA.
_SPOILS = (
    "cuda error",
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "device-side assert triggered",
)
# CUDA raises these before anything runs, so that the device is still usable.
_REFUSALS = (
    "invalid configuration argument",
    "invalid argument",
    "invalid device function",
    "too many resources requested for launch",
    "no kernel image is available",
    "status_not_supported",
    "status_invalid_value",
    "stream is capturing",  # nothing runs while a CUDA graph is recorded
    "during capture",
)


def spoils_device(error: BaseException) -> bool:
    """Return True if the device is unusable in this process after an error such as an illegal memory access."""
    if isinstance(error, SpoiledDevice):
        return True
    text = str(error).lower()
    return any(sign in text for sign in _SPOILS) and not (
        lacks_memory(error) or any(sign in text for sign in _REFUSALS)
    )
