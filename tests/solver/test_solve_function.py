from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from depthfold.core import Frontier, ImportanceTable, LatencyTable, Plan, Span
from depthfold.solver import solve
from oracle import rounded_up
from structures import mobilenet_v2
from tables import importance_table, latency_table, plausible_tables


def mobilenet_frontier(seed: int = 0) -> tuple[LatencyTable, ImportanceTable, Frontier]:
    network = mobilenet_v2()
    latency, importance = plausible_tables(network.spans(), network.flagged_spans(), seed)
    return latency, importance, solve(latency, importance, network=network)


def test_plans_fit_the_network() -> None:
    network, (_, _, frontier) = mobilenet_v2(), mobilenet_frontier()
    for plan in frontier:
        assert network.segments(plan.plan) == tuple(segment.span for segment in plan.segments)
        assert all(segment.shape == network.merged_shape(segment.span) for segment in plan.segments)


def test_activation_is_inserted_if_that_pays() -> None:
    """Position 1 has no activation. Inserting one has importance 1, and then nothing merges across it."""
    times = {(0, 1): 1.0, (1, 2): 1.0, (0, 2): 1.5}
    values = {(0, 1, 1, 0): 0.0, (0, 1, 1, 1): 1.0, (1, 2, 0, 1): 0.0, (1, 2, 1, 1): 0.0, (0, 2, 1, 1): -1.0}
    fast, good = solve(latency_table(times), importance_table(values)).plans
    assert (fast.plan, fast.boundaries, fast.latency, fast.importance) == (Plan({2}, ()), (1,), 1.5, 0.0)
    assert (good.plan, good.boundaries, good.latency, good.importance) == (Plan({1, 2}, (1,)), (1,), 2.0, 1.0)


def test_last_position_may_have_no_activation() -> None:
    values = {(0, 1, 1, 0): 1.0, (0, 1, 1, 1): 0.0}
    (plan,) = solve(latency_table({(0, 1): 1.0}), importance_table(values)).plans
    assert plan.plan == Plan((), ())
    (plan,) = solve(latency_table({(0, 1): 1.0}), importance_table({**values, (0, 1, 1, 1): 2.0})).plans
    assert plan.plan == Plan({1}, ())


def test_ablation_merges_along_A() -> None:
    latency, _, frontier = mobilenet_frontier()
    times = latency.times
    for plan in frontier:
        assert plan.latency_by_activations >= plan.latency
        ends = (0, *sorted(plan.plan.activations - {50}), 50)
        whole = [times.get(Span(i, j)) for i, j in pairwise(ends)]
        if None not in whole:
            assert plan.latency_by_activations == sum(rounded_up(time) for _, time in whole) / 10**9


def test_figure_2_of_the_paper() -> None:
    """With its T_opt and the budget 21 only k' = 0 is feasible: 1.8, and no activation. 1.9 needs 23."""
    times = {(0, 1): 9.0, (0, 2): 12.0, (1, 2): 6.0, (0, 3): 20.0, (1, 3): 14.0, (2, 3): 11.0}
    values = {(0, 1): 0.5, (0, 2): 0.9, (1, 2): 0.3, (0, 3): 1.8, (1, 3): 1.4, (2, 3): 0.5}
    frontier = solve(latency_table(times), importance_table({(*ends, 1, 1): v for ends, v in values.items()}))
    assert (frontier.at("21ms").importance, frontier.at("21ms").plan.cuts) == (1.8, ())
    assert (frontier.at("23ms").importance, frontier.at("23ms").plan.cuts) == (1.9, (1,))


def test_published_csv_files_are_solved(tmp_path: Path) -> None:
    latency, importance, frontier = mobilenet_frontier()
    latency.write_csv(tmp_path / "time.csv")
    importance.write_csv(tmp_path / "imp.csv")
    again = solve(LatencyTable.read_csv(tmp_path / "time.csv"), ImportanceTable.read_csv(tmp_path / "imp.csv"))
    assert again.points == frontier.points


def test_plan_of_a_floored_grid_is_compared_at_its_real_sum() -> None:
    """The authors' code floors times to multiples of 0.05 ms, so its plans exceed their budget."""
    latency, importance, frontier = mobilenet_frontier()
    exact = latency.times
    floored = latency_table({(span.i, span.j): math.floor(20 * both[1]) / 20 for span, both in exact.items()})
    grid = solve(floored, importance)
    for budget in ("25ms", "22.1ms", "20ms"):
        plan = grid.at(budget)
        real = sum(exact[segment.span][1] for segment in plan.segments)
        assert float(budget.removesuffix("ms")) < real < plan.latency + 0.05 * len(plan.segments)
        assert frontier.at(budget).importance < plan.importance <= frontier.at(f"{real + 1e-6:.9f}ms").importance


def test_solving_imports_no_torch() -> None:
    code = "import depthfold, sys; depthfold.solve; depthfold.Frontier; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
