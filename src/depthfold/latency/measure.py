"""measure_latency(): the table T[i, j], on this machine and the runtime that will run the network."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Literal, get_args

from depthfold.backends import Backend, SupportsInside, get
from depthfold.core import Calibration, LatencyTable, Network, Plan, Span, Timing
from depthfold.core.latency_table import COSTS
from depthfold.core.network import Space
from depthfold.errors import InvalidValue, TableError
from depthfold.latency.blocks import BlockShape, block_shapes
from depthfold.latency.calibration import Whole, doubt_calibration, doubt_journal, fit
from depthfold.latency.candidates import time_blocks, time_plans
from depthfold.latency.journal import LatencyJournal
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
    run: str | Path | None = None,
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
    With a run folder, `run`, everything measured is kept in its journal: run again, it continues there. With `retry`,
    what the runtime rejected before, for example because it ran out of memory, is tried once more.
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
        journal = stack.enter_context(LatencyJournal(run, traced, environment))
        if retry:
            journal.reasons.clear()
        progress = progress or stack.enter_context(progress_bars())
        distinct = {keys[span]: block for span, block in blocks.items()}
        doubt_journal(traced, block_backend, distinct, journal, timer)
        time_blocks(traced, block_backend, distinct, journal, timer, progress)
        times = {span: journal.time(key) for span, key in keys.items() if journal.timed(key)}
        calibration = None
        if mode == "in context":
            some = max(2, round(RANDOM_SHARE * networks))
            usable = passable(traced.depth, times)
            if not usable:
                raise _no_way(journal)
            thin = some >= len(COSTS)  # with fewer, a fit could not tell what activations cost from what else differs
            plans = tuple(plans_of_all_depths(traced.network, usable, some, thin=thin))
            time_plans(traced, backend, plans, journal, timer, progress)
            # From these alone, whatever else the journal holds: a resumed run must choose the same plans to go on with.
            first = fit(wholes(traced.network, journal, times, plans), blocks, times)
            guess = {span: _in_context(span, times[span], blocks[span], first) for span in usable}
            fast = fast_plans(traced.network, guess, networks - some, thin=thin)
            time_plans(traced, backend, fast, journal, timer, progress, "fast networks")
            calibration = fit(wholes(traced.network, journal, times, journal.plans.values()), blocks, times)
            doubt_calibration(calibration, journal.path)
    return LatencyTable(
        network=traced.network.name,
        fingerprint=traced.network.fingerprint,
        environment=environment,
        calibration=calibration,
        activations=traced.network.activations,
        entries=tuple(_entry(span, block, keys[span], journal, calibration) for span, block in blocks.items()),
    )


def wholes(
    network: Network, journal: LatencyJournal, times: Mapping[Span, float], plans: Iterable[Plan]
) -> list[Whole]:
    """Those of the plans that were timed as whole networks and whose blocks were timed, too."""
    found = []
    original = journal.name_plan(network.vanilla)
    for plan in plans:
        key = journal.name_plan(plan)
        segments, activations = network.segments(plan), network.final_activations(plan)
        if all(span in times for span in segments):
            if journal.timed(key):
                found.append(Whole(segments, journal.time(key), activations))
            elif journal.shares.get(key) and journal.timed(original):
                found.append(Whole(segments, median(journal.shares[key]) * journal.time(original), activations))
    if len({whole.segments for whole in found}) < 2:
        advice = "Measure with more networks"
        if said := _all_reasons(journal):
            advice = f"The runtime says: {said}. {_WAYS_OUT}"
        raise TableError(
            f"Only {len(found)} whole networks could be timed, and a calibration needs two different ones. {advice}; "
            'in Python, mode="alone" gives a table of the blocks alone.'
        )
    return found


def _no_way(journal: LatencyJournal) -> TableError:
    if not journal.reasons:
        return TableError("This network has no layers that can be timed. Print it: every convolution has its reason.")
    return TableError(
        f"The runtime rejected so many blocks that no whole network is left: {_all_reasons(journal)}. {_WAYS_OUT}; in "
        'Python, mode="alone" gives a table with the reasons.'
    )


def _all_reasons(journal: LatencyJournal) -> str:
    """Each one once, to stand in a sentence: some of them end with a full stop."""
    return "; ".join(dict.fromkeys(reason.removesuffix(".") for reason in journal.reasons.values()))


def _entry(span: Span, block: BlockShape, key: str, journal: LatencyJournal, calibration: Calibration | None) -> Timing:
    if key in journal.reasons:
        return Timing(span=span, reason=journal.reasons[key])
    samples, time = journal.samples(key), journal.time(key)
    if calibration is None:
        return Timing.measured(span, samples, (time, time))
    without, with_one = (_in_context(span, time, block, calibration, block.activated(b)) for b in (False, True))
    return Timing.measured(span, samples, (without, with_one), calibration.slope)


def _in_context(span: Span, alone: float, block: BlockShape, calibration: Calibration, activated: int = 0) -> float:
    inside = calibration.in_context(alone, *block.elements, activated)
    return inside + (calibration.outside if span.i == 0 else 0.0)
