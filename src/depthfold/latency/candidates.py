"""Candidates: blocks and whole networks, built with random weights, compiled, timed in turns and noted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from torch import Tensor, nn

from depthfold.backends import Backend, Compiled
from depthfold.backends.base import Inputs
from depthfold.core import Plan
from depthfold.errors import BackendError, InvalidValue, OutOfMemory
from depthfold.latency.blocks import BlockShape, block_module
from depthfold.latency.building import build, held
from depthfold.latency.journal import LatencyJournal
from depthfold.latency.tally import Tally
from depthfold.latency.timer import Timer
from depthfold.merging import sketch
from depthfold.progress import Progress
from depthfold.rewriting import rewrite
from depthfold.tracing import TracedNetwork
from depthfold.tracing.functional import conv_tensors

Item = TypeVar("Item")

# Candidates that are compiled at the same time may hold so many numbers in all (2 GB in single precision).
TOGETHER = 512_000_000


def network_inputs(network: TracedNetwork) -> Inputs:
    given = network.inputs.for_graph(network.graph)
    if not all(isinstance(value, Tensor) for value in given):
        raise InvalidValue(
            f"The traced part takes {', '.join(type(value).__name__ for value in given)}; latency can be measured only "
            'where it takes tensors. Trace the part that does, with at="...".'
        )
    return tuple(given)


def shallow_of(network: TracedNetwork, plan: Plan) -> nn.Module:
    """The traced part as the plan folds it, with random weights."""
    whole = sketch(rewrite(network, plan))
    return whole.get_submodule(network.at) if network.at else whole


def build_plan(network: TracedNetwork, backend: Backend, plan: Plan, inputs: Inputs) -> Compiled:
    return build(backend, lambda: (shallow_of(network, plan), inputs))


def build_block(network: TracedNetwork, backend: Backend, block: BlockShape) -> Compiled:
    return build(backend, lambda: (block_module(network, block), block.inputs()))


def time_blocks(
    network: TracedNetwork,
    backend: Backend,
    blocks: Mapping[str, BlockShape],
    journal: LatencyJournal,
    timer: Timer,
    progress: Progress,
) -> None:
    """Blocks by their keys in the journal, each alone."""

    def compiled(block: BlockShape) -> Compiled:
        return build_block(network, backend, block)

    _measure("blocks", blocks, compiled, lambda block: block.parameters + sum(block.elements), journal, timer, progress)


def time_plans(
    network: TracedNetwork,
    backend: Backend,
    plans: Iterable[Plan],
    journal: LatencyJournal,
    timer: Timer,
    progress: Progress,
    what: str = "networks",
) -> None:
    """Whole networks, as the plans fold them."""
    inputs = network_inputs(network)

    def compiled(plan: Plan) -> Compiled:
        return build_plan(network, backend, plan, inputs)

    outside = _numbers_outside(network, inputs)

    def size(plan: Plan) -> int:
        return outside + sum(network.merged_shape(span).parameters for span in network.segments(plan))

    _measure(what, {journal.name_plan(plan): plan for plan in plans}, compiled, size, journal, timer, progress)


def _numbers_outside(network: TracedNetwork, inputs: Inputs) -> int:
    """How many numbers a network holds besides the weights of its layers: stem, head and inputs are in every plan."""
    nodes = {node.name: node for node in network.graph.graph.nodes}
    layers = {id(tensor) for site in network.sites for tensor in conv_tensors(network.graph, nodes[site.conv])}
    tensors = (*network.graph.parameters(), *network.graph.buffers(), *inputs)
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
