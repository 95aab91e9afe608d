"""PyTorch on CUDA: global settings and CUDA graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def cuda_settings(*, tf32: bool, benchmark: bool) -> Iterator[None]:
    """Turn TF32 and the search for the fastest convolution algorithm on or off, and restore both afterwards.

    PyTorch has two APIs for TF32, which must not contradict each other. Setting the old one sets both, and
    TorchInductor reads both. Only the new one can be read in every state. So this reads the new one, sets the old one,
    and restores both.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    holders: tuple[Any, ...] = (cudnn.conv, cudnn.rnn, matmul)  # type: ignore[attr-defined]
    before = [holder.fp32_precision for holder in holders]
    benchmark_before = cudnn.benchmark
    cudnn.allow_tf32 = matmul.allow_tf32 = tf32
    cudnn.benchmark = benchmark
    try:
        yield
    finally:
        cudnn.benchmark = benchmark_before
        cudnn.allow_tf32, matmul.allow_tf32 = before[0] == "tf32", before[2] == "tf32"
        for holder, precision in zip(holders, before, strict=True):
            if holder.fp32_precision != precision:
                holder.fp32_precision = precision


def capture_cuda_graph(forward: Callable[[], Any]) -> Callable[[], Any]:
    """Record the launches of one forward as a CUDA graph. Return a function that replays it in a single launch."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # libraries must choose algorithms and allocate memory before the capture
            forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = forward()

    def replay(owner: Callable[[], Any] = forward) -> Any:
        # `owner` keeps the module and its inputs alive, because the graph holds only their addresses.
        graph.replay()
        return output

    return replay
