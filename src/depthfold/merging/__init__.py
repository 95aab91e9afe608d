"""Merge a rewritten network into a shallow one, and verify the result."""

from depthfold.merging.merge import merge, sketch
from depthfold.merging.verification import Verification
from depthfold.merging.verify import verify

__all__ = ["Verification", "merge", "sketch", "verify"]
