"""The figures in the remarks on the networks for CIFAR-10 in docs/results.md are those of the committed results."""

import functools
import inspect
from types import SimpleNamespace

import torch

from depthfold.baselines import pruning_steps as pruning
from depthfold.solver.surrogate import fit_to_plans
from experiments.cifar_networks import CifarResNet
from experiments.equal_latency.candidates import CONTROL, FURTHER, PRUNED, PUBLISHED, SEARCHES, frontiers
from experiments.equal_latency.page.write import SHARES
from experiments.equal_latency.results import OURS, SEED_DEVIATION
from experiments.gpu_runs import PLANS
from experiments.subjects import SUBJECTS
from results_texts import (
    at,
    load_importance,
    load_latency,
    load_surrogate,
    pruning_steps,
    remark,
    rivals_of,
    sections,
)

RULE = "LayerMerge's rule"
MAGNITUDE, TAYLOR = PRUNED
MAX_RATIO = inspect.signature(pruning).parameters["max_ratio"].default
ROUND_TO = inspect.signature(pruning).parameters["round_to"].default
FIRST_STEPS = inspect.signature(pruning).parameters["steps"].default
BOTH_STEPS = FIRST_STEPS + FURTHER["steps"]


@functools.cache
def searched(name):
    """Return what the searches of a network had, and the plans that they found with the committed surrogate."""
    subject, latency, surrogate = SUBJECTS[name], load_latency(name), load_surrogate(name)
    # The plans do not depend on the weights, and those of ResNet-56 are not in the repository.
    network = subject.trace(CifarResNet(9).eval() if name == "resnet56" else subject.build()).network
    assert network.fingerprint == latency.fingerprint
    importance = load_importance(name)
    again = fit_to_plans(surrogate.plans)
    found, now = (frontiers(latency, importance, network, each) for each in (surrogate, again))
    return SimpleNamespace(network=network, latency=latency, surrogate=surrogate, again=again, found=found, now=now)


def fastest(name, method):
    """Return the fastest plan of a search, and its predicted latency as a share of the original's."""
    has = searched(name)
    shares = [has.latency.predict(has.network, plan) / has.latency.original for plan in has.found[method].plans]
    share = min(shares)
    return has.found[method].plans[shares.index(share)].plan, share


def plan_at(frontier, name, share):
    return str(frontier.at(f"{float(share.strip('%')) / 100 * searched(name).latency.original}ms").plan)


def saved(latency, *spans):
    """Return by how much one block is faster than the layers in it, each with its activation, as a share."""
    times = {(span.i, span.j): both[True] for span, both in latency.times.items()}
    return {(i, j): 1 - times[i, j] / sum(times[n, n + 1] for n in range(i, j)) for i, j in spans if (i, j) in times}


def ahead(results, share, method):
    return results.ahead(at(results, share, method))


def lost(results, share, method):
    return results.lost(at(results, share, method))


def reached(results, method):
    return [share for share in SHARES if any(one.method == method for one in results.at(share))]


def test_vgg_merges_only_at_the_beginning_of_its_stages():
    text, latency = remark("vgg19_bn"), load_latency("vgg19_bn")
    stages = [(0, 2), (2, 4), (4, 8), (8, 12), (12, 16)]
    assert {end - start for start, end in stages[2:]} == {4} and "three of the four convolutions of a stage" in text
    pairs = saved(latency, *((n, n + 2) for n in range(15)))
    firsts = [pairs.pop((start, start + 2)) for start, _ in stages[:4]]
    said = f"saves {100 * min(firsts):.0f} to {100 * max(firsts):.0f} % of their time in the first four stages."
    assert f"merging the first two convolutions of a stage into a 5x5 {said}" in text
    assert max(pairs.values()) < 0 and "Elsewhere it costs time:" in text
    assert f"a 5x5 convolution has {5 * 5 / (2 * 3 * 3):.1f} times the FLOPs of two 3x3 convolutions." in text


