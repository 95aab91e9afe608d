"""Tables that several tests share. No torch."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import get_args

import pytest

from depthfold.core import (
    Calibration,
    ConvShape,
    Drops,
    FlaggedSpan,
    ImportanceTable,
    LatencyTable,
    Network,
    Score,
    Space,
    Span,
    Timing,
)
from depthfold.core.options import Move, block_options, span_options
from depthfold.errors import PlanError
from structures import Builder
from structures import shape as square


def timing(i: int, j: int, with_one: float, without: float | None = None) -> Timing:
    """An entry with both times; one time stands for both."""
    return Timing(span=Span(i, j), times=(with_one if without is None else without, with_one))


def latency_table(times: dict[tuple[int, int], float], **fields: object) -> LatencyTable:
    return LatencyTable(entries=tuple(timing(*ends, time) for ends, time in times.items()), **fields)


def importance_table(values: dict[tuple[int, int, int, int], float], **fields: object) -> ImportanceTable:
    entries = tuple(Score(span=FlaggedSpan(*key), samples=(value,)) for key, value in values.items())
    return ImportanceTable(entries=entries, **fields)


def with_two_times(
    latency: LatencyTable,
    without: Callable[[Span, float], float],
    with_one: Callable[[Span, float], float] = lambda span, time: time,
) -> LatencyTable:
    """The table with two functions of each span and its time as the times without and with an activation."""
    entries = (
        Timing(span=entry.span, times=(without(entry.span, entry.times[1]), with_one(entry.span, entry.times[1])))
        if entry.times is not None
        else entry
        for entry in latency.entries
    )
    return replace(latency, entries=tuple(entries))


def plausible_tables(
    spans: Iterable[Span], blocks: Iterable[FlaggedSpan], seed: int
) -> tuple[LatencyTable, ImportanceTable]:
    """Random real tables that pull against each other as measured ones do: merging saves time and costs accuracy.

    Such tables have much longer frontiers than independent random numbers, where long spans win both ways.
    """
    rng = random.Random(seed)
    single = [rng.uniform(0.2, 1.2) for _ in range(1000)]
    damage = [rng.uniform(0.0, 0.02) for _ in range(1000)]
    times = {(s.i, s.j): sum(single[s.i : s.j]) * (rng.uniform(0.35, 1.2) if len(s) > 1 else 1.0) for s in spans}
    values = {
        (f.i, f.j, f.a, f.b): rng.gauss(0.003 * (f.a + f.b), 0.002) - rng.uniform(0.5, 1.5) * sum(damage[f.i + 1 : f.j])
        for f in blocks
    }
    return latency_table(times), importance_table(values)


def tables_with_moves(
    network: Network, space: Space, moves: Iterable[Move], seed: int
) -> tuple[LatencyTable, ImportanceTable]:
    """Random tables for all moves: a kernel takes time with its size and the layers that stay; drops cost accuracy."""
    rng = random.Random(seed)
    single = [rng.uniform(0.2, 1.2) for _ in range(network.depth)]
    damage = [rng.uniform(0.0, 0.02) for _ in range(network.depth)]
    options = {span: span_options(network, span, moves) for span in network.spans(space)}
    timings, scores = [], []
    for span, shapes in options.items():
        for shape, dropped in shapes.items():
            kept = [l for l in span.layers if l not in dropped.missing]
            time = sum(single[l - 1] for l in kept) * (rng.uniform(0.35, 1.2) if len(kept) > 1 else 1.0)
            timings.append(Timing(span=span, times=(time, time + 0.05), shape=shape if dropped else None))
    for block, dropped in block_options(network, space, moves):
        removed = sum(damage[l - 1] for l in block.span.inner)
        lost = rng.uniform(0.5, 1.5) * (removed + sum(2 * damage[l - 1] for l in dropped.missing))
        value = rng.gauss(0.003 * (block.a + block.b), 0.002) - lost
        scores.append(Score(span=block, samples=(value,), dropped=dropped))
    return LatencyTable(entries=tuple(timings)), ImportanceTable(entries=tuple(scores))


def only_outside(cost: float) -> Calibration:
    """A calibration with a cost outside the spans. The times of blocks stay as they are."""
    return Calibration(
        slope=1.0, per_segment=0.0, per_read=0.0, per_write=0.0, outside=cost, networks=2, median_error=0.0,
        worst_error=0.0,
    )  # fmt: skip


def small_instance(seed: int) -> tuple[LatencyTable, ImportanceTable]:
    """Up to 9 layers, with ties, barriers, missing entries and flags as the seed decides."""
    rng = random.Random(seed)
    depth = rng.randint(1, 9)
    density = rng.choice((1.0, 0.7, 0.4))
    barriers = {p for p in range(1, depth) if rng.random() < 0.25} if rng.random() < 0.5 else set()
    spans = [
        (i, j)
        for i in range(depth)
        for j in range(i + 1, depth + 1)
        if not any(i < p < j for p in barriers) and (j == i + 1 or rng.random() < density)
    ]
    if rng.random() < 0.15 and depth > 1:
        spans.remove(rng.choice([ends for ends in spans if ends[1] == ends[0] + 1 and ends[1] < depth]))
    flags = _flags(rng, depth, barriers, extended=rng.random() < 0.6)
    value = _values(rng)
    times = {ends: abs(value()) if rng.random() > 0.1 else 0.0 for ends in spans}
    blocks = [(i, j, a, b) for i, j in spans for a in flags[i] for b in flags[j]]
    if rng.random() < 0.3:  # the exclusion rule of the paper's space, and other missing entries
        firsts = {block[:2]: block for block in blocks}
        blocks = [block for block in blocks if block in firsts.values() or rng.random() < 0.7]
    shift = rng.choice((0.0, 3.0, 3.0, -3.0))  # 3: every block is a gain, so that latency and importance conflict
    latency, importance = latency_table(times), importance_table({block: value() + shift for block in blocks})
    return (_untimed(rng, latency), importance) if rng.random() < 0.2 else (latency, importance)


def moves_instance(seed: int) -> tuple[Network, LatencyTable, ImportanceTable]:
    """Up to 7 layers of a random network, with tables for all moves: ties, missing entries, two times, no pattern.

    Three seeds share a network, because its options take as long to find as its frontier.
    """
    rng = random.Random(seed)
    network, options_of = _network_with_options(seed // 3)
    space: Space = rng.choice(("paper", "full"))
    value, shift = _values(rng), rng.choice((0.0, 3.0, 3.0, -3.0))
    share = rng.choice((1.0, 0.5, 0.5)) if network.depth < 6 else 0.3
    timings, scores = [], []
    options: dict[Span, list[Drops]] = {}
    for span in network.spans(space):
        shapes = _more_options(rng, network, span, options_of[span])
        chosen = [shape for shape in shapes if not shapes[shape] or rng.random() < share]
        options[span] = [shapes[shape] for shape in chosen]
        for shape in shapes if rng.random() < 0.5 else chosen:
            own = shape if shapes[shape] else None
            if rng.random() < 0.05:
                timings.append(Timing(span=span, reason="out of memory", shape=own))
            else:
                time = abs(value()) if rng.random() > 0.1 else 0.0
                without = rng.choice((time, time, max(time - 0.25, 0.0), time / 2, time + 0.5))
                timings.append(Timing(span=span, times=(without, time), shape=own))
    merged = frozenset(network.flagged_spans(space))
    for block in network.flagged_spans(space, exclusion=False):
        for dropped in options[block.span]:
            if block not in merged and not dropped.missing.issuperset(block.span.layers):
                continue
            if dropped and rng.random() < 0.1:
                scores.append(Score(span=block, reason="not measured", dropped=dropped))
            else:
                scores.append(Score(span=block, samples=(value() + shift,), dropped=dropped))
    fitted = only_outside(rng.choice((0.0, 0.25, 0.5))) if rng.random() < 0.6 else None
    latency = LatencyTable(entries=tuple(timings), calibration=fitted)
    return network, latency, ImportanceTable(entries=tuple(scores))


@functools.lru_cache(maxsize=4)
def _network_with_options(number: int) -> tuple[Network, dict[Span, dict[ConvShape, Drops]]]:
    rng = random.Random(f"network {number}")
    network = random_network(rng, rng.choice((2, 3, 3, 4, 4, 5, 5, 6, 7)))
    return network, {span: span_options(network, span, get_args(Move)) for span in network.spans("full")}


def _more_options(
    rng: random.Random, network: Network, span: Span, options: dict[ConvShape, Drops]
) -> dict[ConvShape, Drops]:
    """The options of all moves, and sometimes a mixture of dropped layers and branches."""
    shapes = dict(options)
    inside = [branch for branch in sorted(network.droppable_branches) if span.contains(branch)]
    if inside and rng.random() < 0.8:
        branch = rng.choice(inside)
        others = [l for l in network.droppable_layers & set(span.layers) if l not in branch.layers]
        dropped = Drops([l for l in others if rng.random() < 0.5], [branch])
        if not dropped.missing.issuperset(span.layers):
            with contextlib.suppress(PlanError):  # a skip does not fit
                shapes.setdefault(network.merged_shape(span, dropped), dropped)
    return shapes


def random_network(rng: random.Random, depth: int) -> Network:
    """A chain with residuals, some of them nested or projected, strides, depth-wise layers and barriers."""
    build, sources = Builder(4, 16), [0]
    barriers: list[int] = []
    bare = rng.random() < 0.7  # some layers have no activation
    for l in range(1, depth + 1):
        stride = 2 if rng.random() < 0.08 else 1
        outs = rng.choice((4, 4, 4, 4, 4, 8))
        groups = 4 if build.channels == outs == 4 and rng.random() < 0.3 else 1
        kernel = rng.choice((1, 3, 3))
        activation = None if bare and rng.random() < 0.45 else "relu"
        build.add(outs, activation, kernel=kernel, stride=stride, groups=groups)
        for source in [p for p in sources if l - p > 1]:
            if rng.random() < 0.4 and build.size == build.sizes[source]:
                same = build.widths[source] == outs
                build.skip(source, None if same else square(build.widths[source], outs, kernel=1))
                break
        sources = [p for p in sources if all(p <= s.source or p >= s.target for s in build.skips)] + [l]
        if l < depth and rng.random() < 0.1 and not any(s.source < l < s.target for s in build.skips):
            barriers.append(l)
            sources = [l]
    return build.network("random", barriers=tuple(barriers), ends_in_output=rng.random() < 0.5)


def two_times_instance(seed: int, *, cheaper: bool = False) -> tuple[LatencyTable, ImportanceTable]:
    """A small instance whose times without an activation are `cheaper`, or of any size: equal, larger, ties, zero."""
    rng = random.Random(f"bare {seed}")
    latency, importance = small_instance(seed)

    def without(_: Span, time: float) -> float:
        less = (time, 0.0, time, time / 2, max(time - 0.25, 0.0), max(time - 1.0, 0.0), time * rng.random())
        return rng.choice(less if cheaper else (*less, time + 0.5, rng.uniform(0.0, 3.0)))

    def with_one(_: Span, time: float) -> float:
        return time if cheaper or rng.random() < 0.7 else time + rng.choice((0.0, 0.25, rng.random()))

    return with_two_times(latency, without, with_one), importance


def _flags(rng: random.Random, depth: int, barriers: set[int], extended: bool) -> list[tuple[int, ...]]:
    """Which flags a position may have: its own activation stays, a barrier without one stays so, elsewhere both."""
    flags: list[tuple[int, ...]] = [(1,)]
    for p in range(1, depth + 1):
        bare = extended and rng.random() < 0.6
        flags.append(((0,) if p in barriers or rng.random() < 0.2 else (0, 1)) if bare else (1,))
    return flags


def _values(rng: random.Random) -> Callable[[], float]:
    """Real numbers, or small whole and quarter numbers with many ties, whose sums are exact."""
    return rng.choice((lambda: rng.uniform(-2, 2), lambda: float(rng.randint(-3, 3)), lambda: rng.randint(-8, 8) / 4))


def _untimed(rng: random.Random, latency: LatencyTable) -> LatencyTable:
    """Some entries lose their time and get a reason instead."""
    entries = [
        Timing(span=entry.span, reason="out of memory") if rng.random() < 0.1 and len(entry.span) > 1 else entry
        for entry in latency.entries
    ]
    return LatencyTable(entries=tuple(entries))


def batches(number: int) -> list[object]:
    """Return the parameters of a test in batches. CI runs the first third of them."""
    return [n if 3 * n < number else pytest.param(n, marks=pytest.mark.slow) for n in range(number)]
