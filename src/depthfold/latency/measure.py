"""measure_latency(): the table T[i, j], on this machine and the runtime that will run the network."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median, stdev
from typing import Literal, get_args

from depthfold.backends import Backend, SupportsInside, get
from depthfold.core import Calibration, LatencyTable, Network, Plan, Span, Timing
from depthfold.core.calibration import COSTS
from depthfold.core.network import Space
from depthfold.errors import InvalidValue, TableError
from depthfold.latency.blocks import BlockShape, block_shapes, changed_segments
from depthfold.latency.calibration import Whole, doubt_calibration, doubt_journal, fit
from depthfold.latency.candidates import time_blocks, time_plans
from depthfold.latency.notebook import Notebook
from depthfold.latency.samples import fast_plans, passable, plans_of_all_depths
from depthfold.latency.timer import Timer
from depthfold.progress import Progress, progress_bars
from depthfold.tracing import TracedNetwork, expect_traced

Mode = Literal["in context", "alone"]

# So many of the whole networks for the calibration are plans of all depths; the rest are nearly as fast as can be.
RANDOM_SHARE = 0.7
_WAYS_OUT = "Name another runtime, or other options of it, or try them again with retry=True (--retry)"


def measure_latency(
    traced: TracedNetwork,
    target: str | Backend,
    *,
    space: Space = "paper",
    mode: Mode = "in context",
    journal: str | Path | None = None,
    timer: Timer | None = None,
    networks: int = 20,
    retry: bool = False,
    progress: Progress | None = None,
) -> LatencyTable:
    """Measure how long every span of the search space takes as one convolution.

    Blocks that are equal are timed once, each alone. In the mode "in context" they run as the runtime runs them inside
    a network, where it can say how that differs; some whole networks (`networks` of them) are timed, too, and the table
    is calibrated so that its sum over a plan predicts the latency of the merged network, with what the activations cost
    that the plan leaves out or inserts. "alone" is the paper's table.
    With a `journal` everything measured is kept as it comes: run again, it goes on; with `retry`, what the runtime
    rejected before (out of memory, say) is tried once more.
    The batch and the input size are those with which the network was traced. `progress` is told how far it is; without
    one, a terminal shows bars with the time that is left.
    """
    expect_traced(traced, "measure_latency")
    if mode not in get_args(Mode):
        raise InvalidValue(f"There is no mode {mode!r}; there are {' and '.join(map(repr, get_args(Mode)))}.")
    if mode == "in context" and (type(networks) is not int or networks < 2):
        raise InvalidValue(
            f"A calibration needs two whole networks at least, found networks={networks!r}. Ask for 2 or more (20 "
            'unless you say otherwise), or for blocks alone with mode="alone".'
        )
    backend, inputs, timer = get(target), traced.example_tensors(), timer or Timer()
    environment = backend.environment(inputs)
    blocks = block_shapes(traced, traced.spans(space))
    if mode == "in context" and traced.depth == len(blocks) > 0:
        wider = ", or try the search space 'full'" if space == "paper" else ""
        raise TableError(
            f"Nothing in this network can be merged in the search space {space!r}, so there is nothing to choose. "
            f"Print it, for the reasons{wider}."
        )
    block_backend = backend.inside() if mode == "in context" and isinstance(backend, SupportsInside) else backend
    # What the blocks are called in the journal: those that another runtime runs must not be taken for them.
    runtime = "" if block_backend == backend else f"{block_backend.environment(inputs).runtime} "
    keys = {span: runtime + block.key for span, block in blocks.items()}
    with contextlib.ExitStack() as stack:
        notebook = stack.enter_context(Notebook.open(journal, traced, environment))
        if retry:
            notebook.reasons.clear()
        progress = progress or stack.enter_context(progress_bars())
        distinct = {keys[span]: block for span, block in blocks.items()}
        doubt_journal(traced, block_backend, distinct, notebook, timer, journal)
        time_blocks(traced, block_backend, distinct, notebook, timer, progress)
        times = {span: notebook.time(key) for span, key in keys.items() if notebook.timed(key)}
        calibration = None
        if mode == "in context":
            some = max(2, round(RANDOM_SHARE * networks))
            usable = passable(traced.depth, times)
            if not usable:
                raise _no_way(notebook)
            thin = some >= len(COSTS)  # with fewer, a fit could not tell what activations cost from what else differs
            plans = tuple(plans_of_all_depths(traced.network, usable, some, thin=thin))
            time_plans(traced, backend, plans, notebook, timer, progress)
            # From these alone, whatever else the journal holds: a resumed run must choose the same plans to go on with.
            first = fit(wholes(traced.network, notebook, times, plans), blocks, times)
            guess = {span: _in_context(span, times[span], blocks[span], first) for span in usable}
            fast = fast_plans(traced.network, guess, networks - some, thin=thin)
            time_plans(traced, backend, fast, notebook, timer, progress, "fast networks")
            calibration = fit(wholes(traced.network, notebook, times, notebook.plans.values()), blocks, times)
            doubt_calibration(calibration, journal)
    return LatencyTable(
        network=traced.network.name,
        fingerprint=traced.network.fingerprint,
        environment=environment,
        calibration=calibration,
        entries=tuple(_entry(span, block, keys[span], notebook, calibration) for span, block in blocks.items()),
    )


def wholes(network: Network, notebook: Notebook, times: Mapping[Span, float], plans: Iterable[Plan]) -> list[Whole]:
    """Those of the plans that were timed as whole networks and whose blocks were timed, too."""
    found = []
    original = notebook.name_plan(network.vanilla)
    for plan in plans:
        key = notebook.name_plan(plan)
        segments, changed = network.segments(plan), changed_segments(network, plan)
        if all(span in times for span in segments):
            if notebook.timed(key):
                found.append(Whole(segments, notebook.time(key), changed))
            elif notebook.shares.get(key) and notebook.timed(original):
                found.append(Whole(segments, median(notebook.shares[key]) * notebook.time(original), changed))
    if len({whole.segments for whole in found}) < 2:
        advice = "Measure with more networks"
        if said := _all_reasons(notebook):
            advice = f"The runtime says: {said}. {_WAYS_OUT}"
        raise TableError(
            f"Only {len(found)} whole networks could be timed, and a calibration needs two different ones. {advice}; "
            'in Python, mode="alone" gives a table of the blocks alone.'
        )
    return found


def _no_way(notebook: Notebook) -> TableError:
    if not notebook.reasons:
        return TableError("This network has no layers that can be timed. Print it: every convolution has its reason.")
    return TableError(
        f"The runtime rejected so many blocks that no whole network is left: {_all_reasons(notebook)}. {_WAYS_OUT}; in "
        'Python, mode="alone" gives a table with the reasons.'
    )


def _all_reasons(notebook: Notebook) -> str:
    """Each one once, to stand in a sentence: some of them end with a full stop."""
    return "; ".join(dict.fromkeys(reason.removesuffix(".") for reason in notebook.reasons.values()))


def _entry(span: Span, block: BlockShape, key: str, notebook: Notebook, calibration: Calibration | None) -> Timing:
    if key in notebook.reasons:
        return Timing(span=span, reason=notebook.reasons[key])
    samples, time = notebook.samples(key), notebook.time(key)
    deviation = stdev(samples) if len(samples) > 1 else None
    if calibration is None:
        return Timing(span=span, time=time, stdev=deviation, samples=samples)
    other = None
    if calibration.per_activation:
        other = _in_context(span, time, block, calibration, activated=block.other_activation)
    return Timing(
        span=span,
        time=_in_context(span, time, block, calibration),
        active=other if block.activation is None else None,
        bare=None if block.activation is None else other,
        stdev=deviation and calibration.slope * deviation,
        samples=samples,
    )


def _in_context(span: Span, alone: float, block: BlockShape, calibration: Calibration, activated: int = 0) -> float:
    inside = calibration.in_context(alone, *block.elements, activated)
    return inside + (calibration.outside if span.i == 0 else 0.0)
