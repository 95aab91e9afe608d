"""The folder of a training: its last and its best weights, and its metrics. The first process alone writes."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from depthfold.errors import CheckpointError, InvalidValue
from depthfold.tracing.weights import weights
from depthfold.training import checkpoint
from depthfold.training.curve import Point
from depthfold.training.device import DeviceContext
from depthfold.training.metrics import Metrics
from depthfold.training.state import Identity, State
from depthfold.training.stepper import Stepper, copy_into

LAST, BEST = "last.safetensors", "best.safetensors"


class Keeper:
    """Keeps what a training needs to go on, and finds it again. Its methods are called in all processes."""

    def __init__(self, folder: str | Path, context: DeviceContext, tensorboard: bool) -> None:
        self.folder, self._context, self._tensorboard = Path(folder), context, tensorboard
        self._metrics: Metrics | None = None  # of the first process

    @contextlib.contextmanager
    def resumed(self, identity: Identity, stepper: Stepper) -> Iterator[State | None]:
        """Hold the folder, and put its last checkpoint, if there is one of the same training, into the stepper."""
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
        """Keep everything, to go on from here. A better score first: the last checkpoint says which one is the best."""

        def write() -> None:
            document = state.dumps()
            if self._metrics is not None:
                self._metrics.sync()
            if state.best is not None and state.best.step == state.step:
                checkpoint.write(self.folder / BEST, document, stepper.scored_weights())
            checkpoint.write(self.folder / LAST, document, stepper.tensors())

        self._context.run_on_main(write)

    def put_best(self, model: nn.Module) -> Point | None:
        """Give the model the weights of the best score, and say which that is."""
        state = self._context.run_on_main(lambda: load_weights(model, self.folder, "best"))
        self._context.broadcast(weights(model).values())
        return state.best

    def _find(
        self, identity: Identity, stepper: Stepper, stack: contextlib.ExitStack
    ) -> tuple[State, tuple[str, ...]] | None:
        stack.enter_context(_held(self.folder))
        found = _read(self.folder / LAST) if (self.folder / LAST).exists() else None
        if found is not None:
            identity.expect(found[0].identity, self.folder)
        # The line of a step holds its score; where that is still to be taken, a line that is there comes once more.
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
    """Give the model the last or the best weights in a folder, averaged ones where the recipe has an average, and
    return what is known of them."""
    path = Path(folder) / (LAST if which == "last" else BEST)
    state, tensors = _read(path)
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


def _read(path: Path) -> tuple[State, dict[str, Tensor]]:
    document, tensors = checkpoint.read(path)
    try:
        return State.loads(document), tensors
    except InvalidValue as error:
        raise CheckpointError(
            f"The checkpoint {path} cannot be read: {error} Go on with the depthfold that wrote it, give this training "
            "a folder of its own, or delete that one to start again."
        ) from error


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The folder for this process alone. The lock is the kernel's, and ends with the process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise CheckpointError(f"The folder {folder} cannot be written: {error.strerror}. Name another.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise CheckpointError(
            f"The folder {folder} is in use by another process. Wait for it, or give this training a folder of its own."
        ) from error
    try:
        yield
    finally:
        os.close(lock)
