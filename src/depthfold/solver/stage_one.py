"""Stage one: the best way through the layers between two activations, once for latency and once for importance.

Both are shortest-path problems over the spans that exist. Neither knows of the other, because S and B need only
contain A: between two neighbouring activations they are free of each other.
"""

from __future__ import annotations

import numpy as np

from depthfold.solver.arrays import Exact, Floats, Ints


def both_flags(T: Floats) -> tuple[Exact, Ints, Ints]:
    """T_opt, S_opt and M_opt of T[b, i, j], each by the flag b at its end, too.

        T_opt[b, k, l] = min over k <= m < l of T_opt[0, k, m] + T[b, m, l]

    Between k and l no activation stands, so every segment of a chain is bare but the last one, which has the activation
    at l if there is one (b = 1).
    """
    exact = Exact.of(T)
    bare, S_bare = fastest_merging(exact[0])
    active, S_active = fastest_merging(exact[1], bare)
    M_opt = np.stack([merging_by_activations(T[0]), merging_by_activations(T[1], T[0])])
    return Exact.stack(bare, active), np.stack([S_bare, S_active]), M_opt


def fastest_merging(T: Exact, before: Exact | None = None) -> tuple[Exact, Ints]:
    """Algorithm 1: T_opt[k, l], and for S_opt the last cut m of its best chain (m = k: no cut, one convolution).

    T has the last span of a chain, and `before` is the T_opt of what leads to it; without one, T_opt itself.
    Barriers are no special case. No span crosses them, so every chain from one side to the other has a cut there,
    with or without an activation. Ties go to the smallest m, and so to the unsplit span.
    """
    size = len(T.units)
    T_opt = Exact(np.full((size, size), np.inf), np.zeros((size, size)))
    np.fill_diagonal(T_opt.units, 0.0)
    S_opt = np.full((size, size), -1, dtype=np.intp)
    for l in range(1, size):
        through = (T_opt if before is None else before)[:l, :l] + T[:l, l]
        least = through.units.min(axis=1, keepdims=True)
        m = np.where(through.units == least, through.rest, 1.0).argmin(axis=1)
        T_opt.units[:l, l], T_opt.rest[:l, l] = through.units[np.arange(l), m], through.rest[np.arange(l), m]
        S_opt[:l, l] = m
    return T_opt, S_opt


def best_blocks(I: Floats) -> tuple[Floats, Ints]:
    """Algorithm 3, corrected: I_opt[a, b, k, l], and for B_opt the last boundary m (m = k: one block).

        I_opt[k, l, a, b] = max(I[k, l, a, b], max over k < m < l of I_opt[k, m, a, 0] + I[m, l, 0, b])

    As printed, the case m = k loses the flag a and takes I[k, l, 0, b], the update uses m' where m is meant, and
    unreachable states start at 0 although importances are often negative. Ties go to the unsplit block.
    """
    size = I.shape[-1]
    I_opt = np.full(I.shape, -np.inf)
    B_opt = np.full(I.shape, -1, dtype=np.intp)
    starts_bare = np.isfinite(I[0]).any(axis=(0, 2))  # the only positions where a chain can be split
    for l in range(1, size):
        I_opt[:, :, :l, l] = I[:, :, :l, l]
        B_opt[:, :, :l, l] = np.arange(l)
        inner = np.flatnonzero(starts_bare[:l])
        if inner.size:
            before, last = I_opt[:, 0, :l][..., inner], I[0][:, inner, l]
            through = before[:, None] + last[None, :, None]  # axes: a, b, k, m
            best, value = through.argmax(axis=-1), through.max(axis=-1)
            better = value > I[:, :, :l, l]
            I_opt[:, :, :l, l] = np.where(better, value, I_opt[:, :, :l, l])
            B_opt[:, :, :l, l] = np.where(better, inner[best], B_opt[:, :, :l, l])
    return I_opt, B_opt


def merging_by_activations(T: Floats, bare: Floats | None = None) -> Ints:
    """The ablation of Section 5.3, all layers between two activations merged: the last cut m of every chain (k, l).

    T has the last span of a chain, and `bare` the others; without it, T has all of them.

    Where one span covers them, there is no cut (m = k). Where none does (a barrier or the end of a residual lies
    between) they merge into as few convolutions as possible, the fastest choice of those.
    """
    size = len(T)
    M_opt = np.repeat(np.arange(size), size).reshape(size, size)
    if np.isfinite(T[np.triu_indices(size, 1)]).all():
        return M_opt
    count = np.where(np.eye(size, dtype=bool), 0.0, np.inf)
    time = count.copy()
    for l in range(1, size):
        counts = count[:l, :l] + np.where(np.isfinite(T[:l, l]), 1.0, np.inf)
        count[:l, l] = counts.min(axis=1)
        fewest = np.where(counts == count[:l, l][:, None], time[:l, :l], np.inf)
        M_opt[:l, l] = (fewest + T[:l, l]).argmin(axis=1)
        time[:l, l] = (fewest + (T if bare is None else bare)[:l, l]).min(axis=1)
    return M_opt
