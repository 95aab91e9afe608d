"""Rewrite a traced network according to a plan: remove and insert activations, move padding."""

from depthfold.rewriting.rewrite import rewrite

__all__ = ["rewrite"]
