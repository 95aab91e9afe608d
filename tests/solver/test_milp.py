"""The frontier compared with a mixed-integer program, at the size and structure of MobileNetV2."""

from __future__ import annotations

from itertools import pairwise

import pytest

from depthfold.core import Budget, Frontier, ImportanceTable
from depthfold.solver import solve
from oracle import milp_best
from structures import mobilenet_v2
from tables import importance_table, plausible_tables

MILP_GAP = 1e-6  # HiGHS stops when it is this close to its bound; it has no smaller absolute gap by default


def test_structure_has_the_counts_of_the_paper() -> None:
    network = mobilenet_v2()
    assert network.depth == 50
    assert len(network.spans()) == 171
    assert len(network.flagged_spans()) == 315
    assert len(network.flagged_spans(exclusion=False)) == 405


CASES = [
    (1, True, False),
    pytest.param(3, False, False, marks=pytest.mark.slow),
    pytest.param(4, True, True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("seed", "exclusion", "plain"), CASES)
def test_frontier_equals_a_mixed_integer_program(seed: int, exclusion: bool, plain: bool) -> None:
    network = mobilenet_v2()
    latency, importance = plausible_tables(network.spans(), network.flagged_spans(exclusion=exclusion), seed)
    if plain:
        importance = _plain(importance)
    frontier = solve(latency, importance)
    for budget in _ten_budgets(frontier):
        time, value = milp_best(latency, importance, budget)
        plan = frontier.at(Budget.milliseconds(budget))
        assert time <= budget
        assert value <= plan.importance
        assert plan.importance <= value + MILP_GAP


def _plain(importance: ImportanceTable) -> ImportanceTable:
    """Every block between two activations, as in Eq. 4."""
    values = {(f.i, f.j, 1, 1): value for f, value in importance.importances.items() if f.a and f.b}
    return importance_table(values)


def _ten_budgets(frontier: Frontier) -> list[float]:
    """In the middle of wide gaps between plans: HiGHS may overrun a budget by its own tolerance."""
    gaps = [(one.latency, two.latency) for one, two in pairwise(frontier.points) if two.latency - one.latency > 1e-3]
    chosen = [gaps[n * (len(gaps) - 1) // 9] for n in range(10)]
    budgets = [(low + high) / 2 for low, high in chosen]
    assert len(set(budgets)) == 10
    return budgets
