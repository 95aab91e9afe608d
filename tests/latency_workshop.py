"""Helpers for tests of latency: a small network, a runtime with known latencies, and a quick timer."""

import copy
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import torch
from torch import nn

from depthfold.backends.cost_model import CostModel
from depthfold.latency import Timer
from depthfold.latency.blocks import block_shapes
from depthfold.merging import sketch
from depthfold.rewriting import rewrite
from depthfold.testing import random_plan

QUICK = Timer(warmup=0.0, round_seconds=0.0, samples=2, rounds=2, extra=0)
COST = CostModel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfused(CostModel):
    """A runtime that runs every activation as a separate pass. `costs` has the kinds and their seconds per element."""

    name: ClassVar[str] = "unfused"

    costs: tuple[tuple[type[nn.Module], float], ...]

    def compile(self, module, inputs):
        seconds = 0.0
        run = copy.deepcopy(module)
        for part in run.modules():
            for kind, cost in self.costs:
                if isinstance(part, kind):

                    def add(_module, _inputs, out, cost=cost):
                        nonlocal seconds
                        seconds += cost * out.numel()

                    part.register_forward_hook(add)
        with torch.inference_mode():
            run(*inputs)
        compiled = CostModel.compile(self, module, inputs)
        compiled._seconds += seconds
        return compiled


class Small(nn.Module):
    """A stem, three inverted residuals (the second strided) and a head: skips, depth-wise layers, a projection."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.blocks = nn.ModuleList(self.block(8, 16, 8, 1) for _ in range(2))
        self.down = self.block(8, 16, 12, 2)
        self.last = self.block(12, 24, 12, 1)
        self.projection = nn.Conv2d(12, 12, 1)
        self.head = nn.Linear(12, 5)

    @staticmethod
    def block(ins, hidden, outs, stride):
        return nn.Sequential(
            nn.Conv2d(ins, hidden, 1), nn.ReLU6(),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden), nn.ReLU6(),
            nn.Conv2d(hidden, outs, 1), nn.BatchNorm2d(outs),
        )  # fmt: skip

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        x = self.down(x)
        x = self.projection(x) + self.last(x)
        return self.head(x.mean((2, 3)))


def milliseconds(traced, plan, runtime=COST):
    return 1e3 * runtime.compile(sketch(rewrite(traced, plan)), tuple(traced.blueprint.inputs.args)).seconds()


def block_shape(traced, span, batch=1):
    return block_shapes(traced, (span,), batch)[span]


def plans(traced, count):
    return [random_plan(traced.network, Random(seed), "paper") for seed in range(count)]
