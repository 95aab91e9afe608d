"""docs/results.md and its pictures are those that the committed results give."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.equal_latency import results as equal_latency_results
from experiments.equal_latency.candidates import PRUNED
from experiments.equal_latency.page import missing as results_missing
from experiments.equal_latency.page import write as results_page
from experiments.equal_latency.page.summary import _range, speed_ups
from experiments.equal_latency.results import LONGER, NARROWER, OURS, RESULTS, Measured, NetworkResults
from experiments.gpu_runs import rows
from lacking import needs

ROOT = Path(__file__).parents[2]


def test_page_is_made_from_the_results():
    assert (ROOT / "docs" / "results.md").read_text() == results_page.page(), "run `make results`"


@needs("matplotlib")
def test_pictures_and_readme_are_made_from_the_results(tmp_path):
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    readme, rows = (ROOT / "README.md").read_text(), results_page.readme_rows()
    assert rows and rows in readme, "run `make results`"
    (tmp_path / "README.md").write_text(readme.replace(rows, "| an old row |\n"))
    results_page.main(tmp_path)
    assert (tmp_path / "README.md").read_text() == readme
    drawn = sorted((tmp_path / "docs" / "pictures").iterdir())
    assert drawn
    for picture in drawn:
        assert picture.read_text() == (ROOT / "docs" / "pictures" / picture.name).read_text(), "run `make results`"


def profile(latency):
    from depthfold.core import Environment, Profile

    environment = Environment(
        machine="m", device="cpu", runtime="r", runtime_version="1", batch=1, input_size=(3, 8, 8)
    )
    return Profile(
        environment=environment, quartiles=(latency, latency, latency), count=3, flops=2_000_000_000,
        parameters=1_500_000, depth=3, memory=5_000_000,
    )  # fmt: skip


def test_table_has_the_mean_over_seeds_and_the_measured_speed_up():
    one = Measured(
        "paper", "50%", {1: 91.0, 0: 92.0}, holdout={0: 93.0, 1: 94.0}, profile=profile(2.0), original=profile(5.0)
    )
    row = "| 50 % | ours | 91.50 (92.00, 91.00) | 93.50 | 2.000 | 2.50 | 3 | 2000 | 1.50 | 5 |"
    assert results_page._row("50 %", "ours", one, holdout=True) == row


def test_methods_are_compared_at_the_same_latency():
    ours = [Measured(OURS, "50%", {0: 92.0, 1: 92.5}, profile=profile(2.0), original=profile(4.0)),
            Measured(OURS, "35%", {0: 90.0}, profile=profile(1.5), original=profile(4.0))]  # fmt: skip
    results = NetworkResults("resnet56", {"test": 93.0}, {}, {}, {}, tuple(ours), {}, None)
    known = {1.48: 90.0, 1.5: 90.0, 1.6: 90.45, 1.9: 91.8, 2.0: 92.25, 3.0: 92.625, 4.0: 93.0, 4.05: 93.0}

    def other(latency, original=4.0, **given):
        return Measured("paper", "50%", {0: 92.0}, profile=profile(latency), original=profile(original), **given)

    for latency, expected in known.items():
        assert results.ahead(other(latency)).points == pytest.approx(expected - 92)
    slow = Measured(OURS, "100%", {0: 91.0}, profile=profile(4.4), original=profile(4.0))
    assert replace(results, measured=(*ours, slow)).ahead(other(4.04)).points == pytest.approx(0.8)
    assert results.ahead(other(1.4)) is None and results.ahead(other(4.2)) is None
    assert results_page._ahead(results, other(1.75)) == "**-0.88** (1)"
    assert results_page._ahead(results, other(3.5, 8.0)) == "**-0.88** (1)", "its original was slower, too"
    assert results_page._ahead(results, other(1.75, base="base, another")) == "-0.88 (1) †"
    level = Measured("paper", "50%", {0: 92.25 + 1e-9}, profile=profile(2.0), original=profile(4.0))
    assert results_page._ahead(results, level) == "+0.00 (1)"
    deviations = {1.5: 0.16 * 2**0.5, 2.0: 0.16 * 1.5**0.5, 1.75: 0.16 * (0.25 + 0.125 + 1) ** 0.5, 4.0: 0.16}
    for latency, expected in deviations.items():
        assert results.ahead(other(latency)).deviation == pytest.approx(expected)
    fast = Measured("paper", "35%", {0: 92.0}, profile=profile(1.0), original=profile(4.0))
    assert results_page._ahead(results, fast) == "faster than all moves"


def test_headline_also_compares_with_the_original_fine_tuned_with_the_same_recipe():
    def tuned_to(accuracy):
        measured = (
            Measured("original", "100%", {0: accuracy}),  # its accuracy counts before it is timed again
            Measured(OURS, "80%", {0: 93.3}, profile=profile(3.2), original=profile(4.0)),
            Measured(OURS, "50%", {0: 92.9}, profile=profile(2.0), original=profile(4.0)),
        )
        results = NetworkResults("resnet56", {"test": 93.0}, {}, {}, {}, measured, {}, None)
        return next(results_page._headline(results))

    assert "2.00 times, at 92.90 %" in tuned_to(93.4)
    for accuracy, said in ((93.0, "2.00 times"), (93.4, "1.25 times"), (93.6, "none")):
        assert tuned_to(accuracy).endswith(f"({accuracy:.2f} %): {said}.")


def test_readme_compares_the_best_of_both_kinds_with_the_fine_tuned_original():
    def one(method, at, accuracy, **given):
        return Measured(method, at, {0: accuracy}, profile=profile(3.0), original=profile(4.0), **given)

    magnitude, taylor = PRUNED
    measured = (
        Measured("original", "100%", {0: 93.5}),
        one(OURS, "80%", 93.3), one("paper", "80%", 93.51), one(magnitude, "80%", 92.0), one(taylor, "80%", 92.2),
        one(OURS, "65%", 93.0), Measured(OURS, "50%", profile=profile(2.0), original=profile(4.0)),
        one(taylor, "50%", 80.0), one(taylor, "65%", 92.9, base="base, another"),
    )  # fmt: skip
    bases = {"base, another": {"test": 93.0, "tuned": {"test": 93.2}}}
    results = NetworkResults("resnet56", {"test": 93.0}, {}, {}, {}, measured, {}, None, bases)
    row = "| ResNet-56 † | H200, TF32 | 0.0 | -1.3 | -0.5 | -0.3 | ? | -13.5 |".replace("-1", "\u22121").replace(
        "-0", "\u22120"
    )
    assert results_page._readme_row(results) == row
    assert results_page._change(results, ["DepthShrinker"], "50%") == "?"


def test_headline_can_be_a_network_that_was_fine_tuned_for_longer():
    ours = Measured(OURS, "50%", {0: 92.0}, profile=profile(2.0), original=profile(4.0))
    results = NetworkResults("resnet56", {"test": 93.0}, {}, {}, {}, (ours,), {}, None)
    assert next(results_page._headline(results)).startswith("No network")
    ours.variants[LONGER] = {0: (92.9, 93.5)}
    text = next(results_page._headline(results))
    assert "2.00 times, at 92.90 %" in text and "1 seed, fine-tuned for 180 epochs" in text
    tuned = replace(results, measured=(ours, Measured("original", "100%", {0: 92.9})))
    assert "(92.90 %): none." in next(results_page._headline(tuned)), "that original was not trained for 180 epochs"


def test_page_tells_what_was_not_trained_from_what_meets_no_budget():
    ours, timed = (Measured(method, "50%", profile=profile(2.0), original=profile(4.0)) for method in (OURS, "paper"))
    ours.scores = {0: 92.0}
    trained = Measured("paper", "80%", {0: 93.0}, profile=profile(3.0), original=profile(4.0))
    results = NetworkResults("resnet56", {"test": 93.0}, {}, {}, {}, (ours, timed, trained), {}, None)
    assert results_page._difference(results, "paper", "50%") == "not trained yet"
    assert results_page._difference(results, "paper", "35%") == "none meets the budget"
    missing = results_page.missing([results])
    assert "depthfold, all moves at 80 %, 65 %" in missing and "65 %, 35 %" not in missing
    assert "depthfold, the paper's moves at 50 %, 65 %;" in missing
    trained.profile = None
    assert "depthfold, the paper's moves (trained, not timed: 93.00 % at 80 %);" in results_page.missing([results])
    trained.profile, timed.scores, timed.profile = profile(3.0), {0: 92.0}, None
    assert "the paper's moves at 50 % (trained, not timed: 92.00 %), 65 %;" in results_page.missing([results])


def test_networks_pruned_by_different_methods_have_rows_of_their_own(monkeypatch):
    known = equal_latency_results.rows(equal_latency_results.RESULTS / "mobilenet_v2")
    trained, timed = known["train paper 50% 0"], known["profile paper 50% cuda"]
    for kind in ("channels, magnitude", "channels, Taylor"):
        known[f"train {kind} 50% 0"] = trained | {"method": kind, "plan": f"{kind} 50%"}
        known[f"profile {kind} 50% cuda"] = timed | {"method": kind, "plan": "Plan: the same for both"}
    monkeypatch.setattr(equal_latency_results, "rows", lambda run: known)
    found = dict(results_page._by_plan(equal_latency_results.load("mobilenet_v2").at("50%")))
    assert {"channel pruning, magnitude", "channel pruning, Taylor"} < set(found)


def test_plan_that_two_methods_trained_at_the_same_time_has_one_score(monkeypatch):
    known = equal_latency_results.rows(equal_latency_results.RESULTS / "mobilenet_v2")
    trained = known["train all moves 50% 0"]
    known["train LayerMerge's rule 50% 0"] |= {"plan": trained["plan"], "merged": trained["merged"] - 1}
    del known["train LayerMerge's rule 50% 1"]
    monkeypatch.setattr(equal_latency_results, "rows", lambda run: known)
    found = {one.method: one for one in equal_latency_results.load("mobilenet_v2").at("50%")}
    assert (
        found["all moves"].scores[0] == found["LayerMerge's rule"].scores[0] == pytest.approx(trained["merged"] - 0.5)
    )
    assert found["all moves"].scores[1] == known["train all moves 50% 1"]["merged"]
    assert found["LayerMerge's rule"].scores == found["all moves"].scores, "all seeds of the plan"
    first, second = trained["merged"], trained["merged"] - 1
    row = results_page._row("50 %", "both", found["all moves"], holdout=False)
    assert f" ({first:.2f} / {second:.2f}, {found['all moves'].scores[1]:.2f}) |" in row


def test_networks_of_another_original(monkeypatch):
    """They are compared with that one; a pruned network of other weights than were timed has no latency."""
    known = equal_latency_results.rows(equal_latency_results.RESULTS / "resnet56")
    other = "base, another"
    known[other] = {"test": 95.0, "holdout": 99.0}
    for key, row in known.items():
        if row.get("method") == "paper" and key.startswith("train"):
            row["base"] = other
    known["profile channels, Taylor 65% cuda"]["base"] = other
    monkeypatch.setattr(equal_latency_results, "rows", lambda run: known)
    found = equal_latency_results.load("resnet56")
    assert speed_ups(found, ["paper"]) == "none (none)" and _range(found, "paper") == "other original"
    assert "channels, Taylor" not in {one.method for one in found.at("65%")}
    assert results_page._difference(found, "channels, Taylor", "65%") == "not timed yet"
    text = results_page._network(found)
    assert "| 65 % | depthfold, the paper's moves † | 93.37" in text
    assert "† Fine-tuned from another training of the original, with 95.00 % (hold-out 99.00)." in text
    known[other]["tuned"] = {"test": 93.5, "holdout": 99.0}
    assert speed_ups(equal_latency_results.load("resnet56"), ["paper"]) == "none (1.55)"


def test_plan_that_another_method_trained_only_has_to_be_timed(monkeypatch):
    known = equal_latency_results.rows(equal_latency_results.RESULTS / "mobilenet_v2")
    known = {key: row for key, row in known.items() if not key.startswith("train paper 80%")}
    assert known["profile paper 80% cuda"]["plan"] == known["train all moves 80% 0"]["plan"]
    monkeypatch.setattr(equal_latency_results, "rows", lambda run: known)
    found = {one.method: one for one in equal_latency_results.load("mobilenet_v2").at("80%")}
    assert found["paper"].scores == found["all moves"].scores


def test_network_that_was_only_trained_beside_others_has_no_time_of_a_training(monkeypatch):
    known = equal_latency_results.rows(equal_latency_results.RESULTS / "resnet56")
    shared = {key: {k: v for k, v in row.items() if k != "seconds" or key[:5] != "train"} for key, row in known.items()}
    monkeypatch.setattr(equal_latency_results, "rows", lambda run: shared)
    last = results_page._costs([equal_latency_results.load("resnet56")]).splitlines()[-1]
    assert last.startswith("| ResNet-56, in TF32 on the H200 | ")
    assert last.endswith(f" {known['surrogate']['seconds']:.0f} |  |  |")


@pytest.mark.parametrize("variant", ["without distillation", "without features", "for 180 epochs"])
def test_page_shows_another_fine_tuning_and_the_patterns_of_depthshrinker(variant, monkeypatch):
    known = equal_latency_results.rows(equal_latency_results.RESULTS / "mobilenet_v2")
    known = {key: row for key, row in known.items() if not row.get("variant")}
    trained, timed = known["train all moves 50% 0"], known["profile all moves 50% cuda"]
    for row in known.values():
        row.get("recipe", {})["features"] = 2.0
    varied = {"variant": variant, "merged": trained["merged"] - 1, "recipe": trained["recipe"] | {"features": 7.0}}
    for method, merged in (("DepthShrinker", 91.0), ("all moves", 91.5)):
        named = {"method": method, "at": "DS-A-1.0"}
        known[f"train {method} DS-A-1.0 0"] = trained | named | {"merged": merged, "plan": method}
        known[f"profile {method} DS-A-1.0 cuda"] = timed | named
    known[f"train all moves 50% 0 {variant}"] = trained | varied  # last: its recipe is not that of the page
    monkeypatch.setattr(equal_latency_results, "rows", lambda run: known)
    text = results_page._network(equal_latency_results.load("mobilenet_v2"))
    assert "distillation 0.5, features 2." in text
    assert text.count("Fine-tuned with and without") == (variant != "for 180 epochs")
    assert text.count("| 60 epochs | 180 epochs | hold-out, 60 epochs |") == (variant == "for 180 epochs")
    missing = results_page.missing([equal_latency_results.load("mobilenet_v2")])
    assert ("depthfold, all moves without distillation" in missing) == (variant != "without distillation")
    assert "channel pruning, Taylor without distillation" in missing
    assert "depthfold, the paper's moves at the latency of DS-A-1.0" in missing
    assert f"| 50 % | depthfold, all moves | {trained['merged']:.2f} | {trained['merged'] - 1:.2f} |" in text
    assert "DepthShrinker, published, DS-A-1.0: **+0.50** (1)" in text  # both have the latency of all moves at 50 %


def test_page_says_if_there_is_one_seed_and_if_nothing_is_close_to_the_original(monkeypatch):
    both = equal_latency_results.load("resnet56")
    assert "further seeds" not in results_page.missing([both])
    searched = {one.plan for one in both.measured if one.method in results_page.SEARCHES}
    known = equal_latency_results.rows(equal_latency_results.RESULTS / "resnet56")
    known = {key: row for key, row in known.items() if row.get("seed", 0) == 0}
    known["base"] = known["base"] | {"test": 99.0}
    monkeypatch.setattr(equal_latency_results, "rows", lambda run: known)
    one_seed = equal_latency_results.load("resnet56")
    text, missing = results_page._network(one_seed), results_page.missing([one_seed])
    assert f"further seeds of {len(searched)} networks, which are to have 2" in missing
    assert "No network of depthfold is within 0.2 points of the original. The most accurate one loses" in text
    assert "Every plan was trained with one seed." in text and "Seeds of one plan differ" not in text


def test_page_of_a_network_that_is_measured_in_pieces_has_no_headline_yet(monkeypatch):
    known = equal_latency_results.rows(equal_latency_results.RESULTS / "resnet56")
    known = {key: row for key, row in known.items() if row.get("method") not in ("all moves", "paper")}
    monkeypatch.setattr(equal_latency_results, "rows", lambda run: known)
    text = results_page._network(equal_latency_results.load("resnet56"))
    assert "No network of depthfold is trained and timed yet." in text and "within 0.2 points" not in text


def measured(method, at, latency, score, plan=""):
    scores = {} if score is None else {0: score}
    return Measured(method, at, scores, profile=profile(latency), original=profile(4.0), plan=plan or f"{method} {at}")


def test_summary_has_the_largest_speed_up_and_the_range_of_differences_per_method():
    networks = (
        measured("original", "100%", 4.0, 93.6),
        measured(OURS, "80%", 3.2, 93.5),
        measured(OURS, "50%", 2.0, 92.0, plan="shared"),
        measured("paper", "50%", 2.0, 92.0, plan="shared"),
        measured("LayerMerge's rule", "80%", 3.2, 93.0),
        measured("LayerMerge's rule", "65%", 3.2, 93.0, plan="LayerMerge's rule 80%"),
        measured("LayerMerge's rule", "50%", 2.0, 92.5),
        measured("LayerMerge's rule", "35%", 1.0, 90.0),
        measured("channels, Taylor", "80%", 3.2, 92.0),
        measured("channels, Taylor", "50%", 2.0, None),
    )
    results = NetworkResults("resnet56", {"test": 93.0}, {}, {}, {}, networks, {}, None)
    found = {
        method: speed_ups(results, [method]) for method in (OURS, "paper", "LayerMerge's rule", "channels, Taylor")
    }
    so_far = ["1.25 (1.25) so far", "none (none) so far", "1.25 (none)", "none (none) so far"]
    assert list(found.values()) == so_far
    next(one for one in networks if one.method == "paper").variants["for 180 epochs"] = {0: (93.5, 93.0)}
    assert speed_ups(results, ["paper"]) == "none (none) so far; 2.00 for 180 epochs", "only the last is at 93.5 %"
    assert speed_ups(results, ["channels, magnitude", "paper"]) == speed_ups(results, ["paper"])
    assert speed_ups(results, ["channels, Taylor", "LayerMerge's rule"]) == "1.25 (none) so far", "the better of two"
    assert speed_ups(results, ["channels, magnitude"]) == _range(results, "channels, magnitude") == ""
    assert _range(results, "paper") == "same plans"
    assert _range(results, "LayerMerge's rule") == "-0.5 to +0.5 (2, 1 faster)"
    assert _range(results, "channels, Taylor") == "+1.5 (1)"


def test_start_up_of_a_process_is_not_the_time_of_a_training(monkeypatch):
    known = equal_latency_results.rows(equal_latency_results.RESULTS / "resnet56")
    for key in [key for key in known if key.startswith("train ")]:
        known[key].pop("seconds", None)
    known["train all moves 65% 0"]["seconds"], known["train all moves 65% 1"]["seconds"] = 150.0, 50.0
    monkeypatch.setattr(equal_latency_results, "rows", lambda run: known)
    assert equal_latency_results.load("resnet56").seconds == 50


def test_every_network_was_timed_with_the_plan_it_was_trained_with():
    for folder in RESULTS.iterdir():
        known = rows(folder) if folder.is_dir() else {}
        plans = {}
        for key, row in known.items():
            if key.startswith(("train ", "profile ")) and row["method"] not in NARROWER:
                plans.setdefault((row["method"], row["at"]), set()).add(row["plan"])
        assert all(len(found) == 1 for found in plans.values()), f"{folder.name}: {plans}"


def test_dropped_layers_are_counted():
    from depthfold.core import Drops, Plan

    for layers, branches, number in [((), (), 0), ((4,), (), 1), ((4, 16), ((5, 8),), 5), ((), ((1, 3), (5, 8)), 5)]:
        plan = Plan(activations=(), cuts=(), dropped=Drops(layers, branches))
        assert Measured("all moves", "50%", plan=str(plan)).dropped == number


def test_network_that_was_trained_but_not_timed_is_not_said_to_miss_the_budget(monkeypatch, tmp_path):
    known = equal_latency_results.rows(equal_latency_results.RESULTS / "resnet56")
    untimed = {key: row for key, row in known.items() if key != "profile channels, magnitude 65% cuda"}
    monkeypatch.setattr(equal_latency_results, "rows", lambda run: untimed)
    results = equal_latency_results.load("resnet56")
    assert results_page._difference(results, "channels, magnitude", "65%") == "not timed yet"
    assert results_page._difference(results, "channels, magnitude", "50%") == "none meets the budget"
    assert "channel pruning, magnitude at 65 %" in results_page.missing([results])
    (tmp_path / "resnet56").mkdir()
    (tmp_path / "resnet56" / "channels-magnitude.json").write_text('{"0.8": 4, "0.65": 19, "0.5": 52, "0.35": null}')
    with monkeypatch.context() as patched:
        patched.setattr(results_missing, "RESULTS", tmp_path)
        found = [results_page._difference(results, "channels, magnitude", share) for share in ("50%", "35%")]
    assert found == ["not trained yet", "none meets the budget"]
    untimed = {key: row for key, row in known.items() if not key.startswith("profile")}
    assert equal_latency_results.load("resnet56") is None
