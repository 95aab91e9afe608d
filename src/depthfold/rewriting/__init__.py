"""Rewrite a traced network according to a plan: remove and insert activations, move padding."""

from depthfold.rewriting.activations import activation_at, activation_module, activation_names
from depthfold.rewriting.rewrite import rewrite

__all__ = ["activation_at", "activation_module", "activation_names", "rewrite"]
