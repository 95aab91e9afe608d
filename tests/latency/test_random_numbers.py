"""measure_latency() and choose() do not change the global random state."""

import pytest
import torch

from depthfold.latency import choose, measure_latency
from depthfold.testing import backend_cases
from latency_workshop import COST, QUICK

USES = {
    "a table": lambda traced, frontier: measure_latency(traced, COST, timer=QUICK, networks=6),
    "a table of blocks alone": lambda traced, frontier: measure_latency(traced, COST, timer=QUICK, mode="alone"),
    "a choice": lambda traced, frontier: choose(traced, frontier, "90%", COST, timer=QUICK),
    "the cases of the conformance suite": lambda traced, frontier: backend_cases(),
}


@pytest.mark.parametrize("name", USES)
def test_global_random_state_is_unchanged(name, traced, frontier):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    USES[name](traced, frontier)
    assert torch.equal(torch.rand(3), expected)
