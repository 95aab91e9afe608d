"""Before and after: the original and the merged network, measured and scored side by side."""

from __future__ import annotations

import contextlib
import math
import platform
import shlex
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import nn

from depthfold.backends import Backend, get
from depthfold.backends.registry import describe_target
from depthfold.core import Budget, Environment, Frontier, ImportanceTable, LatencyTable, Profile, SolvedPlan
from depthfold.errors import InvalidValue
from depthfold.latency import profile_all
from depthfold.merging import sketch, verify
from depthfold.progress import Progress, Tick, progress_bars
from depthfold.reporting import Evaluation, Findings, Verified
from depthfold.rewriting import rewrite
from depthfold.store.run_folder import CONFIG
from depthfold.tasks import ClassificationTask
from depthfold.tracing import TracedNetwork
from depthfold.training import Task, device_context, disable_autocast, moved_to, preserve_modes

PACKAGES = ("depthfold", "torch", "numpy", "onnxruntime", "openvino", "tensorrt")


class Examined(TypedDict):
    """The part of the findings that is measured at the end."""

    before: Profile
    after: Profile
    score_before: Evaluation
    score_after: Evaluation
    environment: Environment
    versions: tuple[tuple[str, str], ...]


def inputs_of(task: Task, example_inputs: Any) -> Any:
    """The example inputs, or else an image of the task's size."""
    if example_inputs is not None:
        return example_inputs
    if isinstance(task, ClassificationTask):
        return task.example()
    raise InvalidValue(
        "This task does not say what the model takes. Give it, in the size that it will run in: example_inputs=... in "
        "Python, --input 3x224x224 on the command line."
    )


def findings_of(
    traced: TracedNetwork,
    model: nn.Module,
    student: nn.Module,
    shallow: nn.Module,
    task: Task,
    target: str | Backend,
    budget: Budget,
    *,
    latency: LatencyTable,
    importance: ImportanceTable,
    frontier: Frontier,
    plan: SolvedPlan,
    command: str | None = None,
    progress: Progress | None = None,
) -> Findings:
    """Everything that a report tells of a run: what it was made of, and what is found when both networks are
    examined."""
    verification = verify(student, shallow)
    found = examined(traced, model, shallow, task, target, progress)
    place, chosen_in = describe_target(get(target)), latency.environment
    if chosen_in.differences(found["environment"]):  # the budget is that of the table, wherever it is looked at
        place = f"{chosen_in.runtime or 'another runtime'}, examined in another environment ({place})"
    return Findings(
        title=f"{traced.network.name} at {budget} on {place}",
        network=traced.network,
        latency=latency,
        importance=importance,
        frontier=frontier,
        plan=plan,
        verification=Verified(ok=verification.ok, text=str(verification)),
        command=command,
        **found,
    )


def again(folder: Path) -> str | None:
    """The command that runs a run again, where it was begun by one."""
    return f"depthfold compress --run {shlex.quote(str(folder))}" if (folder / CONFIG).exists() else None


def examined(
    traced: TracedNetwork,
    model: nn.Module,
    shallow: nn.Module,
    task: Task,
    target: str | Backend,
    progress: Progress | None,
) -> Examined:
    """Both networks timed in turns on the target, the original with its batch norms folded, and scored on the test
    set."""
    profiles = before_and_after(traced, shallow, target)
    score_before, score_after = scores(model, shallow, task, progress)
    return Examined(
        before=profiles["before"],
        after=profiles["after"],
        score_before=score_before,
        score_after=score_after,
        environment=profiles["before"].environment,
        versions=(("python", platform.python_version()), *_versions()),
    )


def before_and_after(traced: TracedNetwork, shallow: nn.Module, target: str | Backend) -> dict[str, Profile]:
    """What both networks cost, measured in turns."""
    after = shallow.get_submodule(traced.blueprint.at) if traced.blueprint.at else shallow
    both = {"before": sketch(rewrite(traced, traced.vanilla)), "after": after}
    return profile_all(both, traced.example_tensors(), target)


def scores(
    model: nn.Module, shallow: nn.Module, task: Task, progress: Progress | None = None
) -> tuple[Evaluation, Evaluation]:
    """The scores of both networks on the test set, where trainings run. `progress` is told of every batch of a
    classification, and of every score of another task."""
    turns, what = 1, "scores"
    if isinstance(task, ClassificationTask):
        turns, what = math.ceil(task.count("test") / task.score_batch), "scored batches"
    with contextlib.ExitStack() as stack:
        tick = (progress or stack.enter_context(progress_bars()))(what, 2 * turns, 0)
        return _evaluation(model, task, tick), _evaluation(shallow, task, tick)


def _evaluation(model: nn.Module, task: Task, tick: Tick) -> Evaluation:
    """Of a classification it is a share of so many images; of another task, what it says."""

    def forward_done(*_: object) -> None:  # what a hook returns would take the place of the output
        tick()

    device = device_context().device
    with preserve_modes(model), moved_to(model.eval(), device), disable_autocast(device), torch.no_grad():
        if isinstance(task, ClassificationTask):
            with model.register_forward_hook(forward_done):
                return Evaluation(score=task.score(model, "test") / 100.0, images=task.count("test"))
        score = float(task.score(model, "test"))
    tick()
    return Evaluation(score=score, metric="score", share=False)


def _versions() -> tuple[tuple[str, str], ...]:
    found = []
    for package in PACKAGES:
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:
            continue
    return tuple(found)
