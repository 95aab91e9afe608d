"""Which importances compare outputs with those of the original, and that cheap ones refer to the unchanged network."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F

import depthfold as df
from depthfold.core import BlockOption, FlaggedSpan
from depthfold.errors import JournalError
from depthfold.importance import entry, importance_plan, measure_importance
from depthfold.training import Recipe, recalibrate, train
from tiny_importance import (
    ACTIVATIONS,
    CLASSES,
    RECIPE,
    SIZE,
    UNCHANGED,
    Pair,
    TinyTask,
    batch,
    images,
    scores_in,
    tiny_network,
)

NETWORK = tiny_network()
PAIR = df.trace(Pair(), torch.zeros(1, 2, SIZE, SIZE))
pytestmark = pytest.mark.filterwarnings("ignore::depthfold.importance.SmallHoldout")
COMPARE = ("recalibrated", "local", "fit")
CHEAP = ("brief", *COMPARE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparing(TinyTask):
    """A task that compares outputs by their squared distance. With a teacher, its loss is the distance from it."""

    def loss(self, model, step):
        x, y = batch(step.seed, step.number)
        return F.cross_entropy(model(x), y) if step.teacher is None else F.mse_loss(model(x), step.teacher(x))

    def score(self, model, split):
        raise AssertionError("the score is not needed")

    def outputs(self, model, split):
        assert split == "holdout" and not model.training
        return model(images(8, 77)[0])

    def divergences(self, outputs, reference):
        return (outputs - reference).square().sum(1)


@torch.no_grad()
def closeness(student):
    """Return minus the mean squared distance of the outputs from those of the original, in float64."""
    x, original = images(8, 77)[0], df.rewrite(NETWORK, NETWORK.vanilla).eval()
    return -(student.eval()(x).double() - original(x).double()).square().sum(1).mean().item()


def treated(plan, method):
    """Return the closeness of the network of a plan after the treatment of a method that does not change its block."""
    student = df.rewrite(NETWORK, plan)
    if method == "brief":
        teacher = df.rewrite(NETWORK, NETWORK.vanilla).eval()
        train(student, Comparing(), RECIPE, teacher=teacher, split=None)
    steps = range(3) if method == "recalibrated" else range(3, 7)
    recalibrate(student, Comparing(), RECIPE, steps=steps, seed=RECIPE.seed)
    return closeness(student)


def test_score_is_minus_the_mean_divergence_from_the_original():
    table = measure_importance(NETWORK, Comparing(), RECIPE, method="recalibrated")
    for found in table.entries:
        wanted = treated(importance_plan(NETWORK.network, found.span), "recalibrated")
        assert found.samples == (pytest.approx(wanted, rel=1e-5),)
    assert table.provenance.endswith("; scores are minus the divergence from the original's outputs")
    assert table.quantity == "the agreement with the original's outputs (minus the divergence)"


class Scored(Comparing):
    def score(self, model, split):
        return closeness(model)


@pytest.mark.parametrize("method", CHEAP)
def test_importances_refer_to_the_unchanged_network_after_the_same_treatment(method):
    table = measure_importance(NETWORK, Scored() if method == "brief" else Comparing(), RECIPE, method=method)
    assert table.base == pytest.approx(treated(NETWORK.vanilla, method), rel=1e-5)
    assert table.base < -1e-3  # the treatment changes it: the original itself has 0


@pytest.mark.parametrize("method", CHEAP)
def test_blocks_that_change_nothing_have_importance_0_and_are_not_run(method, tmp_path):
    task, run = TinyTask(folder=str(tmp_path)), tmp_path / "run"
    table = measure_importance(NETWORK, task, RECIPE, method=method, seeds=2, run=run)
    assert {span for span, importance in table.importances.items() if importance == 0} == UNCHANGED
    # Unless the block itself is treated, an activation inserted at 3 gives the same network for two blocks.
    rest = {FlaggedSpan(*ends) for ends in ACTIVATIONS} - UNCHANGED
    shared = set() if method in ("local", "fit") else {FlaggedSpan(3, 4, True, True)}
    keys = [json.loads(line)["key"] for line in (run / "importance.jsonl").read_text().splitlines()[1:]]
    bases = ["base", "base seed 6"]
    assert sorted(keys) == sorted(
        [*bases, *(entry.job_key(BlockOption(span), seed) for span in rest - shared for seed in (5, 6))]
    )
    assert sum(scores_in(tmp_path).values()) == len(keys)


@pytest.mark.parametrize("method", COMPARE)
def test_labels_are_not_used(method):
    """With other names of the classes, the same images are held out and trained on, but every label is wrong."""
    torch.manual_seed(0)
    traced = df.trace(Pair(), torch.zeros(1, 2, SIZE, SIZE))
    x, y = torch.randn(60, 2, SIZE, SIZE), torch.arange(60).sqrt().long() % CLASSES
    one, two = (df.ClassificationTask.tensors(train=(x, labels), holdout=0.5) for labels in (y, (y + 1) % CLASSES))
    recipe = Recipe(steps=3, batch=4, lr=0.05, distillation=1.0)
    found, wanted = (measure_importance(traced, task, recipe, method=method) for task in (two, one))
    assert (found.base, found.entries) == (wanted.base, wanted.entries)
    original = df.rewrite(traced, traced.vanilla).eval()
    assert one.score(original, "holdout") != two.score(original, "holdout")


@pytest.mark.parametrize("method", ["trained", "brief"])
def test_the_whole_network_is_trained_and_judged_by_its_score(method):
    class Both(TinyTask):
        def outputs(self, model, split):
            raise AssertionError("the outputs are not needed")

        def divergences(self, outputs, reference):
            raise AssertionError("the outputs are not needed")

    found, wanted = (measure_importance(PAIR, task, RECIPE, method=method) for task in (Both(), TinyTask()))
    assert found == wanted
    assert "divergence" not in found.provenance + found.quantity


@pytest.mark.parametrize("lacking", ["outputs", "divergences"])
def test_a_task_that_cannot_compare_outputs_uses_its_score(lacking):
    def unneeded(self, *arguments):
        raise AssertionError("half of the interface is not enough")

    given = {"outputs", "divergences"} - {lacking}
    half = type("Half", (TinyTask,), dict.fromkeys(given, unneeded))
    found = measure_importance(PAIR, half(), RECIPE, method="recalibrated")
    assert found == measure_importance(PAIR, TinyTask(), RECIPE, method="recalibrated")
    assert "divergence" not in found.provenance


def test_journal_of_other_scores_is_refused(tmp_path):
    measure_importance(PAIR, TinyTask(), RECIPE, method="recalibrated", run=tmp_path)
    with pytest.raises(JournalError, match=r"other inputs \(compares outputs: False there, True here\)"):
        measure_importance(PAIR, Comparing(), RECIPE, method="recalibrated", run=tmp_path)


def test_a_result_does_not_depend_on_those_before_it(tmp_path):
    """The first one of a worker also computes the outputs of the original."""

    class Noisy(Comparing):
        def outputs(self, model, split):
            outputs = super().outputs(model, split)
            return outputs + torch.rand_like(outputs)

    right = measure_importance(NETWORK, Noisy(), RECIPE, method="recalibrated", run=tmp_path)
    journal = tmp_path / "importance.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:5] + lines[6:]))
    assert measure_importance(NETWORK, Noisy(), RECIPE, method="recalibrated", run=tmp_path) == right


def test_each_seed_has_its_own_base(tmp_path):
    both = measure_importance(NETWORK, Comparing(), RECIPE, method="recalibrated", seeds=2, run=tmp_path)
    one, two = (
        measure_importance(NETWORK, Comparing(), RECIPE.replace(seed=seed), method="recalibrated")
        for seed in (RECIPE.seed, RECIPE.seed + 1)
    )
    assert one.base != two.base
    assert both.base == pytest.approx((one.base + two.base) / 2, rel=1e-12)
    for block, value in both.importances.items():
        assert value == pytest.approx((one.importances[block] + two.importances[block]) / 2, abs=1e-12)
