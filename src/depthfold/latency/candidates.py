"""Candidates: blocks and whole networks, built with random weights, compiled, timed in turns and noted."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from torch import nn

from depthfold.backends import Backend, Compiled, Inputs, backend_errors
from depthfold.core import Plan
from depthfold.errors import BackendError, OutOfMemory
from depthfold.latency.blocks import BlockShape, block_module
from depthfold.latency.journal import LatencyJournal
from depthfold.latency.timer import Timer
from depthfold.merging import sketch
from depthfold.progress import Progress
from depthfold.rewriting import rewrite
from depthfold.tracing import TracedNetwork
from depthfold.tracing.functional import conv_tensors

# What is compiled to be timed: made, and freed in the end, so that it fails in the words of a runtime.

Key = TypeVar("Key")


def build(backend: Backend, make: Callable[[], tuple[nn.Module, Inputs]]) -> Compiled:
    """Compile what `make` returns. What cannot even be made, for want of memory, fails as if the runtime refused it."""
    with backend_errors("It cannot be built"):
        return backend.compile(*make())


@contextlib.contextmanager
def held(compiled: Mapping[Key, Compiled]) -> Iterator[Mapping[Key, Compiled]]:
    """Close all of them in the end. That fails, too, on a device that is spoiled."""
    try:
        yield compiled
    finally:
        with backend_errors("What was compiled cannot be freed"):
            for one in compiled.values():
                one.close()


# How many turns were taken and are still to come, for whoever watches.


class Tally:
    """Counts turns. How many there will be is known only in the end: what spreads too widely gets more of them, and
    what fails gets none. So the total is announced again whenever it changes, before the turn that would end it."""

    __slots__ = ("_done", "_left", "_progress", "_step", "_what")

    def __init__(self, what: str, progress: Progress, done: int, left: Mapping[str, int]) -> None:
        self._what, self._progress, self._done, self._left = what, progress, done, dict(left)
        self._announce()

    def turn(self, key: str, left: int) -> None:
        """One turn of this candidate was taken, and so many are left."""
        foreseen = self._left[key]
        self._left[key] = left + 1
        if left + 1 != foreseen:
            self._announce()
        self._left[key] = left
        self._done += 1
        self._step()

    def failed(self, key: str) -> None:
        """This candidate gets no more turns."""
        if self._left.pop(key, 0):
            self._announce()

    def _announce(self) -> None:
        self._step = self._progress(self._what, self._done + sum(self._left.values()), self._done)


Item = TypeVar("Item")

# Candidates that are compiled at the same time may hold so many numbers in all (2 GB in single precision).
TOGETHER = 512_000_000


def build_plan(traced: TracedNetwork, backend: Backend, plan: Plan, inputs: Inputs) -> Compiled:
    return build(backend, lambda: (sketch(rewrite(traced, plan)), inputs))


def build_block(traced: TracedNetwork, backend: Backend, block: BlockShape) -> Compiled:
    return build(backend, lambda: (block_module(traced, block), block.inputs()))


def time_blocks(
    traced: TracedNetwork,
    backend: Backend,
    blocks: Mapping[str, BlockShape],
    journal: LatencyJournal,
    timer: Timer,
    progress: Progress,
) -> None:
    """Blocks by their keys in the journal, each alone."""

    def compiled(block: BlockShape) -> Compiled:
        return build_block(traced, backend, block)

    _measure("blocks", blocks, compiled, lambda block: block.parameters + sum(block.elements), journal, timer, progress)


def time_plans(
    traced: TracedNetwork,
    backend: Backend,
    plans: Iterable[Plan],
    journal: LatencyJournal,
    timer: Timer,
    progress: Progress,
    what: str = "networks",
) -> None:
    """Whole networks, as the plans fold them."""
    inputs = traced.example_tensors()

    def compiled(plan: Plan) -> Compiled:
        return build_plan(traced, backend, plan, inputs)

    outside = _numbers_outside(traced, inputs)

    def size(plan: Plan) -> int:
        return outside + sum(traced.network.merged_shape(span).parameters for span in traced.network.segments(plan))

    _measure(what, {journal.name_plan(plan): plan for plan in plans}, compiled, size, journal, timer, progress)


def _numbers_outside(traced: TracedNetwork, inputs: Inputs) -> int:
    """How many numbers a network holds besides the weights of its layers: stem, head and inputs are in every plan."""
    nodes = {node.name: node for node in traced.graph.graph.nodes}
    layers = {id(tensor) for site in traced.blueprint.sites for tensor in conv_tensors(traced.graph, nodes[site.conv])}
    tensors = (*traced.graph.parameters(), *traced.graph.buffers(), *inputs)
    return sum(tensor.numel() for tensor in tensors if id(tensor) not in layers)


def _measure(
    what: str,
    items: Mapping[str, Item],
    compiled: Callable[[Item], Compiled],
    size: Callable[[Item], int],
    journal: LatencyJournal,
    timer: Timer,
    progress: Progress,
) -> None:
    """Compile what is not known well enough yet, as much at a time as fits into memory, and time it in turns.

    What the runtime rejects, or fails to run while it is timed, keeps its reason, and the rest goes on. A device that
    is spoiled ends it, and nobody gets a reason: run again, with the journal, it goes on.
    """
    missing = {
        key: item for key, item in items.items() if key not in journal.reasons and not timer.enough(journal.turns[key])
    }
    taken = sum(len(journal.turns[key]) for key in items)
    tally = Tally(what, progress, taken, {key: timer.left(journal.turns[key]) for key in missing})
    if not missing:
        return
    compiling = Tally(f"compiling {what}", progress, 0, dict.fromkeys(missing, 1))  # may take longer than the turns

    def compile_one(key: str) -> Compiled:
        candidate = compiled(items[key])
        compiling.turn(key, 0)
        return candidate

    def keep(key: str, samples: tuple[float, ...]) -> None:
        journal.keep_turn(key, samples)
        tally.turn(key, timer.left(journal.turns[key]))

    def fail(key: str, error: BackendError) -> None:
        if isinstance(error, OutOfMemory) and len(candidates) > 1:  # perhaps only beside the others: alone, later
            queues.append(deque([key]))
        else:
            reject(key, str(error))

    def reject(key: str, reason: str) -> None:
        journal.keep_reason(key, reason)
        tally.failed(key)
        compiling.failed(key)

    queues = deque([deque(missing)])
    while queues:
        queue = queues.popleft()
        while queue:
            candidates = _compile_some(queue, compile_one, lambda key: size(items[key]), reject)
            with held(candidates):
                timer.measure(candidates, journal.turns, keep, fail)


def _compile_some(
    queue: deque[str],
    compile_one: Callable[[str], Compiled],
    size: Callable[[str], int],
    reject: Callable[[str, str], None],
) -> dict[str, Compiled]:
    """As many from the front of the queue as fit into memory together."""
    candidates: dict[str, Compiled] = {}
    total = 0
    while queue and not (candidates and total + size(queue[0]) > TOGETHER):
        key = queue[0]
        try:
            candidates[key] = compile_one(key)
        except BackendError as error:
            if candidates and isinstance(error, OutOfMemory):  # perhaps only beside the others: first of the next ones
                break
            reject(key, str(error))
        queue.popleft()
        total += size(key)
    return candidates
