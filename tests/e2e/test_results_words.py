"""The figures in hand-written sentences of README.md and docs/results.md are those of the committed results."""

from itertools import pairwise

import torch

import depthfold as df
from depthfold.baselines import depthshrinker_plan
from depthfold.core import FlaggedSpan, Surrogate
from experiments.equal_latency.candidates import AMC, CONTROL, PRUNED, PUBLISHED, SEARCHED, UNIFORM
from experiments.equal_latency.page import write as results_page
from experiments.equal_latency.page.summary import DEPTHFOLD, RIVALS, best, differences, most_accurate
from experiments.equal_latency.page.text import LIMITS, METHOD, SECTIONS, SUMMARY
from experiments.equal_latency.results import BASE, OURS, RESULTS, SEED_DEVIATION, load
from experiments.gpu_runs import rows
from experiments.subjects import SUBJECTS
from results_texts import ROOT, WIDTHS, at, load_surrogate, readme, remark, rivals_of, sections, words


def test_losses_of_efficientnet_on_arm():
    lite = sections()["efficientnet_lite0-on-onnxruntime"]
    ours, headline = at(lite, "65%", OURS), results_page.best(lite, longer=True)
    assert (headline.variant, headline.plan, len(headline.scores)) == ("for 180 epochs", ours.plan, 1)
    usual, tuned_usual, longer, tuned_longer = (
        f"{accuracy - one.mean:.1f}" for one in (ours, headline) for accuracy in (lite.base["test"], lite.tuned.mean)
    )
    assert f"Against the fine-tuned original, it loses {tuned_usual} and {tuned_longer} points." in words(SUMMARY)
    said = f"{ours.speed_up:.2f} times as fast at a loss of {usual} points, or of {longer} points after 180 epochs"
    assert said in words(SUMMARY)
    before, after = (f"{lite.base['holdout'] - one.holdout[0]:.1f}" for one in (ours, headline))
    seed = f"{lite.base['test'] - ours.scores[0]:.1f}"
    said = (
        f"seed 0 of all moves at 65 % loses {longer} points instead of {seed}, and {after} instead of {before} on the"
    )
    assert said in remark(lite.name)
    others = [one for results in sections().values() for one in results.measured if one.longer]
    assert [one.plan for one in others] == [ours.plan], "no other network was fine-tuned for that long"


def test_hold_out_accuracies_of_efficientnet_on_arm():
    lite = sections()["efficientnet_lite0-on-onnxruntime"]

    def ahead(share, method):
        scores = (at(lite, share, each).holdout.values() for each in (method, OURS))
        one, ours = (sum(each) / len(each) for each in scores)
        return one - ours

    seeds = at(lite, "50%", OURS).holdout.values()
    said = f"on the hold-out set it is {ahead('80%', 'channels, magnitude'):.1f} points ahead at 80 %"
    assert said in remark(lite.name)
    rule = [ahead(share, "LayerMerge's rule") for share in ("80%", "50%")]
    said = f"it is {rule[0]:.1f} points ahead at 80 % and {-rule[1]:.1f} behind at 50 %, where the seeds of all moves "
    assert said + f"differ by {max(seeds) - min(seeds):.1f}." in remark(lite.name)


