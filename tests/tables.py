"""Tables that several tests share. No torch: everything is built from the nouns."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

from depthfold.core import FlaggedSpan, ImportanceTable, LatencyTable, Score, Span, Timing


def latency_table(times: dict[tuple[int, int], float], **fields: object) -> LatencyTable:
    return LatencyTable(entries=tuple(Timing(span=Span(*ends), time=time) for ends, time in times.items()), **fields)


def importance_table(values: dict[tuple[int, int, int, int], float], **fields: object) -> ImportanceTable:
    entries = tuple(Score(span=FlaggedSpan(*key), samples=(value,)) for key, value in values.items())
    return ImportanceTable(entries=entries, **fields)


def with_bare(
    latency: LatencyTable,
    bare: Callable[[Timing], float | None],
    active: Callable[[Timing], float | None] = lambda entry: None,
) -> LatencyTable:
    """The table with what the entries that have a time take without an activation at their end, and with one."""
    entries = (
        replace(entry, bare=bare(entry), active=active(entry)) if entry.time is not None else entry
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


def small_instance(seed: int) -> tuple[LatencyTable, ImportanceTable]:
    """Up to 9 layers, every kind of trouble: the seed decides which."""
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
    if rng.random() < 0.3:  # the exclusion rule of the paper's space, and entries that somebody left out
        firsts = {block[:2]: block for block in blocks}
        blocks = [block for block in blocks if block in firsts.values() or rng.random() < 0.7]
    shift = rng.choice((0.0, 3.0, 3.0, -3.0))  # 3: every block is a gain, so that latency and importance conflict
    latency, importance = latency_table(times), importance_table({block: value() + shift for block in blocks})
    return (_untimed(rng, latency), importance) if rng.random() < 0.2 else (latency, importance)


def bare_instance(seed: int, *, cheaper: bool = False) -> tuple[LatencyTable, ImportanceTable]:
    """A small instance with bare times: `cheaper` ones, or any: some equal, some more, many ties, and some zero."""
    rng = random.Random(f"bare {seed}")
    latency, importance = small_instance(seed)

    def bare(entry: Timing) -> float | None:
        time = entry.time or 0.0
        less = (None, 0.0, time, time / 2, max(time - 0.25, 0.0), max(time - 1.0, 0.0), time * rng.random())
        return rng.choice(less if cheaper else (*less, time + 0.5, rng.uniform(0.0, 3.0)))

    def active(entry: Timing) -> float | None:
        return None if cheaper or rng.random() < 0.7 else (entry.time or 0.0) + rng.choice((0.0, 0.25, rng.random()))

    return with_bare(latency, bare, active), importance


def _flags(rng: random.Random, depth: int, barriers: set[int], extended: bool) -> list[tuple[int, ...]]:
    """Which flags a position may have: its own activation stays, a bare barrier stays bare, elsewhere both."""
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
