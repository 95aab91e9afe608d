"""What PyTorch needs on a CUDA device: its settings, and graphs of launches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def cuda_settings(*, tf32: bool, benchmark: bool) -> Iterator[None]:
    """TF32 on or off, and whether the fastest convolution algorithm is searched for.

    PyTorch has two ways to set TF32, which must not contradict each other. The old one sets both, and TorchInductor
    reads both; the new one can be read whatever the user did. So: read the new one, set the old one, restore both.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    holders: tuple[Any, ...] = (cudnn.conv, cudnn.rnn, matmul)  # type: ignore[attr-defined]
    before = [holder.fp32_precision for holder in holders]
    searched = cudnn.benchmark
    cudnn.allow_tf32 = matmul.allow_tf32 = tf32
    cudnn.benchmark = benchmark
    try:
        yield
    finally:
        cudnn.benchmark = searched
        cudnn.allow_tf32, matmul.allow_tf32 = before[0] == "tf32", before[2] == "tf32"
        for holder, precision in zip(holders, before, strict=True):
            if holder.fp32_precision != precision:
                holder.fp32_precision = precision


def captured(forward: Callable[[], Any]) -> Callable[[], Any]:
    """The launches of one forward as a CUDA graph: replayed, they cost the processor one call."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # libraries choose their algorithms and allocate before the capture, not in it
            forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = forward()

    def replay(owner: Callable[[], Any] = forward) -> Any:
        # The owner keeps the module and its inputs: the graph knows only the addresses of their memory.
        graph.replay()
        return output

    return replay