def test_readme_says_how_each_network_of_its_table_was_made():
    found = {name: results_page.best(each, longer=True) for name, each in sections().items()}
    assert all(name in WIDTHS or (one.method == OURS and one.dropped) for name, one in found.items())
    steps = {
        name: rows(RESULTS / name).get(f"steps {one.method} {one.at} {SECTIONS[name].stopwatch}")
        for name, one in found.items()
    }
    assert [name for name in steps if steps[name] is None] == ["efficientnet_lite0-on-float16"]
    saved = {
        name: [
            row["original"]["quartiles"][1] - row[step]["quartiles"][1] for step in ("without activations", "along S")
        ]
        for name, row in steps.items()
        if row is not None
    }
    mostly = {name for name, (dropped, all_of_it) in saved.items() if dropped > 0.75 * all_of_it}
    assert mostly == {"vgg19_bn", "resnet56", "efficientnet_lite0-on-onnxruntime"}
    assert "On VGG19-BN, ResNet-56 and ARM, most of the speed-up comes from dropping" in words(SUMMARY)
    assert "which gives most of the speed-up on VGG19-BN, ResNet-56 and ARM." in readme()
    batches = {name: one.original.environment.batch for name, one in found.items()}
    assert {batch for name, batch in batches.items() if "lite0" not in name} == {512}
    assert [batch for name, batch in batches.items() if "lite0" in name] == [128, 128, 1]
    machines = {one.original.environment.machine for name, one in found.items() if name.endswith("onnxruntime")}
    assert machines == {"Linux aarch64, Neoverse-N1, 2 cores"}
    said = "CUDA graphs at batch 512 (EfficientNet-Lite0: 128). ARM: ONNX Runtime at batch 1 on two Neoverse-N1 cores."
    assert said in readme()
    longer = {name: one.variant for name, one in found.items() if one.variant}
    assert longer == {"efficientnet_lite0-on-onnxruntime": "for 180 epochs"}
    assert {each.recipe["epochs"] for each in sections().values()} == {60}
    assert "fine-tuned with the same recipe for 60 epochs" in readme()


def test_readme_has_the_differences_from_other_methods():
    found = sections()

    def extremes(sections, *methods):
        points = [each for results in sections for method in methods for each in differences(results, method)]
        known = [each.points for each in points if each is not None and each.same_original]
        return f"{abs(min(known)):.1f}", f"{abs(max(known)):.1f}", min(known), max(known)

    rule = [each for results in found.values() for each in differences(results, "LayerMerge's rule")]
    compared = [each.is_noise for each in rule if each is not None and each.same_original]
    assert sum(compared) > 0.75 * len(compared) and "LayerMerge's rule is level with all moves in most" in words(
        SUMMARY
    )
    better, worse, *_ = extremes(found.values(), "LayerMerge's rule")
    said = f"[LayerMerge's rule](docs/baselines.md) is {better} points better to {worse} points worse than depthfold."
    assert said in readme()
    assert all(each.has("LayerMerge's rule") for each in found.values())
    pruned = {
        (name, share): [
            ahead.points
            for one in each.at(share)
            if one.method in PRUNED and one.base == BASE and (ahead := each.ahead(one)) is not None
        ]
        for name, each in found.items()
        for share in results_page.SHARES
    }
    both = {key: min(points) for key, points in pruned.items() if len(points) == 2}
    assert {name for name, _ in both} == {*WIDTHS, "vgg19_bn", "resnet56"}
    high = max(both.values())
    where, most = max(
        ((key, max(points)) for key, points in pruned.items() if len(points) == 1), key=lambda one: one[1]
    )
    assert where == ("efficientnet_lite0-on-onnxruntime", "50%")
    assert f"the better kind is up to {high:.1f} points behind, and where only one" in words(SUMMARY)
    assert f"up to {most:.1f} points (by magnitude, on ARM)" in words(SUMMARY)
    searched = [(found[name], one) for name in WIDTHS for one in rivals_of(found[name], SEARCHED)]
    searched.sort(key=lambda each: each[1].speed_up)
    *level, last = (each.ahead(one) for each, one in searched)
    assert len(level) == 5 and all(one.is_noise for one in level) and not last.is_noise
    slowest, *_, second, fastest = (f"{one.speed_up:.2f}" for _, one in searched)
    assert (
        f"on both MobileNetV2 networks is level with depthfold at {slowest} to {second} times the speed, and "
        f"{last.points:.1f} points behind at {fastest} times." in words(SUMMARY)
    )
    patterns = [each for name in WIDTHS for each in differences(found[name], PUBLISHED)]
    points = sorted(one.points for one in patterns)
    assert len(points) == 10 and [one.points for one in patterns if one.points < 0 and not one.is_noise] == points[:1]
    assert points[-1] > max(one.points for one in (*level, last)), "the patterns are further behind than the search"
    said = (
        f"up to {points[-1]:.1f} points worse, but one of its patterns is {-points[0]:.1f} points better at 5 times the"
    )
    assert f"DepthShrinker is level or {said} speed." in readme()
    assert f"pattern F of MobileNetV2-1.4 is {-points[0]:.1f} points ahead" in words(SUMMARY)
    spread = max(each.spread for each in found.values() if each.spread is not None)
    rest = [method for method in RIVALS if method != PUBLISHED]
    assert -extremes(found.values(), "paper", *rest)[2] < spread, "README and summary name what is further ahead"
    control = found["resnet56"].at("65%")[-1]
    assert control.method == CONTROL and found["resnet56"].ahead(control).is_noise
    assert found["resnet56"].tuned.mean <= control.mean
    said = f"a plan from constant importances (one seed, {control.speed_up:.1f} times as fast) is as accurate"
    assert f"On ResNet-56, {said}" in words(SUMMARY)


