"""Network and plan to a trainable copy: activations gone or inserted, padding moved."""

from depthfold.rewriting.rewrite import rewrite

__all__ = ["rewrite"]
