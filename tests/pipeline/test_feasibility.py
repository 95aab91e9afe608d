"""What is known from the latency table alone: the fastest plan, budgets out of reach, and doubtful tables."""

import dataclasses
import re
import warnings

import pytest
import torch

import depthfold as df
from depthfold.core import ImportanceTable, Score
from depthfold.core.latency_table import Timing
from depthfold.errors import BudgetError, TableError
from depthfold.importance import importance_options
from depthfold.latency import measure_latency
from depthfold.latency.choose import MARGIN
from depthfold.pipeline import feasibility
from depthfold.pipeline.feasibility import LatencyCheck, check_trusted, fastest
from depthfold.pipeline.prospects import prospects
from depthfold.solver import solve
from depthfold.training import FunctionTask, preset
from latency_workshop import COST, QUICK, Small


@pytest.fixture(scope="module")
def traced():
    torch.manual_seed(0)
    return df.trace(Small().eval(), torch.randn(1, 3, 32, 32))


MOVES = {"merge": ("merge",), "drops": ("merge", "drop-layers", "drop-branches")}


@pytest.fixture(scope="module")
def latency(traced):
    return measure_latency(traced, COST, timer=QUICK)


@pytest.fixture(scope="module", params=MOVES)
def case(request, traced, latency):
    options = df.Options(moves=MOVES[request.param])
    if request.param == "merge":
        return options, latency
    return options, measure_latency(traced, COST, timer=QUICK, moves=options.moves)


def test_fastest_plan_is_the_first_of_every_frontier(traced, case):
    """The importances decide which plans follow, but not which is the fastest."""
    options, latency = case
    found = fastest(traced, latency, options)
    assert len(found) == 1
    blocks = importance_options(traced, options.space, options.moves)
    random = torch.Generator().manual_seed(1)
    for _ in range(3):
        scores = torch.randn(len(blocks), generator=random).tolist()
        entries = [Score(span=o.block, dropped=o.dropped, samples=(s,)) for o, s in zip(blocks, scores, strict=True)]
        frontier = solve(latency, ImportanceTable(entries=tuple(entries)), network=traced.network)
        assert frontier.points[0].latency == found.points[0].latency


def check(traced, latency, budget, **options):
    LatencyCheck(traced, latency, df.Options(**options), df.Budget.parse(budget), COST)()


def test_budget_out_of_reach_is_refused_with_the_fastest_plan(traced, case):
    options, latency = case
    fast = fastest(traced, latency, options)[0].latency
    share = fast / latency.original
    with pytest.raises(BudgetError) as caught:
        check(traced, latency, f"{50 * share:.2f}%", moves=options.moves)
    assert caught.value.fastest == share
    said = str(caught.value)
    assert f"the fastest plan takes {fast:.4g} ms, {share:.1%} of the original's {latency.original:.4g} ms" in said
    assert "so nothing was trained. Use a budget of" in said and "--space full" in said
    with pytest.raises(BudgetError, match=r"budget of 1e-06 ms: the fastest plan takes"):
        check(traced, latency, "1e-6ms", moves=options.moves)
    check(traced, latency, f"{105 * share:.2f}%", moves=options.moves)


@pytest.mark.parametrize(
    ("space", "advice"),
    [("paper", r"another target or the .* --space full\) or plans that drop"), ("full", "target or plans that drop")],
)
def test_target_on_which_merging_saves_nothing_says_so(traced, latency, space, advice):
    single = {entry.span: entry for entry in latency.entries if len(entry.span) == 1}
    slow = [single.get(span) or Timing(span=span, times=(1e3, 1e3)) for span in traced.spans(space)]
    table = dataclasses.replace(latency, entries=tuple(slow))
    with pytest.raises(BudgetError, match=r"100\.0% of the original's .* Merging saves no time here: use .*" + advice):
        check(traced, table, "80%", space=space)
    found = prospects(traced, table, df.Options(space=space))
    assert not found.worth_it and not found.savings and "0 of " in str(found)
    assert "save time as one convolution.\n\nThe importances:" in str(found)
    assert re.search(r"saves no time\. Try .*" + advice + r" layers .*--moves drop-layers\)\.$", str(found))


def test_advice_is_what_is_not_allowed_yet(traced):
    moves = ("merge", "drop-layers")
    table = measure_latency(traced, COST, timer=QUICK, moves=moves)
    with pytest.raises(BudgetError) as caught:
        check(traced, table, "5%", moves=moves)
    found = prospects(traced, table, df.Options(moves=moves))
    for said in (str(caught.value), str(dataclasses.replace(found, fastest=found.original))):
        assert "--space full" in said and "--moves drop-layers" not in said


def test_advised_budget_is_one_that_compress_accepts(traced, case):
    """compress() asks for a margin, which the advice has to include."""
    options, latency = case
    found = prospects(traced, latency, options)
    budget = re.search(r"budgets of (\d+%) and more", str(found))[1]
    assert found.share <= float(budget[:-1]) / 100 * (1 - MARGIN)
    check(traced, latency, budget, moves=options.moves)


