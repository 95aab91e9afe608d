"""The scores at the end of a run: taken where trainings run, told as they go, and the networks are given back."""

import pytest
import torch
from torch import nn

import depthfold as df
from depthfold.pipeline import evaluation
from depthfold.training import DeviceContext, FunctionTask

ELSEWHERE = torch.device("cuda", 3)


class Traveller(nn.Linear):
    """A network that only says where it was sent: this machine may have one place alone."""

    at = torch.device("cpu")

    def to(self, device):
        self.at = device
        return self


@pytest.fixture
def told():
    """What a progress was told: what, of how many, and a tick for each."""
    lines = []

    def progress(what, total, done):
        lines.append((what, total, done))
        return lambda: lines.append("tick")

    progress.lines = lines
    return progress


def classification(score_batch):
    images, labels = torch.rand(24, 1, 4, 4), torch.arange(24) % 3
    return df.ClassificationTask.tensors(train=(images, labels), test=(images, labels), score_batch=score_batch)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def test_scores_are_taken_where_trainings_run(monkeypatch, told):
    monkeypatch.setattr(evaluation, "device_context", lambda: DeviceContext(device=ELSEWHERE))
    seen, both = [], (Traveller(2, 2).train(), Traveller(2, 2).eval())

    def score(model, split):
        assert not model.training and not torch.is_grad_enabled()
        seen.append((both.index(model), model.at, split))
        return len(seen)

    found = evaluation.scores(*both, FunctionTask(loss=max, score=score), told)
    assert seen == [(0, ELSEWHERE, "test"), (1, ELSEWHERE, "test")]
    assert [each.score for each in found] == [1, 2]
    assert [(model.at.type, model.training) for model in both] == [("cpu", True), ("cpu", False)]
    assert told.lines == [("scores", 2, 0), "tick", "tick"]


def test_networks_come_back_from_a_score_that_fails(monkeypatch, told):
    monkeypatch.setattr(evaluation, "device_context", lambda: DeviceContext(device=ELSEWHERE))
    one = Traveller(2, 2).train()

    def score(*_):
        raise RuntimeError("no images")

    with pytest.raises(RuntimeError, match="no images"):
        evaluation.scores(one, one, FunctionTask(loss=max, score=score), told)
    assert one.at.type == "cpu" and one.training


@pytest.mark.parametrize(("score_batch", "batches"), [(10, 3), (24, 1)])
def test_a_classification_tells_of_every_batch(score_batch, batches, told):
    one, two, task = network(), network(), classification(score_batch)
    found = evaluation.scores(one, two, task, told)
    assert told.lines == [("scored batches", 2 * batches, 0), *["tick"] * 2 * batches]
    assert found[0].score == task.score(one.eval(), "test") / 100 and found[0].images == 24
    assert not one._forward_hooks and not two._forward_hooks


def test_scores_are_in_the_precision_of_the_networks(told):
    """Whatever the caller has switched on around them."""
    seen, one = [], network()

    def score(model, split):
        seen.append(model(torch.rand(2, 1, 4, 4)).dtype)
        return 0.0

    with torch.autocast("cpu", dtype=torch.bfloat16):
        evaluation.scores(one, one, FunctionTask(loss=max, score=score), told)
    assert seen == [torch.float32] * 2
