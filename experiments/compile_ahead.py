"""Compiling ahead for TorchInductor: in many processes at once, so that the one that measures finds it in the cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from functools import lru_cache, partial
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import TypeAlias

from torch import Tensor, nn
from torch._inductor import config

import depthfold as df
from depthfold.backends.inductor import Inductor
from depthfold.errors import BackendError
from depthfold.latency.blocks import BlockShape, block_module, block_shapes
from depthfold.latency.candidates import network_inputs, shallow_of
from depthfold.tracing import TracedNetwork

Build: TypeAlias = Callable[..., TracedNetwork]
Arguments: TypeAlias = tuple[str, int, int]  # what a network is built from: its name, the batch and the size


class Workshop:
    """Processes that compile. They stay, so that each imports and traces only once."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin)

    def blocks(self, build: Build, arguments: Arguments, backend: Inductor) -> list[Future]:
        parts = ((build, arguments, backend, n, self._workers) for n in range(self._workers))
        return [self._pool.submit(_blocks, *part) for part in parts]

    def plans(self, build: Build, arguments: Arguments, backend: Inductor, plans: Iterable[df.Plan]) -> list[Future]:
        return [self._pool.submit(_plan, build, arguments, backend, plan) for plan in plans]


def _begin() -> None:
    """A worker compiles by itself: otherwise each would have processes of its own, as many as there are cores. And it
    ends with its parent; one that outlived it would go on compiling, beside the next measurement."""
    config.compile_threads = 1

    def wait() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    Thread(target=wait, daemon=True).start()


@lru_cache
def _network(build: Build, arguments: Arguments) -> TracedNetwork:
    return build(*arguments)


def _blocks(build: Build, arguments: Arguments, backend: Inductor, worker: int, workers: int) -> None:
    network = _network(build, arguments)
    distinct = {block.key: block for block in block_shapes(network, network.spans("paper"), arguments[1]).values()}
    for _, block in sorted(distinct.items())[worker::workers]:
        _compile(backend.inside(), partial(_module_of, network, block))


def _plan(build: Build, arguments: Arguments, backend: Inductor, plan: df.Plan) -> None:
    network = _network(build, arguments)
    _compile(backend, lambda: (shallow_of(network, plan), network_inputs(network)))


def _module_of(network: TracedNetwork, block: BlockShape) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return block_module(network, block), block.inputs()


def _compile(backend: Inductor, made: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]) -> None:
    # What cannot be compiled is for the measurement to tell; here it would only stop the others.
    try:
        backend.compile(*made()).close()
    except BackendError as error:
        print(f"compiling ahead: {error!s:.200}", flush=True)
