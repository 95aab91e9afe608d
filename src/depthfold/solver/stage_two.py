"""Stage two: Algorithms 2 and 4, for all budgets at once.

D[l, t] of the paper is a step function of the budget t: it rises only where another plan becomes affordable. So it is
kept as its steps, the labels of position l. A label (t, D) is a way to reach l in time t with importance D that no
other way beats in both. The labels at L are the frontier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from depthfold.core import Position
from depthfold.solver.edges import Edges
from depthfold.stage_one import Floats, Ints

# With at least WORTHWHILE candidates, every SAMPLE-th is tested first, in BINS bins of time. This rules out most of the
# others before they are sorted.
SAMPLE, BINS, WORTHWHILE = 32, 2048, 8_000


@dataclass(frozen=True, slots=True)
class Front:
    """The labels of one position by rising t. They are numbered over all positions, from `first` on.

    `parent` is the number of the label that each extends, and `edge` the number of the edge between them. `lost` bounds
    the importance that dropping labels has lost.
    """

    t: Ints
    D: Floats
    parent: Ints
    edge: Ints
    first: int
    lost: float = 0.0


def algorithm_2_and_4(edges: Edges, L: Position, max_labels: int) -> dict[Position, Front]:
    """Return the labels (t, D) of every position that can be reached:

        D[l, t, b] = max over the edges e from k to l of D[k, t - t_e, 1] + I_e

    In the paper there is one edge for each k, l and b, with T_opt[k, l, b] and I_opt[k, l, 1, b]. Algorithm 2 is the
    case in which all flags are 1: then I_opt[k, l, 1, 1] is I[k, l].
    """
    # Erratum: the paper also sets D[0, t, 0] = 0, so a network could start with a = 0. Position 0 has the flag 1.
    fronts = {0: Front(t=_one(0), D=np.zeros(1), parent=_one(-1), edge=_one(-1), first=0)}
    bounds = np.searchsorted(edges.l, np.arange(L + 2)).tolist()
    starts, times, importances = edges.k.tolist(), edges.t.tolist(), edges.I.tolist()
    count = 1
    for l in range(1, L + 1):
        into = [e for e in range(bounds[l], bounds[l + 1]) if starts[e] in fronts]
        if not into:
            continue
        # Difference: the paper asks for t < T_0; here t <= T_0, as in the authors' code. Their code rounds times to a
        # grid, so that plans exceed the budget. Here times are rounded up when a table comes in.
        t = np.concatenate([fronts[starts[e]].t + times[e] for e in into])
        D = np.concatenate([fronts[starts[e]].D + importances[e] for e in into])
        kept, dropped = thinned(undominated(t, D), D, max_labels)
        parent, edge = _origins(kept, np.array(into), edges, fronts)
        lost = max(fronts[k].lost for k in {starts[e] for e in into}) + dropped
        fronts[l] = Front(t[kept], D[kept], parent, edge, count, lost)
        count += len(kept)
    # Erratum: Algorithm 4 takes the best of A[L, T_0, a], which is a set. The best D[L, T_0, a] is meant, and the
    # labels at L have it for every T_0 and both flags.
    return fronts


def _origins(kept: Ints, into: Ints, edges: Edges, fronts: Mapping[Position, Front]) -> tuple[Ints, Ints]:
    """Return the parent and the edge of each kept candidate. Candidates are numbered edge by edge."""
    sources = [fronts[k] for k in edges.k[into].tolist()]
    starts = np.cumsum([0, *(len(source.t) for source in sources)])
    step = np.searchsorted(starts, kept, side="right") - 1
    firsts = np.array([source.first for source in sources])
    return firsts[step] + kept - starts[step], into[step]


def undominated(t: Ints, D: Floats) -> Ints:
    """Return the indices of the points that no other point beats, by rising t; of equal points the first."""
    likely = contenders(t, D)
    order = likely[np.argsort(t[likely], kind="stable")]
    t, D = t[order], D[order]
    rises = np.ones(len(order), dtype=bool)
    rises[1:] = D[1:] > np.maximum.accumulate(D)[:-1]
    kept = np.flatnonzero(rises)
    # Among points with the same t, each is better than the one before, so the last one is the best.
    winners: Ints = order[kept[np.append(t[kept][1:] != t[kept][:-1], True)]]
    return winners


def contenders(t: Ints, D: Floats) -> Ints:
    """Return the indices of the points that may be undominated, by a cheap test that never rejects one that is.

    The front of a sample is stored at the edges of bins of t. A point is rejected if the sample has a better one at or
    before the lower edge of the point's bin.
    """
    everything = np.arange(len(t))
    if len(t) < WORTHWHILE:
        return everything
    sample = everything[::SAMPLE]
    sample = sample[undominated(t[sample], D[sample])]
    front, best = t[sample] - t[sample[0]], D[sample]
    width = front[-1] // BINS + 1
    # One entry more, for the index -1: nothing is known before the first edge.
    at_edge = np.append(best[np.searchsorted(front, width * np.arange(BINS), side="right") - 1], -np.inf)
    bin_of = np.clip((t - t[sample[0]]) // width, -1, BINS - 1)
    return np.flatnonzero(at_edge[bin_of] <= D)


def thinned(front: Ints, D: Floats, max_labels: int) -> tuple[Ints, float]:
    """Return at most `max_labels` points of a front, and the most importance that a dropped one had above the kept one.

    The points are grouped by equal steps of importance and the fastest of each group stays. For every dropped point
    there is a kept one that is not slower and at most a step worse.
    """
    if len(front) <= max_labels:
        return front, 0.0
    D = D[front]
    group = np.minimum((D - D[0]) // ((D[-1] - D[0]) / max_labels), max_labels - 1)
    first = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
    last = np.append(first[1:], len(D)) - 1
    return front[first], float((D[last] - D[first]).max())


def _one(value: int) -> Ints:
    return np.array([value], dtype=np.int64)