def test_fastest_plan_of_vgg():
    text, stages = remark("vgg19_bn"), [range(1, 3), range(3, 5), range(5, 9), range(9, 13), range(13, 17)]
    plan, share = fastest("vgg19_bn", OURS)
    assert f"so the fastest plan has {100 * share:.0f} % of the latency, and none meets 35 %." in text and share > 0.35
    assert max(sum(n in plan.dropped.layers for n in stage) for stage in stages) == 3
    left = [sum(n not in plan.dropped.layers for n in stage) for stage in stages]
    assert left == [1] * 5 and "One has to stay in each of the five stages" in text
    merged = fastest("vgg19_bn", "paper")[1]
    assert merged > 0.75 and "Only plans that drop layers save more than a quarter of the latency." in text
    assert all(not one.dropped and one.share > 0.75 for one in rivals_of(sections()["vgg19_bn"], "paper"))


def test_rivals_of_vgg():
    vgg, text = sections()["vgg19_bn"], remark("vgg19_bn")
    taylor = [ahead(vgg, share, TAYLOR) for share in ("65%", "50%")]
    said = "by Taylor expansion is {:.1f} and {:.1f} points behind all moves at 65 and 50 %."
    assert said.format(*(one.points for one in taylor)) in text and not any(one.is_noise for one in taylor)
    assert reached(vgg, TAYLOR) == ["80%", "65%", "50%"] and reached(vgg, MAGNITUDE) == ["80%", "65%"]
    assert {*pruning_steps(vgg.name, "magnitude")} == {0.8, 0.65}
    said = f"By magnitude it does not reach 50 % with {100 * MAX_RATIO:.0f} % of the channels removed."
    assert said in text
    kinds = [ahead(vgg, "80%", method) for method in PRUNED]
    (both,) = {f"{one.points:.1f}" for one in kinds}
    level = ahead(vgg, "65%", MAGNITUDE)
    said = f"At 80 % both kinds are {both} points behind, and at 65 % magnitude is {-level.points:.1f} points ahead"
    assert f"{said}, which is within noise." in text and all(one.is_noise for one in (*kinds, level))
    assert at(vgg, "50%", RULE).plan == at(vgg, "50%", OURS).plan and "chooses the same plan at 50 %" in text
    assert all(ahead(vgg, share, RULE).is_noise for share in ("80%", "65%")) and "is level at 80 and 65 %." in text
    behind = at(vgg, "80%", "paper").mean - at(vgg, "80%", CONTROL).mean
    assert f"The control is {behind:.1f} points behind the paper's moves at 80 %." in text
    test, holdout = vgg.tuned.mean - vgg.base["test"], vgg.base["holdout"] - vgg.tuned.accuracy("holdout")
    said = f"is {test:.1f} points better than the original on the test set, and {holdout:.1f} points worse on the"
    assert said in text


def test_channel_pruning_of_resnet():
    resnet, text = sections()["resnet56"], remark("resnet56")
    found = {share: [at(resnet, share, method) for method in PRUNED] for share in ("80%", "65%")}
    behind = {share: [resnet.ahead(one) for one in both] for share, both in found.items()}
    assert all(one.is_noise for one in behind["80%"]) and not any(one.is_noise for one in behind["65%"])
    said = "At 80 %, channel pruning is {:.1f} and {:.1f} points behind all moves, which is within noise; its networks"
    assert said.format(*(one.points for one in behind["80%"])) in text
    shares = "for 80 % have {:.0f} and {:.0f} % of the latency.".format(*(100 * one.share for one in found["80%"]))
    assert shares in text
    said = "At 65 % it is {:.1f} and {:.1f} points behind, and it does not reach 50 %"
    assert f"{said.format(*(one.points for one in behind['65%']))} in {BOTH_STEPS} steps." in text
    assert all({*pruning_steps(resnet.name, kind)} == {0.8, 0.65} for kind in PRUNED.values())
    convolutions = [part for part in CifarResNet(9).modules() if isinstance(part, torch.nn.Conv2d)]
    widths = "{}, {} and {}".format(*sorted({each.out_channels for each in convolutions}))
    assert f"{ROUND_TO} of {widths} in one step, and no layer goes below {ROUND_TO}." in text


def test_searches_of_resnet():
    resnet, text = sections()["resnet56"], remark("resnet56")
    assert all(ahead(resnet, share, method).is_noise for share in ("80%", "65%") for method in ("paper", RULE))
    assert "At 80 and 65 % the searches are level." in text
    ours, paper = (at(resnet, "50%", method).scores.values() for method in (OURS, "paper"))
    assert len(ours) == len(paper) == 2 and min(ours) > max(paper)
    assert "at 50 % both seeds are above those of the paper's moves" in text
    ours, rule = (at(resnet, "35%", method).scores.values() for method in (OURS, RULE))
    assert len(ours) == len(rule) == 2 and min(ours) - max(rule) > 0.8 > min(ours) - max(rule) - 0.1
    assert "at 35 % both are more than 0.8 points above those of LayerMerge's rule." in text
    for one in (at(resnet, share, OURS) for share in ("50%", "35%")):
        assert one.original.depth - one.profile.depth - one.dropped < 2
    assert "At 50 % and below, their plans merge almost nothing." in text


