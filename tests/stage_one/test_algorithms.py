"""Algorithms 1 and 3, and the ablation that merges along A."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import numpy as np
import pytest

from depthfold.stage_one import NEVER, algorithm_1, algorithm_3, time_along_activations

INF = np.inf


def times(size: int, both: dict[tuple[int, int], int | tuple[int, int]]) -> np.ndarray:
    """T[i, j, b] of a few spans; one number stands for both flags."""
    T = np.full((size, size, 2), NEVER, dtype=np.int64)
    for ends, time in both.items():
        T[ends] = time
    return T


def test_algorithm_1_splits_if_splitting_is_faster() -> None:
    T = times(4, {(0, 1): 10, (1, 2): 10, (2, 3): 10, (0, 2): 30, (1, 3): 15, (0, 3): 40})
    T_opt, S_opt = algorithm_1(T)
    assert T_opt[0, :, 1].tolist() == [0, 10, 20, 25]
    assert S_opt[0, :, 1].tolist() == [-1, 0, 1, 1]  # (0, 3] is cut at 1; (0, 1] and (1, 3] are not cut


def test_algorithm_1_decides_by_a_picosecond() -> None:
    assert algorithm_1(times(3, {(0, 1): 10, (1, 2): 20, (0, 2): 31}))[1][0, 2, 1] == 1
    assert algorithm_1(times(3, {(0, 1): 10, (1, 2): 20, (0, 2): 29}))[1][0, 2, 1] == 0


def test_algorithm_1_crosses_a_barrier_with_a_cut() -> None:
    T_opt, S_opt = algorithm_1(times(3, {(0, 1): 2, (1, 2): 3}))
    assert (T_opt[0, 2, 1], S_opt[0, 2, 1]) == (5, 1)


def test_algorithm_1_marks_what_it_cannot_reach() -> None:
    T_opt, _ = algorithm_1(times(4, {(0, 1): 2, (2, 3): 3}))
    assert T_opt[0, 2:].tolist() == [[NEVER, NEVER], [NEVER, NEVER]]
    assert T_opt[2, 3].tolist() == [3, 3]


@pytest.mark.parametrize("seed", range(20))
def test_algorithm_1_equals_all_chains_of_spans(seed: int) -> None:
    """Every segment except the last takes its time without an activation."""
    rng = random.Random(seed)
    size = rng.randint(2, 7)
    ends = [pair for pair in combinations(range(size), 2) if rng.random() < 0.7]
    T = times(size, {pair: (rng.randint(0, 9), rng.randint(0, 9)) for pair in ends})
    T_opt, S_opt = algorithm_1(T)
    for k, l in combinations(range(size), 2):
        chains = [(k, *inner, l) for n in range(l - k) for inner in combinations(range(k + 1, l), n)]
        for b in (0, 1):
            sums = [
                sum(int(T[i, j, b if j == l else 0]) for i, j in pairwise(chain))
                for chain in chains
                if all(T[i, j, 0] < NEVER for i, j in pairwise(chain))
            ]
            assert T_opt[k, l, b] == min(sums, default=NEVER)
            if sums:
                m = S_opt[k, l, b]
                assert T_opt[k, l, b] == T_opt[k, m, 0] + T[m, l, b]


def test_ties_go_to_the_unsplit_span() -> None:
    assert algorithm_1(times(3, {(0, 1): 1, (1, 2): 1, (0, 2): 2}))[1][0, 2, 1] == 0
    I = np.full((3, 3, 2, 2), -INF)
    I[0, 1, 1, 0], I[1, 2, 0, 1], I[0, 2, 1, 1] = 1, 1, 2
    assert algorithm_3(I)[1][0, 2, 1, 1] == 0


def test_algorithm_3_keeps_the_flag_at_the_start() -> None:
    """The paper takes I[k, l, 0, b] for I[k, l, 1, b], which is -inf if the network has an activation at k."""
    I = np.full((2, 2, 2, 2), -INF)
    I[0, 1, 1, 1] = -3
    assert algorithm_3(I)[0][0, 1, 1, 1] == -3


@pytest.mark.parametrize("seed", range(20))
def test_algorithm_3_equals_all_chains_of_blocks(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(2, 7)
    I = np.full((size, size, 2, 2), -INF)
    for i, j in combinations(range(size), 2):
        for a in (0, 1):
            for b in (0, 1):
                if rng.random() < 0.6:
                    I[i, j, a, b] = rng.randint(-5, 5)
    I_opt, B_opt = algorithm_3(I)
    for k, l in combinations(range(size), 2):
        for a in (0, 1):
            for b in (0, 1):
                assert I_opt[k, l, a, b] == max(
                    _sum(I, (k, *inner, l), a, b) for n in range(l - k) for inner in combinations(range(k + 1, l), n)
                )
                m = B_opt[k, l, a, b]
                if m > k:
                    assert I_opt[k, l, a, b] == I_opt[k, m, a, 0] + I[m, l, 0, b]


def _sum(I: np.ndarray, ends: tuple[int, ...], a: int, b: int) -> float:
    flags = (a, *(0 for _ in ends[1:-1]), b)
    return sum(I[ends[n], ends[n + 1], flags[n], flags[n + 1]] for n in range(len(ends) - 1))


def test_ablation_merges_as_much_as_possible() -> None:
    few = {(0, 1): 1, (1, 2): 1, (2, 3): 1, (0, 2): 9, (1, 3): 8}  # a residual ends inside: nothing covers (0, 3]
    T_A = time_along_activations(times(4, few))
    assert T_A[0, 2, 1] == 9  # one convolution, although two are faster
    assert T_A[0, 3, 1] == 9  # two convolutions, the faster two: 1 + 8, not 9 + 1
    assert time_along_activations(times(4, few | {(0, 3): 20}))[0, 3, 1] == 20
