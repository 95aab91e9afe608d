"""The metrics of a training run: its learning curve, and the files that follow it (JSON lines and TensorBoard)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthfold.errors import CheckpointError
from depthfold.store import put_in_place
from depthfold.support.optional import load

FILE, BOARD = "metrics.jsonl", "tensorboard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The score after a step, and the mean loss of the steps right before it."""

    step: int
    loss: float
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A finished training run: its steps, its time in seconds, and its learning curve.

    `loss` is the mean of the last steps. `score` belongs to the weights that the model ends with; `best` is the point
    of the best score. Without a split to score on, both are None and the curve is empty. `execution` says how the steps
    were taken: "CUDA graph", "CUDA graph, fused kernels", "CUDA graph, without fused kernels: " and the reason, or
    "eager: " and the reason.
    """

    steps: int
    seconds: float
    loss: float
    execution: str
    curve: tuple[Point, ...] = ()
    best: Point | None = None
    score: float | None = None


class Metrics:
    """The file of metrics. Each line has step, epoch, lr, loss, score (if it was taken), seconds and execution.

    `after` is the step from which the training continues: lines of later steps, which an interrupted process wrote and
    which will be written again, are dropped.
    """

    def __init__(self, folder: Path, after: int, tensorboard: bool) -> None:
        self._path = folder / FILE
        try:
            _keep_until(self._path, after)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise _cannot(self._path, error) from error
        self._board = _board(folder / BOARD, after) if tensorboard else None

    def log(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise _cannot(self._path, error) from error
        if self._board is not None:
            for name in ("loss", "lr", "score"):
                if line[name] is not None:
                    self._board.add_scalar(name, line[name], line["step"])

    def sync(self) -> None:
        """Wait until the lines are on disk, because a checkpoint must not be on disk before them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_curve(folder: Path) -> tuple[dict[str, Any], ...]:
    """Return the lines of the metrics in a folder of checkpoints; none if there is no such file."""
    path = folder / FILE
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return tuple(json.loads(line) for line in _lines_until(text, sys.maxsize))


def _keep_until(path: Path, step: int) -> None:
    if not path.exists():
        return
    found = path.read_text(encoding="utf-8")
    kept = "".join(_lines_until(found, step))
    if kept != found:
        with put_in_place(path) as partial:
            partial.write_text(kept, encoding="utf-8")


def _lines_until(text: str, step: int) -> Iterator[str]:
    for line in text.splitlines(keepends=True):
        try:
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                yield line
        except (ValueError, TypeError, KeyError):
            continue  # incomplete after a kill


def _board(folder: Path, after: int) -> Any:
    load("tensorboard", "tensorboard")
    writer = load("torch.utils.tensorboard", "tensorboard").SummaryWriter
    return writer(str(folder), purge_step=after + 1)


def _cannot(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"The metrics {path} cannot be written: {error.strerror}. Check the folder and its free space, or use another."
    )