def test_merging_blocks_of_resnet():
    text, latency = remark("resnet56"), load_latency("resnet56")
    blocks = range(1, latency.depth, 2)
    one = saved(latency, *((start, start + 2) for start in blocks)).values()
    assert f"saves {100 * min(one):.0f} to {100 * max(one):.0f} % of their time, but merging three blocks" in text
    three = saved(latency, *((start, start + 6) for start in blocks)).values()
    assert len(three) / 2 < sum(each < 0 for each in three) < len(three)
    assert "is slower than not merging them in most places" in text
    assert fastest("resnet56", "paper")[1] > 0.35 and "so merging alone does not reach 35 %." in text
    assert "35%" not in reached(sections()["resnet56"], "paper")


def test_control_of_resnet():
    resnet, text = sections()["resnet56"], remark("resnet56")
    level, behind = (at(resnet, share, CONTROL) for share in ("65%", "50%"))
    assert len(level.scores) == len(behind.scores) == 1 and level.mean >= resnet.base["test"]
    assert resnet.ahead(level).is_noise and not resnet.ahead(behind).is_noise
    said = f"is as accurate as the original at {level.speed_up:.1f} times the speed, and as all moves at that latency"
    assert f"The control, with one seed, {said} within noise." in text
    said = f"At {behind.speed_up:.1f} times the speed it is {resnet.ahead(behind).points:.1f} points behind."
    assert said in text


def test_surrogate_of_resnet():
    resnet, text, has = sections()["resnet56"], remark("resnet56"), searched("resnet56")
    assert f"of which the original classifies {resnet.base['holdout']:.2f} % correctly." in text
    said = f"fitted by least squares (tau {has.surrogate.tau:.2f}). To the same {len(has.surrogate.plans)} trained"
    assert f"{said} plans, depthfold now fits by ranks (tau {has.again.tau:.2f})." in text
    per_block = [each.per_block / each.slope for each in (has.surrogate, has.again)]
    assert round(per_block[0] / per_block[1]) == 15 and "The term per block is a fifteenth of that there" in text
    plans = {share: [plan_at(each[OURS], resnet.name, share) for each in (has.found, has.now)] for share in SHARES}
    assert all(before == at(resnet, share, OURS).plan for share, (before, _) in plans.items())
    assert [share for share, (before, now) in plans.items() if before != now] == ["50%", "35%"]
    trained = {one.plan for one in resnet.measured if one.scores}
    assert not trained & {plans[share][1] for share in ("50%", "35%")}
    assert "and all moves have other plans for 50 and 35 %, which were not trained." in text


def test_searches_of_mobilenet():
    mobile, text = sections()["mobilenet_v2"], remark("mobilenet_v2")
    rule = {share: ahead(mobile, share, RULE) for share in SHARES}
    said = "LayerMerge's rule is {:.1f} and {:.1f} points ahead of all moves at 80 and 35 %, slightly more than seeds"
    assert said.format(*(-rule[share].points for share in ("80%", "35%"))) in text
    assert [share for share, one in rule.items() if one.is_noise] == ["65%", "50%"] and "level at 65 and 50 %" in text
    assert all(ahead(mobile, share, "paper").is_noise for share in SHARES)
    assert "The paper's moves are level with all moves." in text
    most = [
        {max(SEARCHES, key=lambda method: at(mobile, share, method).accuracy(split)) for split in ("test", "holdout")}
        for share in SHARES
    ]
    assert max(map(len, most)) == 2 and "The hold-out set does not agree on which method is best." in text
    surrogate = load_surrogate(mobile.name)
    assert PLANS.epochs == 5 and not any(one.plan.dropped for one in surrogate.plans)
    assert "fitted to plans that were trained for five epochs and that drop nothing" in text
    dropping = [share for share in SHARES if at(mobile, share, OURS).dropped]
    assert dropping == ["65%", "50%", "35%"] and "The plans for 65 % and less changed" in text


