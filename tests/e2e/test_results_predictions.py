"""docs/results.md: which of two plans of equal latency is predicted to be better."""

from dataclasses import replace
from itertools import combinations, pairwise, product
from math import inf
from pathlib import Path
from random import Random

import pytest

import depthfold as df
from depthfold.core import Drops, FlaggedSpan, ImportanceTable, Score
from experiments.equal_latency.page.predictions import (
    blocks_of,
    comparable,
    compared_plans,
    largest_sum,
    parse_plan,
    predictions,
)
from experiments.equal_latency.page.text import SECTIONS
from experiments.equal_latency.results import RESULTS, Measured, load
from experiments.gpu_runs import rows

L = 4
PAGE = Path(__file__).parents[2] / "docs" / "results.md"


def random_table(rng, always):
    """Return importances of all blocks of four layers; layer 2 can be dropped. With `always`, L is an activation."""
    entries = []
    for i, j in combinations(range(L + 1), 2):
        for a, b in product((False, True), repeat=2):
            if (i == 0 and not a) or (j == L and always and not b):
                continue
            span = FlaggedSpan(i, j, a, b)
            options = [Drops(), Drops([2])] if i < 2 <= j else [Drops()]
            entries += [Score(span=span, dropped=each, samples=(rng.uniform(-5, 5),)) for each in options]
    return ImportanceTable(entries=tuple(entries))


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("dropped", [Drops(), Drops([2])])
@pytest.mark.parametrize("activations", [(), (1,), (2, 4), (1, 3), (1, 2, 3)])
def test_largest_sum_is_that_of_all_divisions(always, dropped, activations):
    table = random_table(Random(str(activations)), always)
    plan = df.Plan(activations, range(1, L), dropped)
    active = {0, *activations, *([L] if always else [])}
    sums = []
    for number in range(L):
        for inner in combinations(range(1, L), number):
            ends = (0, *inner, L)
            if not set(activations) <= {*ends, L}:
                continue
            blocks = [FlaggedSpan(i, j, i in active, j in active) for i, j in pairwise(ends)]
            parts = [Drops([2]) if dropped and block.i < 2 <= block.j else Drops() for block in blocks]
            sums.append(sum(2 * table.options[key] + bool(key[1]) for key in zip(blocks, parts, strict=True)))
    assert largest_sum(blocks_of(table, plan), L, lambda value, drops: 2 * value + bool(drops)) == pytest.approx(
        max(sums)
    )


def test_plan_with_blocks_that_the_table_lacks_has_no_sum():
    table = random_table(Random(0), always=True)
    assert largest_sum(blocks_of(table, df.Plan((), (), Drops([3]))), L, lambda value, _: value) == -inf


@pytest.mark.parametrize(
    "plan",
    [
        df.Plan((1, 2, 3, 7), (1, 2, 3, 5, 7)),
        df.Plan((), ()),
        df.Plan((4,), (1, 4, 9), Drops([5])),
        df.Plan((4,), (1, 4, 9), Drops([5, 12], [(6, 9), (9, 11)])),
        df.Plan((4,), (1, 4, 9), Drops([], [(6, 9)])),
    ],
)
def test_plan_is_read_from_its_text(plan):
    assert parse_plan(str(plan)) == plan


def network(latency, *scores):
    original = load("resnet56").original
    profiles = (replace(original, quartiles=(each, each, each)) for each in (latency, 10.0))
    return Measured("paper", "50%", dict(enumerate(scores)), {}, {}, *profiles)


def test_comparable_plans_have_nearly_equal_latencies_and_accuracies_that_differ():
    assert comparable(network(5.0, 93.0), network(5.4, 93.5))
    assert not comparable(network(5.0, 93.0), network(5.6, 93.5))
    assert not comparable(network(5.0, 93.0), network(5.4, 93.4))  # 1.96 * 0.16 * sqrt(2) = 0.44
    assert comparable(network(5.0, 93.0, 93.0), network(5.4, 93.4, 93.4))


def test_page_says_which_plans_are_ordered_rightly():
    found = [load(name, section.stopwatch) for name, section in SECTIONS.items()]
    text = predictions([results for results in found if results])
    assert text in PAGE.read_text()
    assert "| MobileNetV2-1.4, in TF32 on the H200 | 20 | 19 | 19 | 19 |" in text
    assert "Of the 20 pairs" in SECTIONS["mobilenet_v2_1.4"].remark
    wide = {(one.method, one.at): one for one in compared_plans(load("mobilenet_v2_1.4"))}
    ours, pattern = wide["all moves", "DS-F-1.4"], wide["DepthShrinker", "DS-F-1.4"]
    assert comparable(ours, pattern) and pattern.mean > ours.mean


def test_remark_about_the_fourth_training_of_the_original():
    known = rows(RESULTS / "efficientnet_lite0-on-float16-fourth-fit")
    usual = rows(RESULTS / "efficientnet_lite0-on-float16")
    keys = [f"train all moves {share} 0" for share in ("65%", "50%", "35%")]
    assert all(known[key]["plan"] == usual[key]["plan"] for key in keys)
    first, second, third = (f"{known[key]['merged']:.2f}" for key in keys)
    remark = SECTIONS["efficientnet_lite0-on-float16"].remark
    assert f"{first}, {second} and {third} %" in remark and f"{known['base']['test']:.2f} %" in remark
