"""What the settings name, made: the model, the task, and what the model takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from depthfold.core import ImportanceTable
from depthfold.errors import DepthfoldError, InvalidValue, TableError
from depthfold.importance.ledger import digest
from depthfold.pipeline.checks import MISSING
from depthfold.pipeline.config_file import keep_first
from depthfold.pipeline.data import task_of
from depthfold.pipeline.examination import inputs_of
from depthfold.pipeline.models import model_of
from depthfold.pipeline.settings import Settings, given
from depthfold.progress import Progress
from depthfold.solver.fit import check_importance
from depthfold.store import RunFolder
from depthfold.tracing import TracedNetwork, trace
from depthfold.training.task import Task


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """What a command works on. The task is None where the settings name no data. `progress` is told how far each
    stage is; without one, a terminal shows bars."""

    settings: Settings
    model: nn.Module
    inputs: Tensor
    task: Task | None
    progress: Progress | None = None

    @classmethod
    def of(cls, settings: Settings, progress: Progress | None = None) -> Subject:
        size = settings.image[1:] if settings.image else None
        task = task_of(settings.data, size) if settings.data else None
        model = model_of(given(settings.model, "model"), settings.weights)
        return cls(settings=settings, model=model, inputs=_inputs(settings, task), task=task, progress=progress)

    @property
    def folder(self) -> RunFolder:
        return RunFolder.open(self.settings.folder)

    @property
    def target(self) -> str:
        return given(self.settings.target, "target")

    def needed_task(self) -> Task:
        if self.task is None:
            raise InvalidValue(f"{MISSING['data']}.")
        return self.task

    def seen(self) -> TracedNetwork:
        """The network, for a command that only looks: it writes nothing. The run, if there is one, must be of this
        network."""
        network = trace(self.model, self.inputs, ignore=self.settings.ignore, at=self.settings.at)
        if self.settings.run is not None:
            RunFolder(Path(self.settings.run)).knows(network)
        return network

    def traced(self, importance: ImportanceTable | None = None) -> TracedNetwork:
        """The network; where there is a run, its folder is this network's from now on. An importance table that is
        not of this network is refused before that."""
        network = self.seen()
        if importance is not None:
            check_importance(importance, network)
        if self.settings.run is not None:
            self.folder.claim(network)
            keep_first(self.settings)
        return network

    def weighed(self, importance: ImportanceTable | None = None) -> TracedNetwork:
        """The same, for stages that depend on the weights: the run's folder is theirs, too."""
        network = self.traced(importance)
        self.folder.claim_weights(digest(network))
        return network


def given_importance(settings: Settings) -> ImportanceTable | None:
    """The importance table that the settings name: a JSON document, or CSV with the published columns."""
    if settings.importance is None:
        return None
    if settings.importance.endswith(".csv"):
        return ImportanceTable.read_csv(settings.importance)
    try:
        return ImportanceTable.loads(Path(settings.importance).read_text(encoding="utf-8", errors="replace"))
    except DepthfoldError as error:
        raise TableError(f"The importance table {settings.importance} cannot be read: {error}") from error


def _inputs(settings: Settings, task: Task | None) -> Tensor:
    """A batch of the size that was asked for; without one, of an image of the task."""
    if settings.image is not None:
        return torch.randn(settings.batch, *settings.image, generator=torch.Generator().manual_seed(0))
    if task is None:
        raise InvalidValue(
            "What the model takes is not known. Give --input 3x224x224 (channels, height, width), or --data, whose "
            "images say it."
        )
    example: Tensor = inputs_of(task, None)
    return example.repeat(settings.batch, 1, 1, 1) if settings.batch > 1 else example
