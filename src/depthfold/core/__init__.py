"""Frozen data classes that need only the standard library."""

from depthfold.core.budget import Budget
from depthfold.core.calibration import Calibration
from depthfold.core.drops import NOTHING, Drops
from depthfold.core.environment import Environment
from depthfold.core.frontier import Frontier, Point
from depthfold.core.importance_table import ImportanceTable, Score
from depthfold.core.latency_table import LatencyTable, Timing
from depthfold.core.layer import Layer, Refusal, Skip
from depthfold.core.network import Network
from depthfold.core.options import BlockOption, Move, block_options, require_moves, span_options
from depthfold.core.plan import Plan, Segment, SolvedPlan, plan_of
from depthfold.core.profile import Profile, Profiles, side_by_side
from depthfold.core.shape import ConvShape, FixedPadding, Padding, SizeRule, as_pad_argument
from depthfold.core.space import Space, check_space, free_positions
from depthfold.core.span import FlaggedSpan, Position, Span
from depthfold.core.speedup import MeasuredSpeedup
from depthfold.core.surrogate import Surrogate, TrainedPlan
from depthfold.support.document import Document

__all__ = [
    "NOTHING", "BlockOption", "Budget", "Calibration", "ConvShape", "Document", "Drops", "Environment", "FixedPadding",
    "FlaggedSpan", "Frontier", "ImportanceTable", "LatencyTable", "Layer", "MeasuredSpeedup", "Move", "Network",
    "Padding", "Plan", "Point", "Position", "Profile", "Profiles", "Refusal", "Score", "Segment", "SizeRule", "Skip",
    "SolvedPlan", "Space", "Span", "Surrogate", "Timing", "TrainedPlan", "as_pad_argument", "block_options",
    "check_space", "free_positions", "plan_of", "require_moves", "side_by_side", "span_options",
]  # fmt: skip