def test_remark_about_the_wide_mobilenet():
    magnitude, taylor = PRUNED
    wide = sections()["mobilenet_v2_1.4"]
    assert all(each.is_noise for each in differences(wide, "paper"))
    text = remark(wide.name)

    ahead = {max(wide.at(share), key=lambda one: one.holdout[0]).method for share in results_page.SHARES}
    behind = (at(wide, share, OURS).holdout[0] - at(wide, share, magnitude).holdout[0] for share in results_page.SHARES)
    said = (
        "no method is ahead at all budgets, and pruning by magnitude is {:.1f}, {:.1f}, {:.1f} and {:.1f} points behind"
    )
    assert len(ahead) > 1 and said.format(*behind) in text
    level = [(magnitude, share) for share in ("80%", "65%", "50%")] + [(taylor, share) for share in ("80%", "65%")]
    assert all(wide.ahead(at(wide, share, method)).is_noise for method, share in level)
    assert f"and {wide.ahead(at(wide, '35%', magnitude)).points:.1f} points behind at 35 %." in text
    assert f"and {wide.ahead(at(wide, '50%', taylor)).points:.1f} points behind at 50 %, and it does not reach" in text
    assert [one.method for one in wide.at("35%") if one.method in PRUNED] == [magnitude]
    assert f"for 80 % has {100 * at(wide, '80%', taylor).share:.0f} % of the latency." in text
    pruning, ours = (best(wide, methods, tuned=True).speed_up for methods in (PRUNED, ("paper", OURS)))
    following = min(one.speed_up for one in wide.measured if one.method == OURS and one.scores and one.speed_up > 1.3)
    said = (
        f"pruning is {pruning:.2f} times as fast, and depthfold, which has no network between {ours:.2f} and "
        f"{following:.2f} times, {ours:.2f} times."
    )
    assert said in text and said in words(SUMMARY)

    earlier = load(f"{wide.name}-first-fit")
    assert f"(mobilenet_v2_1.4-first-fit, {earlier.base['test']:.2f} %)" in text
    again = [
        (
            one,
            next(each for each in wide.measured if (each.method, each.at, each.plan) == (one.method, one.at, one.plan)),
        )
        for one in earlier.measured
        if one.scores and one.method in ("paper", OURS)
    ]
    lost = [one.mean - other.mean for one, other in again]
    assert (
        len(again) == 5 and f"five of these plans were {min(lost):.1f} to {max(lost):.1f} points more accurate" in text
    )
    speed_ups = [best(earlier, tuned=tuned).speed_up for tuned in (False, True)]
    said = "was {:.2f} times, or {:.2f} times against the fine-tuned original".format(*speed_ups)
    assert f"{said} ({earlier.tuned.mean:.2f} %)" in text
    assert "MobileNetV2-1.4 had {:.2f} and {:.2f} times with the same plans".format(*speed_ups) in words(SUMMARY)


