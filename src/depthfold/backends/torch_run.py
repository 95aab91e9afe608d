"""Where and how PyTorch runs a module: shared by the eager and the compiling backend, and by TensorRT."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from depthfold.backends.base import Inputs, expect_threads, flatten, on_cpu, private_copy, reasons
from depthfold.backends.cuda import captured, cuda_settings
from depthfold.backends.machine import device_name, environment_of, thread_count
from depthfold.backends.registry import spelled
from depthfold.core import Environment
from depthfold.errors import InvalidValue
from depthfold.support.document import decode

Device = Literal["cpu", "cuda"]
Precision = Literal["float32", "tf32", "bfloat16", "float16"]

_TYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Device, precision, layout of the maps and number of threads."""

    device: Device
    precision: Precision
    channels_last: bool
    threads: int | None

    def __post_init__(self) -> None:
        expect_threads(self.threads)
        decode(Device, self.device, "The option device")
        decode(Precision, self.precision, "The option precision")
        if self.precision == "tf32" and self.device != "cuda":
            raise InvalidValue("TF32 exists on CUDA devices only. Use device=cuda, or precision=float32.")

    def environment(self, runtime: str, inputs: Inputs) -> Environment:
        version = str(torch.__version__)
        if self.device == "cuda":
            version = f"{version}, cuDNN {torch.backends.cudnn.version()}"  # type: ignore[no-untyped-call]
        return environment_of(
            inputs,
            device=device_name(self.device),
            runtime=runtime,
            version=version,
            precision=self.precision,
            threads=self.threads,
        )

    def moved(self, module: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
        """A copy of both at this place, in this precision and layout."""
        device_name(self.device)  # raises where there is no such device, before anything is copied
        module, inputs = private_copy(module, inputs)
        module = module.to(self.device, _TYPES[self.precision])
        if self.channels_last:
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return module, tuple(map(self._moved, inputs))

    def _moved(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self.device, _TYPES[self.precision] if tensor.is_floating_point() else tensor.dtype)
        last = self.channels_last and tensor.dim() == 4
        return tensor.contiguous(memory_format=torch.channels_last) if last else tensor.contiguous()

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """PyTorch's global settings as this place needs them; afterwards they are as they were."""
        with torch.inference_mode(), _threads(thread_count(self.threads)):
            if self.device == "cpu":
                yield
            else:
                with cuda_settings(tf32=self.precision != "float32", benchmark=True):
                    yield


class Placed:
    """A backend whose options say at which place PyTorch runs. The options are the backend's own fields, in its own
    order: the name of the runtime in an environment spells them so."""

    __slots__ = ()

    name: ClassVar[str]
    title: ClassVar[str]  # as messages call it
    device: Device
    precision: Precision
    channels_last: bool
    cuda_graphs: bool
    threads: int | None

    def inside(self) -> Self:
        """On a GPU with CUDA graphs: inside a network the processor launches a block while the device works on the one
        before, so a launch costs next to nothing there. A block alone would wait for it."""
        return replace(self, cuda_graphs=True) if self.device == "cuda" else self  # type: ignore[type-var]

    def _place(self) -> Place:
        if self.cuda_graphs and self.device != "cuda":
            raise InvalidValue("CUDA graphs exist on CUDA devices only. Use device=cuda, or leave out cuda_graphs.")
        return Place(
            device=self.device, precision=self.precision, channels_last=self.channels_last, threads=self.threads
        )

    def _run(self, place: Place, forward: Callable[[], Any]) -> TorchRun:
        with reasons(f"{self.title} cannot run this module"), place.settings():
            return TorchRun(place, captured(forward) if self.cuda_graphs else forward, self.title)

    def environment(self, inputs: Inputs) -> Environment:
        return self._place().environment(spelled(self, without=("device", "precision", "threads")), inputs)


class TorchRun:
    """Something that PyTorch runs, at its place, ready to be timed."""

    __slots__ = ("_events", "_forward", "_place", "_what")

    def __init__(self, place: Place, forward: Callable[[], Any], what: str) -> None:
        self._place, self._forward, self._what = place, forward, what
        self._events: tuple[Any, Any] | None = None
        if place.device == "cuda":
            event: Any = torch.cuda.Event
            self._events = event(enable_timing=True), event(enable_timing=True)
        with reasons(f"{what} cannot run this module"), place.settings():
            forward()  # its outputs stay where they are: those of one block may be half a gigabyte
            if place.device == "cuda":
                torch.cuda.synchronize()  # an error of the device is told here, not later and of something else

    def __call__(self) -> Inputs:
        with reasons(f"{self._what} cannot run this module"), self._place.settings():
            return tuple(on_cpu(tensor) for tensor in flatten(self._forward()))

    def seconds(self) -> float:
        with reasons(f"{self._what} cannot run this module"), self._place.settings():
            return self._by_clock() if self._events is None else self._by_events(*self._events)

    def close(self) -> None:
        self._forward = _closed
        if self._events is not None:
            torch.cuda.empty_cache()

    def _by_clock(self) -> float:
        start = time.perf_counter()
        output = self._forward()  # kept until the clock has been read: giving its memory back is not the network's work
        taken = time.perf_counter() - start
        del output
        return taken

    def _by_events(self, start: Any, end: Any) -> float:
        """The device's own clock, from an idle device to an idle device."""
        torch.cuda.synchronize()
        start.record()
        self._forward()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


def _closed() -> Any:
    raise InvalidValue("This compiled module was closed; compile it again.")


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if before == number:
        yield
        return
    torch.set_num_threads(number)
    torch.empty(1 << 18).zero_()  # starts the new threads now, or the first operation that is timed would pay for it
    try:
        yield
    finally:
        torch.set_num_threads(before)
