"""finetune(): a student trained until it has recovered, ready to be merged."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path

import torch
from torch import nn

from depthfold.core import Plan
from depthfold.errors import CheckpointError, InvalidValue
from depthfold.progress import Progress, progress_bars
from depthfold.support.coerce import as_path
from depthfold.support.document import encode
from depthfold.tracing import device_of, student_parts
from depthfold.training.checkpoints import LAST, load_weights
from depthfold.training.loop import train
from depthfold.training.recipe import Recipe, preset
from depthfold.training.task import Task, holds_out

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

    The copy is what `merge` takes. The recipe may be the name of a preset. With a `teacher` (usually the original
    network) the task distils. With a run folder, `run`, checkpoints and metrics are kept in its folder "finetuning":
    run again, it continues there, and a finished training is only read. The copy has the last weights, as in the paper,
    or the best on the hold-out set if the recipe has keep="best"; the folder holds both. A task without a hold-out set
    is not scored. `progress` is called as it advances; without one, a terminal shows a bar with the time left.
    """
    if not isinstance(student, nn.Module):
        raise InvalidValue(f"finetune() takes an nn.Module, found {type(student).__name__}; rewrite() returns one.")
    recipe = preset(recipe) if isinstance(recipe, str) else recipe
    folder = None if run is None else _folder(run)
    home = device_of(student)
    trained = copy.deepcopy(student)
    with contextlib.ExitStack() as stack:
        train(
            trained,
            task,
            recipe,
            teacher=teacher,
            split="holdout" if holds_out(task) else None,
            folder=folder,
            about=_about(student),
            device=device,
            tensorboard=tensorboard,
            progress=progress or stack.enter_context(progress_bars()),
        )
    return trained.to(home)


def finetuned(student: nn.Module, run: str | Path) -> nn.Module:
    """A copy of the student with the weights that finetune() left in the run; nothing is trained."""
    folder, trained = _folder(run), copy.deepcopy(student)
    if not (folder / LAST).exists():
        raise CheckpointError(f"The folder {folder} holds no fine-tuning yet.")
    state = load_weights(trained, folder)
    if state.identity.model != _about(student):
        raise CheckpointError(
            f"The folder {folder} holds the fine-tuning of another plan: {state.identity.model or 'unknown'} there, "
            f"{_about(student) or 'no student'} here. Name the folder of this one, or fine-tune it."
        )
    if state.step < state.identity.steps:
        raise CheckpointError(
            f"The fine-tuning in {folder} has come to step {state.step} of {state.identity.steps}. Fine-tune again: it "
            "goes on from there."
        )
    if state.identity.recipe.keep == "best":
        if state.unscored:
            raise CheckpointError(
                f"The fine-tuning in {folder} has taken its {state.step} steps, but not the last score, so that the "
                "best weights are not known. Fine-tune again, which takes it."
            )
        load_weights(trained, folder, "best")
    return trained


def _folder(run: object) -> Path:
    return as_path("The run folder", run, InvalidValue) / FOLDER


def _about(student: nn.Module) -> str:
    """The network and the plan: students of two plans may have the same weights, and are still different networks."""
    try:
        _, parts, _ = student_parts(student)
    except InvalidValue:  # any other network may be fine-tuned, too
        return ""
    plan = Plan(parts.plan.activations, parts.plan.cuts)  # a solved plan also knows what it costs, on some machine
    return f"network {parts.blueprint.network.fingerprint}, plan {json.dumps(encode(plan))}"
