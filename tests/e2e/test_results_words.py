"""The figures in hand-written sentences of README.md and docs/results.md are those of the committed results."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def words(text):
    return " ".join(text.split())


def readme():
    return words((ROOT / "README.md").read_text())


def remark(name):
    from results_text import SECTIONS

    return words(SECTIONS[name].remark)


def at(results, share, method):
    return next(one for one in results.at(share) if one.method == method)


def sections(results_page):
    found = {results.name: results for results in results_page._results()}
    assert all(map(results_page.best, found.values())) and len(found) == 7, "the rows of the README's table"
    return found


def test_losses_of_efficientnet_on_arm(results_page):
    from equal_latency_results import OURS
    from results_text import SUMMARY

    lite = sections(results_page)["efficientnet_lite0-on-onnxruntime"]
    ours, headline = at(lite, "65%", OURS), results_page.best(lite, longer=True)
    assert (headline.variant, headline.plan, len(headline.scores)) == ("for 180 epochs", ours.plan, 1)
    usual, tuned_usual, longer, tuned_longer = (
        f"{accuracy - one.mean:.1f}" for one in (ours, headline) for accuracy in (lite.base["test"], lite.tuned.mean)
    )
    assert "On ARM, the first of the two networks was fine-tuned for 180 epochs." in readme()
    assert f"Against the fine-tuned original, it loses {tuned_usual} and {tuned_longer} points." in words(SUMMARY)
    said = f"{ours.speed_up:.2f} times as fast at a loss of {usual} points, or of {longer} points after 180 epochs"
    assert said in words(SUMMARY)
    before, after = (f"{lite.base['holdout'] - one.holdout[0]:.1f}" for one in (ours, headline))
    seed = f"{lite.base['test'] - ours.scores[0]:.1f}"
    said = (
        f"seed 0 of all moves at 65 % loses {longer} points instead of {seed}, and {after} instead of {before} on the"
    )
    assert said in remark(lite.name)
    others = [one for results in sections(results_page).values() for one in results.measured if one.longer]
    assert [one.plan for one in others] == [ours.plan], "no other network was fine-tuned for that long"


def test_hold_out_accuracies_of_efficientnet_on_arm(results_page):
    from equal_latency_results import OURS

    lite = sections(results_page)["efficientnet_lite0-on-onnxruntime"]

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


def test_readme_says_how_each_network_of_its_table_was_made(results_page):
    from equal_latency_results import OURS, RESULTS
    from gpu_runs import rows
    from results_text import SECTIONS, SUMMARY

    found = {name: results_page.best(each, longer=True) for name, each in sections(results_page).items()}
    merged = {SECTIONS[name].title for name, one in found.items() if one.method != OURS}
    assert merged == {"MobileNetV2-1.0", "MobileNetV2-1.4"}
    assert "for all networks but MobileNetV2 `--moves drop-layers --moves drop-branches`" in readme()
    steps = {
        name: rows(RESULTS / name).get(f"steps {one.method} {one.at} {SECTIONS[name].stopwatch}")
        for name, one in found.items()
    }
    assert [name for name in steps if steps[name] is None] == ["mobilenet_v2_1.4", "efficientnet_lite0-on-float16"]
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
    longer = {name: one.variant for name, one in found.items() if one.variant}
    assert longer == {"efficientnet_lite0-on-onnxruntime": "for 180 epochs"}
    assert {each.recipe["epochs"] for each in sections(results_page).values()} == {60}
    assert "fine-tuned with the same recipe, 60 epochs." in readme() and "a recipe of 60 epochs instead of" in readme()


def test_readme_has_the_differences_from_other_methods(results_page):
    from equal_latency_candidates import PRUNED, PUBLISHED
    from results_summary import RIVALS, differences

    found = sections(results_page)

    def extremes(sections, *methods):
        points = [each for results in sections for method in methods for each in differences(results, method)]
        known = [each for each in points if each is not None]
        return f"{abs(min(known)):.1f}", f"{abs(max(known)):.1f}", min(known), max(known)

    for methods, of in ((PRUNED, "channel pruning"), (["LayerMerge's rule"], "LayerMerge's search space")):
        low, high, *signs = extremes(found.values(), *methods)
        assert signs[0] < 0 < signs[1] and f"{low} points behind to {high} points ahead of {of}" in readme()
    assert all(each.has("LayerMerge's rule") for each in found.values())
    better = [
        min(each.ahead(one) for one in pruned)
        for each in found.values()
        for share in results_page.SHARES
        if (pruned := [one for one in each.at(share) if one.method in PRUNED])
    ]
    assert f"(at most {max(better):.1f} points ahead of the better of its two kinds)" in readme()
    low, high, *signs = extremes([found["mobilenet_v2"]], PUBLISHED)
    assert signs[0] > 0 and f"{low} to {high} points ahead of DepthShrinker's patterns" in readme()
    spread = max(each.spread for each in found.values() if each.spread is not None)
    assert -extremes(found.values(), "paper", *RIVALS)[2] < spread
    assert f"Seeds of one plan differ by up to {spread:.1f} points" in readme()


def test_remark_about_the_wide_mobilenet(results_page):
    from equal_latency_results import OURS
    from results_summary import differences

    wide = sections(results_page)["mobilenet_v2_1.4"]
    others = ("paper", "LayerMerge's rule")
    assert all(abs(points) < 0.5 for method in others for points in differences(wide, method))
    ours, *behind = (at(wide, "65%", method).holdout[0] for method in (OURS, *others))
    text = remark(wide.name)
    assert {f"{each - ours:.1f} points ahead of all moves at 65 %" for each in behind} == {
        "0.3 points ahead of all moves at 65 %"
    }
    assert "On the hold-out set, the paper's moves and LayerMerge's rule are 0.3 points ahead" in text
    assert f"improves the original by {wide.tuned.mean - wide.base['test']:.1f} points, and" in text
    paper = at(wide, "65%", "paper")
    assert f"{paper.mean - wide.tuned.mean:.1f}" == "0.0"
    assert f"on the hold-out set they are {wide.tuned.holdout[0] - paper.holdout[0]:.1f} points less accurate" in text


def test_page_compares_the_networks_for_arm_with_those_of_earlier_searches(results_page):
    from equal_latency_results import OURS, load

    name, rule = "efficientnet_lite0-on-onnxruntime", "LayerMerge's rule"
    today, earlier, squares = (load(f"{name}{of}", "onnxruntime") for of in ("", "-earlier", "-least-squares"))

    def accuracies(found, method):
        return [next(one.mean for one in found.at(at) if one.method == method) for at in results_page.SHARES]

    lost, ours = (
        [a - b for a, b in zip(accuracies(today, method), accuracies(squares, method), strict=True)]
        for method in (rule, OURS)
    )
    assert max(map(abs, ours)) < 0.5 > abs(lost[0])
    assert "{:.1f}, {:.1f} and {:.1f} points less accurate at 65, 50 and 35 %".format(*lost[1:]) in remark(name)
    best = next(one for one in earlier.at("35%") if one.method == rule)
    said = (
        f"{best.mean:.2f} % at {100 * best.share:.0f} % of the latency, and it is {-today.ahead(best):.1f} points ahead"
    )
    assert said in remark(name)


def test_page_has_the_accuracies_of_all_fits_of_efficientnet(results_page):
    from equal_latency_results import RESULTS
    from gpu_runs import rows

    arm = "efficientnet_lite0-on-onnxruntime"
    fits = [
        rows(RESULTS / f"{arm}-earlier")["base, first fit"],
        rows(RESULTS / "efficientnet_lite0")["base"],
        rows(RESULTS / arm)["base"],
    ]
    first, second, third = (f"{fit['test']:.2f}" for fit in fits)
    for name in ("efficientnet_lite0", arm):
        assert f"are {first}, {second} and {third} %" in remark(name)


def test_readme_says_that_its_first_network_is_slower_on_another_machine(results_page):
    from equal_latency_results import RESULTS, load
    from gpu_runs import rows

    best = results_page.best(load("mobilenet_v2"))
    steps = rows(RESULTS / "mobilenet_v2")[f"steps {best.method} {best.at} onnxruntime"]
    merged, original = (steps[step]["quartiles"][1] for step in ("along S", "original"))
    said = f"on two ARM cores, the network of the first row takes {merged:.1f} ms, and its original {original:.1f} ms"
    assert merged > original and said in readme()
