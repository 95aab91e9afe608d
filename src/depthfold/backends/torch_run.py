"""Running and timing modules with PyTorch, shared by the backends for eager PyTorch, TorchInductor and TensorRT."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from depthfold.backends.base import Inputs, backend_errors, check_threads, flatten, on_cpu, private_copy
from depthfold.backends.cuda import capture_cuda_graph, cuda_settings
from depthfold.backends.machine import device_name, make_environment, thread_count
from depthfold.backends.memory_format import channels_last, set_channels_last
from depthfold.backends.precision import disable_autocast
from depthfold.backends.registry import describe_target
from depthfold.core import Environment
from depthfold.errors import InvalidValue
from depthfold.support.document import decode

Device = Literal["cpu", "cuda"]
Precision = Literal["float32", "tf32", "bfloat16", "float16"]

_TYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def exported_program(module: nn.Module, inputs: Inputs, shapes: tuple[dict[int, Any], ...] | None = None) -> bytes:
    """Return the content of a .pt2 file. PyTorch's own writer of files ends the process if the disk is full."""
    content = io.BytesIO()
    torch.export.save(torch.export.export(module, inputs, dynamic_shapes=shapes), content)
    return content.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptions:
    """Device, precision, memory format and number of threads."""

    device: Device
    precision: Precision
    channels_last: bool
    threads: int | None

    def __post_init__(self) -> None:
        check_threads(self.threads)
        decode(Device, self.device, "The option device")
        decode(Precision, self.precision, "The option precision")
        if self.precision == "tf32" and self.device != "cuda":
            raise InvalidValue("TF32 needs a CUDA device. Use device=cuda, or precision=float32.")

    def environment(self, runtime: str, inputs: Inputs) -> Environment:
        version = str(torch.__version__)
        if self.device == "cuda":
            version = f"{version}, cuDNN {torch.backends.cudnn.version()}"  # type: ignore[no-untyped-call]
        return make_environment(
            inputs, device=device_name(self.device), runtime=runtime, version=version, precision=self.precision,
            threads=self.threads,
        )  # fmt: skip

    def moved(self, module: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
        """Return copies of both on this device, in this precision and memory format."""
        device_name(self.device)  # raises if there is no such device, before anything is copied
        module, inputs = private_copy(module, inputs)
        module = module.to(self.device, _TYPES[self.precision])
        if self.channels_last:
            set_channels_last(module)
        return module, tuple(map(self._moved, inputs))

    def _moved(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self.device, _TYPES[self.precision] if tensor.is_floating_point() else tensor.dtype)
        return channels_last(tensor) if self.channels_last else tensor.contiguous()

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Set PyTorch's global settings for these options, and restore them afterwards."""
        autocast = disable_autocast(torch.device(self.device))
        with torch.inference_mode(), autocast, _threads(thread_count(self.threads)):
            if self.device == "cpu":
                yield
            else:
                with cuda_settings(tf32=self.precision != "float32", benchmark=True):
                    yield


class TorchBackend:
    """The base class of the backends for eager PyTorch and TorchInductor.

    The subclasses declare the options as fields, in the order in which the runtime's name in an environment lists them.
    """

    __slots__ = ()

    name: ClassVar[str]
    title: ClassVar[str]  # its name in messages
    device: Device
    precision: Precision
    channels_last: bool
    cuda_graphs: bool
    threads: int | None

    def inside(self) -> Self:
        """Return the backend with CUDA graphs on a GPU.

        Inside a network, the CPU launches a block while the GPU computes the previous one, so launching takes almost no
        time. A block alone would wait for its launch.
        """
        return replace(self, cuda_graphs=True) if self.device == "cuda" else self  # type: ignore[type-var]

    def _options(self) -> TorchOptions:
        if self.cuda_graphs and self.device != "cuda":
            raise InvalidValue("CUDA graphs need a CUDA device. Use device=cuda, or omit cuda_graphs.")
        return TorchOptions(
            device=self.device, precision=self.precision, channels_last=self.channels_last, threads=self.threads
        )

    def _run(self, options: TorchOptions, forward: Callable[[], Any]) -> TorchRun:
        with backend_errors(f"{self.title} cannot run this module"), options.settings():
            return TorchRun(options, capture_cuda_graph(forward) if self.cuda_graphs else forward, self.title)

    def environment(self, inputs: Inputs) -> Environment:
        return self._options().environment(describe_target(self, without=("device", "precision", "threads")), inputs)


class TorchRun:
    """A forward that PyTorch runs and times with given options."""

    __slots__ = ("_events", "_forward", "_options", "_title")

    def __init__(self, options: TorchOptions, forward: Callable[[], Any], title: str) -> None:
        self._options, self._forward, self._title = options, forward, title
        self._events: tuple[Any, Any] | None = None
        if options.device == "cuda":
            event: Any = torch.cuda.Event
            self._events = event(enable_timing=True), event(enable_timing=True)
        with backend_errors(f"{title} cannot run this module"), options.settings():
            forward()  # the outputs are not copied: those of one block may take half a gigabyte
            if options.device == "cuda":
                torch.cuda.synchronize()  # an error of the device is raised here, not in a later call

    def __call__(self) -> Inputs:
        with backend_errors(f"{self._title} cannot run this module"), self._options.settings():
            return tuple(on_cpu(tensor) for tensor in flatten(self._forward()))

    def seconds(self) -> float:
        with backend_errors(f"{self._title} cannot run this module"), self._options.settings():
            return self._clock_seconds() if self._events is None else self._event_seconds(*self._events)

    def close(self) -> None:
        self._forward = _closed
        if self._events is not None:
            torch.cuda.empty_cache()

    def _clock_seconds(self) -> float:
        start = time.perf_counter()
        output = self._forward()  # kept until the clock is read, so that freeing it is not timed
        seconds = time.perf_counter() - start
        del output
        return seconds

    def _event_seconds(self, start: Any, end: Any) -> float:
        """Time one run with CUDA events, from an idle device to an idle device."""
        torch.cuda.synchronize()
        start.record()
        self._forward()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


def _closed() -> Any:
    raise InvalidValue("This compiled module was closed. Compile it again.")


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if before == number:
        yield
        return
    torch.set_num_threads(number)
    torch.empty(1 << 18).zero_()  # start the new threads now, not in the first timed operation
    try:
        yield
    finally:
        torch.set_num_threads(before)
