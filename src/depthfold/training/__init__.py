"""Training: the task, the recipe, and the loop that measures importances and fine-tunes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from depthfold.support.optional import lazy_getattr

if TYPE_CHECKING:
    from depthfold.training.checkpoints import LAST, load_weights
    from depthfold.training.contexts import moved_to, preserve_modes
    from depthfold.training.device import DeviceContext, device_context
    from depthfold.training.features import check_features
    from depthfold.training.forwards import scoring
    from depthfold.training.loop import train
    from depthfold.training.metrics import Trained, read_curve
    from depthfold.training.recalibration import autocast, batch_norms, loss_without_gradients, recalibrate
    from depthfold.training.recipe import Recipe, preset
    from depthfold.training.stepper import learning_rate, total_steps
    from depthfold.training.task import (
        BatchTask,
        FunctionTask,
        OutputTask,
        Split,
        Step,
        Task,
        check_has_holdout,
        check_keeps_last,
        check_task,
        derive_seed,
        has_holdout,
        score_of,
        task_name,
    )

# Imported on first use: recipes do not need torch.
__getattr__ = lazy_getattr(
    __name__,
    {
        "checkpoints": "LAST load_weights",
        "contexts": "moved_to preserve_modes",
        "device": "DeviceContext device_context",
        "features": "check_features",
        "forwards": "scoring",
        "loop": "train",
        "metrics": "Trained read_curve",
        "recalibration": "autocast batch_norms loss_without_gradients recalibrate",
        "recipe": "Recipe preset",
        "stepper": "learning_rate total_steps",
        "task": "BatchTask FunctionTask OutputTask Split Step Task "
        "check_has_holdout check_keeps_last check_task derive_seed has_holdout score_of task_name",
    },
)

__all__ = [
    "LAST", "BatchTask", "DeviceContext", "FunctionTask", "OutputTask", "Recipe", "Split", "Step", "Task", "Trained",
    "autocast", "batch_norms", "check_features", "check_has_holdout", "check_keeps_last", "check_task", "derive_seed",
    "device_context", "has_holdout", "learning_rate", "load_weights", "loss_without_gradients", "moved_to",
    "preserve_modes", "preset", "read_curve", "recalibrate", "score_of", "scoring", "task_name", "total_steps", "train",
]  # fmt: skip
