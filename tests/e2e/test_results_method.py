"""The figures in what docs/results.md and README.md say about the method are those of the experiments."""

import inspect
import json
from math import sqrt

from depthfold.baselines import pruning_steps as pruning
from depthfold.demo.demo import RECIPE
from depthfold.pipeline.surrogate import PLANS
from depthfold.training import preset
from experiments.equal_latency.candidates import CONTROL, FURTHER, KEPT_BLOCKS, PRUNED, SEARCH_EPOCHS
from experiments.equal_latency.page.text import LIMITS, METHOD, PAPER, SUMMARY
from experiments.equal_latency.page.write import SHARES
from experiments.equal_latency.results import RESULTS
from experiments.gpu_runs import FINETUNING
from experiments.subjects import LONGER, SUBJECTS
from results_texts import at, load_surrogate, pruning_steps, readme, sections, words

STEPS, MAX_RATIO, ROUND_TO = (
    inspect.signature(pruning).parameters[name].default for name in ("steps", "max_ratio", "round_to")
)
FEWER_STEPS = ("vgg19_bn", "efficientnet_lite0")


def test_epochs_of_the_fine_tuning():
    epochs = {f"{each.recipe['epochs']:g}" for each in sections().values()}
    assert epochs == {f"{each.finetuning.epochs:g}" for each in SUBJECTS.values()} == {"60"}
    assert f"with 60 epochs instead of {FINETUNING.epochs:g}." in words(METHOD)
    cifar = [each.recipe for each in sections().values() if "lite0" not in each.name]
    kept = json.loads(FINETUNING.replace(epochs=60).dumps())
    for recipe in cifar:
        assert all(kept[field] == value for field, value in recipe.items() if field not in ("seed", "format"))
    assert "Every network of the tables is distilled, for 60 epochs." in words(PAPER)
    paper = preset("mobilenetv2-1.0").epochs
    assert f"networks for ImageNet are trained for {paper:g} epochs" in words(PAPER)
    assert f"whose networks for ImageNet were trained for {paper:g} epochs." in words(LIMITS)
    assert f"for {paper:g} epochs" == LONGER and "after 180 epochs instead of 60 (one seed" in words(SUMMARY)


def test_budgets():
    assert SHARES == ("80%", "65%", "50%", "35%") and "80, 65, 50 or 35 %, so the speed-ups are near" in words(METHOD)
    factors = [100 / float(share.rstrip("%")) for share in SHARES]
    assert "are near {:.3g}, {:.1f}, {:.0f} and {:.1f}.".format(*factors) in words(METHOD)


def test_plans_that_surrogates_are_fitted_to():
    names = ("mobilenet_v2", "mobilenet_v2_1.4", "vgg19_bn", "resnet56", "efficientnet_lite0")
    (fitted,) = {len(load_surrogate(name).plans) for name in names}
    assert f"which is fitted to {fitted} briefly trained plans" in words(METHOD)
    assert f"`depthfold compress --surrogate` has the same objective, fitted to {PLANS} plans;" in words(METHOD)


def test_search_of_depthshrinker():
    assert f"search trains its gates for {SEARCH_EPOCHS} epochs, with costs from" in words(METHOD)
    assert "yes: {}, {} and {} blocks of both".format(*KEPT_BLOCKS) in words(PAPER)
    for name in ("mobilenet_v2", "mobilenet_v2_1.4"):
        found = {int(file.stem.split("-")[1]) for file in (RESULTS / name).glob("depthshrinker-*.json")}
        assert found == {*KEPT_BLOCKS}


def test_steps_of_channel_pruning():
    most = STEPS + FURTHER["steps"]
    said = f"takes up to {most} steps, {STEPS} on VGG19-BN and EfficientNet-Lite0, and the first step whose measured"
    assert said in words(METHOD)
    removed = 1 - (1 - MAX_RATIO) * (1 - FURTHER["max_ratio"])
    said = (
        f"takes up to {most} steps, removes at most {100 * removed:.0f} % of the channels of a layer, leaves at least"
    )
    assert f"{said} {ROUND_TO}, and is fine-tuned once" in words(LIMITS)
    said = f"takes up to {STEPS} steps, removes at most {100 * MAX_RATIO:.0f} % of the channels of a layer, and rounds"
    assert f"{said} what is kept down to a multiple of {ROUND_TO} in every step" in words(LIMITS)
    files = [RESULTS / name / f"channels-{kind}.json" for name in sections() for kind in PRUNED.values()]
    found = [(file.parent.name, file.stem.removeprefix("channels-")) for file in files if file.exists()]
    assert len(found) == 11
    for name, kind in found:
        assert max(pruning_steps(name, kind).values()) <= (STEPS if name.startswith(FEWER_STEPS) else most)


def test_sampling_errors_of_the_test_sets():
    cifar, imagenette = (sections()[name].base["test"] / 100 for name in ("mobilenet_v2", "efficientnet_lite0"))
    errors = [100 * sqrt(score * (1 - score) / n) for score, n in ((cifar, 10_000), (imagenette, 3925))]
    assert "about {:.2f} points for an accuracy on CIFAR-10 and {:.1f} on Imagenette".format(*errors) in words(METHOD)


def test_control_of_resnet_in_the_summary():
    resnet = sections()["resnet56"]
    control = at(resnet, "65%", CONTROL)
    said = f"constant importances (one seed, {control.speed_up:.1f} times as fast) is as accurate as all moves are"
    assert said in words(SUMMARY) and len(control.scores) == 1 and resnet.ahead(control).is_noise


def test_readme_says_how_long_fine_tuning_takes():
    assert f"It fine-tunes for only {RECIPE['steps']} steps, and ends with a report" in readme()
    paper, quick = preset("mobilenetv2-1.0"), preset("quick")
    assert "--recipe mobilenetv2-1.0" in readme()
    said = f"The recipe is the paper's, {paper.epochs:g} epochs of ImageNet, and was not run; without `--recipe`,"
    assert f"{said} fine-tuning takes {quick.steps} steps, to try it." in readme()
