"""What a run holds already, for the stages that build on it. Where it is missing, an error says what makes it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from torch import nn

from depthfold.core import SolvedPlan
from depthfold.errors import CheckpointError, RunError
from depthfold.exporting import load
from depthfold.finetuning import finetuned
from depthfold.pipeline.choice import Choice
from depthfold.pipeline.recipes import recipe_of
from depthfold.pipeline.results import student_folder
from depthfold.pipeline.settings import Settings
from depthfold.pipeline.subject import Subject
from depthfold.rewriting import rewrite
from depthfold.store import RunFolder
from depthfold.store.run_folder import CHOICE, RESULT
from depthfold.tracing import TracedNetwork


def has_result(settings: Settings) -> bool:
    return settings.run is not None and (Path(settings.run) / RESULT).exists()


def result_of(subject: Subject) -> nn.Module:
    """The merged network of the run."""
    if not has_result(subject.settings):
        run = subject.settings.run
        raise RunError(f"The run folder {run} has no {RESULT} yet. Run: {how('merge', subject.settings)}")
    return load(subject.folder.path / RESULT, subject.model, subject.inputs)


def how(command: str, settings: Settings) -> str:
    """The command for this run, as a shell takes it."""
    return f"depthfold {command} --run {shlex.quote(os.path.normpath(settings.folder))}"


def choice_of(settings: Settings) -> Choice:
    """The plan that was chosen in the run."""
    return RunFolder.at(settings.folder).need(CHOICE, Choice, f"{how('solve', settings)} --budget 60%")


def student_place(subject: Subject, plan: SolvedPlan) -> Path:
    """Where the student of this plan, by the recipe of the settings, is trained."""
    settings = subject.settings
    return student_folder(subject.folder, plan, recipe_of(settings.recipe), distil=settings.distil)


def trained_student(subject: Subject, network: TracedNetwork, plan: SolvedPlan) -> nn.Module:
    """The student of the plan with the weights that fine-tuning left."""
    try:
        return finetuned(rewrite(network, plan), student_place(subject, plan))
    except CheckpointError as error:
        raise CheckpointError(f"{error} Run: {how('finetune', subject.settings)}") from error
