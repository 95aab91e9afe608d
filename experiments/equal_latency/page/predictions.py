"""The section of docs/results.md about which of two plans of equal latency the search prefers, and which is better."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import combinations
from math import inf, sqrt

from depthfold.core import Drops, FlaggedSpan, ImportanceTable, Plan, Surrogate
from experiments.equal_latency.candidates import CONTROL, PLAIN, PUBLISHED, SEARCHED, SEARCHES
from experiments.equal_latency.page.analyses import cells
from experiments.equal_latency.page.text import SECTIONS
from experiments.equal_latency.results import BASE, RESULTS, SEED_DEVIATION, Measured, NetworkResults

PLANS = (*SEARCHES, CONTROL, PUBLISHED, SEARCHED)
NEAR = 0.05  # relative difference of latencies
FACTORS = (2, 3, 4)  # of the importance of a block that drops something
Worth = Callable[[float, Drops], float]  # of a block, from its importance and what it drops

ABOUT = f"""\
## Which plan is better

All pairs of fine-tuned plans of a network whose latencies differ by less than {NEAR * 100:.0f} %, and whose accuracies
differ by more than seeds explain: in how many of them is the plan with the higher prediction more accurate? The plans
are those of the searches, of the control and of DepthShrinker, from the same original. In parentheses: pairs of plans
of the searches alone, which were chosen for their predictions. "Slower" predicts that the slower plan is more accurate.
`make results` computes the table from the committed results.

The surrogate orders nearly all pairs rightly that have a plan of the control or of DepthShrinker. It does not tell
which of the plans that the searches find for MobileNetV2-1.0 is better, nor does the sum of importances. The last
columns have the surrogate with the importance of every block that drops something counted several times. This was
tried afterwards, because DepthShrinker's pattern F, which drops nothing, is better than all moves on MobileNetV2-1.4,
against the prediction. Counted four times, that pair is ordered rightly, and one pair each of VGG19-BN and of
EfficientNet-Lite0 in float16 wrongly. There are too few pairs to choose a factor, and no network was trained from
such a search."""


def predictions(found: list[NetworkResults]) -> str:
    """Return the section."""
    times = [f"drops counted {factor} times" for factor in FACTORS]
    lines = [
        ABOUT,
        "",
        cells("network", "pairs", "slower", "sum of importances", "surrogate", *times),
        "| --- |" + " ---: |" * (4 + len(times)),
    ]
    for results in found:
        plans = compared_plans(results)
        pairs = [pair for pair in combinations(range(len(plans)), 2) if comparable(*(plans[n] for n in pair))]
        ours = [pair for pair in pairs if all(_is_of_a_search(plans[n]) for n in pair)]
        columns = [predicted_rightly(values, plans, pairs, ours) for values in predicted(results, plans)]
        if pairs:
            lines.append(cells(SECTIONS[results.name].name, f"{len(pairs)} ({len(ours)})", *columns))
    return "\n".join(lines)


Pairs = list[tuple[int, int]]


def predicted_rightly(values: list[float], plans: list[Measured], pairs: Pairs, ours: Pairs) -> str:
    """Return the number of pairs in which the plan with the higher value is more accurate, also of the searches."""
    right = {(m, n) for m, n in pairs if (values[m] - values[n]) * (plans[m].mean - plans[n].mean) > 0}
    return f"{len(right)} ({len(right.intersection(ours))})"


def _is_of_a_search(one: Measured) -> bool:
    return one.method.removesuffix(f", {PLAIN}") in SEARCHES


def comparable(one: Measured, two: Measured) -> bool:
    """Return True if two plans are about equally fast, and not equally accurate."""
    deviation = SEED_DEVIATION * sqrt(1 / len(one.scores) + 1 / len(two.scores))
    near = max(one.share, two.share) < (1 + NEAR) * min(one.share, two.share)
    return near and abs(one.mean - two.mean) > 1.96 * deviation


def compared_plans(results: NetworkResults) -> list[Measured]:
    """Return one network for each plan that was trained and timed."""
    found = {
        one.plan: one
        for one in results.measured
        if one.method.removesuffix(f", {PLAIN}") in PLANS and one.scores and one.profile and one.base == BASE
    }
    return list(found.values())


def predicted(results: NetworkResults, plans: list[Measured]) -> Iterator[list[float]]:
    """Yield the predictions of each column for the plans."""
    folder = RESULTS / SECTIONS[results.name].network
    table = ImportanceTable.loads((folder / "importance.json").read_text())
    surrogate = Surrogate.loads((folder / "surrogate.json").read_text())
    blocks = [blocks_of(table, parse_plan(one.plan)) for one in plans]

    def weighted(drops: float) -> Worth:
        return lambda value, dropped: surrogate.predict(value * (drops if dropped else 1.0), 1) - surrogate.intercept

    yield [one.share for one in plans]
    for worth in (lambda value, _: value, weighted(1.0), *map(weighted, FACTORS)):
        yield [largest_sum(each, table.depth, worth) for each in blocks]


Blocks = list[tuple[FlaggedSpan, Drops, float]]


def blocks_of(table: ImportanceTable, plan: Plan) -> Blocks:
    """Return the blocks of a table that can be part of a plan, with what they drop and their importances, by their end.

    No activation is inside a block, and the flags of a block say whether there is one at its ends. A table without
    blocks that end in the identity at L counts L as an activation.
    """
    L, values = table.depth, table.options
    always = all(block.b for block, _ in values if block.j == L)
    active = {0, *plan.activations, *([L] if always else [])}
    found = [
        (block, dropped, value)
        for (block, dropped), value in values.items()
        if (block.a, block.b) == (block.i in active, block.j in active)
        if not any(l in active for l in range(block.i + 1, block.j))
        if dropped == plan.dropped.within(block.span)
    ]
    return sorted(found, key=lambda one: one[0].j)


def largest_sum(blocks: Blocks, L: int, worth: Worth) -> float:
    """Return the largest sum over the ways to divide the layers 1..L into blocks, -inf if there is none."""
    best = {0: 0.0}
    for block, dropped, value in blocks:
        if block.i in best:
            best[block.j] = max(best.get(block.j, -inf), best[block.i] + worth(value, dropped))
    return best.get(L, -inf)


def parse_plan(text: str) -> Plan:
    """Return the plan that was recorded as text."""
    kept, _, dropped = text.partition("; drops ")
    activations, cuts = (_positions(part) for part in kept.removeprefix("Plan: activations at ").split("; cuts at "))
    layers, _, branches = dropped.partition("branch")
    pairs = [(int(i), int(j)) for i, j in re.findall(r"\((\d+), (\d+)\]", branches)]
    plan = Plan(activations, cuts, Drops(map(int, re.findall(r"\d+", layers)), pairs))
    assert str(plan) == text, f"{text} was read as {plan}"
    return plan


def _positions(text: str) -> list[int]:
    ends = [part.split("-") for part in re.findall(r"\d+(?:-\d+)?", text)]
    return [position for each in ends for position in range(int(each[0]), int(each[-1]) + 1)]
