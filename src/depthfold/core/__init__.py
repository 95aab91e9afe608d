"""The nouns: frozen data, standard library only."""

from depthfold.core.budget import Budget
from depthfold.core.calibration import Calibration
from depthfold.core.environment import Environment
from depthfold.core.frontier import Frontier, Point
from depthfold.core.importance_table import ImportanceTable, Score
from depthfold.core.latency_table import LatencyTable
from depthfold.core.layer import Layer, Refusal, Skip
from depthfold.core.network import Network
from depthfold.core.plan import Plan
from depthfold.core.profile import Profile
from depthfold.core.shape import ConvShape
from depthfold.core.solved_plan import Segment, SolvedPlan
from depthfold.core.span import FlaggedSpan, Position, Span
from depthfold.core.timing import Timing
from depthfold.support.document import Document

__all__ = [
    "Budget",
    "Calibration",
    "ConvShape",
    "Document",
    "Environment",
    "FlaggedSpan",
    "Frontier",
    "ImportanceTable",
    "LatencyTable",
    "Layer",
    "Network",
    "Plan",
    "Point",
    "Position",
    "Profile",
    "Refusal",
    "Score",
    "Segment",
    "Skip",
    "SolvedPlan",
    "Span",
    "Timing",
]
