"""Stage two: Pareto labels. A label is a way to reach a position, with its latency and its importance.

A state is a position where an activation stands (and position 0, and the end L with or without one). From state k
to state l all layers between are linear, so the step costs T_opt[k, l] and is worth I_opt[k, l, 1, b]. Keeping, at
every state, the labels that no other label beats in both is Algorithm 4 for all budgets at once, with real costs.

Algorithm 4 also has states without an activation. They are not needed here: stage one's chains already pass through
boundaries with the flag 0, and keeping them out leaves B and S free of each other, as eq. opt-ext has them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from depthfold.solver.arrays import Bools, Floats, Ints

# A quick look at every SAMPLE-th candidate sorts out most of the others before the full sort, from WORTHWHILE
# candidates on. BINS is how finely that look is stored.
SAMPLE, BINS, WORTHWHILE = 16, 4096, 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """All labels of all states, one state after another. `parent` is the label before, `final` are those at L."""

    latency: Floats
    importance: Floats
    position: Ints
    parent: Ints
    flag: Ints
    final: slice
    lost: float


@dataclass(frozen=True, slots=True)
class _State:
    latency: Floats
    importance: Floats
    parent: Ints
    flag: Ints
    first: int  # the number of this state's first label among all labels
    lost: float


def pareto_labels(T_opt: Floats, I_opt: Floats, max_labels: int) -> Labels:
    """The labels of every state, in units of the lattice. `final` is empty where no chain reaches L."""
    L = len(T_opt) - 1
    none = np.zeros(1, dtype=np.intp)
    states = {0: _State(np.zeros(1), np.zeros(1), none - 1, none + 1, 0, 0.0)}
    count = 1
    for l in range(1, L + 1):
        steps = [
            (k, b)
            for b in ((0, 1) if l == L else (1,))
            for k in np.flatnonzero(np.isfinite(T_opt[:l, l]) & np.isfinite(I_opt[1, b, :l, l])).tolist()
            if k in states
        ]
        if steps:
            states[l] = _reach(l, steps, states, T_opt, I_opt, max_labels, count)
            count += len(states[l].latency)
    end = states.get(L)
    return Labels(
        latency=np.concatenate([state.latency for state in states.values()]),
        importance=np.concatenate([state.importance for state in states.values()]),
        position=np.repeat(list(states), [len(state.latency) for state in states.values()]),
        parent=np.concatenate([state.parent for state in states.values()]),
        flag=np.concatenate([state.flag for state in states.values()]),
        final=slice(end.first, count) if end else slice(count, count),
        lost=end.lost if end else 0.0,
    )


def _reach(
    l: int,
    steps: list[tuple[int, int]],
    states: dict[int, _State],
    T_opt: Floats,
    I_opt: Floats,
    max_labels: int,
    first: int,
) -> _State:
    """The labels of state l from those of all states before it."""
    ks, bs = (np.array(column, dtype=np.intp) for column in zip(*steps, strict=True))
    sizes = np.array([len(states[k].latency) for k, _ in steps])
    latency = np.concatenate([states[k].latency for k, _ in steps])
    latency += np.repeat(T_opt[ks, l], sizes)
    importance = np.concatenate([states[k].importance for k, _ in steps])
    importance += np.repeat(I_opt[1, bs, ks, l], sizes)

    kept = undominated(latency, importance)
    lost = max(states[k].lost for k, _ in steps)
    if len(kept) > max_labels:
        thinned, error = _thin(importance[kept], max_labels)
        kept, lost = kept[thinned], lost + error

    ends = np.cumsum(sizes)
    step = np.searchsorted(ends, kept, side="right")
    firsts = np.array([states[k].first for k, _ in steps])
    parent = firsts[step] + kept - (ends - sizes)[step]
    return _State(latency[kept], importance[kept], parent, bs[step], first, lost)


def undominated(latency: Floats, importance: Floats) -> Ints:
    """The indices of the points that no other beats, by rising latency; the first one stands for equal points."""
    contenders = None
    if len(latency) > WORTHWHILE:
        contenders = np.flatnonzero(_contends(latency, importance))
        latency, importance = latency[contenders], importance[contenders]
    order = np.argsort(latency, kind="stable")  # stable: the candidates are sorted runs, and ties stay in order
    latency, importance = latency[order], importance[order]
    rises = np.ones(len(order), dtype=bool)
    rises[1:] = importance[1:] > np.maximum.accumulate(importance)[:-1]
    kept = np.flatnonzero(rises)
    # Of those with the same latency each rises above the one before: the last one is the best.
    kept = kept[np.append(latency[kept][1:] != latency[kept][:-1], True)]
    winners: Ints = order[kept] if contenders is None else contenders[order[kept]]
    return winners


def _contends(latency: Floats, importance: Floats) -> Bools:
    """Which points may be undominated: a cheap test that never rejects one that is.

    The front of a sample is stored on a grid of latencies. A point is out if the sample has a better one at the grid
    line that lies at least one bin before it.
    """
    sample = undominated(latency[::SAMPLE], importance[::SAMPLE])
    front, best = latency[::SAMPLE][sample], importance[::SAMPLE][sample]
    width = (front[-1] - front[0]) / BINS
    if width < 4:  # units of the lattice: below that, rounding could matter
        return np.ones(len(latency), dtype=bool)
    lines = front[0] + width * np.arange(BINS)
    at_line = np.append(best[np.searchsorted(front, lines, side="right") - 1], -np.inf)
    bin_before = (latency - front[0]) / width
    bin_before -= 1.0
    np.clip(bin_before, -1.0, BINS - 1.0, out=bin_before)
    # -1, before the first line, is the last entry: nothing is known there. Casting cuts (-1, 0) off to 0, one bin
    # too far, so it is floored first.
    near: Bools = importance >= at_line[np.floor(bin_before, out=bin_before).astype(np.intp)]
    return near


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
