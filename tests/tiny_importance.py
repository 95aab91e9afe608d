"""A network of five layers and a task with random data that can be made to fail.

The task writes a log, from which tests know how often each block was trained.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from depthfold.core import FlaggedSpan, Plan
from depthfold.tracing import student_parts
from depthfold.training import Recipe

SIZE, CLASSES = 6, 3
RECIPE = Recipe(steps=3, batch=4, lr=0.05, seed=5)
Fate = Literal["nan", "too large", "dies"]


class Tiny(nn.Module):
    """Layers 2 and 3 are a residual branch, layer 4 has a stride; there is no activation at 3 and 5."""

    def __init__(self, seed=0):
        super().__init__()
        before = torch.get_rng_state()
        torch.manual_seed(seed)
        self.conv1, self.norm1 = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv3, self.norm3 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv4, self.norm4 = nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv5, self.norm5 = nn.Conv2d(6, 6, 1, bias=False), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, CLASSES)
        for norm in (self.norm1, self.norm2, self.norm3, self.norm4, self.norm5):  # as if it had been trained
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.uniform_(norm.bias, -0.5, 0.5)
            nn.init.uniform_(norm.running_mean, -0.5, 0.5)
            nn.init.uniform_(norm.running_var, 0.5, 1.5)
            norm.num_batches_tracked += 7
        torch.set_rng_state(before)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = self.norm3(self.conv3(F.relu(self.norm2(self.conv2(x))))) + x
        x = F.relu(self.norm4(self.conv4(x)))
        return self.head(self.norm5(self.conv5(x)).mean((2, 3)))


# The activations for each flagged span, derived by hand. The network's own are at 1, 2 and 4.
ACTIVATIONS = {
    (0, 1, 1, 1): {1, 2, 4},
    (0, 3, 1, 1): {3, 4},
    (0, 4, 1, 1): {4},
    (0, 5, 1, 1): {5},
    (1, 2, 1, 1): {1, 2, 4},
    (1, 3, 1, 0): {1, 4},
    (1, 3, 1, 1): {1, 3, 4},
    (1, 4, 1, 1): {1, 4},
    (1, 5, 1, 0): {1},
    (1, 5, 1, 1): {1, 5},
    (2, 3, 1, 0): {1, 2, 4},
    (2, 3, 1, 1): {1, 2, 3, 4},
    (3, 4, 0, 1): {1, 2, 4},
    (3, 4, 1, 1): {1, 2, 3, 4},
    (3, 5, 0, 1): {1, 2, 5},
    (3, 5, 1, 1): {1, 2, 3, 5},
    (4, 5, 1, 0): {1, 2, 4},
    (4, 5, 1, 1): {1, 2, 4, 5},
}
# The blocks of one layer with the network's own activations, which change nothing.
UNCHANGED = {FlaggedSpan(*ends) for ends in ((0, 1, 1, 1), (1, 2, 1, 1), (2, 3, 1, 0), (3, 4, 0, 1), (4, 5, 1, 0))}


def tiny_network(seed=0):
    return df.trace(Tiny(seed), torch.zeros(1, 2, SIZE, SIZE))


class Pair(nn.Module):
    """Two layers with an activation each, which have three blocks. `norm` is the class of their batch norms."""

    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(2, 4, 3, padding=1, bias=False), norm(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), norm(4)
        self.head = nn.Linear(4, CLASSES)
        for module in (self.norm1, self.norm2):
            module.running_mean += 0.5
            module.weight.data += 0.25

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        return self.head(F.relu(self.norm2(self.conv2(x))).mean((2, 3)))


def images(number, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 2, SIZE, SIZE, generator=generator)
    return x, torch.randint(0, CLASSES, (number,), generator=generator)


def batch(seed, number):
    """Return the batch of a step."""
    return images(RECIPE.batch, 1000 * seed + number)


@torch.no_grad()
def holdout_score(model):
    device = next(model.parameters()).device
    x, y = (tensor.to(device) for tensor in images(8, 77))
    return -F.cross_entropy(model(x), y).item()


@dataclass(frozen=True, kw_only=True)
class TinyTask:
    """A task in which the training of a plan fails as given in `fates`, until the folder contains the file `repaired`.

    With `hold`, trainings wait in their second step once the log has that many scores.
    """

    folder: str | None = None
    fates: tuple[tuple[Plan, Fate], ...] = ()
    hold: int | None = None
    identity: str = "tiny"

    def steps_per_epoch(self, recipe):
        return 2

    def loss(self, model, step):
        if step.number == 1 and self.folder:
            self._wait()
        x, y = (tensor.to(step.device) for tensor in batch(step.seed, step.number))
        loss = F.cross_entropy(model(x), y)
        if step.number == 1 and self.fates and not (Path(self.folder) / "repaired").exists():
            plan = student_parts(model)[1].plan
            match dict(self.fates).get(plan):
                case "nan":
                    return loss * float("nan")
                case "too large":
                    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
                case "dies":
                    os._exit(3)
        return loss

    def score(self, model, split):
        if split == "test":
            raise AssertionError("the test set is not for importances")
        score = holdout_score(model)
        self._log(repr(score))
        return score

    def _wait(self):
        self._log(f"trains in {os.getpid()}")
        if self.hold is None or sum(scores_in(self.folder).values()) < self.hold:
            return
        self._log(f"waits in {os.getpid()}")
        while not (Path(self.folder) / "go").exists():
            time.sleep(0.02)

    def _log(self, line):
        if self.folder is not None:
            with (Path(self.folder) / "log").open("a") as log:
                log.write(line + "\n")


def log_of(folder):
    path = Path(folder) / "log"
    return path.read_text().splitlines() if path.exists() else []


def scores_in(folder):
    """Return how often each score was computed. No two trainings have the same score."""
    return Counter(line for line in log_of(folder) if " " not in line)


def waiting_in(folder):
    """Return the processes that have waited in a training, including dead ones."""
    return {int(line.split()[-1]) for line in log_of(folder) if line.startswith("waits in")}


def trainings_in(folder):
    return sum(line.startswith("trains in") for line in log_of(folder))


def running(pid):
    """Return True if the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
