"""docs/results.md: which of two plans of equal latency is predicted to be better."""

import re
from dataclasses import replace
from itertools import combinations, pairwise, product
from math import inf
from pathlib import Path
from random import Random

import pytest

import depthfold as df
from depthfold.core import Drops, FlaggedSpan, ImportanceTable, Score
from experiments.equal_latency.page.predictions import (
    FACTORS,
    blocks_of,
    comparable,
    compared_plans,
    largest_sum,
    parse_plan,
    predicted_rightly,
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
    assert comparable(network(5.0, 93.0), network(5.2, 93.5))
    assert not comparable(network(5.0, 93.0), network(5.3, 93.5))
    assert not comparable(network(5.0, 93.0), network(5.2, 93.4))  # 1.96 * 0.16 * sqrt(2) = 0.44
    assert comparable(network(5.0, 93.0, 93.0), network(5.2, 93.4, 93.4))


def test_pairs_are_counted_in_which_the_higher_prediction_is_more_accurate():
    plans = [network(5.0, 93.0), network(5.0, 94.0), network(5.0, 92.0)]
    pairs = [(0, 1), (0, 2), (1, 2)]
    assert predicted_rightly([2.0, 3.0, 1.0], plans, pairs, [(0, 1)]) == "3 (1)"
    assert predicted_rightly([1.0, 2.0, 3.0], plans, pairs, [(0, 1), (1, 2)]) == "1 (1)"
    assert predicted_rightly([1.0, 1.0, 1.0], plans, pairs, pairs) == "0 (0)", "equal predictions are not right"


def test_page_says_which_plans_are_ordered_rightly():
    found = [results for name, section in SECTIONS.items() if (results := load(name, section.stopwatch))]
    text = predictions(found)
    assert text in PAGE.read_text()
    rows_ = {line.split(", ")[0][2:]: line.split(" | ")[1:] for line in text.splitlines() if line.startswith("| ")}
    rows_["EfficientNet-Lite0 in float16"] = text.split("in float16 on the H200 | ")[1].splitlines()[0].split(" | ")
    wide, first, vgg, half = (
        [tuple(map(int, re.findall(r"\d+", cell))) for cell in rows_[name]]
        for name in ("MobileNetV2-1.4", "MobileNetV2-1.0", "VGG19-BN", "EfficientNet-Lite0 in float16")
    )
    pairs, _, _, surrogate, *_, four = range(len(FACTORS) + 4)
    assert wide[surrogate][0] == wide[pairs][0] - 1 and wide[four] == wide[pairs]
    assert f"Of {wide[pairs][0]} pairs of plans" in " ".join(SECTIONS["mobilenet_v2_1.4"].remark.split())
    assert [one[surrogate][0] - one[four][0] for one in (vgg, half)] == [1, 1] and FACTORS[-1] == 4
    (_, between), (all_right, right) = first[pairs], first[surrogate]
    assert right < between / 2 and (all_right - right) / (first[pairs][0] - between) > 0.9
    plans = {(one.method, one.at): one for one in compared_plans(load("mobilenet_v2_1.4"))}
    ours, pattern = plans["all moves", "DS-F-1.4"], plans["DepthShrinker", "DS-F-1.4"]
    assert comparable(ours, pattern) and pattern.mean > ours.mean


def test_remark_about_the_fourth_training_of_the_original():
    known = rows(RESULTS / "efficientnet_lite0-on-float16-fourth-fit")
    usual = rows(RESULTS / "efficientnet_lite0-on-float16")
    keys = [f"train all moves {share} 0" for share in ("65%", "50%", "35%")]
    assert all(known[key]["plan"] == usual[key]["plan"] for key in keys)
    first, second, third = (f"{known[key]['merged']:.2f}" for key in keys)
    remark = SECTIONS["efficientnet_lite0-on-float16"].remark
    assert f"{first}, {second} and {third} %" in remark and f"{known['base']['test']:.2f} %" in remark
