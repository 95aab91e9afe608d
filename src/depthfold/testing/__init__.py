"""Shipped for tests of depthfold and of what builds on it: small networks, random plans, Hypothesis strategies,
and the conformance suite of backends.
"""

from depthfold.testing.backends import backend_cases, check_backend
from depthfold.testing.networks import Block, Branches, Conv, NetworkSpec, Pool, SmallCNN
from depthfold.testing.plans import random_plan, randomise_statistics

__all__ = [
    "Block",
    "Branches",
    "Conv",
    "NetworkSpec",
    "Pool",
    "SmallCNN",
    "backend_cases",
    "check_backend",
    "random_plan",
    "randomise_statistics",
]
