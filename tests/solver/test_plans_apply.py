"""Every plan of a frontier with all moves can be applied: to the network, and to its model."""

from __future__ import annotations

import random
from typing import get_args

import pytest
import torch
from torch import nn

import depthfold as df
from depthfold.core import Network, Span
from depthfold.core.options import Move
from depthfold.solver import solve
from depthfold.testing import randomise_statistics
from nets import agree
from tables import random_network, tables_with_moves


class Stage(nn.Module):
    """Layers with a residual around some of them, whose skip is the identity or a projection of any kernel."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        kernels = [rng.choice((1, 3, 3)) for _ in range(rng.randint(2, 4))]
        self.layers = nn.Sequential(*(self._layer(kernel, rng) for kernel in kernels))
        self.layers[-1] = self.layers[-1][:2]  # no activation before the addition
        largest = 1 + sum(kernel - 1 for kernel in kernels)
        kernel = rng.choice([k for k in (1, 3, 5) if k <= largest])
        self.skip = nn.Conv2d(4, 4, kernel, padding=kernel // 2) if rng.random() < 0.6 else nn.Identity()

    @staticmethod
    def _layer(kernel: int, rng: random.Random) -> nn.Sequential:
        conv = nn.Conv2d(4, 4, kernel, padding=kernel // 2, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(4), *([nn.ReLU()] if rng.random() < 0.5 else []))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + self.skip(x)


def random_model(seed: int) -> nn.Module:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    parts: list[nn.Module] = [nn.Conv2d(4, 4, 3, padding=1)]
    for _ in range(rng.randint(1, 2)):
        parts += [Stage(rng), *([nn.ReLU()] if rng.random() < 0.5 else [])]
    return randomise_statistics(nn.Sequential(*parts, nn.Conv2d(4, 4, 3, padding=1)), seed).double().eval()


def avoids_a_skip_that_exceeds(network: Network, plan: df.Plan) -> bool:
    """True if the plan could have merged a span, but with its drops a skip does not fit into what is left of it."""
    cuts = (0, *plan.cuts, network.depth)
    for i, j in ((i, j) for n, i in enumerate(cuts) for j in cuts[n + 1 :]):
        span = Span(i, j)
        if network.why_not(span):
            continue
        try:
            network.merged_shape(span, plan.dropped)
        except df.errors.PlanError:
            return True
    return False


def test_plans_of_random_models_are_rewritten_and_merged() -> None:
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    dropped = avoided = 0
    for seed in range(18):
        traced = df.trace(random_model(seed), x)
        latency, importance = tables_with_moves(traced.network, "full", get_args(Move), seed)
        plans = [solved.plan for solved in solve(latency, importance, network=traced.network)]
        for number, plan in enumerate(plans):
            traced.network.segments(plan)
            avoided += avoids_a_skip_that_exceeds(traced.network, plan)
            if plan.dropped and number % 5 == seed % 5:
                student = df.rewrite(traced, plan)
                with torch.no_grad():
                    agree(df.merge(student)(x), student(x))
                dropped += 1
    assert dropped > 12
    assert avoided


@pytest.mark.parametrize("space", ["paper", "full"])
def test_plans_of_random_networks_have_segments(space: str) -> None:
    for seed in range(60):
        network = random_network(random.Random(seed), 7)
        latency, importance = tables_with_moves(network, space, get_args(Move), seed)
        for solved in solve(latency, importance, network=network):
            spans = network.segments(solved.plan)
            assert [segment.span for segment in solved.segments] == list(spans)
