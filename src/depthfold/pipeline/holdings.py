"""What a run holds already, for the stages that build on it. Where it is missing, an error says what makes it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from torch import nn

from depthfold.core import Budget, SolvedPlan
from depthfold.errors import CheckpointError, RunError
from depthfold.exporting import load
from depthfold.finetuning import finetuned
from depthfold.pipeline.artefacts import chosen_plan, student_folder
from depthfold.pipeline.recipes import recipe_of
from depthfold.pipeline.settings import Settings
from depthfold.pipeline.subject import Subject
from depthfold.rewriting import rewrite
from depthfold.store import RunFolder
from depthfold.store.run_folder import PLAN, RESULT, STUDENTS
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
    made_from = folder.made_from(RESULT)
    if made_from is None:
        raise RunError(f"{here} was not finished. {merge}")
    if (plan := folder.read(PLAN, SolvedPlan)) is not None:
        if made_from["plan"] != str(plan.plan):
            raise RunError(f"{here} is of another plan than the one that was chosen since. {merge}")
        newest = student_place(settings, plan)
        if newest.exists() and newest.name != made_from["student"]:
            raise RunError(f"{here} was not merged from the student that was fine-tuned last, {newest}. {merge}")
    return folder.path / STUDENTS / made_from["student"]


def how(command: str, settings: Settings) -> str:
    """The command for this run, as a shell takes it."""
    return f"depthfold {command} --run {shlex.quote(os.path.normpath(settings.folder))}"


def choice_of(settings: Settings) -> tuple[SolvedPlan, Budget]:
    """Return the plan that was chosen in the run, and its budget."""
    return chosen_plan(RunFolder.at(settings.folder), f"{how('solve', settings)} --budget 60%")


def student_place(settings: Settings, plan: SolvedPlan) -> Path:
    """Where the student of this plan, by the recipe of the settings, is trained."""
    return student_folder(RunFolder.at(settings.folder), plan, recipe_of(settings.recipe), distil=settings.distil)


def trained_student(network: TracedNetwork, plan: SolvedPlan, place: Path, settings: Settings) -> nn.Module:
    """The student of the plan with the weights that fine-tuning left in the folder."""
    try:
        return finetuned(rewrite(network, plan), place)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Run: {how('finetune', settings)}") from error
