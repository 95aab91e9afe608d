"""evaluate(): measure and score the original and the merged network side by side."""

from __future__ import annotations

import contextlib
import math
import platform
import shlex
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import nn

from depthfold.backends import Backend, describe_target, disable_autocast, get
from depthfold.core import Budget, Frontier, ImportanceTable, LatencyTable, Profile, Profiles, SolvedPlan
from depthfold.finetuning import FOLDER as FINETUNING
from depthfold.latency import profile_all
from depthfold.merging import sketch, verify
from depthfold.pipeline import artefacts
from depthfold.progress import Progress, Tick, note, progress_bars
from depthfold.reporting import Evaluation, Findings, TrainingPoint, Verified
from depthfold.rewriting import rewrite
from depthfold.store import RunFolder
from depthfold.store.run_folder import CONFIG, RESULT, STUDENTS
from depthfold.support.text import count
from depthfold.tasks import ClassificationTask
from depthfold.tracing import TracedNetwork
from depthfold.training import Split, Task, device_context, moved_to, preserve_modes, read_curve, score_of

PACKAGES = ("depthfold", "torch", "numpy", "onnxruntime", "openvino", "tensorrt")


class ChanceAccuracy(UserWarning):
    """The original is no better than chance, so that nothing that is learnt from it is worth the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Networks:
    """The four forms of one network: traced, original, rewritten and trained, and merged."""

    traced: TracedNetwork
    model: nn.Module
    student: nn.Module
    shallow: nn.Module


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A plan, and the tables, the frontier and the budget that it was found with."""

    latency: LatencyTable
    importance: ImportanceTable
    frontier: Frontier
    plan: SolvedPlan
    budget: Budget


def evaluate(
    networks: Networks,
    solution: Solution,
    task: Task,
    target: str | Backend,
    *,
    folder: Path,
    progress: Progress | None = None,
) -> Findings:
    """Verify the merged network, measure and score it and the original, and return everything that a report shows.

    Profiles of the run are reused. The scores are always computed, because the test data may have changed.
    """
    traced, run = networks.traced, RunFolder.at(folder)
    chosen_in = artefacts.chosen_in(run)
    verification = verify(networks.student, networks.shallow)

    def measure() -> Profiles:
        return Profiles(**before_and_after(traced, networks.shallow, target, progress))

    profiles = artefacts.make_profiles(run, traced, solution.plan.plan, target, measure)
    score_before, score_after = scores(networks.model, networks.shallow, task, progress)
    # A run that a command started can be resumed with this one.
    command = f"depthfold compress --run {shlex.quote(str(folder))}" if (folder / CONFIG).exists() else None
    here, where = profiles.before.environment, describe_target(get(target))
    notes: tuple[str, ...] = ()
    if elsewhere := "; ".join(chosen_in.differences(here)):
        where = f"{chosen_in.runtime or 'another runtime'}, evaluated in another environment ({where})"
        notes = (f"The plan met its budget in another environment than this report's ({elsewhere}).",)
    return Findings(
        title=f"{traced.network.name} at {solution.budget} on {where}", network=traced.network,
        latency=solution.latency, importance=solution.importance, frontier=solution.frontier, plan=solution.plan,
        verification=Verified(ok=verification.ok, text=str(verification)), command=command,
        before=profiles.before, after=profiles.after, score_before=score_before, score_after=score_after,
        environment=here, versions=(("python", platform.python_version()), *_versions()),
        training=training_curve(folder), notes=notes,
    )  # fmt: skip


def training_curve(folder: Path) -> tuple[TrainingPoint, ...]:
    """Return the curve of the fine-tuning that made the result of the run; empty if its metrics are missing."""
    made_from = RunFolder.at(folder).made_from(RESULT)
    if made_from is None:
        return ()
    lines = read_curve(folder / STUDENTS / made_from["student"] / FINETUNING)
    return tuple(TrainingPoint(step=line["step"], loss=line["loss"], score=line["score"]) for line in lines)


def before_and_after(
    traced: TracedNetwork, shallow: nn.Module, target: str | Backend, progress: Progress | None = None
) -> dict[str, Profile]:
    """Measure both networks alternately on the target, the original with its batch norms folded."""
    after = shallow.get_submodule(traced.blueprint.at) if traced.blueprint.at else shallow
    both = {"before": sketch(rewrite(traced, traced.network.vanilla)), "after": after}
    with contextlib.ExitStack() as stack:
        shown = progress or stack.enter_context(progress_bars("Before and after"))
        return profile_all(both, traced.example_tensors(), target, progress=shown)


def scores(
    model: nn.Module, shallow: nn.Module, task: Task, progress: Progress | None = None
) -> tuple[Evaluation, Evaluation]:
    """Score both networks on the test set, on the training device.

    `progress` counts the batches of a classification, or the scores of another task.
    """
    steps, what = 1, "scores"
    if isinstance(task, ClassificationTask):
        steps, what = math.ceil(task.count("test") / task.score_batch), "scored batches"
    with contextlib.ExitStack() as stack:
        tick = (progress or stack.enter_context(progress_bars("Scores before and after")))(what, 2 * steps, 0)
        return _evaluation(model, task, tick), _evaluation(shallow, task, tick)


def score_original(model: nn.Module, task: Task, progress: Progress | None = None) -> None:
    """Score a classifier on the hold-out set before anything is trained. Warn if it is no better than chance.

    A task of the user's own is not scored: what chance is there is not known.
    """
    if not isinstance(task, ClassificationTask) or not task.has_holdout:
        return
    with contextlib.ExitStack() as stack:
        tick = (progress or stack.enter_context(progress_bars("The original")))("score of the original", 1, 0)
        found = _evaluation(model, task, lambda: None, "holdout")
        note(tick, lambda: f"{found} on the {found.split}")
        tick()
    if task.is_chance(100.0 * found.score, "holdout"):
        images = count(task.count("holdout"), "image")
        warnings.warn(
            f"The original scores {found} on the {images} of the {found.split}, which is no better than chance for "
            f"{task.classes} classes. Check its weights, the normalisation and the order of the classes.",
            ChanceAccuracy,
            stacklevel=4,  # the caller of compress()
        )


def _evaluation(model: nn.Module, task: Task, tick: Tick, split: Split = "test") -> Evaluation:
    """Return the share of right classifications; for another task, its own score."""

    def forward_done(*_: object) -> None:  # a value that a hook returns replaces the output
        tick()

    device = device_context().device
    with preserve_modes(model), moved_to(model.eval(), device), disable_autocast(device), torch.no_grad():
        if isinstance(task, ClassificationTask):
            with model.register_forward_hook(forward_done):
                right, named = task.score(model, split) / 100.0, {"test": "test set", "holdout": "hold-out set"}
                return Evaluation(score=right, split=named[split], images=task.count(split))
        score = score_of(task, model, split)
    tick()
    return Evaluation(score=score, metric="score", share=False)


def _versions() -> tuple[tuple[str, str], ...]:
    found = []
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found.append((package, version(package)))
    return tuple(found)
