"""Records a function as a CUDA graph, and leaves the process usable if that fails."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch


class CannotCapture(RuntimeError):
    """The reason why a training step cannot be captured."""


def record_cuda_graph(body: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """Run the body once, then capture it without running it, and return the graph.

    The body must allocate no tensor that outlives it, and its tensors must stay at their addresses.
    """
    stream = _capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream), _fastest_convolutions():
            _warm_up(body)
            _make_room(device)
            return _capture(body, device)
    finally:
        torch.cuda.current_stream(device).wait_stream(stream)


@functools.cache  # libraries keep a workspace for each stream
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _fastest_convolutions() -> Iterator[None]:
    """Let cuDNN time its algorithms in the warm-up, unless results shall be reproducible.

    The shapes do not change, so the capture uses the same algorithms.
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or not torch.backends.cudnn.deterministic
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _warm_up(body: Callable[[], None]) -> None:
    """Run the body, so that libraries choose algorithms and allocate memory, and check that it can be replayed."""
    generator, mode = torch.default_generator.get_state(), torch.cuda.get_sync_debug_mode()
    # A step that waits for the device would also fail in the capture, but then not all of PyTorch's state is restored.
    torch.cuda.set_sync_debug_mode("error")
    try:
        body()
    except RuntimeError as error:
        if "synchronizing CUDA operation" in str(error):
            raise CannotCapture("the step waits for the device, for example in Tensor.item()") from error
        raise
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    if not torch.equal(generator, torch.default_generator.get_state()):
        raise CannotCapture("the step draws random numbers on the CPU")


def _make_room(device: torch.device) -> None:
    """Free cached memory if the capture may need it. The allocator does not do so during a capture."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if torch.cuda.mem_get_info(device)[0] < 1.25 * cached:  # the warm-up has cached what the capture will allocate
        torch.cuda.empty_cache()


def _capture(body: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    # Other threads may use the device meanwhile, for example to read images.
    graph.capture_begin(pool, capture_error_mode="thread_local")
    try:
        try:
            body()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # which would only say that the capture has failed
                graph.capture_end()
            raise
        graph.capture_end()
    except BaseException:
        _clean_up(graph, pool, device)
        raise
    return graph


def _clean_up(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> None:
    """Remove what a failed capture leaves behind."""
    graph.reset()
    # If capture_end() fails, PyTorch still takes the capture to be under way: it cannot free cached memory, and the
    # generator refuses to draw. There is no public way to end it. A copy of the generator's state is not in a capture.
    with contextlib.suppress(RuntimeError):  # it was not under way
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())