def test_rivals_of_the_wide_mobilenet():
    wide, rule = sections()["mobilenet_v2_1.4"], "LayerMerge's rule"
    text = remark(wide.name)
    assert all(wide.ahead(at(wide, share, rule)).is_noise for share in ("80%", "65%", "50%"))
    behind, holdout = wide.ahead(at(wide, "35%", rule)), (at(wide, "35%", method).holdout[0] for method in (rule, OURS))
    assert not behind.is_noise and f"and {behind.points:.1f} points behind at 35 %, where it is as accurate" in text
    assert abs(next(holdout) - next(holdout)) < 0.05
    patterns = {one.at: wide.ahead(one) for one in rivals_of(wide, PUBLISHED)}
    level = [name for name, ahead in patterns.items() if ahead.is_noise]
    assert level == ["DS-A-1.4", "DS-C-1.4", "DS-D-1.4"] and "A, C and D are level with all moves" in text
    said = "and B and E are {:.1f} and {:.1f} points behind, with one seed each."
    assert said.format(*(patterns[f"DS-{name}-1.4"].points for name in "BE")) in text
    searched = "where it keeps 12, 9 and 7 of 17 blocks, at {:.2f}, {:.2f} and {:.2f} times the speed."
    assert searched.format(*(one.speed_up for one in rivals_of(wide, SEARCHED))) in text
    (uniform,) = rivals_of(wide, UNIFORM)
    assert wide.ahead(uniform).is_noise and abs(uniform.share - 0.8) < 0.01
    both, one, last = (at(wide, share, CONTROL) for share in ("65%", "50%", "35%"))
    assert both.plan == at(wide, "80%", CONTROL).plan and both.share < 0.65
    assert f"faster than both and {wide.ahead(both).points:.1f} points behind all moves at that" in text
    assert f"and one for 50 %, {wide.ahead(one).points:.1f} points behind." in text
    said = (
        f"Its plan for 35 % takes {100 * last.share:.0f} % of the latency, and is {wide.ahead(last).points:.1f} points"
    )
    assert said in text


def test_pattern_that_the_surrogate_underestimates():
    wide = sections()["mobilenet_v2_1.4"]
    pattern, ours = (
        next(one for one in wide.measured if (one.method, one.at) == (method, "DS-F-1.4"))
        for method in (PUBLISHED, OURS)
    )
    text = remark(wide.name)
    assert f"pattern F is {-wide.ahead(pattern).points:.1f} points ahead of all moves" in text
    tables = (RESULTS / wide.name).joinpath
    importance = df.ImportanceTable.loads(tables("importance.json").read_text())
    latency = df.LatencyTable.loads(tables("latency.json").read_text())
    surrogate = Surrogate.loads(tables("surrogate.json").read_text())
    subject = SUBJECTS[wide.name]
    traced = subject.trace(subject.build())
    frontier = df.solve(latency, importance, network=traced.network, surrogate=surrogate)
    plan = depthshrinker_plan(traced, pattern.at)
    solved = frontier.at(f"{latency.predict(traced.network, plan)}ms")
    assert (str(plan), str(solved.plan)) == (pattern.plan, ours.plan)
    assert len(plan.activations) == 17 and not plan.dropped and set(plan.cuts) < plan.activations
    assert len(solved.plan.activations) == 8 and len(solved.plan.dropped.branches) == 8
    blocks = [FlaggedSpan(i, j, True, True) for i, j in pairwise([0, *sorted(plan.activations)])]
    predicted = surrogate.predict(sum(importance.importances[block] for block in blocks), len(blocks))
    said = f"{predicted:.0f} % for F and {surrogate.intercept + solved.importance:.0f} % for all moves"
    assert f"The surrogate predicts the opposite, {said}." in text


def test_rivals_of_mobilenet():
    text, results = remark("mobilenet_v2"), sections()["mobilenet_v2"]
    said = (
        "where it keeps 12 and 9 of 17 blocks, at {:.2f} and {:.2f} times the speed. Where it keeps 7, at {:.2f} times"
    )
    assert said.format(*(one.speed_up for one in rivals_of(results, SEARCHED))) in text
    last = results.ahead(rivals_of(results, SEARCHED)[-1])
    assert not last.is_noise and f"it is {last.points:.1f} points behind, slightly more than seeds explain" in text
    narrower = [one for method in (UNIFORM, AMC) for one in rivals_of(results, method)]
    assert all(results.ahead(one).is_noise for one in narrower)
    said = "is level with all moves, at {:.2f} and {:.2f} times the speed.".format(*(one.speed_up for one in narrower))
    assert said in text


