"""The figures in the remarks on EfficientNet-Lite0 in docs/results.md are those of the committed results."""

import json

from pytest import approx

from depthfold.solver.surrogate import fit_to_plans
from experiments.equal_latency.candidates import CONTROL, PRUNED
from experiments.equal_latency.page.text import LIMITS
from experiments.equal_latency.page.write import SHARES
from experiments.equal_latency.results import BASE, OURS, RESULTS, SEED_DEVIATION, load
from experiments.gpu_runs import rows
from experiments.subjects import LONGER
from results_texts import at, load_surrogate, pruning_steps, remark, sections, words

RULE = "LayerMerge's rule"
MAGNITUDE, TAYLOR = PRUNED
TF32, FLOAT16, ARM = "efficientnet_lite0", "efficientnet_lite0-on-float16", "efficientnet_lite0-on-onnxruntime"
SQUARES = f"{ARM}-least-squares"


def ahead(results, share, method):
    return results.ahead(at(results, share, method))


def measured(results, share, method):
    """Return what was measured, even if it was trained and not timed, or timed and not trained."""
    return next(one for one in results.measured if (one.method, one.at) == (method, share))


def trained(name):
    return {(row["method"], row["at"]): row for key, row in rows(RESULTS / name).items() if key.startswith("train ")}


def test_channel_pruning_of_lite0():
    lite, text = sections()[TF32], remark(TF32)
    magnitude, taylor = (at(lite, "65%", method) for method in PRUNED)
    said = f"Channel pruning by magnitude is {lite.ahead(magnitude).points:.1f} points behind all moves at 65 %."
    assert said in text and not lite.ahead(magnitude).is_noise
    others = [measured(lite, share, MAGNITUDE) for share in ("80%", "50%")]
    said = "For 80 and 50 % it has {:.2f} and {:.2f} %, but those networks were not timed."
    assert said.format(*(one.mean for one in others)) in text and all(one.profile is None for one in others)
    said = f"By Taylor expansion it is {lite.ahead(taylor).points:.1f} points behind at 65 %."
    parameters = 1 - taylor.profile.parameters / taylor.original.parameters
    assert f"{said} It removes {100 * parameters:.0f} % of the parameters there," in text
    memory = 1 - taylor.profile.memory / taylor.original.memory
    assert f"the peak memory falls by {100 * memory:.0f} % only." in text


def test_steps_of_channel_pruning_of_lite0():
    lite, text = sections()[TF32], remark(TF32)
    steps = pruning_steps(TF32, "Taylor")
    assert [*steps] == [0.8, 0.65] and steps[0.65] == 40, "the last step"
    found = [measured(lite, share, TAYLOR) for share in ("80%", "65%")]
    row = rows(RESULTS / TF32)
    assert all(row[f"profile {TAYLOR} {one.at} cuda"]["base"] == "base, third fit" for one in found)
    said = (
        "they take {:.0f} and {:.0f} % of the latency instead of 80 and 65 %, and the second of them is the last step."
    )
    assert said.format(*(100 * one.share for one in found)) in text


def test_searches_of_lite0():
    lite, text = sections()[TF32], remark(TF32)
    behind = [ahead(lite, share, method) for share in ("65%", "50%") for method in (RULE, "paper")]
    (same,) = {f"{one.points:.1f}" for one in behind}
    said = f"LayerMerge's rule and the paper's moves are {same} points behind at 65 and 50 %, which is little for one"
    assert said in text and all(one.is_noise for one in behind)
    control = at(lite, "65%", CONTROL)
    said = f"The control for 65 % takes {100 * control.share:.0f} % of the latency, and is"
    assert f"{said} {lite.ahead(control).points:.1f} points behind all moves there." in text
    first = at(lite, "80%", OURS)
    assert first.original.depth - first.profile.depth == 4 - 1 and not first.dropped
    assert "The plan for 80 % only merges four layers, at the largest resolution, into one." in text
    factor = first.profile.flops / first.original.flops
    said = f"The network then has {factor:.1f} times the FLOPs and less than half of the peak memory."
    assert said in text and first.profile.memory < first.original.memory / 2


def test_surrogate_of_lite0_by_least_squares():
    squares, ranks = load_surrogate(SQUARES), load_surrogate(TF32)
    assert squares.plans == ranks.plans
    again = fit_to_plans(squares.plans)
    assert (again.slope, again.per_block) == (approx(ranks.slope), approx(ranks.per_block))
    assert round(squares.per_block / squares.slope / (ranks.per_block / ranks.slope)) == 7
    for name in (TF32, ARM):
        assert "term per block is seven times as large" in remark(name)


def test_originals_of_lite0():
    lite = sections()[TF32]
    assert "The networks with a dagger start from the third, the others from the second" in remark(TF32)
    assert {one.base for one in lite.measured if one.scores} == {BASE, "base, third fit"}
    third = lite.bases["base, third fit"]
    for name in (FLOAT16, ARM):
        other = sections()[name]
        assert other.base["test"] == third["test"] and {one.base for one in other.measured} == {BASE}


