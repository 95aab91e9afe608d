"""Training: the task, the recipe, and the loop that measures importances and fine-tunes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from depthfold.training.checkpoints import LAST as LAST
    from depthfold.training.checkpoints import load_weights as load_weights
    from depthfold.training.contexts import disable_autocast as disable_autocast
    from depthfold.training.contexts import fork_rng as fork_rng
    from depthfold.training.contexts import moved_to as moved_to
    from depthfold.training.contexts import preserve_modes as preserve_modes
    from depthfold.training.device import DeviceContext as DeviceContext
    from depthfold.training.device import device_context as device_context
    from depthfold.training.loop import train as train
    from depthfold.training.metrics import Trained as Trained
    from depthfold.training.recipe import Recipe as Recipe
    from depthfold.training.recipe import preset as preset
    from depthfold.training.task import FunctionTask as FunctionTask
    from depthfold.training.task import Split as Split
    from depthfold.training.task import Step as Step
    from depthfold.training.task import Task as Task
    from depthfold.training.task import check_has_holdout as check_has_holdout
    from depthfold.training.task import check_task as check_task
    from depthfold.training.task import derive_seed as derive_seed
    from depthfold.training.task import has_holdout as has_holdout
    from depthfold.training.task import task_name as task_name

# The module of each name. It is imported on first use: recipes do not need torch.
_HOME = {
    "DeviceContext": "device",
    "FunctionTask": "task",
    "LAST": "checkpoints",
    "Recipe": "recipe",
    "Split": "task",
    "Step": "task",
    "Task": "task",
    "Trained": "metrics",
    "derive_seed": "task",
    "device_context": "device",
    "disable_autocast": "contexts",
    "check_has_holdout": "task",
    "check_task": "task",
    "fork_rng": "contexts",
    "has_holdout": "task",
    "load_weights": "checkpoints",
    "moved_to": "contexts",
    "preserve_modes": "contexts",
    "preset": "recipe",
    "task_name": "task",
    "train": "loop",
}

__all__ = [*sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'depthfold.training' has no attribute {name!r}; it has {', '.join(_HOME)}")
    return getattr(importlib.import_module(f"depthfold.training.{_HOME[name]}"), name)
