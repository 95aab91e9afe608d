"""Plans whose networks are timed for the calibration.

By default they have activations where the blocks of the table have them. With `drop_activations`, some plans leave out
a random share of their activations of each kind, because the calibration cannot determine the costs of activations
otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from random import Random

from depthfold.core import Network, Plan, Position, Span
from depthfold.latency.blocks import timed_with_activation
from depthfold.latency.calibration import MIN_DIFFERING

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
    plans: list[Plan] = []
    thinned: list[Plan] = []
    for n in range(count - 1):
        # First prefer long spans, later short ones: otherwise all random plans have about the same depth.
        exponent = 2.5 - 4.0 * n / max(count - 2, 1)
        segments: list[Span] = []
        while not segments or segments[-1].j < network.depth:
            position = segments[-1].j if segments else 0
            weights = [(j - position) ** exponent for j in following[position]]
            segments.append(Span(position, rng.choices(following[position], weights=weights)[0]))
        plans.append(_plan(network, segments))
        thinned.append(_drop_some_activations(network, plans[-1], coin))
    yield network.vanilla
    yield from _drop_every_kind(network, plans, thinned) if drop_activations else plans


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
        yield _drop_some_activations(network, plan, coin) if drop_activations and n % 2 else plan


def _drop_some_activations(network: Network, plan: Plan, coin: Random) -> Plan:
    """Return the plan without a random share of its activations of each kind, from none to all."""
    shares = {kind: coin.random() for kind in _kinds(network)}
    kept = [p for p in sorted(plan.activations) if coin.random() >= shares[_kind(network, p)]]
    return Plan(kept, plan.cuts)


def _drop_every_kind(network: Network, plans: list[Plan], thinned: list[Plan]) -> list[Plan]:
    """Return the plans without some activations, `thinned`, changed so that enough of them lack some of each kind.

    Chance may keep a kind that few layers have, and then its cost could not be fitted. This changes nothing if all
    activations are of one kind.
    """
    kinds = _kinds(network)
    for kind in kinds if len(kinds) > 1 else ():
        own = {p for p in range(1, network.depth) if _kind(network, p) == kind}  # at the output, it always stays
        lacking = {n for n, plan in enumerate(plans) if (plan.activations - thinned[n].activations) & own}
        others = [n for n, plan in enumerate(plans) if plan.activations & own and n not in lacking]
        for n in others[: max(MIN_DIFFERING - len(lacking), 0)]:
            thinned[n] = Plan(thinned[n].activations - own, plans[n].cuts)
    return thinned


def _kinds(network: Network) -> list[str | None]:
    """Return each kind of activation once."""
    return list(dict.fromkeys(_kind(network, p) for p in sorted(network.activations)))


def _kind(network: Network, position: Position) -> str | None:
    """Return the kind of the activation at a position: the network's own, or the one that would be inserted."""
    return network.layers[position - 1].activation or network.main_activation


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