def test_page_compares_the_networks_for_arm_with_those_of_earlier_searches():
    name, rule = "efficientnet_lite0-on-onnxruntime", "LayerMerge's rule"
    today, earlier, squares = (load(f"{name}{of}", "onnxruntime") for of in ("", "-earlier", "-least-squares"))

    def accuracies(found, method):
        return [next(one.mean for one in found.at(at) if one.method == method) for at in results_page.SHARES]

    lost, ours = (
        [a - b for a, b in zip(accuracies(today, method), accuracies(squares, method), strict=True)]
        for method in (rule, OURS)
    )
    assert max(map(abs, ours)) < 0.44 > abs(lost[0])
    said = "{:.1f}, {:.1f} and {:.1f} points less accurate than with ranks at 65, 50 and 35 %".format(*lost[1:])
    assert said in remark(name)
    behind = [a - b for a, b in zip(accuracies(earlier, rule), accuracies(earlier, OURS), strict=True)]
    assert "by {:.1f}, {:.1f}, {:.1f} and {:.1f} points at 80, 65, 50 and 35 %".format(*behind) in remark(name)
    best = next(one for one in earlier.at("35%") if one.method == rule)
    said = (
        f"{best.mean:.2f} % at {100 * best.share:.0f} % of the latency there, which is "
        f"{-today.ahead(best).points:.1f} points ahead of all moves of this table"
    )
    assert said in remark(name)


def test_page_has_the_accuracies_of_all_fits_of_efficientnet():
    arm = "efficientnet_lite0-on-onnxruntime"
    fits = [
        rows(RESULTS / f"{arm}-earlier")["base, first fit"],
        rows(RESULTS / "efficientnet_lite0")["base"],
        rows(RESULTS / arm)["base"],
    ]
    first, second, third = (f"{fit['test']:.2f}" for fit in fits)
    for name in ("efficientnet_lite0", arm):
        assert f"are {first}, {second} and {third} %" in remark(name)


def test_readme_says_that_its_first_network_is_slower_on_another_machine():
    best = results_page.best(load("mobilenet_v2"))
    steps = rows(RESULTS / "mobilenet_v2")[f"steps {best.method} {best.at} onnxruntime"]
    merged, original = (steps[step]["quartiles"][1] for step in ("along S", "original"))
    said = (
        f"The MobileNetV2-1.0 that is {best.speed_up:.2f} times as fast on the H200 is slower than its original on ARM "
        f"({merged:.1f} ms, its original {original:.1f} ms) and has {best.profile.parameters / 1e6:.1f} million "
        f"parameters instead of {best.original.parameters / 1e6:.1f}, because merging makes depth-wise convolutions "
        "dense."
    )
    assert merged > original and best.profile.flops > best.original.flops and said in readme()


def test_plans_that_drop_layers_carry_over():
    from depthfold.core import MeasuredSpeedup, Profile

    def timed(where, source, share):
        row = rows(RESULTS / where)[f"transfer {source} {share} onnxruntime"]
        original, moved = (Profile.from_json(row[each]) for each in ("original", "moved"))
        assert at(sections()[source], share, OURS).plan == row["plan"], "its accuracy is known"
        found = MeasuredSpeedup(original=original.quartiles, network=moved.quartiles)
        return original.environment.machine.split()[1].rstrip(","), found

    (arm, vgg), (_, resnet), (x86, lite) = (
        timed("vgg19_bn-on-onnxruntime", "vgg19_bn", "50%"),
        timed("resnet56-on-onnxruntime", "resnet56", "50%"),
        timed("efficientnet_lite0-on-xeon", "efficientnet_lite0-on-onnxruntime", "65%"),
    )
    assert (arm, x86) == ("aarch64", "x86_64")
    assert not any(one.unreliable for one in (vgg, resnet, lite))
    vgg, resnet, lite = (f"{each.factor:.2f}" for each in (vgg, resnet, lite))
    said = f"are {vgg} and {resnet} times as fast on two ARM cores, and that of EfficientNet-Lite0 for ARM at 65 % is"
    assert f"{said} {lite} times as fast on two x86 cores." in words(SUMMARY)
    slower = set()
    for folder in RESULTS.glob("*-on-*"):
        for row in rows(folder).values():
            if row.get("from") in sections():
                original, moved = (Profile.from_json(row[each]).latency for each in ("original", "moved"))
                slower |= {row["from"]} if moved > original else set()
    assert slower == {"mobilenet_v2", "efficientnet_lite0"}


