"""The scores of an evaluation: computed on the training device, with progress, without changing the networks."""

import pytest
import torch
from torch import nn

import depthfold as df
from depthfold.errors import InvalidValue
from depthfold.pipeline import evaluation
from depthfold.progress import progress_lines
from depthfold.training import DeviceContext, FunctionTask

ELSEWHERE = torch.device("cuda", 3)


class Movable(nn.Linear):
    """A network that only records its device, because this machine may have only one."""

    at = torch.device("cpu")

    def to(self, device):
        self.at = device
        return self


@pytest.fixture
def progress():
    """Return a progress that records its calls and ticks in `lines`."""
    lines = []

    def record(what, total, done):
        lines.append((what, total, done))
        return lambda: lines.append("tick")

    record.lines = lines
    return record


def classification(score_batch):
    images, labels = torch.rand(24, 1, 4, 4), torch.arange(24) % 3
    return df.ClassificationTask.tensors(train=(images, labels), test=(images, labels), score_batch=score_batch)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def test_scores_are_computed_on_the_training_device(monkeypatch, progress):
    monkeypatch.setattr(evaluation, "device_context", lambda: DeviceContext(device=ELSEWHERE))
    seen, both = [], (Movable(2, 2).train(), Movable(2, 2).eval())

    def score(model, split):
        assert not model.training and not torch.is_grad_enabled()
        seen.append((both.index(model), model.at, split))
        return len(seen)

    found = evaluation.scores(*both, FunctionTask(loss=max, score=score), progress)
    assert seen == [(0, ELSEWHERE, "test"), (1, ELSEWHERE, "test")]
    assert [each.score for each in found] == [1, 2]
    assert [(model.at.type, model.training) for model in both] == [("cpu", True), ("cpu", False)]
    assert progress.lines == [("scores", 2, 0), "tick", "tick"]


def test_networks_are_restored_after_a_failed_score(monkeypatch, progress):
    monkeypatch.setattr(evaluation, "device_context", lambda: DeviceContext(device=ELSEWHERE))
    one = Movable(2, 2).train()

    def score(*_):
        raise RuntimeError("no images")

    with pytest.raises(RuntimeError, match="no images"):
        evaluation.scores(one, one, FunctionTask(loss=max, score=score), progress)
    assert one.at.type == "cpu" and one.training


def test_score_that_is_not_a_number_is_refused(progress):
    task = FunctionTask(loss=max, score=lambda *_: "0.9")
    with pytest.raises(InvalidValue, match=r"score must be a single number, higher for a better model, found str\."):
        evaluation.scores(network(), network(), task, progress)


@pytest.mark.parametrize(("score_batch", "batches"), [(10, 3), (24, 1)])
def test_classification_reports_every_batch(score_batch, batches, progress):
    one, two, task = network(), network(), classification(score_batch)
    found = evaluation.scores(one, two, task, progress)
    assert progress.lines == [("scored batches", 2 * batches, 0), *["tick"] * 2 * batches]
    assert found[0].score == task.score(one.eval(), "test") / 100 and found[0].images == 24
    assert not one._forward_hooks and not two._forward_hooks


class FirstPixel(nn.Module):
    """A network that reads the class from the first pixel."""

    def forward(self, images):
        return nn.functional.one_hot(images[:, 0, 0, 0].long(), 5).float()


def five_classes(known):
    """Return a task with 20 images of each class in the hold-out set, whose first pixel is the class if it is known."""
    images, labels = torch.zeros(200, 1, 2, 2), torch.arange(200) % 5
    images[:, 0, 0, 0] = known * labels
    return df.ClassificationTask.tensors(train=(images, labels), holdout=20, normalise=((0.0,), (1.0,)))


def test_original_at_chance_is_scored_and_warned_about():
    lines = []
    with pytest.warns(evaluation.ChanceAccuracy) as caught:
        evaluation.score_original(FirstPixel(), five_classes(known=False), progress_lines(lines.append))
    assert str(caught[0].message) == (
        "The original scores 20.00% ± 4.00 on the 100 images of the hold-out set, which is no better than chance for 5 "
        "classes. Check its weights, the normalisation and the order of the classes."
    )
    assert lines[-1] == "score of the original: 1 of 1, done; 20.00% ± 4.00 on the hold-out set"


def test_original_that_is_better_than_chance_gives_no_warning(recwarn):
    lines = []
    evaluation.score_original(FirstPixel(), five_classes(known=True), progress_lines(lines.append))
    assert lines[-1].endswith("100.00% ± 0.00 on the hold-out set") and not recwarn


def test_only_a_classification_with_a_hold_out_set_is_scored_beforehand(recwarn):
    def refuse(*_):
        raise AssertionError("scored")

    own = FunctionTask(loss=max, score=refuse)
    images, labels = torch.rand(24, 1, 4, 4), torch.arange(24) % 3
    without = df.ClassificationTask.tensors(train=(images, labels), test=(images, labels), holdout=0)
    for task in (own, without):
        evaluation.score_original(network(), task, refuse)
    assert not recwarn


def test_scores_are_computed_in_the_precision_of_the_networks(progress):
    """An autocast of the caller has no effect."""
    seen, one = [], network()

    def score(model, split):
        seen.append(model(torch.rand(2, 1, 4, 4)).dtype)
        return 0.0

    with torch.autocast("cpu", dtype=torch.bfloat16):
        evaluation.scores(one, one, FunctionTask(loss=max, score=score), progress)
    assert seen == [torch.float32] * 2
