"""Test helpers: small networks, random plans, Hypothesis strategies, conformance suites of backends and executors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from depthfold.support.optional import lazy_getattr

if TYPE_CHECKING:
    from depthfold.testing.backends import backend_cases, check_backend
    from depthfold.testing.executors import check_executor
    from depthfold.testing.networks import (
        Block,
        Branches,
        Conv,
        NetworkSpec,
        Pool,
        SmallCNN,
        random_plan,
        randomise_statistics,
    )

# Imported on first use: the suite of executors starts many processes that do not need torch.
__getattr__ = lazy_getattr(
    __name__,
    {
        "backends": "backend_cases check_backend",
        "executors": "check_executor",
        "networks": "Block Branches Conv NetworkSpec Pool SmallCNN random_plan randomise_statistics",
    },
)

__all__ = [
    "Block", "Branches", "Conv", "NetworkSpec", "Pool", "SmallCNN", "backend_cases", "check_backend",
    "check_executor", "random_plan", "randomise_statistics",
]  # fmt: skip