def test_searches_of_mobilenet_without_a_surrogate():
    mobile = sections()["mobilenet_v2"]
    plain = {
        share: at(mobile, share, f"{RULE}, plain sum").mean - at(mobile, share, f"{OURS}, plain sum").mean
        for share in SHARES
    }
    assert plain.pop("35%") < 0.05
    limit = 1.96 * SEED_DEVIATION  # between means of two seeds
    assert all(abs(points) < limit + 0.02 for points in plain.values())
    least, most = (f"{each(plain.values()):.1f}" for each in (min, max))
    said = f"LayerMerge's rule is {least} to {most} points ahead of all moves at 80, 65 and 50 %, about as much as"
    assert said in remark(mobile.name)


def test_patterns_for_mobilenet():
    mobile, text = sections()["mobilenet_v2"], remark("mobilenet_v2")
    patterns = {one.at: mobile.ahead(one) for one in rivals_of(mobile, PUBLISHED)}
    behind = {name: one.points for name, one in patterns.items() if not one.is_noise}
    assert [*behind] == ["DS-B-1.0", "DS-C-1.0", "DS-D-1.0"]
    said = "All moves are {:.1f}, {:.1f} and {:.1f} points ahead of DepthShrinker's patterns B, C and D, with one seed"
    assert said.format(*behind.values()) in text
    assert {len(one.scores) for one in rivals_of(mobile, PUBLISHED)} == {1}
    assert patterns["DS-A-1.0"].is_noise and "with one seed each, and level with A." in text


def test_channel_pruning_of_mobilenet():
    mobile, text = sections()["mobilenet_v2"], remark("mobilenet_v2")
    points = {(share, method): ahead(mobile, share, method) for share in SHARES[:3] for method in PRUNED}
    (same,) = {f"{points['65%', method].points:.1f}" for method in PRUNED}
    assert f"At 65 %, channel pruning by both criteria is {same} points behind, about as much as seeds explain;" in text
    holdout = at(mobile, "65%", TAYLOR).accuracy("holdout") - at(mobile, "65%", OURS).accuracy("holdout")
    assert f"on the hold-out set, Taylor expansion is {holdout:.1f} points ahead there." in text
    said = "At 50 % they are {:.1f} (magnitude) and {:.1f} points (Taylor expansion) behind."
    assert said.format(*(points["50%", method].points for method in PRUNED)) in text
    said = "At 80 % they are {:.1f} points behind and {:.1f} ahead, which is within noise."
    assert said.format(points["80%", MAGNITUDE].points, -points["80%", TAYLOR].points) in text
    assert all(points["80%", method].is_noise for method in PRUNED)
    assert not any(points["50%", method].is_noise for method in PRUNED)
    said = "At 35 % pruning by magnitude loses {:.1f} points, and all moves lose {:.1f};"
    assert said.format(lost(mobile, "35%", MAGNITUDE), lost(mobile, "35%", OURS)) in text
    assert f"by Taylor expansion, pruning does not reach 35 % in {BOTH_STEPS} steps." in text
    assert (
        {*pruning_steps(mobile.name, "Taylor")}
        == {0.8, 0.65, 0.5}
        == {*pruning_steps(mobile.name, "magnitude")} - {0.35}
    )
    control = {share: at(mobile, share, CONTROL) for share in SHARES}
    plans = {share: one.plan for share, one in control.items()}
    assert plans["80%"] == plans["65%"] != plans["50%"] == plans["35%"] and control["80%"].share < 0.65
    assert "The control has one plan for 80 and 65 %, which is faster than both, and one for 50 and 35 %." in text


def test_mobilenet_with_half_the_latency_can_have_more_flops():
    mobile = sections()["mobilenet_v2"]
    halves = [at(mobile, "50%", method) for method in SEARCHES]
    assert any(
        one.profile.flops > one.original.flops and one.profile.parameters > one.original.parameters for one in halves
    )
    assert "can have more FLOPs and parameters than the original." in remark(mobile.name)


def test_plan_strings_are_those_of_the_library():
    """The searches above are compared with committed plans by their text."""
    vgg = searched("vgg19_bn")
    for share in ("80%", "65%", "50%"):
        assert plan_at(vgg.found[OURS], "vgg19_bn", share) == at(sections()["vgg19_bn"], share, OURS).plan
