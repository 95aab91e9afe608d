"""Triton kernels for training steps of CNNs, and modules that use them in place of a model."""

from depthfold.kernels.fuse import FusedEval, fuse, fuse_eval

__all__ = ["FusedEval", "fuse", "fuse_eval"]