def test_summary_has_the_figures_of_its_tables():
    found, said = sections(), words(SUMMARY)
    on_gpu = {name: each for name, each in found.items() if not name.endswith("onnxruntime")}
    faster = {name: results_page.best(each).speed_up for name, each in on_gpu.items()}
    least = faster.pop("mobilenet_v2_1.4")
    assert all(1.95 < each < 2.1 for each in faster.values()) and "about 2 times as fast" in said
    assert f"but MobileNetV2-1.4 only {least:.2f} times." in said
    fairer = [results_page.best(each, tuned=True).speed_up for each in on_gpu.values()]
    assert f"comparison, they become {min(fairer):.2f} to {max(fairer):.2f} times as fast." in said
    every = [results_page.best(each, tuned=True).speed_up for each in found.values()]
    assert (
        f"on two cores of an ARM server; all networks, {min(every):.2f} to {max(every):.2f} times. The table"
        in readme()
    )
    arm = found["efficientnet_lite0-on-onnxruntime"]
    within = {f"{results_page.best(arm, tuned=tuned).speed_up:.2f}" for tuned in (False, True)}
    assert within == {"1.27"} and "Within 0.2 points of either original it is 1.27 times." in said
    rule = {name: differences(each, "LayerMerge's rule") for name, each in found.items()}
    ahead = {
        name: [f"{one.points:.1f}" for one in each if one.same_original and not one.is_noise]
        for name, each in rule.items()
    }
    assert {name: points for name, points in ahead.items() if points} == {
        "mobilenet_v2": ["-0.3", "-0.4"], "mobilenet_v2_1.4": ["0.6"], "resnet56": ["1.2"]
    }  # fmt: skip
    assert (
        "in most places, 0.3 and 0.4 points ahead on MobileNetV2-1.0 at 80 and 35 %, and 0.6 and 1.2 points behind on "
        "MobileNetV2-1.4 and ResNet-56 at 35 %" in said
    )
    level = {
        name: [
            share
            for share in results_page.SHARES
            if any(one.method in PRUNED and (ahead := each.ahead(one)) and ahead.is_noise for one in each.at(share))
        ]
        for name, each in found.items()
    }
    assert [level[name] for name in (*WIDTHS, "vgg19_bn", "resnet56")] == [
        ["80%", "65%"], ["80%", "65%", "50%"], ["80%", "65%"], ["80%"]
    ]  # fmt: skip
    assert (
        "at 80, 65 and 50 % of the latency, on MobileNetV2-1.0 and VGG19-BN at 80 and 65 %, and on ResNet-56 at 80"
        in said
    )
    assert at(arm, "65%", OURS).dropped


def test_noise_is_judged_by_the_deviation_between_seeds():
    from statistics import variance

    numbers, found = [], sections()
    for name in ("mobilenet_v2", "resnet56"):
        plans = {one.plan: one.scores.values() for one in found[name].measured if len(one.scores) > 1}
        assert {len(scores) for scores in plans.values()} == {2}
        assert f"{(sum(map(variance, plans.values())) / len(plans)) ** 0.5:.2f}" == f"{SEED_DEVIATION:.2f}"
        numbers.append(len(plans))
    assert (
        f"is {SEED_DEVIATION:.2f} points on MobileNetV2-1.0 and on ResNet-56 ({numbers[0]} and {numbers[1]} plans"
        in (words(METHOD))
    )
    limits = [f"{1.96 * SEED_DEVIATION * (2 / seeds) ** 0.5:.2f}" for seeds in (1, 2)]
    assert round(float(limits[0]), 1) == 0.4 and "a difference of up to 0.4 points may be noise" in readme()
    assert "{} points between one seed each, {} between means of two".format(*limits) in words(METHOD)


