"""Plans whose networks are timed for the calibration.

By default they have activations where the blocks of the table have them. With `drop_activations`, some plans leave out
a random share of their activations, because the calibration cannot determine the cost of activations otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from random import Random

from depthfold.core import Network, Plan, Position, Span
from depthfold.latency.blocks import timed_with_activation

# The random factors on the times of spans for nearly fastest plans: standard deviation of their logarithm.
JITTER = 0.2


def usable_spans(depth: Position, spans: Iterable[Span]) -> list[Span]:
    """Return the spans that are part of some path from 0 to `depth`. Blocks that the runtime rejected leave gaps."""
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
    network: Network, spans: Iterable[Span], count: int, seed: int = 0, *, drop_activations: bool = False
) -> Iterator[Plan]:
    """Yield the vanilla plan, then random plans from shallow to deep."""
    following: dict[Position, list[Position]] = {}
    for span in spans:
        following.setdefault(span.i, []).append(span.j)
    rng, coin = Random(seed), Random(f"activations {seed}")
    yield network.vanilla
    for n in range(count - 1):
        # First prefer long spans, later short ones: otherwise all random plans have about the same depth.
        exponent = 2.5 - 4.0 * n / max(count - 2, 1)
        segments: list[Span] = []
        while not segments or segments[-1].j < network.depth:
            position = segments[-1].j if segments else 0
            weights = [(j - position) ** exponent for j in following[position]]
            segments.append(Span(position, rng.choices(following[position], weights=weights)[0]))
        plan = _plan(network, segments)
        yield _drop_some_activations(plan, coin) if drop_activations else plan


def nearly_fastest_plans(
    network: Network, times: Mapping[Span, float], count: int, seed: int = 0, *, drop_activations: bool = False
) -> Iterator[Plan]:
    """Yield the fastest plan according to these times, and others that are nearly as fast.

    A solver picks plans like these. Random plans are different: they have large kernels. With `drop_activations`, every
    second plan leaves out some.
    """
    rng, coin = Random(seed), Random(f"activations {seed}")
    found: dict[Plan, None] = {}
    for n in range(5 * count):  # several attempts give the same plan, and a small network may have fewer than `count`
        varied = {span: time * math.exp(rng.gauss(0.0, JITTER if n else 0.0)) for span, time in times.items()}
        found.setdefault(_plan(network, _fastest(network.depth, varied)))
        if len(found) == count:
            break
    for n, plan in enumerate(found):
        yield _drop_some_activations(plan, coin) if drop_activations and n % 2 else plan


def _drop_some_activations(plan: Plan, coin: Random) -> Plan:
    """Return the plan without a random share of its activations, from none to all."""
    share = coin.random()
    return Plan([position for position in sorted(plan.activations) if coin.random() >= share], plan.cuts)


def _fastest(depth: Position, times: Mapping[Span, float]) -> list[Span]:
    """Return the spans from 0 to `depth` with the smallest sum."""
    best: dict[Position, tuple[float, Span | None]] = {0: (0.0, None)}
    for span in sorted(times, key=lambda span: span.j):  # all spans that end at i come before those that start there
        if span.i in best:
            total = best[span.i][0] + times[span]
            if span.j not in best or total < best[span.j][0]:
                best[span.j] = (total, span)
    path: list[Span] = []
    position = depth
    while (last := best[position][1]) is not None:
        path.append(last)
        position = last.i
    return path[::-1]


def _plan(network: Network, segments: list[Span]) -> Plan:
    active = [span.j for span in segments if timed_with_activation(network, span)]
    return Plan(activations=active, cuts=[span.j for span in segments[:-1]])
