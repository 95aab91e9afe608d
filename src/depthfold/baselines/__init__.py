"""Methods to compare with: DepthShrinker, LayerMerge, channel pruning. Each function returns plans or a network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from depthfold.support.optional import lazy_getattr

if TYPE_CHECKING:
    from depthfold.baselines.channels import amc_mobilenet_v2, narrow, uniform_width
    from depthfold.baselines.depthshrinker import COSTS, PATTERNS, depthshrinker_plan, inverted_residuals, plan_without
    from depthfold.baselines.pruning import prune_channels, pruning_steps, stopwatch, task_gradients
    from depthfold.baselines.search import search_depthshrinker
    from depthfold.baselines.tables import constant_importance, layermerge_frontier

# Imported on first use: plans and tables need neither torch nor Torch-Pruning.
__getattr__ = lazy_getattr(
    __name__,
    {
        "channels": "amc_mobilenet_v2 narrow uniform_width",
        "depthshrinker": "COSTS PATTERNS depthshrinker_plan inverted_residuals plan_without",
        "pruning": "prune_channels pruning_steps stopwatch task_gradients",
        "search": "search_depthshrinker",
        "tables": "constant_importance layermerge_frontier",
    },
)

__all__ = [
    "COSTS", "PATTERNS", "amc_mobilenet_v2", "constant_importance", "depthshrinker_plan", "inverted_residuals",
    "layermerge_frontier", "narrow", "plan_without", "prune_channels", "pruning_steps", "search_depthshrinker",
    "stopwatch", "task_gradients", "uniform_width",
]  # fmt: skip
