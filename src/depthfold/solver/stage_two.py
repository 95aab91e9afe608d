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


@dataclass(frozen=True, slots=True)
class Front:
    """The labels of one position by rising t. They are numbered over all positions, from `first` on.

    `parent` is the number of the label that each extends, and `edge` the number of the edge between them.
    """

    t: Ints
    D: Floats
    parent: Ints
    edge: Ints
    first: int


def algorithm_2_and_4(edges: Edges, L: Position) -> dict[Position, Front]:
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
        kept = undominated(t, D)
        parent, edge = _origins(kept, np.array(into), edges, fronts)
        fronts[l] = Front(t[kept], D[kept], parent, edge, count)
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
    order = np.argsort(t, kind="stable")
    t, D = t[order], D[order]
    rises = np.ones(len(order), dtype=bool)
    rises[1:] = D[1:] > np.maximum.accumulate(D)[:-1]
    kept = np.flatnonzero(rises)
    # Among points with the same t, each is better than the one before, so the last one is the best.
    winners: Ints = order[kept[np.append(t[kept][1:] != t[kept][:-1], True)]]
    return winners


def _one(value: int) -> Ints:
    return np.array([value], dtype=np.int64)
