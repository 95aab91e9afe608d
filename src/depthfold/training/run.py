"""A training under way: its steps, and what is due after each of them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from depthfold.errors import InvalidValue, NotFinite
from depthfold.training.borrowing import Seed
from depthfold.training.checkpoints import Checkpoints, Identity, State
from depthfold.training.losses import Losses, advice
from depthfold.training.metrics import Point, Trained
from depthfold.training.schedule import due, learning_rate
from depthfold.training.stepper import Stepper, copy_into, weights
from depthfold.training.task import Split, Step, Task, mix

CHECKPOINTS = 10  # of a training that has a folder, and whose recipe does not say how often
LOG = 50  # steps between two lines of the metrics; a score and a checkpoint have a line, too


@dataclass(slots=True, kw_only=True)
class Run:
    """A training under way. Stepper and checkpoints handle everything that differs between processes."""

    task: Task
    stepper: Stepper
    total: int
    split: Split | None
    losses: Losses
    seed: int
    reseed: Seed  # the global random numbers
    checkpoints: Checkpoints | None = None
    identity: Identity | None = None  # goes with the checkpoints
    done: int = 0
    loss: float = math.nan
    curve: tuple[Point, ...] = ()
    best: Point | None = None
    best_weights: dict[str, Tensor] | None = None  # where the best are to be kept, and there is no folder to keep them
    before: float = 0.0  # seconds, in the processes before this one
    started: float = field(default_factory=time.perf_counter)

    def take_up(self, state: State | None) -> None:
        """Go on from a checkpoint. A score that was due there and was not taken is taken now."""
        if state is None:
            return
        self.done, self.loss, self.before = state.step, state.loss, state.seconds
        self.curve, self.best = state.curve, state.best
        self.losses.pending.extend(state.pending)
        if state.unscored:
            lr = learning_rate(self.stepper.recipe, self.done - 1, self.total)
            self._settle(lr, score=True, checkpoint=True)

    def take(self, step: Step) -> None:
        """Take one step, and do what is due after it."""
        # What draws from the global random numbers (dropout) depends on the step alone, so that a resumed training need
        # not know what was drawn before it.
        self.reseed(mix(self.seed, "step", step.number, step.rank))
        lr = learning_rate(step.recipe, step.number, self.total)
        self.losses.add(step.number, lr, self.stepper.step(self.task, step, lr))
        self.done = step.number + 1
        score, checkpoint = self.split is not None and self._due(step.recipe.evaluate), self._due(self._interval)
        # A mean of the losses is taken whether there is a folder or not, so that the curve is the same.
        line = score or self._due(step.recipe.checkpoint) or self._due(LOG)
        if line or checkpoint:
            self.loss = self.losses.mean(so_far=not line)
        if score or checkpoint:
            self._expect_finite(lr)
        if score or (checkpoint and not line):
            self._save()  # before the score: that is the task's code and may fail, and must not take the steps with it
        if line:
            self._settle(lr, score=score, checkpoint=checkpoint)

    def finish(self) -> Trained:
        """Leave the model with the weights that the recipe wants, and tell how it went."""
        model, last = self.stepper.model, self.curve[-1] if self.curve else None
        if self.stepper.recipe.keep == "best" and self.best is not None:
            if self.best_weights is not None:
                copy_into(weights(model), self.best_weights)
            elif self.checkpoints is not None:
                self.best = self.checkpoints.put_best(model)
            last = self.best
        elif self.stepper.average is not None:
            copy_into(weights(model), self.stepper.kept())
        return Trained(
            steps=self.total,
            seconds=self._seconds(),
            loss=self.loss,
            curve=self.curve,
            best=self.best,
            score=None if last is None else last.score,
        )

    @property
    def _interval(self) -> int | None:
        """Steps between two checkpoints."""
        default = None if self.checkpoints is None else math.ceil(self.total / CHECKPOINTS)
        return self.stepper.recipe.checkpoint or default

    def _due(self, every: int | None) -> bool:
        return due(every, self.done, self.total)

    def _expect_finite(self, lr: float) -> None:
        self.stepper.gather()
        if not self.stepper.finite():
            recipe = self.stepper.recipe
            raise NotFinite(
                f"The weights are no longer finite after step {self.done} of {self.total}, with the learning rate "
                f"{lr:.4g}. {advice(recipe)}",
                step=self.done,
                lr=lr,
            )

    def _settle(self, lr: float, *, score: bool, checkpoint: bool) -> None:
        better = self._score(lr) if score else False
        self._log(lr, scored=score)
        if checkpoint or better:
            self._save()

    def _score(self, lr: float) -> bool:
        """Score the model, and say whether it is the best so far."""
        stepper, split = self.stepper, self.split
        if split is None:
            return False
        self.reseed(mix(self.seed, "score", self.done))  # taken after a resumption, it is the same
        stepper.model.eval()
        with torch.no_grad():
            own = _number(self.task.score(stepper.scored, split))
        stepper.train_mode()
        # Each process has scored the same weights; that of the first counts, lest they disagree about the best.
        score = float(stepper.place.by_main(lambda: own))
        if not math.isfinite(score):
            raise NotFinite(
                f"The task's score is {score} after step {self.done} of {self.total}; expected a finite number, higher "
                f"for a better model. If the model's outputs are not finite: {advice(stepper.recipe)}",
                step=self.done,
                lr=lr,
            )
        point = Point(step=self.done, loss=self.loss, score=score)
        self.curve = (*self.curve, point)
        if self.best is not None and score <= self.best.score:
            return False
        self.best = point
        if self.checkpoints is None and stepper.recipe.keep == "best":
            self.best_weights = {name: tensor.detach().clone() for name, tensor in stepper.kept().items()}
        return True

    def _log(self, lr: float, *, scored: bool) -> None:
        if self.checkpoints is None:
            return
        epochs = self.stepper.recipe.epochs
        self.checkpoints.log(
            {
                "step": self.done,
                "epoch": None if epochs is None else round(epochs * self.done / self.total, 6),
                "lr": lr,
                "loss": self.loss,
                "score": self.curve[-1].score if scored else None,
                "seconds": round(self._seconds(), 3),
            }
        )

    def _save(self) -> None:
        if self.checkpoints is None or self.identity is None:
            return
        scaler = self.stepper.scaler.state_dict()  # empty where there is none
        state = State(
            identity=self.identity,
            step=self.done,
            seconds=self._seconds(),
            loss=self.loss,
            pending=tuple(self.losses.pending),
            curve=self.curve,
            best=self.best,
            scale=scaler.get("scale"),
            growth=scaler.get("_growth_tracker", 0),
        )
        self.checkpoints.save(state, self.stepper)

    def _seconds(self) -> float:
        return self.before + time.perf_counter() - self.started


def _number(score: object) -> float:
    try:
        return float(score)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidValue(
            f"The task's score must be one number, higher for a better model, found {score!r:.80}."
        ) from error
