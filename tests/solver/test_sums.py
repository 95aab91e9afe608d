from __future__ import annotations

import math

import numpy as np
import pytest

from depthfold.core.latency_table import sum_rounded_up
from depthfold.solver.sums import rounded_to_nearest, rounded_up


@pytest.mark.parametrize("orders", [0, 3, 20, 300])
@pytest.mark.parametrize("sign", [1, -1])
def test_equal_to_fsum_to_the_last_bit(orders: int, sign: int) -> None:
    """20 and 300 orders of magnitude are more than two floats hold: then fsum itself is asked."""
    rng = np.random.default_rng(orders)
    rows = rng.uniform(0.1, 1.0, (500, 30)) * 10.0 ** rng.integers(-orders, 1, (500, 30))
    rows[rng.random(rows.shape) < 0.3] = 0.0
    rows[rng.random(rows.shape) < 0.5] *= sign
    assert rounded_to_nearest(rows) == [math.fsum(row) for row in rows.tolist()]
    assert rounded_up(rows) == [sum_rounded_up(row) for row in rows.tolist()]


def test_nothing_adds_up_to_nothing() -> None:
    assert rounded_up(np.zeros((2, 3))) == [0.0, 0.0]
    assert rounded_to_nearest(np.zeros((0, 3))) == []
