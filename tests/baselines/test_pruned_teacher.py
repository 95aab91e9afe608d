"""The teacher of a pruned network in the experiments."""

from __future__ import annotations

import torch
from torch import nn

from depthfold.training import FunctionTask, Recipe, train
from experiments.equal_latency.pruned_teacher import show_kept_features


def taught(model, step):
    x = torch.ones(4, 5)
    return (model(x[:, :2]) - step.teacher(x)).square().mean()


def test_the_teacher_shows_the_features_that_its_student_kept():
    teacher, student = nn.Sequential(nn.ReLU(), nn.Linear(5, 3)), nn.Sequential(nn.ReLU(), nn.Linear(2, 3))
    kept = [3, 1]
    student[1].weight.data = teacher[1].weight.data[:, kept].half().float()
    x, seen = torch.randn(4, 5), []
    expected = teacher(x)
    show_kept_features(teacher, student)
    for part in teacher.modules():
        if isinstance(part, nn.Linear):
            part.register_forward_pre_hook(lambda part, inputs: seen.append(inputs[0]))
    assert torch.equal(teacher(x), expected)
    assert torch.equal(seen[-1], x.relu()[:, kept])  # the linear layer that runs last
    recipe = Recipe(steps=2, batch=4, features=1.0)
    train(student, FunctionTask(loss=taught, score=lambda model, split: 0.0), recipe, teacher=teacher, split=None)
