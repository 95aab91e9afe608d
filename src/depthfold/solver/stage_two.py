"""Stage two: Pareto labels. A label is a way to reach a position, with its latency and its importance.

A state is a position where an activation stands (and position 0, and the end L with or without one). From state k
to state l all layers between are linear, so the step costs T_opt[k, l, b] and is worth I_opt[k, l, 1, b]. Keeping, at
every state, the labels that no other label beats in both is Algorithm 4 for all budgets at once, with real costs.

Algorithm 4 also has states without an activation. They are not needed here: stage one's chains already pass through
boundaries with the flag 0, and keeping them out leaves B and S free of each other, as eq. opt-ext has them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from depthfold.solver.arrays import Exact, Floats, Ints

# A quick look at every SAMPLE-th candidate sorts out most of the others before the full sort, from WORTHWHILE
# candidates on. BINS is how finely that look is stored.
SAMPLE, BINS, WORTHWHILE = 32, 2048, 8_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """All labels of all states, one state after another. `parent` is the label before, `final` are those at L."""

    position: Ints
    parent: Ints
    flag: Ints
    final: slice
    lost: float


@dataclass(frozen=True, slots=True)
class _State:
    latency: Exact
    importance: Floats
    parent: Ints
    flag: Ints
    first: int  # the number of this state's first label among all labels
    lost: float


def pareto_labels(T_opt: Exact, I_opt: Floats, max_labels: int) -> Labels:
    """The labels of every state. `final` is empty where no chain reaches L, `lost` is in units of the lattice."""
    L = T_opt.units.shape[-1] - 1
    none = np.zeros(1, dtype=np.intp)
    states = {0: _State(Exact(np.zeros(1), np.zeros(1)), np.zeros(1), none - 1, none + 1, 0, 0.0)}
    count = 1
    possible = np.isfinite(T_opt.units) & np.isfinite(I_opt[1])  # axes: b, k, l
    for l in range(1, L + 1):
        flags = (0, 1) if l == L else (1,)
        steps = [(k, b) for b in flags for k in np.flatnonzero(possible[b, :l, l]).tolist() if k in states]
        if steps:
            states[l] = _reach(l, steps, states, T_opt, I_opt, max_labels, count)
            count += len(states[l].parent)
    end = states.get(L)
    return Labels(
        position=np.repeat(list(states), [len(state.parent) for state in states.values()]),
        parent=np.concatenate([state.parent for state in states.values()]),
        flag=np.concatenate([state.flag for state in states.values()]),
        final=slice(end.first, count) if end else slice(count, count),
        lost=end.lost if end else 0.0,
    )


def _reach(
    l: int,
    steps: list[tuple[int, int]],
    states: dict[int, _State],
    T_opt: Exact,
    I_opt: Floats,
    max_labels: int,
    first: int,
) -> _State:
    """The labels of state l from those of all states before it."""
    ks, bs = (np.array(column, dtype=np.intp) for column in zip(*steps, strict=True))
    sizes = np.array([len(states[k].parent) for k, _ in steps])
    importance = np.concatenate([states[k].importance for k, _ in steps])
    importance += np.repeat(I_opt[1, bs, ks, l], sizes)
    latency = Exact(
        np.concatenate([states[k].latency.units for k, _ in steps]),
        np.concatenate([states[k].latency.rest for k, _ in steps]),
    )
    kept = contenders(latency.units + np.repeat(T_opt.units[bs, ks, l], sizes), importance)
    ends = np.cumsum(sizes)
    step = np.searchsorted(ends, kept, side="right")
    latency, importance = latency[kept] + T_opt[bs[step], ks[step], l], importance[kept]

    best = undominated(latency, importance)
    lost = max(states[k].lost for k, _ in steps)
    if len(best) > max_labels:
        thinned, error = _thin(importance[best], max_labels)
        best, lost = best[thinned], lost + error

    kept, step = kept[best], step[best]
    firsts = np.array([states[k].first for k, _ in steps])
    parent = firsts[step] + kept - (ends - sizes)[step]
    return _State(latency[best], importance[best], parent, bs[step], first, lost)


def undominated(latency: Exact, importance: Floats) -> Ints:
    """The indices of the points that no other beats, by rising latency; the first one stands for equal points."""
    order = _by_latency(latency)
    latency, importance = latency[order], importance[order]
    rises = np.ones(len(order), dtype=bool)
    rises[1:] = importance[1:] > np.maximum.accumulate(importance)[:-1]
    kept = np.flatnonzero(rises)
    # Of those with the same latency each rises above the one before: the last one is the best.
    units, rest = latency.units[kept], latency.rest[kept]
    slower = (units[1:] != units[:-1]) | (rest[1:] != rest[:-1])
    winners: Ints = order[kept[np.append(slower, True)]]
    return winners


def _by_latency(latency: Exact) -> Ints:
    """The order of rising latency; equal ones stay as they were. The rest rarely decides, so it is asked last."""
    order = np.argsort(latency.units, kind="stable")
    units, rest = latency.units[order], latency.rest[order]
    if ((units[1:] == units[:-1]) & (rest[1:] < rest[:-1])).any():
        order = np.lexsort((latency.rest, latency.units))
    return order


def contenders(units: Floats, importance: Floats) -> Ints:
    """The indices of points that may be undominated: a cheap test that never rejects one that is.

    The front of a sample is stored on a grid of latencies. A point is out if the sample has a better one at the grid
    line that lies at least one bin before it; `units` may lack a carry of 1, which is far less than a bin.
    """
    everything = np.arange(len(units))
    if len(units) < WORTHWHILE:
        return everything
    sample = undominated(Exact(units[::SAMPLE], np.zeros(len(units[::SAMPLE]))), importance[::SAMPLE])
    front, best = units[::SAMPLE][sample], importance[::SAMPLE][sample]
    width = (front[-1] - front[0]) / BINS
    if width < 8:  # units: rounding and the carry could matter
        return everything
    lines = front[0] + width * np.arange(BINS)
    # One entry more, for the index -1: nothing is known before the first line.
    at_line = np.append(best[np.searchsorted(front, lines, side="right") - 1], -np.inf)
    bin_before = (units - front[0]) / width
    bin_before -= 1.0
    np.clip(bin_before, -1.0, BINS - 1.0, out=bin_before)
    return np.flatnonzero(importance >= at_line[np.floor(bin_before, out=bin_before).astype(np.intp)])


def _thin(importance: Floats, max_labels: int) -> tuple[Ints, float]:
    """At most `max_labels` of the labels of a front, and how much importance a dropped one was above the kept one.

    Labels are grouped by equal steps of importance and the fastest of each group stays. Whoever loses a label finds
    one that is no slower and less than a step worse, and every way on from there stays open.
    """
    step = (importance[-1] - importance[0]) / max_labels
    group = np.minimum((importance - importance[0]) // step, max_labels - 1)
    first = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
    last = np.append(first[1:], len(importance)) - 1
    return first, float((importance[last] - importance[first]).max())
