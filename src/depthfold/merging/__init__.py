"""Rewritten copy to the shallow network, verified."""

from depthfold.merging.merge import merge, sketch
from depthfold.merging.verify import Verification, verify

__all__ = ["Verification", "merge", "sketch", "verify"]
