"""Candidates: blocks and whole networks with random weights, compiled, timed in rounds and recorded in the journal."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from depthfold.backends import Backend, Compiled, Inputs, backend_errors
from depthfold.core import Plan
from depthfold.errors import BackendError, OutOfMemory
from depthfold.latency.blocks import BlockShape, block_module
from depthfold.latency.calibration import DoubtfulTable, describe_journal
from depthfold.latency.journal import LatencyJournal
from depthfold.latency.timer import Rounds, Timer, milliseconds
from depthfold.merging import sketch
from depthfold.progress import Progress
from depthfold.rewriting import rewrite
from depthfold.tracing import TracedNetwork
from depthfold.tracing.functional import conv_tensors

Key = TypeVar("Key")
Item = TypeVar("Item")

# The candidates that are compiled at the same time have at most this many elements together: 2 GB, because ONNX Runtime
# and OpenVINO keep about 12 bytes for each.
MAX_ELEMENTS = 170_000_000
# They also have at most this many threads together: an ONNX Runtime session owns its threads, and hangs if the system
# does not give it one. Containers often allow 1024 or more.
MAX_THREADS = 512
# If the time of a block has changed by more than this, new blocks are not comparable with those in the journal.
MAX_SPEED_CHANGE = 0.15


def build_plan(traced: TracedNetwork, backend: Backend, plan: Plan, inputs: Inputs) -> Compiled:
    """Compile the merged network of a plan. If it cannot even be made, this is also a BackendError."""
    with backend_errors("It cannot be built"):
        return backend.compile(sketch(rewrite(traced, plan)), inputs)


@contextlib.contextmanager
def closing_all(compiled: Mapping[Key, Compiled]) -> Iterator[Mapping[Key, Compiled]]:
    """Close all of them at the end. This also fails on a device that an error has made unusable."""
    try:
        yield compiled
    finally:
        with backend_errors("The compiled modules cannot be closed"):
            for one in compiled.values():
                one.close()


class RoundCounter:
    """Counts rounds for a progress bar.

    The total changes: a candidate with a large spread gets more rounds, and one that fails gets no more. A new total is
    announced before the last step of the old one, so that the bar is never full too early.
    """

    __slots__ = ("_done", "_progress", "_remaining", "_step", "_what")

    def __init__(self, what: str, progress: Progress, done: int, remaining: Mapping[str, int]) -> None:
        self._what, self._progress, self._done, self._remaining = what, progress, done, dict(remaining)
        self._announce()

    def step(self, key: str, remaining: int) -> None:
        """Count one round of this candidate. `remaining` rounds follow."""
        expected = self._remaining[key]
        self._remaining[key] = remaining + 1
        if remaining + 1 != expected:
            self._announce()
        self._remaining[key] = remaining
        self._done += 1
        self._step()

    def fail(self, key: str) -> None:
        """Expect no more rounds of this candidate."""
        if self._remaining.pop(key, 0):
            self._announce()

    def _announce(self) -> None:
        self._step = self._progress(self._what, self._done + sum(self._remaining.values()), self._done)


@dataclass(frozen=True, slots=True)
class CandidateTimer:
    """Compiles and times blocks and whole networks of a traced network, and records the results in a journal."""

    traced: TracedNetwork
    journal: LatencyJournal
    timer: Timer
    progress: Progress
    threads: int  # of each compiled candidate

    def time_blocks(self, backend: Backend, blocks: Mapping[str, BlockShape]) -> None:
        """Time each block alone. The keys are those of the journal."""
        self._warn_if_speed_changed(backend, blocks)
        self._time("blocks", blocks, lambda block: self._build_block(backend, block), lambda block: block.moved)

    def time_plans(self, backend: Backend, plans: Iterable[Plan], what: str = "networks") -> None:
        """Time the merged network of each plan."""
        traced, inputs = self.traced, self.traced.example_tensors()
        outside = elements_outside(traced, inputs)

        def size(plan: Plan) -> int:
            return outside + sum(traced.network.merged_shape(span).parameters for span in traced.network.segments(plan))

        items = {self.journal.add_plan(plan): plan for plan in plans}
        self._time(what, items, lambda plan: build_plan(traced, backend, plan, inputs), size)

    def _build_block(self, backend: Backend, block: BlockShape) -> Compiled:
        with backend_errors("It cannot be built"):
            return backend.compile(block_module(self.traced, block), block.inputs())

    def _warn_if_speed_changed(self, backend: Backend, blocks: Mapping[str, BlockShape]) -> None:
        """Time a block of the journal again before others are added. Warn and record it if its time has changed.

        Use the block with the median time: it is typical, and not the first, which was timed on a cold machine.
        """
        journal = self.journal
        earlier = sorted((key for key in blocks if journal.is_timed(key)), key=journal.time)
        if not earlier or not any(journal.is_missing(key, self.timer) for key in blocks):
            return
        key = earlier[len(earlier) // 2]
        rounds: dict[str, Rounds] = {}
        try:
            with closing_all({key: self._build_block(backend, blocks[key])}) as again:
                self.timer.measure(again, rounds)
        except BackendError:  # for example, no memory is free now: then the new blocks will fail as well
            return
        change = milliseconds(rounds[key]) / journal.time(key)
        if abs(change - 1) <= MAX_SPEED_CHANGE:
            return
        journal.add_doubt(f"a block took {change:.2f} times as long as before when the measurement was resumed")
        warnings.warn(
            f"A block of {describe_journal(journal.path)} now takes {change:.2f} times as long as when it was "
            "measured, so new entries are not comparable. Delete it, and measure again when nothing else runs.",
            DoubtfulTable,
            stacklevel=4,
        )

    def _time(
        self,
        what: str,
        items: Mapping[str, Item],
        compile_item: Callable[[Item], Compiled],
        size: Callable[[Item], int],
    ) -> None:
        """Compile the missing items, as many at a time as fit into memory, and time them in rounds.

        An item that fails gets a reason, and the others continue. A device that an error has made unusable ends the
        measurement without a reason for any item, so that the next run can resume.
        """
        journal, timer = self.journal, self.timer
        missing = {key: item for key, item in items.items() if journal.is_missing(key, timer)}
        done = sum(len(journal.rounds[key]) for key in items)
        remaining = {key: timer.remaining(journal.rounds[key]) for key in missing}
        counter = RoundCounter(what, self.progress, done, remaining)
        if not missing:
            return
        compiling = RoundCounter(f"compiling {what}", self.progress, 0, dict.fromkeys(missing, 1))

        def compile_one(key: str) -> Compiled:
            candidate = compile_item(items[key])
            compiling.step(key, 0)
            return candidate

        def add(key: str, samples: tuple[float, ...]) -> None:
            journal.write_round(key, samples)
            counter.step(key, timer.remaining(journal.rounds[key]))

        def fail(key: str, error: BackendError) -> None:
            if isinstance(error, OutOfMemory) and len(candidates) > 1:  # it may fit alone: try that later
                queues.append(deque([key]))
            else:
                reject(key, str(error))

        def reject(key: str, reason: str) -> None:
            journal.add_reason(key, reason)
            counter.fail(key)
            compiling.fail(key)

        queues = deque([deque(missing)])
        while queues:
            queue = queues.popleft()
            while queue:
                most = max(1, MAX_THREADS // self.threads)
                candidates = _compile_some(queue, compile_one, lambda key: size(items[key]), reject, most)
                with closing_all(candidates):
                    timer.measure(candidates, journal.rounds, add, fail)


def _compile_some(
    queue: deque[str],
    compile_one: Callable[[str], Compiled],
    size: Callable[[str], int],
    reject: Callable[[str, str], None],
    most: int,
) -> dict[str, Compiled]:
    """Compile as many candidates from the front of the queue as fit into memory together, at most `most`."""
    candidates: dict[str, Compiled] = {}
    total = 0
    while queue and len(candidates) < most and not (candidates and total + size(queue[0]) > MAX_ELEMENTS):
        key = queue[0]
        try:
            candidates[key] = compile_one(key)
        except BackendError as error:
            if candidates and isinstance(error, OutOfMemory):  # it may fit without the others: try it first next time
                break
            reject(key, str(error))
        queue.popleft()
        total += size(key)
    return candidates


def elements_outside(traced: TracedNetwork, inputs: Inputs) -> int:
    """Return the number of elements besides the weights of the layers: those of stem, head and inputs."""
    nodes = {node.name: node for node in traced.graph.graph.nodes}
    layers = {id(tensor) for site in traced.blueprint.sites for tensor in conv_tensors(traced.graph, nodes[site.conv])}
    tensors = (*traced.graph.parameters(), *traced.graph.buffers(), *inputs)
    return sum(tensor.numel() for tensor in tensors if id(tensor) not in layers)
