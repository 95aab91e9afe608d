"""The backend protocol, and functions that every backend needs."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import sys
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
    """A module that was compiled for given inputs and has run on them once."""

    def __call__(self) -> Inputs:
        """Run once and return all outputs on the CPU, half precision as float32."""

    def seconds(self) -> float:
        """Run once and return the duration. Inputs are already on the device; outputs are not copied."""

    def close(self) -> None:
        """Free all resources. The module cannot run afterwards."""


@runtime_checkable
class Backend(Protocol):
    """A runtime: a frozen dataclass whose fields are its options.

    Raises BackendError if the runtime rejects a module, OutOfMemory if the module does not fit into memory, and
    MissingDependency if a library is not installed. Modules are not modified, and run in evaluation mode.
    """

    name: ClassVar[str]

    def environment(self, inputs: Inputs) -> Environment:
        """Return the environment of modules compiled for these inputs. No field is None."""

    def compile(self, module: nn.Module, inputs: Inputs) -> Compiled:
        """Compile the module for these inputs and run it once."""

    def export(self, module: nn.Module, inputs: Inputs, path: str | Path) -> Path:
        """Write the module to a file that the runtime loads without depthfold. Return the path."""


@runtime_checkable
class Exporter(Backend, Protocol):
    """A backend that can open the files that it exports."""

    def export(self, module: nn.Module, inputs: Inputs, path: str | Path, *, dynamic_batch: bool = False) -> Path:
        """With `dynamic_batch`, write a file that accepts batches of any size, or raise BackendError. The inputs must
        then have a batch of at least 2, because PyTorch treats a size of 1 as a constant."""

    def open(self, path: str | Path, inputs: Inputs) -> Compiled:
        """Load a file that export() wrote for these inputs and run it once."""


@runtime_checkable
class SupportsInside(Backend, Protocol):
    """A backend on which a module that runs alone has a cost that it does not have inside a network."""

    def inside(self) -> Backend:
        """Return the backend that runs a module without that cost."""


def private_copy(module: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    """Return copies of module and inputs in evaluation mode and without gradients, which a backend may modify."""
    if not inputs or not all(isinstance(tensor, Tensor) for tensor in inputs):
        raise InvalidValue(
            f"A module is compiled for a tuple of tensors, found {inputs!r:.80}. Pass the arguments of its forward."
        )
    module = copy.deepcopy(module).eval().requires_grad_(False)
    return module, tuple(tensor.detach().clone() for tensor in inputs)


def float32_copy(module: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    """Return private copies in float32, whatever the precision of the network."""
    module, inputs = private_copy(module, inputs)
    return module.float(), tuple(tensor.float() if tensor.is_floating_point() else tensor for tensor in inputs)


def flatten(output: Any) -> Inputs:
    """Return the tensors in the output of a forward, in order. None, numbers and text are left out."""
    found = tuple(_tensors(output))
    if not found:
        raise BackendError(f"The forward must return at least one tensor, found {output!r:.80}.")
    return found


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | tuple | list):
        for item in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(item)
    elif not (output is None or isinstance(output, bool | int | float | str)):
        raise BackendError(
            f"The forward must return tensors, or tuples or dicts of tensors, found {type(output).__name__}."
        )


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU, half precision as float32."""
    reduced = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.detach().to("cpu", torch.float32 if reduced else tensor.dtype, copy=True)


def raise_interruption(error: BaseException, handled: BaseException | None) -> None:
    """Raise the Ctrl-C that an error followed, unless it is one that was being handled before.

    If it comes while a library is imported, the library may fail with an error of its own, which would say that the
    module cannot run.
    """
    earlier = set(map(id, _chain(handled)))
    for before in _chain(error):
        if isinstance(before, KeyboardInterrupt) and id(before) not in earlier:
            raise before from None


def _chain(error: BaseException | None) -> list[BaseException]:
    """Return an error, its causes, and the errors that were being handled when these were raised."""
    found: list[BaseException] = []
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and not any(one is other for other in found):
            found.append(one)
            waiting += [one.__cause__, one.__context__]
    return found


@contextlib.contextmanager
def backend_errors(what: str) -> Iterator[None]:
    """Convert the errors of a runtime to BackendError, with the reason in one line after `what`.

    If the device is unusable afterwards, raise SpoiledDevice, because the error says nothing about the module.
    """
    handled = sys.exception()
    try:
        yield
    except SpoiledDevice:
        raise
    except Exception as error:
        raise_interruption(error, handled)
        text = f"{what}: {one_line(error)}"
        if spoils_device(error):
            raise SpoiledDevice(
                f"{text}, and the device is now unusable for this process. Start again to resume from the journal; if "
                "the error comes back, use other options of the runtime, or another runtime."
            ) from error
        if isinstance(error, DepthfoldError):
            raise
        if lacks_memory(error):
            raise OutOfMemory(text) from error
        raise BackendError(text) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress what libraries print and log for their developers, such as the graph of a failed export."""
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)


def batched(inputs: Inputs) -> tuple[bool, ...]:
    """Return for each input whether its first dimension is the batch, that is, as large as that of the first input."""
    size = inputs[0].shape[:1]
    return tuple(tensor.dim() > 0 and tensor.shape[:1] == size for tensor in inputs)


def with_batch(inputs: Inputs, size: int) -> Inputs:
    """Return the inputs with a batch of another size, by repeating or dropping items."""
    pairs = zip(inputs, batched(inputs), strict=True)
    return tuple(
        tensor[torch.arange(size, device=tensor.device) % len(tensor)] if has else tensor for tensor, has in pairs
    )


def dynamic_shapes(inputs: Inputs) -> tuple[dict[int, Any], ...]:
    """Return the `dynamic_shapes` for torch.export: only the batch is dynamic."""
    batch = torch.export.Dim("batch", min=1)
    return tuple({0: batch} if has else {} for has in batched(inputs))


def check_suffix(path: str | Path, suffix: str) -> Path:
    path = Path(path)
    if path.suffix != suffix:
        raise InvalidValue(f"The files of this runtime end in {suffix}, found {path.name!r}. Use {path.stem}{suffix}.")
    return path


def check_threads(threads: int | None) -> None:
    if threads is not None and threads < 1:
        raise InvalidValue(f"The number of threads must be at least 1, found {threads}. Omit it to use PyTorch's.")
