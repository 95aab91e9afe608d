"""Checkpoints: the folder of a training run, with its last and best weights and everything needed to resume.

A checkpoint is one safetensors file with tensors and a JSON document. The document is in the metadata of the file, so
tensors and document always belong to the same step. The file is written to a temporary name and renamed, so a kill at
any time leaves the previous one intact. A digest of the contents detects damage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from depthfold.core import Document
from depthfold.errors import CheckpointError, InvalidValue
from depthfold.store import differences, lock, put_in_place
from depthfold.support.digest import digest
from depthfold.support.document import encode
from depthfold.support.optional import load
from depthfold.tracing import digest_tensors
from depthfold.tracing.weights import weights
from depthfold.training.device import DeviceContext
from depthfold.training.metrics import Metrics, Point
from depthfold.training.recipe import Recipe
from depthfold.training.stepper import Stepper, copy_into, due
from depthfold.training.task import Task, task_name

LAST, BEST = "last.safetensors", "best.safetensors"
_DOCUMENT, _DIGEST = "depthfold", "digest"  # in the metadata
_ADVICE = "Restore it, or delete it to start again."


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The inputs of a training run. Two runs with equal inputs are the same run.

    `model` describes what the weights do not show, for example the plan of a student; `shapes`, `weights` and part of
    `teacher` are digests.
    """

    recipe: Recipe
    steps: int
    seed: int
    split: str | None
    model: str
    shapes: str
    weights: str
    task: str
    teacher: str | None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        task: Task,
        recipe: Recipe,
        *,
        teacher: nn.Module | None,
        steps: int,
        seed: int,
        split: str | None,
        about: str,
    ) -> Identity:
        """Return the identity of a training run that starts from the current weights of the model."""
        tensors = weights(model)
        return cls(
            recipe=recipe,
            steps=steps,
            seed=seed,
            split=split,
            model=about,
            shapes=digest(sorted((name, [*tensor.shape], str(tensor.dtype)) for name, tensor in tensors.items())),
            weights=digest_tensors(tensors),
            task=task_name(task),
            teacher=None if teacher is None else _name_of(teacher),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class State(Document):
    """The progress of a training run. `pending` are the losses that the next mean starts with; `scale` and `growth`
    belong to the scaler of float16."""

    FORMAT: ClassVar[str] = "depthfold.checkpoint"
    VERSION: ClassVar[int] = 3

    identity: Identity
    step: int
    seconds: float
    loss: float
    pending: tuple[float, ...] = ()
    curve: tuple[Point, ...] = ()
    best: Point | None = None
    scale: float | None = None
    growth: int = 0

    @property
    def unscored(self) -> bool:
        """True if the score after its step is missing: the task's score failed, or the process was killed first."""
        identity = self.identity
        wanted = identity.split is not None and due(identity.recipe.evaluate, self.step, identity.steps)
        return wanted and (not self.curve or self.curve[-1].step < self.step)


class Checkpoints:
    """The checkpoints of one training run in a folder. All processes call the methods; the main process writes."""

    def __init__(self, folder: str | Path, context: DeviceContext, tensorboard: bool) -> None:
        self.folder, self._context, self._tensorboard = Path(folder), context, tensorboard
        self._metrics: Metrics | None = None  # of the first process

    @contextlib.contextmanager
    def resumed(self, identity: Identity, stepper: Stepper) -> Iterator[State | None]:
        """Lock the folder, and load its last checkpoint into the stepper if it has one of the same training run."""
        with contextlib.ExitStack() as stack:
            found = self._context.run_on_main(lambda: self._find(identity, stepper, stack))
            if found is None:
                yield None
                return
            state, names = found
            if not self._context.is_main:
                stepper.allocate_momentum(names)
            self._context.broadcast(stepper.tensors().values())
            if state.scale is not None:
                stepper.scaler.load_state_dict(
                    stepper.scaler.state_dict() | {"scale": state.scale, "_growth_tracker": state.growth}
                )
            yield state

    def log(self, line: dict[str, Any]) -> None:
        def write() -> None:
            if self._metrics is not None:
                self._metrics.log(line)

        self._context.run_on_main(write)

    def save(self, state: State, stepper: Stepper) -> None:
        """Write everything needed to resume. A new best checkpoint comes first, because the last one refers to it."""

        def write() -> None:
            document = state.dumps()
            if self._metrics is not None:
                self._metrics.sync()
            if state.best is not None and state.best.step == state.step:
                write_checkpoint(self.folder / BEST, document, stepper.scored_weights())
            write_checkpoint(self.folder / LAST, document, stepper.tensors())

        self._context.run_on_main(write)

    def put_best(self, model: nn.Module) -> Point | None:
        """Load the weights of the best score into the model, and return that point."""
        state = self._context.run_on_main(lambda: load_weights(model, self.folder, "best"))
        self._context.broadcast(weights(model).values())
        return state.best

    def _find(
        self, identity: Identity, stepper: Stepper, stack: contextlib.ExitStack
    ) -> tuple[State, tuple[str, ...]] | None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be written: {error.strerror}. Use another folder.") from error
        stack.enter_context(lock(self.folder, CheckpointError))
        found = _read_state(self.folder / LAST) if (self.folder / LAST).exists() else None
        if found is not None and (others := "; ".join(differences(encode(found[0].identity), encode(identity)))):
            raise CheckpointError(
                f"The folder {self.folder} holds another training run ({others}). Use another folder, or delete it to "
                "start again."
            )
        # The line of a step includes its score. If the score is missing, the line of that step is written again.
        lines = found[0].step - found[0].unscored if found else 0
        self._metrics = Metrics(self.folder, lines, self._tensorboard)
        stack.callback(self._metrics.close)
        if found is None:
            return None
        state, tensors = found
        stepper.allocate_momentum(tensors)
        copy_into(stepper.tensors(), tensors)
        return state, tuple(tensors)


def load_weights(model: nn.Module, folder: str | Path, which: Literal["last", "best"] = "last") -> State:
    """Load the last or best weights of a folder into the model and return their state.

    These are the averaged weights if the recipe has an average.
    """
    path = Path(folder) / (LAST if which == "last" else BEST)
    state, tensors = _read_state(path)
    if which == "last":
        prefix = "model." if state.identity.recipe.ema is None else "average."
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    live = weights(model)
    if {name: t.shape for name, t in live.items()} != {name: t.shape for name, t in tensors.items()}:
        raise CheckpointError(
            f"The weights in {path} are of another model: their names or shapes differ. Load them into the model that "
            "was trained."
        )
    copy_into(live, tensors)
    return state


def write_checkpoint(path: Path, document: str, tensors: Mapping[str, Tensor]) -> None:
    """Write the file. An existing one is replaced."""
    save_file = load("safetensors.torch", "train").save_file
    # Copies, each in its own memory: safetensors refuses tensors that share memory or are not contiguous.
    kept = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    metadata = {_DOCUMENT: document, _DIGEST: digest_tensors(kept, document)}
    try:
        with put_in_place(path) as partial:
            save_file(kept, partial, metadata)
    except (OSError, _safetensors_error()) as error:
        raise CheckpointError(
            f"The checkpoint {path} cannot be written: {error}. Check the folder and its free space, or use another; "
            "the checkpoint before this one, if any, is unchanged."
        ) from error


def read_checkpoint(path: Path) -> tuple[str, dict[str, Tensor]]:
    """Return the document and the tensors, on the CPU. Raise CheckpointError if the file is damaged."""
    safe_open = load("safetensors", "train").safe_open
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, _safetensors_error()) as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read: {error}. {_ADVICE}") from error
    document = metadata.get(_DOCUMENT)
    if document is None:
        raise CheckpointError(f"{path} is not a checkpoint of depthfold: it holds only tensors. {_ADVICE}")
    if metadata.get(_DIGEST) != digest_tensors(tensors, document):
        raise CheckpointError(f"The checkpoint {path} is damaged: its contents do not match their digest. {_ADVICE}")
    return document, tensors


def _name_of(teacher: nn.Module) -> str:
    """Return the class of the teacher, and a digest of its weights and of the names and classes of its modules."""
    modules = sorted((name, type(module).__qualname__) for name, module in teacher.named_modules())
    return f"{type(teacher).__name__} {digest_tensors(weights(teacher), repr(modules))}"


def _read_state(path: Path) -> tuple[State, dict[str, Tensor]]:
    document, tensors = read_checkpoint(path)
    try:
        return State.loads(document), tensors
    except InvalidValue as error:
        raise CheckpointError(
            f"The checkpoint {path} cannot be read: {error} Otherwise use another folder, or delete it to start again."
        ) from error


def _safetensors_error() -> Any:
    return load("safetensors", "train").SafetensorError
