"""The protocol of a runtime, and the few things that every implementation of it needs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from depthfold.core import Environment
from depthfold.errors import (
    BackendError,
    DepthfoldError,
    InvalidValue,
    OutOfMemory,
    SpoiledDevice,
    lacks_memory,
    spoils_device,
)
from depthfold.support.text import one_line

Inputs = tuple[Tensor, ...]


class Compiled(Protocol):
    """A module compiled for given inputs. It has run once already, so a shape that cannot run never gets this far."""

    def __call__(self) -> Inputs:
        """Run once and return all outputs on the CPU, those of reduced precision as float32. For numerics."""

    def seconds(self) -> float:
        """Run once and return how long that took: inputs in place, outputs left where the runtime puts them."""

    def close(self) -> None:
        """Free what it holds. It cannot run any more."""


@runtime_checkable
class Backend(Protocol):
    """A runtime with its options: a frozen dataclass whose fields are the options.

    A module that the runtime rejects raises BackendError, one that does not fit OutOfMemory, a library that is not
    installed MissingDependency. The module that is given is never changed, and always run in evaluation mode.
    """

    name: ClassVar[str]

    def environment(self, inputs: Inputs) -> Environment:
        """Where modules run that are compiled for these inputs. Every field is stated."""

    def compile(self, module: nn.Module, inputs: Inputs) -> Compiled:
        """The module made ready for these inputs, on which it has run once."""

    def export(self, module: nn.Module, inputs: Inputs, path: str | Path) -> Path:
        """Write the module to a file that the runtime loads without depthfold. Returns the path."""


@runtime_checkable
class Exporter(Backend, Protocol):
    """A backend whose files can be read again, so that what was written can be compared with what it was made of."""

    def export(self, module: nn.Module, inputs: Inputs, path: str | Path, *, dynamic_batch: bool = False) -> Path:
        """The file takes batches of any size where `dynamic_batch` is asked for, or it raises BackendError. The batch
        of the inputs must then be 2 or more: PyTorch takes a size of 1 for a constant."""

    def open(self, path: str | Path, inputs: Inputs) -> Compiled:
        """A file that export() wrote, made ready for these inputs, on which it has run once."""


@runtime_checkable
class InsideOthers(Backend, Protocol):
    """A backend on which a module alone waits for something that a part of a larger network does not wait for."""

    def inside(self) -> Backend:
        """The backend that runs a module as it would run inside a network: without that."""


def private_copy(module: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    """A copy of module and inputs that a backend may do with as it likes, in evaluation mode and without gradients."""
    if not inputs or not all(isinstance(tensor, Tensor) for tensor in inputs):
        raise InvalidValue(
            f"A module is compiled for a tuple of tensors, found {inputs!r:.80}. Give at least one, as the forward "
            "takes them."
        )
    module = copy.deepcopy(module).eval().requires_grad_(False)
    return module, tuple(tensor.detach().clone() for tensor in inputs)


def in_float32(module: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    """Such a copy in single precision: whatever a network was trained in, a runtime computes in what it states."""
    module, inputs = private_copy(module, inputs)
    return module.float(), tuple(tensor.float() if tensor.is_floating_point() else tensor for tensor in inputs)


def flatten(output: Any) -> Inputs:
    """The tensors of whatever a forward returns, in order. Nothing, numbers and words beside them cost no time."""
    found = tuple(_tensors(output))
    if not found:
        raise BackendError(f"The module returns no tensor, found {output!r:.80}. Return one from its forward.")
    return found


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | tuple | list):
        for item in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(item)
    elif not (output is None or isinstance(output, bool | int | float | str)):
        raise BackendError(f"The module returns {type(output).__name__}; expected tensors, or tuples or dicts of them.")


def on_cpu(tensor: Tensor) -> Tensor:
    """A copy on the CPU for comparison."""
    reduced = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.detach().to("cpu", torch.float32 if reduced else tensor.dtype, copy=True)


@contextlib.contextmanager
def reasons(what: str) -> Iterator[None]:
    """Whatever a runtime raises, as a BackendError with its reason in one line. What spoils the device is no reason
    against a module, and a SpoiledDevice whoever raised it."""
    try:
        yield
    except SpoiledDevice:
        raise
    except Exception as error:
        text = f"{what}: {one_line(error)}"
        if spoils_device(error):
            raise SpoiledDevice(
                f"{text}. After this error the device does nothing more for this process, so nothing else was tried, "
                "and nothing is noted against what was running. Start again: what a journal holds is kept. If it ends "
                "in the same place each time, use other options of the runtime, or another one."
            ) from error
        if isinstance(error, DepthfoldError):
            raise
        if lacks_memory(error):
            raise OutOfMemory(text) from error
        raise BackendError(text) from error


def batched(inputs: Inputs) -> tuple[bool, ...]:
    """Which of the inputs have a batch in front: those whose first size is that of the first input."""
    size = inputs[0].shape[:1]
    return tuple(tensor.dim() > 0 and tensor.shape[:1] == size for tensor in inputs)


def with_batch(inputs: Inputs, size: int) -> Inputs:
    """The same inputs with a batch of another size: its items over and over again, or the first of them."""
    pairs = zip(inputs, batched(inputs), strict=True)
    return tuple(
        tensor[torch.arange(size, device=tensor.device) % len(tensor)] if has else tensor for tensor, has in pairs
    )


def dynamic_shapes(inputs: Inputs) -> tuple[dict[int, Any], ...]:
    """Sizes that torch.export leaves open: the batch."""
    batch = torch.export.Dim("batch", min=1)
    return tuple({0: batch} if has else {} for has in batched(inputs))


def expect_suffix(path: str | Path, suffix: str) -> Path:
    path = Path(path)
    if path.suffix != suffix:
        raise InvalidValue(f"This runtime writes {suffix} files, found {path.name!r}. Name it {path.stem}{suffix}.")
    return path


def expect_threads(threads: int | None) -> None:
    if threads is not None and threads < 1:
        raise InvalidValue(f"The number of threads must be 1 or more, found {threads}; leave it out for PyTorch's own.")
