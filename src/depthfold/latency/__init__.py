"""Measure latencies: the table T[i, j, b], plans end to end, and profiles of any network."""

from depthfold.core import Profile, side_by_side
from depthfold.latency.calibration import DoubtfulTable
from depthfold.latency.choose import choose
from depthfold.latency.measure import measure_latency
from depthfold.latency.profile import profile, profile_all
from depthfold.latency.timer import Timer
from depthfold.progress import progress_bars

__all__ = [
    "DoubtfulTable", "Profile", "Timer", "choose", "measure_latency", "profile", "profile_all", "progress_bars",
    "side_by_side",
]  # fmt: skip
