"""What became of a training, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The score after so many steps, and the mean loss of the steps right before it."""

    step: int
    loss: float
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A training that is done: how many steps, how long they took in all, and the learning curve.

    `loss` is the mean of the last steps. The score is that of the weights which the model ends with; `best` is the
    point of the best one. Without a split to score on, both are None and the curve is empty.
    """

    steps: int
    seconds: float
    loss: float
    curve: tuple[Point, ...] = ()
    best: Point | None = None
    score: float | None = None
