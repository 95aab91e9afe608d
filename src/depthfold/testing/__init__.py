"""Helpers for tests: small networks, random plans, Hypothesis strategies, and the conformance suites of backends and
executors.
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

# The module of each name, imported on first use: the suite of executors starts many processes that do not need torch.
_MODULES = {
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

__all__ = [*sorted(_MODULES)]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'depthfold.testing' has no attribute {name!r}; it has {', '.join(_MODULES)}")
    return getattr(importlib.import_module(f"depthfold.testing.{_MODULES[name]}"), name)
