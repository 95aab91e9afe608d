"""Rewritten copy to the shallow network, verified."""

from depthfold.merging.merge import merge
from depthfold.merging.verify import Verification, verify

__all__ = ["Verification", "merge", "verify"]