def test_readme_begins_with_both_headlines():
    """The networks are within 0.2 points of the original as it is, and of the fine-tuned one."""
    networks = [sections()[name] for name in ("mobilenet_v2", "efficientnet_lite0-on-onnxruntime")]
    gpu, arm = ([results_page.best(one, tuned=tuned) for tuned in (True, False)] for one in networks)
    assert gpu[0] is gpu[1] and arm[0] is arm[1]
    said = (
        f"With at most 0.2 points of accuracy lost, MobileNetV2-1.0 for CIFAR-10 becomes {gpu[0].speed_up:.2f} times as"
    )
    assert (
        f"{said} fast on an H200, and EfficientNet-Lite0 for Imagenette {arm[0].speed_up:.2f} times on two " in readme()
    )
    chosen = [results_page.best(one, tuned=True, split="holdout") for one in networks]
    assert chosen[1] is None
    said = f"{gpu[0].speed_up:.2f} times becomes {chosen[0].speed_up:.2f}, and none on ARM is within 0.2 points."
    assert (
        f"Networks were selected by test accuracy; [selected by a hold-out set](docs/results.md#summary), {said}"
        in readme()
    )


def test_speed_ups_of_the_readme_are_those_of_its_columns():
    columns = dict(zip(results_page.README_SHARES, (1.25, 1.5, 2), strict=True))
    header = " | ".join(f"{columns[share]:g} times: depthfold | pruning" for share in results_page.README_SHARES)
    assert f"| network | target | {header} |" in readme()
    first = []
    for results in sections().values():
        found = [most_accurate(results, methods, share) for methods in (DEPTHFOLD, PRUNED) for share in columns]
        assert all(one.network.speed_up > 0.97 * columns[one.network.at] for one in found if one)
        assert all(one.network.speed_up < 1.12 * columns[one.network.at] for one in found[1:3] + found[4:] if one)
        first += [(found[0], found[3])]
    ours, pruned = (max(one.network.speed_up for one in each if one) for each in zip(*first, strict=True))
    said = f"In the first column, depthfold is up to {ours:.2f} times as fast, pruning up to {pruned:.2f} times."
    assert said in readme()


def test_readme_says_where_channel_pruning_is_as_accurate():
    def level(results, share):
        both = [most_accurate(results, methods, share) for methods in (DEPTHFOLD, PRUNED)]
        if None in both:
            return False
        deviation = SEED_DEVIATION * sum(1 / len(one.network.scores) for one in both) ** 0.5
        return both[1].lost - both[0].lost < 1.96 * deviation

    found = sections()
    cifar = (*WIDTHS, "vgg19_bn", "resnet56")
    assert [[name for name in found if level(found[name], share)] for share in results_page.SHARES] == [
        [*cifar], ["mobilenet_v2_1.4", "vgg19_bn"], ["mobilenet_v2_1.4"], []
    ]  # fmt: skip
    said = (
        "within noise, at 1.25 times on all networks for CIFAR-10, at 1.5 times on VGG19-BN, and at all three on "
        "MobileNetV2-1.4:"
    )
    assert said in readme()
    wide = found["mobilenet_v2_1.4"]
    pruned, ours = (best(wide, methods, tuned=True).speed_up for methods in (PRUNED, DEPTHFOLD))
    assert f"within 0.2 points, it is {pruned:.2f} times as fast there, and depthfold {ours:.2f} times." in readme()


def test_readme_says_what_merging_alone_costs_on_arm():
    lite = sections()["efficientnet_lite0-on-onnxruntime"]
    merging, dropping = (at(lite, "80%", method) for method in ("paper", OURS))
    costs = [f"{lite.lost(one, tuned=True):.1f}" for one in (merging, dropping)]
    assert dropping.profile.depth == dropping.original.depth - dropping.dropped, "it merges nothing"
    said = "On ARM, merging alone costs {} points at 1.25 times the speed; dropping layers costs {}."
    assert said.format(*costs) in readme()