def test_time_of_the_importances_has_their_scores_and_needs_the_data(traced, latency):
    random = torch.randn(60, 3, 8, 8), torch.arange(60) % 3
    images = df.ClassificationTask.tensors(train=random, holdout=5)
    own, options = FunctionTask(loss=max, score=max), df.Options(importance_method="brief")
    for task, scored in ((images, 15), (own, 0)):
        found = prospects(traced, latency, options, task)
        recipe = preset("brief")
        one = (3 * recipe.steps * recipe.batch + scored) * latency.original / 1e3
        assert found.seconds == pytest.approx(found.importances * one)
    assert "their time depends on the data" in str(prospects(traced, latency, options))


def test_table_of_another_space_is_refused_without_a_budget(traced, latency):
    full = measure_latency(traced, COST, timer=QUICK, space="full")
    for table, own, space in ((latency, "paper", "full"), (full, "full", "paper")):
        with pytest.raises(TableError, match=f"is of the search space '{own}', and importances are to be of '{space}'"):
            LatencyCheck(traced, table, df.Options(space=space), None)()
    lacking = dataclasses.replace(latency, entries=tuple(one for one in latency.entries if one.span != df.Span(1, 3)))
    with pytest.raises(TableError, match=r"has no entry for \(1, 3\], which the importance table has\. Measure it"):
        LatencyCheck(traced, lacking, df.Options(), None)()


@pytest.mark.parametrize(("budget", "met"), [("101%", True), ("0.99x", True), ("100%", False), ("1x", False)])
def test_budget_that_the_original_meets_gives_a_warning(budget, met, traced, latency):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(traced, latency, budget)
    assert [f"meets the budget of {budget} already" in str(one.message) for one in caught] == [True] * met


def test_plan_is_timed_if_the_error_of_the_table_decides(traced, latency, monkeypatch):
    share = fastest(traced, latency, df.Options())[0].latency / latency.original
    timed = []
    monkeypatch.setattr(feasibility, "choose", lambda *given, **_: timed.append(given[2]))
    rough = dataclasses.replace(
        latency, calibration=dataclasses.replace(latency.calibration, worst_error=0.2, median_error=0.01)
    )
    for factor, times in ((0.9, 1), (1.1, 1), (1.3, 0)):
        timed.clear()
        check(traced, rough, f"{100 * factor * share:.2f}%")
        assert len(timed) == times, factor
    with pytest.raises(BudgetError, match="No plan meets"):
        check(traced, rough, f"{75 * share:.2f}%")


def test_budget_is_timed_here_if_the_table_is_of_another_machine(traced, latency):
    """Its times may be those of a slower machine, so they refuse nothing."""
    slow = dataclasses.replace(
        latency,
        entries=tuple(
            entry if entry.times is None else dataclasses.replace(entry, times=tuple(50 * t for t in entry.times))
            for entry in latency.entries
        ),
        environment=dataclasses.replace(latency.environment, machine="a phone"),
    )
    fast = fastest(traced, latency, df.Options())[0].latency
    check(traced, slow, f"{1.2 * fast}ms")
    with pytest.raises(BudgetError, match="measured"):
        check(traced, slow, f"{0.5 * fast}ms")


def test_doubtful_table_is_refused_unless_it_is_allowed(traced, latency):
    check_trusted(latency, None)
    assert "if the latency table is right" not in str(prospects(traced, latency, df.Options()))
    poor = dataclasses.replace(latency.calibration, median_error=0.08, worst_error=0.3)
    for table, why in (
        (dataclasses.replace(latency, calibration=poor), "with an error of 8.0% in the median"),
        (dataclasses.replace(latency, doubt="a block took 1.40 times as long"), "a block took 1.40 times as long"),
    ):
        with pytest.raises(TableError, match="doubtful, so nothing was trained") as caught:
            check(traced, table, "90%")
        assert why in str(caught.value) and "allow_doubtful=True (--allow-doubtful)" in str(caught.value)
        with pytest.raises(BudgetError):  # rather than to measure again for a budget that no plan can meet
            check(traced, table, "1%")
        check(traced, table, "90%", allow_doubtful=True)
        *_, worth, doubt = str(prospects(traced, table, df.Options())).splitlines()
        assert "orth " in worth and ", if the latency table is right:" in worth
        assert why in doubt and "or train with it anyway: allow_doubtful=True (--allow-doubtful)." in doubt
        assert df.LatencyTable.loads(table.dumps()) == table


def test_doubt_is_not_written_if_there_is_none():
    table = df.LatencyTable(entries=(Timing(span=df.Span(0, 1), times=(1.0, 1.0)),))
    assert "doubt" not in table.to_json()
    check_trusted(table, None)
