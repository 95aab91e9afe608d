"""Rewritten copy to the shallow network, verified."""

from depthfold.merging.merge import merge, sketch
from depthfold.merging.verification import Verification
from depthfold.merging.verify import verify

__all__ = ["Verification", "merge", "sketch", "verify"]
