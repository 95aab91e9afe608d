"""train(): the one loop, for the importances' short trainings and for fine-tuning."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

from depthfold.errors import InvalidValue, NotFinite
from depthfold.progress import Progress, silent
from depthfold.support.coerce import as_path
from depthfold.tracing.weights import weights
from depthfold.training.borrowing import Seed, lent, modes_kept, own_precision, own_random_numbers, placed
from depthfold.training.checkpoints import Checkpoints, Identity, State
from depthfold.training.metrics import Point, Trained
from depthfold.training.place import Place, find_place
from depthfold.training.recipe import Recipe
from depthfold.training.stepper import Stepper, copy_into, due, learning_rate, total_steps
from depthfold.training.task import Split, Step, Task, expect_task, mix

# The losses of the steps, on their way from the device, and what is said when one of them is no number.

# Reading a loss waits until the device has computed it; so there they are read many at a time.
TOGETHER = 50


class Losses:
    """Takes a loss after each step. Raises NotFinite, in all processes alike, when one of them is not finite: at once
    on a CPU, on other devices at the latest TOGETHER steps later, and always before anything is written."""

    def __init__(self, recipe: Recipe, place: Place, total: int) -> None:
        self._recipe, self._place, self._total = recipe, place, total
        self._together = 1 if place.device.type == "cpu" else TOGETHER
        self._waiting: list[tuple[int, float, Tensor]] = []
        self.pending: list[float] = []  # read, and of no mean yet

    def add(self, number: int, lr: float, loss: Tensor) -> None:
        self._waiting.append((number, lr, loss))
        if len(self._waiting) >= self._together:
            self._settle()

    def mean(self, *, so_far: bool = False) -> float:
        """The mean over the steps since this was asked last, and over the processes. With `so_far` it does not count as
        asked: the next mean is over these steps, too."""
        self._settle()
        mean = fmean(self.pending)
        if not so_far:
            self.pending.clear()
        return mean

    def _settle(self) -> None:
        if not self._waiting:
            return
        losses = self._place.mean(torch.stack([loss.float() for _, _, loss in self._waiting])).tolist()
        for (number, lr, _), loss in zip(self._waiting, losses, strict=True):
            if not math.isfinite(loss):
                raise NotFinite(
                    f"The loss is {loss} at step {number + 1} of {self._total}, with the learning rate {lr:.4g}. "
                    f"{advice(self._recipe)}",
                    step=number + 1,
                    lr=lr,
                )
        self._waiting.clear()
        self.pending.extend(losses)


def advice(recipe: Recipe) -> str:
    """What to try when a training has left the finite numbers, of the things that the recipe does not do yet."""
    ways = [f"take a smaller learning rate than {recipe.lr:g} (lr)"]
    if not recipe.warmup:
        ways.append("let it rise slowly at first (warmup)")
    if recipe.clip is None:
        ways.append("limit the norm of the gradient (clip)")
    if recipe.precision != "float32":
        ways.append(f'compute in float32 instead of {recipe.precision} (precision="float32")')
    text = ", or ".join(ways)
    return f"{text[0].upper()}{text[1:]}."


# A training under way: its steps, and what is due after each of them.

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


def train(
    model: nn.Module,
    task: Task,
    recipe: Recipe,
    *,
    seed: int | None = None,
    teacher: nn.Module | None = None,
    split: Split | None = "holdout",
    folder: str | Path | None = None,
    about: str = "",
    device: str | torch.device | None = None,
    tensorboard: bool = False,
    progress: Progress = silent,
) -> Trained:
    """Train the model, in place, and score it on `split`.

    The device, and the other processes of an `accelerate launch`, are accelerate's to say; with `device` this process
    trains alone on it. The model stays there. Without a `seed` the recipe's is taken: model, task, recipe and seed
    decide every step, and the global random numbers are afterwards as they were. With a `folder` the training keeps
    checkpoints and metrics there and, run again, goes on from the last one, to the same weights; `about` says what
    kind of model it is where its weights do not. The teacher is put back as it was found. A model in training mode may
    have parts in evaluation mode, which stay so; one in evaluation mode is trained as a whole.
    """
    _expect(model, task, recipe, split, folder, tensorboard)
    place, total = find_place(device), total_steps(recipe, task)
    if recipe.batch % place.world:
        raise InvalidValue(
            f"The recipe's batch of {recipe.batch} cannot be parted evenly among {place.world} processes. Take a "
            f"multiple of {place.world}."
        )
    seed = recipe.seed if seed is None else seed
    with contextlib.ExitStack() as stack:
        stack.enter_context(modes_kept(model))
        stack.enter_context(placed(model, place.device, recipe.channels_last))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(own_precision(place.device))
        lesson = stack.enter_context(lent(teacher, model, place.device))
        reseed = stack.enter_context(own_random_numbers(place.device))
        stepper = Stepper(model, recipe, place)
        losses = Losses(recipe, place, total)
        run = Run(task=task, stepper=stepper, total=total, split=split, losses=losses, seed=seed, reseed=reseed)
        if folder is not None:
            run.identity = Identity.of(
                model, task, recipe, teacher=teacher, steps=total, seed=seed, split=split, about=about
            )
            run.checkpoints = Checkpoints(folder, place, tensorboard)
            run.take_up(stack.enter_context(run.checkpoints.resumed(run.identity, stepper)))
        tick = progress("steps", total, run.done) if place.main else silent("", 0, 0)
        step = Step(
            number=0,
            seed=seed,
            recipe=recipe,
            device=place.device,
            teacher=lesson,
            rank=place.rank,
            world=place.world,
        )
        for number in range(run.done, total):
            run.take(dataclasses.replace(step, number=number))
            tick()
        return run.finish()


def _expect(model: object, task: object, recipe: object, split: object, folder: object, tensorboard: bool) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidValue(f"train() trains an nn.Module, found {type(model).__name__}.")
    expect_task(task)
    if not isinstance(recipe, Recipe):
        raise InvalidValue(f'train() takes a Recipe, found {recipe!r:.80}. preset("quick") is one.')
    if split is None and recipe.keep == "best":
        raise InvalidValue(
            'The recipe keeps the weights of the best score (keep="best"), and there is nothing to score on. Give the '
            'task a hold-out set (holdout=0.1, say), or keep the last weights: recipe.but(keep="last").'
        )
    if folder is not None:
        as_path("The folder of a training", folder, InvalidValue)
    elif tensorboard:
        raise InvalidValue("TensorBoard's files go into the folder of the training: give it one.")