def test_searches_of_lite0_in_float16():
    lite, text = sections()[FLOAT16], remark(FLOAT16)
    assert all(ahead(lite, share, method).is_noise for share in ("65%", "50%") for method in ("paper", RULE))
    assert "The searches are level at 65 and 50 %." in text
    paper = at(lite, "35%", "paper")
    assert not paper.dropped and not lite.ahead(paper).is_noise
    said = f"the paper's moves, which cannot drop layers, are {lite.ahead(paper).points:.1f} points behind;"
    assert f"At 35 % {said} LayerMerge's rule is level." in text and ahead(lite, "35%", RULE).is_noise
    name = f"{FLOAT16}-fourth-fit"
    fourth = trained(name)
    said = f"From a fourth ({name}, {rows(RESULTS / name)['base']['test']:.2f} %), the plans of all moves for 65, 50"
    scores = [fourth[OURS, share]["merged"] for share in ("65%", "50%", "35%")]
    assert said + " and 35 % have {:.2f}, {:.2f} and {:.2f} %.".format(*scores) in text
    for share in ("65%", "50%", "35%"):
        assert fourth[OURS, share]["plan"] == at(lite, share, OURS).plan


def test_channel_pruning_of_lite0_on_arm():
    lite, text = sections()[ARM], remark(ARM)
    behind = [ahead(lite, share, MAGNITUDE) for share in SHARES]
    said = "by magnitude is {:.1f}, {:.1f}, {:.1f} and {:.1f} points behind all moves at 80, 65, 50 and 35 %;"
    assert said.format(*(one.points for one in behind)) in text and not any(one.is_noise for one in behind)


def test_searches_of_lite0_on_arm():
    lite, text = sections()[ARM], remark(ARM)
    assert all(ahead(lite, share, RULE).is_noise for share in SHARES)
    assert "LayerMerge's rule is level with all moves on the test set;" in text
    assert [share for share in SHARES if any(one.method == "paper" for one in lite.at(share))] == ["80%"]
    paper, control = (ahead(lite, "80%", method) for method in ("paper", CONTROL))
    said = f"do not reach 65 %, and at 80 % they are {paper.points:.1f} points behind all moves; the control is"
    assert f"{said} {control.points:.1f} points behind." in text
    merged = [
        one.original.depth - one.profile.depth - one.dropped for one in (at(lite, share, OURS) for share in SHARES)
    ]
    assert merged == [0, 1, 1, 4]
    assert "At 80 % all moves only drop; at 65 and 50 % they also merge one convolution away, at 35 % four:" in text


def test_latency_of_the_original_on_arm():
    """It was timed again in turn with every network, on two days."""
    lite, text = sections()[ARM], remark(ARM)
    apart = {("35%", OURS), ("80%", CONTROL), ("100%", "original")}
    days = [], []
    for one in lite.measured:
        if one.original is not None and one.scores:
            days[(one.at, one.method) not in apart].append(one.original.latency)
    first, second = (f"{min(day):.1f} to {max(day):.1f} ms" for day in days)
    assert len(days[0]) == 3 and max(days[0]) < min(days[1])
    said = (
        f"The original took {first} when it was timed with all moves at 35 %, the control and the fine-tuned original"
    )
    assert f"{said}, and {second} with the others, on another day." in text


def test_accuracy_of_lite0_at_80_per_cent_on_arm():
    lite = sections()[ARM]
    one = at(lite, "80%", OURS)
    assert lite.lost(one) <= 0 and len(one.scores) == 1
    said = f"loses nothing on the test set, but {lite.lost(one, 'holdout'):.1f} points on the hold-out set (one seed)."
    tuned = [lite.lost(one, split, tuned=True) for split in ("test", "holdout")]
    said += " Against the fine-tuned original it loses {:.1f} and {:.1f} points.".format(*tuned)
    assert said in words(LIMITS)


def test_earlier_searches_on_arm():
    lite, text = sections()[ARM], remark(ARM)
    squares, earlier = (load(name, "onnxruntime") for name in (SQUARES, f"{ARM}-earlier"))
    assert f"Fine-tuned {LONGER}, seed 0 of all moves at 65 %" in text
    plans = {share: {at(each, share, OURS).plan for each in (lite, squares)} for share in SHARES}
    assert [share for share in SHARES if len(plans[share]) == 1] == ["35%"] and "have the same plan at 35 %." in text
    level = abs(at(lite, "80%", RULE).mean - at(squares, "80%", RULE).mean) < 1.96 * SEED_DEVIATION * 2**0.5
    assert level and "LayerMerge's rule is as accurate at 80 %, and" in text
    assert f"At 35 %, LayerMerge's rule had {at(earlier, '35%', RULE).mean:.2f} %" in text


def test_images_of_imagenette():
    """The accuracies are multiples of one image."""
    test, known = 3925, 3791
    assert f"Of the {test:,} test images of Imagenette, {known:,} are in the training set of ImageNet" in words(LIMITS)
    assert f"{test - known} of the {test:,} test images are from ImageNet's validation set" in remark(ARM)
    for name in (TF32, FLOAT16, ARM):
        for one in sections()[name].measured:
            for scores, images in ((one.scores, test), (one.holdout, 947)):
                counts = [score * images / 100 for score in scores.values()]
                assert all(abs(count - round(count)) < 1e-6 for count in counts)


def test_recipe_with_features_raised_the_mean_accuracy_on_the_hold_out_set():
    text, earlier = remark(ARM), rows(RESULTS / f"{ARM}-earlier")
    changed = [row for row in earlier.values() if row.get("variant") == "without features"]
    usual = [earlier[f"train {row['method']} {row['at']} {row['seed']}"] for row in changed]
    assert len(changed) == 9 and "for the nine networks that had been trained without it" in text
    assert sum(row["holdout"] for row in usual) > sum(row["holdout"] for row in changed)
    assert {json.dumps(row["recipe"].get("features")) for row in usual} == {"2.0"} and "`features=2` was then" in text
