"""Tables without drops have the plans of the solver that did not know drops."""

from __future__ import annotations

import json

import pytest

from golden_frontiers import FILE, instances, plans_of

STORED = json.loads(FILE.read_text())
GIVEN = dict(instances())


def test_every_instance_is_stored() -> None:
    assert GIVEN.keys() == STORED.keys()
    assert sum(len(plans) for plans in STORED.values()) > 700


@pytest.mark.parametrize("kind", ["small", "two times", "MobileNetV2", "ResNet34"])
def test_plans_are_those_of_the_solver_without_drops(kind: str) -> None:
    """Activations, cuts, boundaries, latencies and importances, plan by plan."""
    for name in (name for name in GIVEN if name.startswith(kind)):
        assert plans_of(GIVEN[name]) == STORED[name], name
