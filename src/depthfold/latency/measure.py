"""measure_latency(): the table T[i, j, b] on this machine and the given runtime."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Literal, get_args

from depthfold.backends import Backend, SupportsInside, get
from depthfold.core import Calibration, ConvShape, LatencyTable, Network, Plan, Space, Span, Timing
from depthfold.core.options import MERGE, Move, require_moves
from depthfold.errors import InvalidValue, TableError
from depthfold.latency.blocks import BlockShape, block_shapes, dropped_shapes, empty_shapes
from depthfold.latency.calibration import (
    FITTED,
    Blocks,
    Samples,
    TimedNetwork,
    TimesAlone,
    fit,
    kind_at,
    warn_if_floored,
    warn_if_inaccurate,
)
from depthfold.latency.candidates import CandidateTimer
from depthfold.latency.cannot_pay import BlockKey, blocks_that_cannot_pay
from depthfold.latency.cost import MeasuringCost, cost_of
from depthfold.latency.journal import LatencyJournal
from depthfold.latency.samples import nearly_fastest_plans, plans_of_all_depths, usable_spans
from depthfold.latency.timer import Timer
from depthfold.progress import Progress, progress_bars
from depthfold.rewriting import activation_names
from depthfold.support.coerce import as_whole
from depthfold.support.machine import available_memory
from depthfold.support.text import amount, count
from depthfold.tracing import TracedNetwork, require_traced

Mode = Literal["in context", "alone"]

# The share of the calibration's networks that are random plans of all depths. The others are nearly the fastest plans.
RANDOM_SHARE = 0.7
_FIX = "Use another runtime or other options, or try again with retry=True (--retry)"


def measure_latency(
    traced: TracedNetwork,
    target: str | Backend,
    *,
    space: Space = "paper",
    moves: Iterable[Move] = MERGE,
    mode: Mode = "in context",
    run: str | Path | None = None,
    timer: Timer | None = None,
    networks: int = 20,
    retry: bool = False,
    progress: Progress | None = None,
) -> LatencyTable:
    """Measure how long every span of the search space takes as one convolution.

    With the `moves` "drop-layers" and "drop-branches", also measure every other shape that a span can have without some
    of its layers.

    Equal blocks are timed once, each alone. In the mode "in context", `networks` whole networks are also timed, and the
    table is calibrated so that its sum over a plan predicts the latency of the merged network, including the cost of
    activations that the plan leaves out or inserts. The mode "alone" does not calibrate, as in the paper.

    With a run folder, `run`, every measurement is written to a journal, and the next call resumes there. With `retry`,
    blocks that failed before, for example because memory ran out, are tried again. The batch and the input size are
    those of the traced network. Without `progress`, a terminal or a notebook shows a bar.
    """
    _check_arguments(traced, mode, networks)
    moves = require_moves(moves)
    backend, timer = get(target), timer or Timer()
    environment = backend.environment(traced.example_tensors())
    blocks = block_shapes(traced, traced.spans(space))
    dropped = dropped_shapes(traced.network, blocks, moves)
    left_out = blocks_that_cannot_pay(blocks, dropped, environment)
    in_context = mode == "in context"
    if in_context:
        _check_mergeable(traced, blocks, space, left_out)
    block_backend = backend.inside() if in_context and isinstance(backend, SupportsInside) else backend
    # Blocks that run on another runtime have other keys in the journal.
    runtime = "" if block_backend == backend else f"{block_backend.environment(traced.example_tensors()).runtime} "
    keys = {span: runtime + block.key for span, block in blocks.items() if (span, None) not in left_out}
    more = {key: runtime + block.key for key, block in dropped.items() if key not in left_out}
    calibration = None
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(LatencyJournal(run, traced, environment))
        if retry:
            journal.reasons.clear()
        every = {key: blocks[span] for span, key in keys.items()} | {key: dropped[which] for which, key in more.items()}
        if _starts_something(journal, timer, every, in_context):
            warn_if_large(cost_of(traced, blocks, dropped, environment, networks if in_context else 0, timer))
        progress = progress or stack.enter_context(progress_bars(f"Latency table on {environment.runtime}"))
        candidates = CandidateTimer(traced, journal, timer, progress, environment.threads or 1)
        candidates.time_blocks(block_backend, every)
        if in_context:
            times = {span: journal.time(key) for span, key in keys.items() if journal.is_timed(key)}
            calibration = _calibrate(candidates, backend, blocks, times, networks)
            warn_if_inaccurate(calibration, journal.path)
    kinds = activation_names(traced)
    of_kind = {span: calibration and calibration.of_kind(kind_at(span, kinds)) for span in blocks}
    table = LatencyTable(
        network=traced.network.name, fingerprint=traced.network.fingerprint, environment=environment,
        calibration=calibration, activations=traced.network.activations, doubt=journal.doubt,
        entries=(
            *(_entry(span, None, blocks[span], journal, key, of_kind[span]) for span, key in keys.items()),
            *(_entry(*which, dropped[which], journal, key, of_kind[which[0]]) for which, key in more.items()),
            *(Timing(span=span, reason=reason, shape=shape) for (span, shape), reason in left_out.items()),
        ),
    )  # fmt: skip
    warn_if_floored(table.entries, journal.path)
    empty = (key for key in empty_shapes(traced.network, blocks, moves) if key not in dropped)
    return replace(table, entries=(*table.entries, *_empty_entries(table, traced.network, empty)))


def _empty_entries(table: LatencyTable, network: Network, empty: Iterable[tuple[Span, ConvShape]]) -> Iterator[Timing]:
    """Yield the entries of spans of which nothing is left. They follow from the others and the calibration, which a CSV
    file does not have."""
    outside = table.calibration.outside if table.calibration else 0.0
    for span, shape in empty:
        times = table.empty_times(network, span, outside)
        if times is not None:
            yield Timing(span=span, times=times, shape=shape)


def _check_arguments(traced: TracedNetwork, mode: str, networks: int) -> None:
    require_traced(traced, "measure_latency")
    if mode not in get_args(Mode):
        raise InvalidValue(f"There is no mode {mode!r}. Use {' or '.join(map(repr, get_args(Mode)))}.")
    if mode == "in context":
        as_whole("The number of networks for the calibration", networks, InvalidValue, least=2)


def _starts_something(journal: LatencyJournal, timer: Timer, blocks: Iterable[str], in_context: bool) -> bool:
    """Return True if a block is missing in the journal, or if no whole network of a calibration was timed yet."""
    networks_are_new = in_context and not any(map(journal.is_timed, journal.plans))
    return networks_are_new or any(journal.is_missing(key, timer) for key in blocks)


class LargeMeasurement(UserWarning):
    """Measuring the table may take more memory than is free."""


def warn_if_large(cost: MeasuringCost) -> None:
    """Give the caller of measure_latency() a LargeMeasurement warning if memory may run out."""
    free = available_memory()
    if free is not None and cost.memory > free / 2:
        warnings.warn(
            f"Measuring the latency table may take most of the free memory ({amount(free)}B): {cost}. Use a smaller "
            'batch or input, or the search space "paper".',
            LargeMeasurement,
            stacklevel=3,
        )


def _check_mergeable(traced: TracedNetwork, blocks: Blocks, space: Space, left_out: Mapping[BlockKey, str]) -> None:
    """Raise TableError if there are only single layers, from which no calibration can be fitted."""
    if traced.depth == len(blocks) > 0:
        wider = ", or try the search space 'full'" if len(traced.spans("full")) > traced.depth else ""
        raise TableError(
            f"Nothing in this network can be merged in the search space {space!r}. Print the network to see the "
            f"reasons{wider}."
        )
    hopeless = sum(shape is None for _, shape in left_out)
    if hopeless and traced.depth == len(blocks) - hopeless:
        raise TableError(
            f"Nothing in this network can become faster by merging: {count(hopeless, 'block')} of several layers would "
            "have far more work than the layers. Use another target."
        )


def _calibrate(
    candidates: CandidateTimer, backend: Backend, blocks: Blocks, times: TimesAlone, count: int
) -> Calibration:
    """Time whole networks and fit the times of the blocks to them."""
    network, journal = candidates.traced.network, candidates.journal
    usable = usable_spans(network.depth, times)
    if not usable:
        raise _no_network(journal)
    kinds = activation_names(candidates.traced)
    random = max(2, round(RANDOM_SHARE * count))
    drop = random >= len(FITTED)  # with fewer networks, a fit could not separate activations from the other costs
    plans = tuple(plans_of_all_depths(network, usable, random, drop_activations=drop))
    candidates.time_plans(backend, plans)
    # Use only these plans, not all plans of the journal, so that a resumed run selects the same plans below.
    first = fit(Samples(timed_networks(network, journal, times, plans), blocks, times, kinds))
    guess = {span: _in_context(span, times[span], blocks[span], first) for span in usable}
    fast = nearly_fastest_plans(network, guess, count - random, drop_activations=drop)
    candidates.time_plans(backend, fast, "fast networks")
    return fit(Samples(timed_networks(network, journal, times, journal.plans.values()), blocks, times, kinds))


def timed_networks(
    network: Network, journal: LatencyJournal, times: TimesAlone, plans: Iterable[Plan]
) -> list[TimedNetwork]:
    """Return the plans that were timed as whole networks and whose blocks were also timed.

    Plans with dropped layers, which choose() may have timed, are not among them: `times` has only whole spans.
    """
    found = []
    original = journal.add_plan(network.vanilla)
    for plan in (plan for plan in plans if not plan.dropped):
        key = journal.add_plan(plan)
        segments, activations = network.segments(plan), network.final_activations(plan)
        if all(span in times for span in segments):
            if journal.is_timed(key):
                found.append(TimedNetwork(segments, journal.time(key), activations))
            elif journal.shares.get(key) and journal.is_timed(original):
                latency = median(journal.shares[key]) * journal.time(original)
                found.append(TimedNetwork(segments, latency, activations))
    if len({timed.segments for timed in found}) < 2:
        reasons = _all_reasons(journal)
        fix = f"The runtime reported: {reasons}. {_FIX}" if reasons else "Measure with more networks"
        raise TableError(
            f"Only {len(found)} whole networks could be timed, but a calibration needs two different ones. {fix}; "
            'in Python, mode="alone" needs none.'
        )
    return found


def _no_network(journal: LatencyJournal) -> TableError:
    if not journal.reasons:
        return TableError("This network has no layers that can be timed. Print the network to see the reasons.")
    return TableError(
        f"The runtime rejected so many blocks that no whole network is left: {_all_reasons(journal)}. {_FIX}; in "
        'Python, mode="alone" gives a table with the reasons.'
    )


def _all_reasons(journal: LatencyJournal) -> str:
    """Return each reason once, without a full stop at the end."""
    return "; ".join(dict.fromkeys(reason.removesuffix(".") for reason in journal.reasons.values()))


def _entry(
    span: Span,
    shape: ConvShape | None,
    block: BlockShape,
    journal: LatencyJournal,
    key: str,
    calibration: Calibration | None,
) -> Timing:
    if key in journal.reasons:
        return Timing(span=span, reason=journal.reasons[key], shape=shape)
    samples, time = journal.samples(key), journal.time(key)
    if calibration is None:
        return Timing.measured(span, samples, (time, time), shape=shape)
    extra = [block.extra_activations(b) for b in (False, True)]
    without, with_one = (_in_context(span, time, block, calibration, more) for more in extra)
    bare, active = (calibration.is_floored(time, *block.elements, more) for more in extra)
    return replace(
        Timing.measured(span, samples, (without, with_one), calibration.slope, shape), floored=(bare, active)
    )


def _in_context(span: Span, alone: float, block: BlockShape, calibration: Calibration, extra: int = 0) -> float:
    inside = calibration.in_context(alone, *block.elements, extra)
    return inside + (calibration.outside if span.i == 0 else 0.0)
