"""A session: the model, the data, the example inputs and the run folder that the settings name."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from depthfold.core import Budget, ImportanceTable, LatencyTable, require_moves
from depthfold.errors import DataError, DepthfoldError, InvalidValue, TableError, TraceError
from depthfold.pipeline.preflight import check_drops, check_latency, inputs_of
from depthfold.progress import Progress
from depthfold.settings.config_file import keep
from depthfold.settings.data import check_image_size, make_task
from depthfold.settings.models import make_model, usual_input, warn_if_untrained
from depthfold.settings.settings import Settings
from depthfold.solver import check_importance
from depthfold.store import RunFolder
from depthfold.support.text import amount, count
from depthfold.tracing import TracedNetwork, device_of, dtype_of, trace
from depthfold.training import Task, preserve_modes

FLOAT32 = 4  # bytes
Table = TypeVar("Table", ImportanceTable, LatencyTable)


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots, because of the cached properties
class Session:
    """The objects that a command works with, created on first use. Without `progress`, a terminal shows bars.

    An existing run folder keeps these settings instead of its own if `keeps` is True.

    Few stages need the data, so most commands still work after the data are deleted.
    """

    settings: Settings
    progress: Progress | None = None
    keeps: bool = False

    @cached_property
    def model(self) -> nn.Module:
        """The model with its weights."""
        return make_model(self.settings.need("model"), self.settings.weights)

    @cached_property
    def image(self) -> tuple[int, int, int] | None:
        """Channels, height and width of an image, or None if the data decide.

        Without --input, a model of torchvision or timm gets images of its usual size, unless all images of the data
        have a size of their own: those of a folder seldom do.
        """
        given, data = self.settings.image, self.settings.data
        if given is not None or not (data is None or data.startswith("imagefolder:")):
            return given
        return usual_input(self.settings.need("model"), self.settings.weights, self.model)

    @cached_property
    def inputs(self) -> Tensor:
        """A batch of noise of the size of the images, or of one image of the task if it decides the size."""
        image, batch = self.image, self.settings.batch
        if image is not None:
            with _allocating(batch, image):
                return torch.randn(batch, *image, generator=torch.Generator().manual_seed(0))
        if self.settings.data is None:
            raise InvalidValue(
                "The size of the model's inputs is not known. Give --input 3x224x224 (channels, height, width), or "
                "--data, whose images have that size."
            )
        try:
            example: Tensor = inputs_of(self.task, None)
        except DataError as error:
            raise DataError(f"{error} If only the size of the images is needed, give --input 3x224x224.") from error
        with _allocating(batch, example.shape[1:]):
            return example.repeat(batch, 1, 1, 1) if batch > 1 else example

    @cached_property
    def task(self) -> Task:
        """The task on which networks are trained and scored."""
        image = self.image
        return make_task(self.settings.need("data"), None if image is None else image[1:])

    @cached_property
    def importance(self) -> ImportanceTable | None:
        """The importance table that the settings name: JSON, or CSV with the published columns."""
        path = self.settings.importance
        return None if path is None else _read_table(ImportanceTable, "importance", path)

    @cached_property
    def latency(self) -> LatencyTable | None:
        """The latency table that the settings name, in the same formats."""
        path = self.settings.latency
        return None if path is None else _read_table(LatencyTable, "latency", path)

    @property
    def folder(self) -> RunFolder:
        """The run folder; it is created if it does not exist."""
        return RunFolder.open(self.settings.need("run"))

    @property
    def target(self) -> str:
        """The runtime to measure on."""
        return self.settings.need("target")

    @property
    def budget(self) -> Budget:
        """The latency to reach."""
        return Budget.parse(self.settings.need("budget"))

    def training_task(self) -> Task:
        """Return the task for a stage that trains or scores. Its images must have the size of the inputs."""
        if (image := self.image) is not None:
            check_image_size(self.task, image[1:])
        warn_if_untrained(self.settings.need("model"), self.settings.weights)
        return self.task

    def trace(self) -> TracedNetwork:
        """Trace the model and write nothing. Raise RunError if the run folder belongs to another network."""
        with self.checking_channels():
            traced = trace(self.model, self.inputs, ignore=self.settings.ignore, at=self.settings.submodule)
        if self.settings.run is not None:
            RunFolder(Path(self.settings.run)).knows(traced.network)
        return traced

    @contextlib.contextmanager
    def checking_channels(self) -> Iterator[None]:
        """Raise InvalidValue in place of an error if the model takes images, but not of the channels of --input."""
        try:
            yield
        except (DataError, TraceError) as error:
            given = self.settings.image
            if given is None or (fits := _with_channels(self.model, given)) is None:
                raise
            first = " (channels first)" if fits == (given[2], *given[:2]) else ""
            raise InvalidValue(
                f"The model does not take the inputs of --input {self.settings.input}: they have "
                f"{count(given[0], 'channel')}, and its first convolution takes {fits[0]}. Give --input with "
                f"{count(fits[0], 'channel')}: --input {'x'.join(map(str, fits))}{first}."
            ) from error

    def claim(
        self, importance: ImportanceTable | None = None, latency: LatencyTable | None = None, *, weights: bool = True
    ) -> TracedNetwork:
        """Trace the model and assign the run folder to the network and, unless `weights` is False, to its weights.

        An importance table of another network or other moves, or a latency table of another network or target, is
        refused first. The run folder then keeps the settings, so that --run alone resumes an interrupted command.
        """
        traced = self.trace()
        if latency is not None:
            check_latency(latency, traced, self.target)
        if importance is not None:
            check_importance(importance, traced.network)
        if importance is not None and importance is self.importance:
            check_drops(importance, traced.network, self.settings.space, require_moves(self.settings.moves))
        self.folder.claim(traced.network)
        if weights:
            self.folder.claim_weights(traced.weights_digest)
        keep(self.settings, if_new=not self.keeps)
        return traced


def _with_channels(model: nn.Module, given: tuple[int, int, int]) -> tuple[int, int, int] | None:
    """Return the input size with the channels of the first convolution, if the model takes that and it is another.

    If only the order of the three numbers is wrong, return them in the right order.
    """
    wanted = next((part.in_channels for part in model.modules() if isinstance(part, nn.Conv2d)), given[0])
    if wanted == given[0]:
        return None
    fits = (wanted, *(given[:2] if given[2] == wanted else given[1:]))
    try:
        with preserve_modes(model), torch.no_grad():
            model.eval()(torch.zeros(1, *fits, device=device_of(model), dtype=dtype_of(model)))
    except Exception:  # noqa: BLE001 - any error of the user's code: the channels are not the only fault
        return None
    return fits


def _read_table(kind: type[Table], name: str, path: str) -> Table:
    if path.endswith(".csv"):
        return kind.read_csv(path)
    try:
        return kind.loads(Path(path).read_text(encoding="utf-8", errors="replace"))
    except DepthfoldError as error:
        raise TableError(f"The {name} table {path} cannot be read: {error}") from error


@contextlib.contextmanager
def _allocating(batch: int, image: Sequence[int]) -> Iterator[None]:
    """Raise InvalidValue if the inputs cannot be allocated."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        size = amount(FLOAT32 * batch * math.prod(image))
        raise InvalidValue(
            f"A batch of {batch:,} inputs of {'x'.join(map(str, image))} takes {size}B, which cannot be allocated. "
            "Give a smaller --batch, or the real size of an image as --input."
        ) from error
