"""Measuring a table, and choosing from it, leaves the random numbers of the user's training as they were."""

import pytest
import torch

from depthfold.latency import choose, measure_latency
from depthfold.testing import backend_cases
from latency_workshop import COST, QUICK

USES = {
    "a table": lambda network, frontier: measure_latency(network, COST, timer=QUICK, networks=6),
    "a table of blocks alone": lambda network, frontier: measure_latency(network, COST, timer=QUICK, mode="alone"),
    "a choice": lambda network, frontier: choose(network, frontier, "90%", COST, timer=QUICK),
    "the cases of the conformance suite": lambda network, frontier: backend_cases(),
}


@pytest.mark.parametrize("name", USES)
def test_random_numbers_are_left_alone(name, network, frontier):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    USES[name](network, frontier)
    assert torch.equal(torch.rand(3), expected)
