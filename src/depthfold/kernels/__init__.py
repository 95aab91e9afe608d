"""Triton kernels for training steps of CNNs, and modules that use them in place of a model."""

from depthfold.kernels.fuse import Fused, FusedEval, fuse, fuse_eval

__all__ = ["Fused", "FusedEval", "fuse", "fuse_eval"]
