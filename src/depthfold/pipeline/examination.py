"""Before and after: the original and the merged network, measured and scored side by side."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypedDict

import torch
from torch import nn

from depthfold.backends import Backend
from depthfold.core import Environment, Profile
from depthfold.errors import InvalidValue
from depthfold.latency import profile_all
from depthfold.latency.candidates import network_inputs, shallow_of
from depthfold.reporting import Evaluation
from depthfold.tracing import TracedNetwork
from depthfold.training.classification import ClassificationTask
from depthfold.training.task import Task

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
        "compress() needs example_inputs for this task: what the model takes, in the size that it will run in."
    )


def examined(
    network: TracedNetwork, model: nn.Module, shallow: nn.Module, task: Task, target: str | Backend
) -> Examined:
    """Both networks timed in turns on the target, the original with its batch norms folded, and scored on the test
    set."""
    after = shallow.get_submodule(network.at) if network.at else shallow
    both = {"before": shallow_of(network, network.vanilla), "after": after}
    profiles = profile_all(both, network_inputs(network), target)
    return Examined(
        before=profiles["before"],
        after=profiles["after"],
        score_before=evaluation(model, task),
        score_after=evaluation(shallow, task),
        environment=profiles["before"].environment,
        versions=(("python", platform.python_version()), *_versions()),
    )


def evaluation(model: nn.Module, task: Task) -> Evaluation:
    """The score on the test set. Of a classification it is a share of so many images; of another task, what it says."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            score = float(task.score(model.eval(), "test"))
    finally:
        for module, mode in modes:
            module.training = mode
    if isinstance(task, ClassificationTask):
        return Evaluation(score=score / 100.0, images=task.count("test"))
    return Evaluation(score=score, metric="score", share=False)


def _versions() -> tuple[tuple[str, str], ...]:
    found = []
    for package in PACKAGES:
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:
            continue
    return tuple(found)
