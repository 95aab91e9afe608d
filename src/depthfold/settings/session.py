"""What the settings name, made: the model, the task, and what the model takes."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from depthfold.core import ImportanceTable
from depthfold.core.coerce import as_text
from depthfold.core.wording import amount
from depthfold.errors import DataError, DepthfoldError, InvalidValue, TableError, lacks_memory
from depthfold.importance.ledger import digest
from depthfold.pipeline.config_file import keep_first
from depthfold.pipeline.data import expect_size, task_of
from depthfold.pipeline.examination import inputs_of
from depthfold.pipeline.models import model_of, warn_if_untrained
from depthfold.pipeline.settings import Settings, given
from depthfold.progress import Progress
from depthfold.solver.fit import check_importance
from depthfold.store import RunFolder
from depthfold.tracing import TracedNetwork, trace
from depthfold.training.task import Task

CONTAINER = Path("/sys/fs/cgroup/memory.max")  # of control groups, version 2, as a container sees its own
FLOAT = 4  # bytes of a number: example inputs are in float32


# No slots: what is made at first use is kept in the dictionary of the object.
@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """What a command works on. `progress` is told how far each stage is; without one, a terminal shows bars.

    The task is made when a stage asks for it: most of them do well without, and a run outlives its data."""

    settings: Settings
    model: nn.Module
    progress: Progress | None = None

    @classmethod
    def of(cls, settings: Settings, progress: Progress | None = None) -> Subject:
        model = model_of(given(settings.model, "model"), settings.weights)
        return cls(settings=settings, model=model, progress=progress)

    @cached_property
    def inputs(self) -> Tensor:
        """A batch of the size that was asked for; without one, of an image of the task."""
        image, batch = self.settings.image, self.settings.batch
        if image is not None:
            with _room_for(batch, image):
                return torch.randn(batch, *image, generator=torch.Generator().manual_seed(0))
        if self.settings.data is None:
            raise InvalidValue(
                "What the model takes is not known. Give --input 3x224x224 (channels, height, width), or --data, whose "
                "images say it."
            )
        try:
            example: Tensor = inputs_of(self.task, None)
        except DataError as error:
            raise DataError(f"{error} If only the size of its images is needed, --input 3x224x224 says it.") from error
        with _room_for(batch, example.shape[1:]):
            return example.repeat(batch, 1, 1, 1) if batch > 1 else example

    @cached_property
    def task(self) -> Task:
        """What the network is trained and scored on."""
        size = self.settings.image[1:] if self.settings.image else None
        return task_of(as_text("The setting 'data'", given(self.settings.data, "data"), InvalidValue), size)

    @property
    def folder(self) -> RunFolder:
        return RunFolder.open(self.settings.folder)

    @property
    def target(self) -> str:
        return given(self.settings.target, "target")

    def needed_task(self) -> Task:
        """The task, for stages that train or score: its images must be those that the network takes."""
        if (image := self.settings.image) is not None:
            expect_size(self.task, image[1:])
        warn_if_untrained(given(self.settings.model, "model"), self.settings.weights)
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


@contextlib.contextmanager
def _room_for(batch: int, image: Sequence[int]) -> Iterator[None]:
    """Refuse inputs that alone take more than the machine has, before they are made: a system may promise such memory,
    and kill whoever uses it. What the system refuses by itself is told in the same words."""
    size = FLOAT * batch * math.prod(image)
    memory, whose = _memory()
    asked = f"A batch of {batch:,} inputs of {'x'.join(map(str, image))} takes {amount(size)}B"
    less = "Give --batch as many images as the network will be given at a time, and --input their size."
    if size > memory:
        has = f"this {whose} has {amount(memory)}B of memory in all, for the network and all else, too"
        raise InvalidValue(f"{asked}, and {has}. {less}")
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        raise InvalidValue(
            f"{asked}, and the system refuses that: others use its memory, or it has a limit. {less}"
        ) from error


def _memory() -> tuple[int, str]:
    """How many bytes there are for us, and whether by the machine or by the limit of a container."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = CONTAINER.read_text(encoding="ascii").strip()
    except OSError:  # no container, or none that has this file
        limit = ""
    if limit.isdecimal() and int(limit) < machine:  # without a limit it says "max"
        return int(limit), "container"
    return machine, "machine"


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
