"""Shipped for tests of depthfold and of what builds on it: small networks, random plans, Hypothesis strategies."""

from depthfold.testing.networks import Block, Branches, Conv, NetworkSpec, Pool, SmallCNN
from depthfold.testing.plans import random_plan, randomise_statistics

__all__ = [
    "Block",
    "Branches",
    "Conv",
    "NetworkSpec",
    "Pool",
    "SmallCNN",
    "random_plan",
    "randomise_statistics",
]
