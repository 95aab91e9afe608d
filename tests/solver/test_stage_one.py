from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest

from depthfold.solver.arrays import Exact, lattice_exponent
from depthfold.solver.stage_one import best_blocks, fastest_merging, merging_by_activations

INF = np.inf


def fastest(T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sums of these tests are whole in units, so nothing is left in the rest."""
    T_opt, S_opt = fastest_merging(Exact.of(T))
    assert not T_opt.rest.any()
    return np.ldexp(T_opt.units, -lattice_exponent(T)), S_opt


def test_splits_where_splitting_is_faster() -> None:
    T = np.full((4, 4), INF)
    T[0, 1], T[1, 2], T[2, 3], T[0, 2], T[1, 3], T[0, 3] = 1, 1, 1, 3, 1.5, 4
    T_opt, S_opt = fastest(T)
    assert T_opt[0].tolist() == [0, 1, 2, 2.5]
    assert S_opt[0].tolist() == [-1, 0, 1, 1]  # (0, 3] is cut at 1; (0, 1] and (1, 3] are not cut


def test_the_last_bit_decides() -> None:
    """0.1 + 0.2 lies between the floats 0.3 and 0.30000000000000004."""
    T = np.full((3, 3), INF)
    T[0, 1], T[1, 2], T[0, 2] = 0.1, 0.2, 0.30000000000000004
    assert fastest_merging(Exact.of(T))[1][0, 2] == 1
    T[0, 2] = 0.3
    assert fastest_merging(Exact.of(T))[1][0, 2] == 0


def test_a_chain_crosses_a_barrier_with_a_cut() -> None:
    T = np.full((3, 3), INF)
    T[0, 1], T[1, 2] = 2, 3
    T_opt, S_opt = fastest(T)
    assert (T_opt[0, 2], S_opt[0, 2]) == (5, 1)


def test_ties_go_to_the_unsplit_span() -> None:
    T = np.full((3, 3), INF)
    T[0, 1], T[1, 2], T[0, 2] = 1, 1, 2
    assert fastest(T)[1][0, 2] == 0
    I = np.full((2, 2, 3, 3), -INF)
    I[1, 0, 0, 1], I[0, 1, 1, 2], I[1, 1, 0, 2] = 1, 1, 2
    assert best_blocks(I)[1][1, 1, 0, 2] == 0


def test_algorithm_3_keeps_the_flag_at_the_start() -> None:
    """As printed it takes I[k, l, 0, b] for I[k, l, 1, b], which is minus infinity where k has its own activation."""
    I = np.full((2, 2, 2, 2), -INF)
    I[1, 1, 0, 1] = -3
    assert best_blocks(I)[0][1, 1, 0, 1] == -3


@pytest.mark.parametrize("seed", range(20))
def test_best_blocks_equal_all_chains_of_blocks(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(2, 7)
    I = np.full((2, 2, size, size), -INF)
    for i, j in combinations(range(size), 2):
        for a in (0, 1):
            for b in (0, 1):
                if rng.random() < 0.6:
                    I[a, b, i, j] = rng.randint(-5, 5)
    I_opt, B_opt = best_blocks(I)
    for k, l in combinations(range(size), 2):
        for a in (0, 1):
            for b in (0, 1):
                assert I_opt[a, b, k, l] == max(
                    _sum(I, (k, *inner, l), a, b) for n in range(l - k) for inner in combinations(range(k + 1, l), n)
                )
                m = B_opt[a, b, k, l]
                if m > k:
                    assert I_opt[a, b, k, l] == I_opt[a, 0, k, m] + I[0, b, m, l]


def _sum(I: np.ndarray, ends: tuple[int, ...], a: int, b: int) -> float:
    flags = (a, *(0 for _ in ends[1:-1]), b)
    return sum(I[flags[n], flags[n + 1], ends[n], ends[n + 1]] for n in range(len(ends) - 1))


def test_merging_by_activations_merges_as_much_as_it_can() -> None:
    T = np.full((4, 4), INF)
    T[0, 1], T[1, 2], T[2, 3], T[0, 2], T[1, 3] = 1, 1, 1, 9, 8  # a residual end: nothing covers (0, 3]
    M_opt = merging_by_activations(T)
    assert M_opt[0, 2] == 0  # one convolution, although two are faster
    assert M_opt[0, 3] == 1  # two convolutions, the faster two: 1 + 8, not 9 + 1
    T[0, 3] = 20
    assert merging_by_activations(T)[0, 3] == 0
