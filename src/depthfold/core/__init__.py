"""The nouns: frozen data, standard library only."""

from depthfold.core.document import Document
from depthfold.core.layer import Layer, Skip
from depthfold.core.network import Network
from depthfold.core.plan import Plan
from depthfold.core.refusal import Refusal
from depthfold.core.shape import ConvShape
from depthfold.core.span import FlaggedSpan, Position, Span

__all__ = [
    "ConvShape",
    "Document",
    "FlaggedSpan",
    "Layer",
    "Network",
    "Plan",
    "Position",
    "Refusal",
    "Skip",
    "Span",
]
