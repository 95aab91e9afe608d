"""measure_latency(): the table T[i, j], on this machine and the runtime that will run the network."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import stdev
from typing import Literal, TypeVar, get_args

from torch import Tensor, nn

from depthfold.backends import Backend, Compiled, get
from depthfold.core import Calibration, LatencyTable, Network, Plan, Span, Timing, fingerprint
from depthfold.core.space import Space
from depthfold.errors import BackendError, InvalidValue, TableError
from depthfold.latency.blocks import BlockShape, block_module, block_shapes
from depthfold.latency.calibration import Whole, calibration_plans, fit
from depthfold.latency.notebook import Notebook
from depthfold.latency.timer import Timer
from depthfold.merging import sketch
from depthfold.progress import Progress, progress_bars
from depthfold.rewriting import rewrite
from depthfold.tracing import TracedNetwork

Item = TypeVar("Item")
Mode = Literal["in context", "alone"]

# Candidates that are compiled at the same time may have so many parameters in all (1 GB in single precision).
TOGETHER = 256_000_000


def measure_latency(
    network: TracedNetwork,
    target: str | Backend,
    *,
    space: Space = "paper",
    mode: Mode = "in context",
    journal: str | Path | None = None,
    timer: Timer | None = None,
    networks: int = 20,
    progress: Progress | None = None,
) -> LatencyTable:
    """Measure how long every span of the search space takes as one convolution.

    Blocks that are equal are timed once, each alone. In the mode "in context" some whole networks (`networks` of them)
    are timed, too, and the table is calibrated so that its sum over a plan predicts the latency of the merged network;
    "alone" is the paper's table. With a `journal` everything measured is kept as it comes: run again, it goes on.
    The batch and the input size are those with which the network was traced. `progress` is told how far it is; without
    one, a terminal shows bars with the time that is left.
    """
    if mode not in get_args(Mode):
        raise InvalidValue(f"There is no mode {mode!r}; there are {' and '.join(map(repr, get_args(Mode)))}.")
    backend, inputs, timer = get(target), network_inputs(network), timer or Timer()
    environment = backend.environment(inputs)
    blocks = block_shapes(network, network.spans(space), batch=inputs[0].shape[0])
    with contextlib.ExitStack() as stack:
        notebook = stack.enter_context(Notebook.open(journal, network, environment))
        progress = progress or stack.enter_context(progress_bars())
        time_blocks(network, backend, blocks.values(), notebook, timer, progress)
        times = {span: notebook.time(block.key) for span, block in blocks.items() if block.key not in notebook.reasons}
        calibration = None
        if mode == "in context":
            plans = calibration_plans(network, tuple(times), networks)
            time_plans(network, backend, plans, notebook, timer, progress)
            calibration = fit(wholes(network, notebook, times), blocks, times)
    return LatencyTable(
        network=network.name,
        fingerprint=fingerprint(network),
        environment=environment,
        calibration=calibration,
        entries=tuple(_entry(span, block, notebook, calibration) for span, block in blocks.items()),
    )


def network_inputs(network: TracedNetwork) -> tuple[Tensor, ...]:
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


def time_blocks(
    network: TracedNetwork,
    backend: Backend,
    blocks: Iterable[BlockShape],
    notebook: Notebook,
    timer: Timer,
    progress: Progress,
) -> None:
    """Every block that differs from the others, alone."""
    distinct = {block.key: block for block in blocks}

    def build(block: BlockShape) -> Compiled:
        return backend.compile(block_module(network, block), block.inputs())

    _measure("blocks", distinct, build, lambda block: block.parameters, notebook, timer, progress)


def time_plans(
    network: TracedNetwork,
    backend: Backend,
    plans: Iterable[Plan],
    notebook: Notebook,
    timer: Timer,
    progress: Progress,
) -> None:
    """Whole networks, as the plans fold them."""
    inputs = network_inputs(network)

    def build(plan: Plan) -> Compiled:
        return backend.compile(shallow_of(network, plan), inputs)

    def size(plan: Plan) -> int:
        return sum(network.merged_shape(span).parameters for span in network.segments(plan))

    _measure("networks", {notebook.name_plan(plan): plan for plan in plans}, build, size, notebook, timer, progress)


def wholes(network: Network, notebook: Notebook, times: Mapping[Span, float]) -> list[Whole]:
    """The whole networks that were timed and whose blocks were, too."""
    found = []
    for key, plan in notebook.plans.items():
        segments = network.segments(plan)
        if notebook.turns.get(key) and all(span in times for span in segments):
            found.append(Whole(segments, notebook.time(key)))
    if len(found) < 2:
        reasons = "; ".join(dict.fromkeys(notebook.reasons.values())) or "every plan has a block without a time"
        raise TableError(
            f"Only {len(found)} whole networks could be timed, and a calibration needs two at least: {reasons}. "
            'Measure with mode="alone", or with more networks.'
        )
    return found


def _measure(
    what: str,
    items: Mapping[str, Item],
    build: Callable[[Item], Compiled],
    size: Callable[[Item], int],
    notebook: Notebook,
    timer: Timer,
    progress: Progress,
) -> None:
    """Compile what is not known well enough yet, as much at a time as fits into memory, and time it in turns.

    What the runtime rejects keeps its reason, and the rest goes on.
    """
    missing = {
        key: item
        for key, item in items.items()
        if key not in notebook.reasons and not timer.enough(notebook.turns[key])
    }
    turns = sum(timer.turns - min(len(notebook.turns[key]), timer.turns) for key in missing)
    step = progress(what, timer.turns * len(items), timer.turns * len(items) - turns)

    def keep(key: str, samples: tuple[float, ...]) -> None:
        notebook.keep_turn(key, samples)
        step()

    for group in _groups(missing, size):
        candidates: dict[str, Compiled] = {}
        for key in group:
            try:
                candidates[key] = build(items[key])
            except BackendError as error:
                notebook.keep_reason(key, str(error))
        try:
            timer.measure(candidates, notebook.turns, keep)
        finally:
            for candidate in candidates.values():
                candidate.close()


def _groups(items: Mapping[str, Item], size: Callable[[Item], int]) -> Iterator[list[str]]:
    """The keys of as many items at a time as fit into memory together."""
    group: list[str] = []
    total = 0
    for key, item in items.items():
        if group and total + size(item) > TOGETHER:
            yield group
            group, total = [], 0
        group.append(key)
        total += size(item)
    if group:
        yield group


def _entry(span: Span, block: BlockShape, notebook: Notebook, calibration: Calibration | None) -> Timing:
    if block.key in notebook.reasons:
        return Timing(span=span, reason=notebook.reasons[block.key])
    samples, time = notebook.samples(block.key), notebook.time(block.key)
    if calibration is not None:
        time = calibration.in_context(time, *block.elements) + (calibration.outside if span.i == 0 else 0.0)
    return Timing(span=span, time=time, stdev=stdev(samples) if len(samples) > 1 else None, samples=samples)
