"""Plans to learn from: whole networks that are timed so that blocks alone become blocks in context.

They have activations where the blocks of the table have them; thinned ones leave some out, because what activations
cost inside a network can be seen in no other way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from random import Random

from depthfold.core import Network, Plan, Position, Span
from depthfold.latency.blocks import block_is_active

# How far the times of spans are shaken for plans that are nearly the fastest: standard deviation of the logarithm.
SHAKE = 0.2


def passable(depth: Position, spans: Iterable[Span]) -> list[Span]:
    """The spans that lie on some way from 0 to the end: where the runtime rejected blocks, others may lead nowhere."""
    ordered = sorted(spans, key=lambda span: (span.i, span.j))
    from_start, to_end = {0}, {depth}
    for span in ordered:
        if span.i in from_start:
            from_start.add(span.j)
    for span in sorted(ordered, key=lambda span: span.j, reverse=True):
        if span.j in to_end:
            to_end.add(span.i)
    return [span for span in ordered if span.i in from_start and span.j in to_end]


def plans_of_all_depths(
    network: Network, spans: Iterable[Span], count: int, seed: int = 0, *, thin: bool = False
) -> Iterator[Plan]:
    """The network as it is, and random plans, from mostly folded to hardly, thinned if asked for."""
    following: dict[Position, list[Position]] = {}
    for span in spans:
        following.setdefault(span.i, []).append(span.j)
    rng, coin = Random(seed), Random(f"activations {seed}")
    yield network.vanilla
    for n in range(count - 1):
        # From mostly long steps to mostly short ones: otherwise all random plans have about the same depth.
        lean = 2.5 - 4.0 * n / max(count - 2, 1)
        segments: list[Span] = []
        while not segments or segments[-1].j < network.depth:
            position = segments[-1].j if segments else 0
            weights = [(j - position) ** lean for j in following[position]]
            segments.append(Span(position, rng.choices(following[position], weights=weights)[0]))
        plan = _plan(network, segments)
        yield _thinned(plan, coin) if thin else plan


def fast_plans(
    network: Network, times: Mapping[Span, float], count: int, seed: int = 0, *, thin: bool = False
) -> Iterator[Plan]:
    """The fastest plan by these times, and others that are nearly as fast, every other one thinned if asked for: what a
    solver chooses is of this kind, and random plans are not (their kernels are large)."""
    rng, coin = Random(seed), Random(f"activations {seed}")
    found: dict[Plan, None] = {}
    for n in range(5 * count):  # several tries lead to the same plan; a small network may not have as many
        shaken = {span: time * math.exp(rng.gauss(0.0, SHAKE if n else 0.0)) for span, time in times.items()}
        found.setdefault(_plan(network, _fastest(network.depth, shaken)))
        if len(found) == count:
            break
    for n, plan in enumerate(found):
        yield _thinned(plan, coin) if thin and n % 2 else plan


def _thinned(plan: Plan, coin: Random) -> Plan:
    """The plan with any share of its activations left out, from none to all."""
    share = coin.random()
    return Plan([position for position in sorted(plan.activations) if coin.random() >= share], plan.cuts)


def _fastest(depth: Position, times: Mapping[Span, float]) -> list[Span]:
    """The spans from 0 to `depth` with the smallest sum."""
    best: dict[Position, tuple[float, Span | None]] = {0: (0.0, None)}
    for span in sorted(times, key=lambda span: span.j):  # whatever ends at i comes before what starts there
        if span.i in best:
            total = best[span.i][0] + times[span]
            if span.j not in best or total < best[span.j][0]:
                best[span.j] = (total, span)
    way: list[Span] = []
    position = depth
    while (last := best[position][1]) is not None:
        way.append(last)
        position = last.i
    return way[::-1]


def _plan(network: Network, segments: list[Span]) -> Plan:
    active = [span.j for span in segments if block_is_active(network, span)]
    return Plan(activations=active, cuts=[span.j for span in segments[:-1]])