def test_readme_says_what_the_surrogate_is_worth():
    from depthfold.pipeline.surrogate import PLANS

    found = sections()["mobilenet_v2"]
    plain = {one.method: one for one in found.measured if one.at == "50%" and one.method.endswith("plain sum")}
    without, usual = plain["paper, plain sum"], at(found, "50%", "paper")
    assert without.mean > plain["all moves, plain sum"].mean and usual.mean > at(found, "50%", OURS).mean
    speeds = {f"{one.speed_up:.2f}" for one in (without, usual)}
    losses = [f"{found.lost(one, tuned=True):.1f}" for one in (without, usual)]
    said = "without, MobileNetV2-1.0 loses {} points at {} times the speed instead of {}."
    assert len(speeds) == 1 and said.format(losses[0], *speeds, losses[1]) in readme()
    fitted = {len(load_surrogate(name).plans) for name in ("mobilenet_v2", "mobilenet_v2_1.4", "resnet56", "vgg19_bn")}
    assert f"`--surrogate` trains {PLANS} whole plans briefly" in readme() and fitted == {24}
    assert "The results above were found with 24;" in readme()


def test_readme_says_in_how_many_networks_there_is_nothing_to_merge():
    rows_of_zoo = [line for line in (ROOT / "docs" / "zoo.md").read_text().splitlines() if line.startswith("| ")]
    nothing = [line for line in rows_of_zoo if "(nothing to merge)" in line]
    assert f"([225 networks](docs/zoo.md), {len(nothing)} of them with nothing to merge)" in readme()
    assert len([line for line in rows_of_zoo if line.count("|") > 10]) == 225 + 2, "and the header"


def test_readme_has_the_time_of_the_search():
    times = [
        f"{results_page.minutes(each):.0f}"
        for name, each in sections().items()
        if "lite0" not in name and not SECTIONS[name].surrogate
    ]
    assert len(times) == 3 and f"and one fine-tuning took {min(times)} to {max(times)} minutes." in readme()


def test_page_says_how_much_the_first_steps_of_pruning_remove():
    import json

    def removed(name, kind, step):
        assert json.loads((RESULTS / name / f"channels-{kind}.json").read_text())["0.8"] == step
        one = at(sections()[name], "80%", f"channels, {kind}")
        return f"{100 * (1 - one.profile.flops / one.original.flops):.0f} %"

    said = words(LIMITS)
    lite = removed("efficientnet_lite0-on-onnxruntime", "magnitude", 2)
    assert f"the first two by magnitude remove {lite} of the FLOPs, so its" in said
    (taylor,) = {removed(name, "Taylor", 1) for name in WIDTHS}
    assert f"the first step by Taylor expansion removes {taylor} of the FLOPs, because a fifth" in said
    for name in WIDTHS:
        weights = SECTIONS[name].weights or f"experiments/equal_latency/measured/{name}/base.safetensors"
        layers = SUBJECTS[name].load(ROOT / weights).modules()
        norms = torch.cat([layer.weight.abs() for layer in layers if isinstance(layer, torch.nn.BatchNorm2d)])
        assert 0.19 < (norms < 1e-4).float().mean() < 0.23 and "a fifth of their batch norm weights" in said


def test_page_says_what_torch_compile_leaves_to_gain():
    table = (ROOT / "experiments" / "latency_h200" / "README.md").read_text().splitlines()
    graphs, compiled = (
        [float(cell) for cell in line.split(" | ")[3:7]]
        for runtime in ("CUDA graphs", "inductor")
        for line in table
        if line.startswith(f"| MobileNetV2-1.0 | TF32 | {runtime} |")
    )
    said = f"by a factor of {graphs[0] / compiled[0]:.1f}, and the fastest of all plans is then {compiled[3]:.1f} times"
    assert f"{said} as fast instead of {graphs[3]:.1f}" in words(LIMITS)
