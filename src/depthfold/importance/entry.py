"""The jobs of a table: one training per block and seed, and the score of the original network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypedDict

import torch

from depthfold.core import FlaggedSpan
from depthfold.errors import NotFinite
from depthfold.importance.definition import importance_student
from depthfold.jobs import Job, Work
from depthfold.rewriting import rewrite
from depthfold.tracing import TracedNetwork
from depthfold.training import (
    Recipe,
    Task,
    derive_seed,
    device_context,
    disable_autocast,
    fork_rng,
    score_precision,
    train,
)

# The argument of a job: the block's (i, j, a, b) and the seed of the training, or None for the original network.
Payload = tuple[tuple[int, int, bool, bool], int] | None

BASE = "base"  # the key of the original network


def job_key(block: FlaggedSpan, seed: int) -> str:
    return f"{block.i}-{block.j}-{int(block.a)}-{int(block.b)} seed {seed}"


def make_job(block: FlaggedSpan, seed: int) -> Job:
    payload: Payload = ((block.i, block.j, block.a, block.b), seed)
    return Job(key=job_key(block, seed), payload=payload)


class Result(TypedDict):
    """The score on the hold-out set, the learning curve (step, loss, score) and the duration of the training."""

    score: float
    curve: list[tuple[int, float, float]]
    seconds: float


@dataclass(frozen=True, slots=True)
class EntrySetup:
    """The setup of a worker: the traced network, the task without its data, the recipe, and `reinit`.

    The network is moved to the CPU, because the worker may have no other device.
    """

    traced: TracedNetwork
    task: Task
    recipe: Recipe
    reinit: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "traced", self.traced.cpu())

    def __call__(self) -> Work:
        return self.result

    def result(self, payload: Payload) -> Result:
        """Train a block and return its result, which depends only on the payload."""
        if payload is None:
            return self._original()
        ends, seed = payload
        block = FlaggedSpan(*ends)
        student = importance_student(self.traced, block, seed=derive_seed(seed, "reset", ends), reinit=self.reinit)
        try:
            trained = train(student, self.task, self.recipe, seed=seed)
        finally:
            # A graph refers to itself, so it stays in memory until the garbage collector runs. Free its weights now:
            # on a GPU they may be a gigabyte, and running the collector may take as long as a training.
            student.to("meta")
        assert trained.score is not None
        curve = [(point.step, point.loss, point.score) for point in trained.curve]
        return Result(score=trained.score, curve=curve, seconds=trained.seconds)

    def _original(self) -> Result:
        device = device_context().device
        original = rewrite(self.traced, self.traced.vanilla).eval().to(device)
        with torch.no_grad(), disable_autocast(device), fork_rng(device) as reseed:
            reseed(derive_seed(self.recipe.seed, "original"))
            with score_precision(self.recipe.precision, device):  # as the trained ones
                score = float(self.task.score(original, "holdout"))
        if not math.isfinite(score):
            raise NotFinite(f"The score of the original network is {score}; expected a finite number.")
        return Result(score=score, curve=[], seconds=0.0)
