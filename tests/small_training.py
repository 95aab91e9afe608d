"""A small network with all kinds of state, a task with random data, and a recorder of steps for the CPU."""

from __future__ import annotations

import weakref

import torch
import torch.nn.functional as F
from torch import nn

from depthfold.training import FunctionTask


class SmallNet(nn.Module):
    """A network with a convolution, batch norm, dropout, a frozen layer, and a parameter with two names."""

    def __init__(self, seed=0, dropout=0.2):
        super().__init__()
        generator_state = torch.get_rng_state()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(dropout)
        self.mix = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.mix.weight
        self.frozen = nn.Linear(4, 3).requires_grad_(False)
        torch.set_rng_state(generator_state)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.frozen(self.tied(F.relu(self.mix(self.dropout(x)))))


class Heads(SmallNet):
    """A network with a head that the loss ignores, and one that only the first process uses, in a method."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.norm = nn.Identity()
        torch.manual_seed(0)
        self.every, self.unused, self.some = (nn.Conv2d(2, 3, 1) for _ in range(3))
        self.register_buffer("centre", torch.zeros(()), persistent=False)
        self.centres = []  # that the loss saw

    def forward(self, x):
        return {"every": self.every(x).mean((2, 3)), "unused": self.unused(x)}

    def loss(self, step):
        x, y = batch_of(step)
        self.centres.append(self.centre.item())
        self.centre += x.mean()  # of this process's part
        value = F.cross_entropy(self(x)["every"] + super().forward(x), y)
        return value + step.world_size * self.some(torch.ones(1, 2, 1, 1)).mean() if step.rank == 0 else value


def score_of_heads(model, split):
    return 0.0


def batch_of(step):
    """Return this process's part of the batch. The whole batch does not depend on the number of processes."""
    generator = torch.Generator().manual_seed(step.seed * 1000 + step.number)
    x = torch.randn(step.recipe.batch, 2, 5, 5, generator=generator)
    y = torch.randint(0, 3, (step.recipe.batch,), generator=generator)
    part = slice(step.rank, None, step.world_size)
    return x[part].to(step.device), y[part].to(step.device)


def loss(model, step):
    x, y = batch_of(step)
    outputs = model(x)
    value = F.cross_entropy(outputs, y)
    if step.teacher is not None:
        value = value + F.mse_loss(outputs, step.teacher(x))
    return value


@torch.no_grad()
def score(model, split):
    generator = torch.Generator().manual_seed({"holdout": 7, "test": 8}[split])
    x = torch.randn(16, 2, 5, 5, generator=generator)
    y = torch.randint(0, 3, (16,), generator=generator)
    device = next(model.parameters()).device
    return -F.cross_entropy(model(x.to(device)).float(), y.to(device)).item()


TASK = FunctionTask(loss=loss, score=score, epoch_steps=4)


class SmallTask:
    """The same task with a separate batch. It calls `watch` with the arguments of every batch_loss."""

    identity = "small"

    def __init__(self, watch=lambda *arguments: None):
        self.watch = watch

    def steps_per_epoch(self, recipe):
        return 4

    def batch(self, step):
        return batch_of(step)

    def batch_loss(self, model, batch, step):
        self.watch(model, batch, step)
        x, y = batch
        outputs = model(x)
        value = F.cross_entropy(outputs, y)
        if step.teacher is not None:
            value = value + F.mse_loss(outputs, step.teacher(x))
        return value

    def loss(self, model, step):
        return self.batch_loss(model, self.batch(step), step)

    def score(self, model, split):
        return score(model, split)


def failing_at(number, how):
    """Return the task, but call `how` with the step of this number before it is taken."""

    def fails(model, step):
        if step.number == number:
            how(step)
        return loss(model, step)

    return FunctionTask(loss=fails, score=score, epoch_steps=4)


class Recorder:
    """Records a function on the CPU for capture.RECORDERS.

    Like a CUDA graph, it runs the function first, and does not keep its tensors alive. With an `error`, it runs the
    function twice and fails.
    """

    def __init__(self, error=None):
        self.error, self.recordings, self.replays, self.resets = error, 0, 0, 0

    def __call__(self, body, device):
        self.recordings += 1
        self._body = weakref.ref(body)
        body()
        if self.error is not None:
            body()
            raise self.error
        return self

    def replay(self):
        self.replays += 1
        self._body()()

    def reset(self):
        self.resets += 1


def equal(one, two):
    """Return True if two models have the same parameters and buffers, bit for bit."""
    first, second = one.state_dict(), two.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
