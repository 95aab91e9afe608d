"""What a run holds already, for the stages that build on it. Where it is missing, an error says what makes it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from torch import nn

from depthfold.core import SolvedPlan
from depthfold.errors import CheckpointError, RunError
from depthfold.exporting import load
from depthfold.exporting.load import read_config
from depthfold.finetuning import finetuned
from depthfold.pipeline.choice import Choice
from depthfold.pipeline.recipes import recipe_of
from depthfold.pipeline.results import student_folder
from depthfold.pipeline.settings import Settings
from depthfold.pipeline.subject import Subject
from depthfold.rewriting import rewrite
from depthfold.store import RunFolder
from depthfold.store.run_folder import CHOICE, RESULT, RESULT_OF, STUDENTS
from depthfold.tracing import TracedNetwork


def has_result(settings: Settings) -> bool:
    return settings.run is not None and (Path(settings.run) / RESULT).exists()


def result_of(subject: Subject) -> nn.Module:
    """The merged network of the run."""
    merged_from(subject.settings)
    return load(subject.folder.path / RESULT, subject.model, subject.inputs)


def merged_from(settings: Settings) -> Path:
    """The folder of the student that the result was merged from. A result of another plan than the one that is chosen
    now, or of another student than the one that was fine-tuned for it since, is refused."""
    folder, merge = RunFolder.at(settings.folder), f"Run: {how('merge', settings)}"
    if not has_result(settings):
        raise RunError(f"The run folder {settings.run} has no {RESULT} yet. {merge}")
    here = f"The result in the run folder {settings.run}"
    if (choice := folder.read(CHOICE, Choice)) is not None:
        plan, now = read_config(folder.path / RESULT).plan, choice.plan
        if (plan.activations, plan.cuts) != (now.activations, now.cuts):
            raise RunError(f"{here} is of another plan than the one that was chosen since. {merge}")
        newest = student_place(settings, now)
        if newest.exists() and newest.name != folder.read_line(RESULT_OF):
            raise RunError(f"{here} was not merged from the student that was fine-tuned last, {newest}. {merge}")
    if not (name := folder.read_line(RESULT_OF)):
        raise RunError(f"{here} does not say which student it was merged from. {merge}")
    return folder.path / STUDENTS / name


def how(command: str, settings: Settings) -> str:
    """The command for this run, as a shell takes it."""
    return f"depthfold {command} --run {shlex.quote(os.path.normpath(settings.folder))}"


def choice_of(settings: Settings) -> Choice:
    """The plan that was chosen in the run."""
    return RunFolder.at(settings.folder).need(CHOICE, Choice, f"{how('solve', settings)} --budget 60%")


def student_place(settings: Settings, plan: SolvedPlan) -> Path:
    """Where the student of this plan, by the recipe of the settings, is trained."""
    return student_folder(RunFolder.at(settings.folder), plan, recipe_of(settings.recipe), distil=settings.distil)


def trained_student(traced: TracedNetwork, plan: SolvedPlan, place: Path, settings: Settings) -> nn.Module:
    """The student of the plan with the weights that fine-tuning left in the folder."""
    try:
        return finetuned(rewrite(traced, plan), place)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Run: {how('finetune', settings)}") from error
