"""Stage one: Algorithms 1 and 3, the best way through the layers between two activations.

Algorithm 1 finds the fastest segments and Algorithm 3 the most important blocks. The two are independent, because S and
B need only contain A. Arrays have the paper's indices; the loop over k is one operation on the rows of an array.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from depthfold.core import LatencyTable
from depthfold.core.latency_table import picoseconds

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# The time of a span that does not exist. Two of them add up to less than 2^63, and the sum of any 4,600 entries of a
# latency table is smaller, so no sum overflows up to 4,600 layers.
NEVER = 2**62 - 1


def time_array(latency: LatencyTable) -> Ints:
    """Return T[i, j, b] in whole picoseconds, NEVER if there is no such span."""
    T = np.full((latency.depth + 1, latency.depth + 1, 2), NEVER, dtype=np.int64)
    for span, times in latency.times.items():
        T[span.i, span.j] = [picoseconds(time) for time in times]
    return T


def algorithm_1(T: Ints) -> tuple[Ints, Ints]:
    """Return T_opt[k, l, b] and S_opt[k, l, b] (Eq. 5): the least time of the layers k+1..l, and the last cut m of it.

    S_opt has one cut instead of the set: the others are those of S_opt[k, m, 0]. If m = k, there is no cut.
    """
    L = len(T) - 1
    T_opt = np.full_like(T, NEVER)
    S_opt = np.full_like(T, -1)
    # Erratum: the paper has no notion of a span that does not exist. Here its T is NEVER. No span crosses a barrier, so
    # every way from one side of it to the other has a cut there.
    T_opt[np.arange(L + 1), np.arange(L + 1)] = 0
    for l in range(1, L + 1):
        for b in (0, 1):
            # m <- argmin over k <= m' < l of T_opt[k, m'] + T[m', l]; ties go to the smallest m', so to no cut.
            # The paper has one time per span. Here every segment except the last takes its time without an activation,
            # because there is none between k and l.
            through = T_opt[:l, :l, 0] + T[:l, l, b]
            m = through.argmin(axis=1)
            T_opt[:l, l, b] = np.minimum(through[np.arange(l), m], NEVER)
            S_opt[:l, l, b] = m
    return T_opt, S_opt


def algorithm_3(I: Floats) -> tuple[Floats, Ints]:
    """Return I_opt[k, l, a, b] and B_opt[k, l, a, b]: the largest importance of the layers k+1..l if there is no
    activation between them, and the last boundary m of it. If m = k, there is one block.

        I_opt[k, l, a, b] = max(I[k, l, a, b], max over k < m < l of I_opt[k, m, a, 0] + I[m, l, 0, b])
    """
    L = len(I) - 1
    # I is -inf for blocks that the table lacks. The box sets some to -inf itself: here `flagged_spans` leaves them out.
    I_opt = np.full_like(I, -np.inf)
    B_opt = np.full(I.shape, -1)
    possible = I[:, :, 0].max(axis=(1, 2)) > -np.inf  # the positions m where a block starts without an activation
    for l in range(1, L + 1):
        # Erratum: for m = k the paper takes I_opt[k, k, a, 0] + I[k, l, 0, b]. This loses the flag a, and is -inf for
        # every a if the network has an activation at k, because I has no entry with the flag 0 there.
        I_opt[:l, l] = I[:l, l]
        B_opt[:l, l] = np.arange(l)[:, None, None]
        inner = np.flatnonzero(possible[:l])
        for a, b in ((0, 0), (0, 1), (1, 0), (1, 1)) if inner.size else ():
            # m <- argmax over k < m' < l of I_opt[k, m', a, 0] + I[m', l, 0, b]; ties go to the unsplit block.
            through = I_opt[:l, inner, a, 0] + I[inner, l, 0, b]
            m = through.argmax(axis=1)
            # Erratum: the paper updates with m' instead of m, and B_opt lacks the flags.
            value = through[np.arange(l), m]
            better = value > I[:l, l, a, b]
            I_opt[:l, l, a, b] = np.where(better, value, I[:l, l, a, b])
            B_opt[:l, l, a, b] = np.where(better, inner[m], np.arange(l))
    return I_opt, B_opt


def time_along_activations(T: Ints) -> Ints:
    """Return T_A[k, l, b], the ablation of Section 5.3: the time if all layers between two activations are merged.

    If no span covers them, because of a barrier or the end of a residual, they are merged into as few convolutions as
    possible, and into the fastest of these.
    """
    L = len(T) - 1
    if (T[np.triu_indices(L + 1, 1)] < NEVER).all():
        return T
    T_A = np.full_like(T, NEVER)
    T_A[np.arange(L + 1), np.arange(L + 1)] = 0
    count = np.where(np.eye(L + 1, dtype=bool), 0, NEVER)
    for l in range(1, L + 1):
        counts = count[:l, :l] + np.where(T[:l, l, 1] < NEVER, 1, NEVER)
        count[:l, l] = np.minimum(counts.min(axis=1), NEVER)
        for b in (0, 1):
            through = np.where(counts == count[:l, l, None], T_A[:l, :l, 0] + T[:l, l, b], NEVER)
            T_A[:l, l, b] = np.minimum(through.min(axis=1), NEVER)
    return T_A
