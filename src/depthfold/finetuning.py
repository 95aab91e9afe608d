"""finetune(): train a student before it is merged."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path

import torch
from torch import nn

from depthfold.errors import CheckpointError, InvalidValue
from depthfold.progress import Progress, progress_bars
from depthfold.support.coerce import as_path
from depthfold.support.document import encode
from depthfold.tracing import device_of, student_parts
from depthfold.training import LAST, Recipe, Task, has_holdout, load_weights, preset, train

FOLDER = "finetuning"  # in the run folder


def finetune(
    student: nn.Module,
    task: Task,
    recipe: Recipe | str = "quick",
    *,
    teacher: nn.Module | None = None,
    run: str | Path | None = None,
    device: str | torch.device | None = None,
    tensorboard: bool = False,
    progress: Progress | None = None,
) -> nn.Module:
    """Return a trained copy of the student, on the same device. The student itself is not changed.

    The recipe may be the name of a preset. With a `teacher` (usually the original network) the task distils. With a run
    folder, `run`, checkpoints and metrics are written into its subfolder "finetuning". A second call resumes; if
    training is finished, it only loads the weights. The copy has the last weights, as in the paper, or the best on the
    hold-out set if the recipe has keep="best"; the folder holds both. A task without a hold-out set is not scored.
    `progress` is called as training advances; without it, a terminal or a notebook shows a progress bar.
    """
    if not isinstance(student, nn.Module):
        raise InvalidValue(
            f"finetune() takes an nn.Module, found {type(student).__name__}. Pass the result of rewrite()."
        )
    recipe = preset(recipe) if isinstance(recipe, str) else recipe
    folder = None if run is None else _folder(run)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # inference tensors cannot be trained
        trained = copy.deepcopy(student)
        train(
            trained,
            task,
            recipe,
            teacher=teacher,
            split="holdout" if has_holdout(task) else None,
            folder=folder,
            about=_about(student),
            device=device,
            tensorboard=tensorboard,
            progress=progress or stack.enter_context(progress_bars("Fine-tuning")),
        )
        return trained.to(device_of(student))


def finetuned(student: nn.Module, run: str | Path) -> nn.Module:
    """Return a copy of the student with the weights that finetune() wrote into the run folder."""
    folder, trained = _folder(run), copy.deepcopy(student)
    if not (folder / LAST).exists():
        raise CheckpointError(f"The folder {folder} has no fine-tuning yet. Call finetune() first.")
    state = load_weights(trained, folder)
    if state.identity.model != _about(student):
        raise CheckpointError(
            f"The folder {folder} has the fine-tuning of another plan: {state.identity.model or 'unknown'} there, "
            f"{_about(student) or 'not a student'} here. Use the folder of this plan, or fine-tune it."
        )
    if state.step < state.identity.steps:
        raise CheckpointError(
            f"The fine-tuning in {folder} stopped at step {state.step} of {state.identity.steps}. Fine-tune again to "
            "resume it."
        )
    if state.identity.recipe.keep == "best":
        if state.unscored:
            raise CheckpointError(
                f"The fine-tuning in {folder} has all {state.step} steps but not the last score, so the best weights "
                "are unknown. Fine-tune again to score it."
            )
        load_weights(trained, folder, "best")
    return trained


def _folder(run: object) -> Path:
    return as_path("The run folder", run, InvalidValue) / FOLDER


def _about(student: nn.Module) -> str:
    """Return the network and the plan of a student: students of two plans may have equal weights."""
    try:
        _, parts, _ = student_parts(student)
    except InvalidValue:  # not a student: any network can be fine-tuned
        return ""
    return f"network {parts.blueprint.network.fingerprint}, plan {json.dumps(encode(parts.plan))}"
