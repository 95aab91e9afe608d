"""Shipped for tests of depthfold and of what builds on it: small networks, random plans, Hypothesis strategies,
and the conformance suites of backends and of executors.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from depthfold.testing.backends import backend_cases as backend_cases
    from depthfold.testing.backends import check_backend as check_backend
    from depthfold.testing.executors import check_executor as check_executor
    from depthfold.testing.networks import Block as Block
    from depthfold.testing.networks import Branches as Branches
    from depthfold.testing.networks import Conv as Conv
    from depthfold.testing.networks import NetworkSpec as NetworkSpec
    from depthfold.testing.networks import Pool as Pool
    from depthfold.testing.networks import SmallCNN as SmallCNN
    from depthfold.testing.networks import random_plan as random_plan
    from depthfold.testing.networks import randomise_statistics as randomise_statistics

# Where each name lives. Imported on first use: the suite of executors starts many processes, and they need no torch.
_HOME = {
    "Block": "networks",
    "Branches": "networks",
    "Conv": "networks",
    "NetworkSpec": "networks",
    "Pool": "networks",
    "SmallCNN": "networks",
    "backend_cases": "backends",
    "check_backend": "backends",
    "check_executor": "executors",
    "random_plan": "networks",
    "randomise_statistics": "networks",
}

__all__ = [*sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'depthfold.testing' has no attribute {name!r}; it has {', '.join(_HOME)}")
    return getattr(importlib.import_module(f"depthfold.testing.{_HOME[name]}"), name)
