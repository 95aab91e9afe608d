"""A small traced network and its frontier."""

import pytest
import torch

import depthfold as df
from depthfold.core import Score
from depthfold.latency import measure_latency
from latency_workshop import COST, QUICK, Small


@pytest.fixture(scope="session")
def traced():
    torch.manual_seed(0)
    return df.trace(Small(), torch.randn(1, 3, 32, 32), ignore=["stem"])


@pytest.fixture(scope="session")
def frontier(traced):
    table = measure_latency(traced, COST, timer=QUICK, networks=12)
    scores = {}
    for n, block in enumerate(traced.flagged_spans("paper")):
        scores[block] = -0.3 * (len(block.span) - 1) - 0.01 * (n % 7)
    entries = tuple(Score(span=block, samples=(value,)) for block, value in scores.items())
    return df.solve(table, df.ImportanceTable(entries=entries), network=traced.network)
