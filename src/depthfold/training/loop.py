"""The training loop, used for importances and for fine-tuning."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

from depthfold.backends import disable_autocast
from depthfold.errors import InvalidValue, NotFinite
from depthfold.progress import Progress, note, silent
from depthfold.support.coerce import as_path
from depthfold.tracing import SeedFunction, fork_rng
from depthfold.tracing.weights import weights
from depthfold.training.capture import StepRunner
from depthfold.training.checkpoints import Checkpoints, Identity, State
from depthfold.training.contexts import (
    channels_last,
    outputs_of,
    preserve_modes,
    teacher_on,
)
from depthfold.training.device import DeviceContext, device_context
from depthfold.training.features import check_features, matched_features
from depthfold.training.forwards import scoring
from depthfold.training.metrics import Point, Trained
from depthfold.training.recipe import Recipe
from depthfold.training.stepper import Stepper, copy_into, due, learning_rate, total_steps
from depthfold.training.task import Split, Step, Task, check_keeps_last, check_task, derive_seed, score_of

READ_TOGETHER = 50  # losses: reading one waits until the device has computed it
CHECKPOINTS = 10  # in a training run with a folder, unless the recipe sets their interval
LOG = 50  # steps between two lines of the metrics; scores and checkpoints also have a line
LINES = 20  # in the metrics of a training run with a folder, if it is shorter than LINES * LOG steps


class Losses:
    """Collects the loss of each step.

    Raises NotFinite in all processes if a loss is not finite: immediately on a CPU, on other devices at most
    READ_TOGETHER steps later, and always before anything is written.
    """

    def __init__(self, recipe: Recipe, context: DeviceContext, total: int) -> None:
        self._recipe, self._context, self._total = recipe, context, total
        self._together = 1 if context.device.type == "cpu" else READ_TOGETHER
        self._unread: list[tuple[int, float, Tensor]] = []
        self.pending: list[float] = []  # read, but not yet part of a mean

    def add(self, number: int, lr: float, loss: Tensor) -> None:
        self._unread.append((number, lr, loss))
        if len(self._unread) >= self._together:
            self._read()

    def mean(self, *, keep: bool = False) -> float:
        """Return the mean over the processes and over the steps since the last mean.

        With `keep`, these steps are also part of the next mean.
        """
        self._read()
        mean = fmean(self.pending)
        if not keep:
            self.pending.clear()
        return mean

    def recent(self, steps: int) -> float:
        """Return the mean over the last `steps` steps, or those since the last mean if they are fewer."""
        self._read()
        return fmean(self.pending[-steps:])

    def _read(self) -> None:
        if not self._unread:
            return
        losses = self._context.mean(torch.stack([loss.float() for _, _, loss in self._unread])).tolist()
        for (number, lr, _), loss in zip(self._unread, losses, strict=True):
            if not math.isfinite(loss):
                raise NotFinite(
                    f"The loss is {loss} at step {number + 1} of {self._total}, with the learning rate {lr:.4g}. "
                    f"{advice(self._recipe)}",
                    step=number + 1,
                    lr=lr,
                )
        self._unread.clear()
        self.pending.extend(losses)


def advice(recipe: Recipe) -> str:
    """Return what to try after a divergence, leaving out what the recipe already does."""
    ways = [f"use a smaller learning rate than {recipe.lr:g} (lr)"]
    if not recipe.warmup:
        ways.append("raise it slowly at first (warmup)")
    if recipe.clip is None:
        ways.append("limit the norm of the gradient (clip)")
    if recipe.precision != "float32":
        ways.append(f'compute in float32 instead of {recipe.precision} (precision="float32")')
    text = ", or ".join(ways)
    return f"{text[0].upper()}{text[1:]}."


@dataclass(slots=True, kw_only=True)
class TrainingRun:
    """A training run in progress. Only the stepper and the checkpoints distinguish between processes."""

    task: Task
    stepper: Stepper
    runner: StepRunner
    total: int
    split: Split | None
    losses: Losses
    seed: int
    reseed: SeedFunction  # of the global generators
    checkpoints: Checkpoints | None = None
    identity: Identity | None = None  # set together with the checkpoints
    done: int = 0
    loss: float = math.nan
    curve: tuple[Point, ...] = ()
    best: Point | None = None
    best_weights: dict[str, Tensor] | None = None  # if they are wanted, and there is no folder for them
    seconds_before: float = 0.0  # before this training was resumed
    started: float = field(default_factory=time.perf_counter)

    def resume(self, state: State | None) -> None:
        """Continue from a checkpoint. If the score of its step is missing, compute it now."""
        if state is None:
            return
        self.done, self.loss, self.seconds_before = state.step, state.loss, state.seconds
        self.curve, self.best = state.curve, state.best
        self.losses.pending.extend(state.pending)
        if state.unscored:
            lr = learning_rate(self.stepper.recipe, self.done - 1, self.total)
            self._report(lr, score=True, checkpoint=True)

    def finish(self, teacher: nn.Module | None, progress: Progress) -> Trained:
        """Take the remaining steps, load the weights that the recipe keeps into the model, and return the result."""
        context, outputs = self.stepper.context, outputs_of(teacher)
        tick = progress("steps", self.total, self.done) if context.is_main else silent("", 0, 0)
        for number in range(self.done, self.total):
            self._take(
                Step(
                    number=number,
                    seed=self.seed,
                    recipe=self.stepper.recipe,
                    device=context.device,
                    teacher=outputs,
                    rank=context.rank,
                    world_size=context.world_size,
                )
            )
            note(tick, self._state)  # before the last tick, which may end the line
            tick()
        return self._result()

    def _state(self) -> str:
        """Return the present loss and the last score, as far as they are known without waiting for the device."""
        loss = fmean(self.losses.pending[-LOG:]) if self.losses.pending else self.loss
        score = f", score {self.curve[-1].score:.4g}" if self.curve else ""
        return f"loss {loss:.4g}{score}" if math.isfinite(loss) else ""

    def _take(self, step: Step) -> None:
        """Take one step, then score, log and save if due."""
        # Dropout draws from the global generators. Their seed depends only on the step, so a resumed training run draws
        # the same numbers.
        self.reseed(derive_seed(self.seed, "step", step.number, step.rank))
        lr = learning_rate(step.recipe, step.number, self.total)
        loss = self.runner.take(step, lr)
        self.losses.add(step.number, lr, loss)
        self.stepper.check_gradient(loss)
        self.done = step.number + 1
        score, checkpoint = self.split is not None and self._due(step.recipe.evaluate), self._due(self._interval)
        # The curve must be the same with and without a folder, so only these steps end a mean of the losses.
        report = score or self._due(step.recipe.checkpoint) or self._due(LOG)
        if report or checkpoint:
            self.loss = self.losses.mean(keep=not report)
        if score or checkpoint:
            self._check_finite(lr)
        if score or (checkpoint and not report):
            self._save()  # before the score, which is the user's code and may fail
        if report:
            self._report(lr, score=score, checkpoint=checkpoint)
        elif self.checkpoints is not None and self._due(between := max(1, min(LOG, self.total // LINES))):
            self._log(lr, self.losses.recent(between), scored=False)

    def _result(self) -> Trained:
        model, last = self.stepper.model, self.curve[-1] if self.curve else None
        if self.stepper.recipe.keep == "best" and self.best is not None:
            if self.best_weights is not None:
                copy_into(weights(model), self.best_weights)
            elif self.checkpoints is not None:
                self.best = self.checkpoints.put_best(model)
            last = self.best
        elif self.stepper.average is not None:
            copy_into(weights(model), self.stepper.scored_weights())
        return Trained(
            steps=self.total,
            seconds=self._seconds(),
            loss=self.loss,
            curve=self.curve,
            best=self.best,
            score=None if last is None else last.score,
            execution=self.runner.execution,
        )

    @property
    def _interval(self) -> int | None:
        """The number of steps between two checkpoints."""
        default = None if self.checkpoints is None else math.ceil(self.total / CHECKPOINTS)
        return self.stepper.recipe.checkpoint or default

    def _due(self, every: int | None) -> bool:
        return due(every, self.done, self.total)

    def _check_finite(self, lr: float) -> None:
        self.stepper.sync_buffers()
        if not self.stepper.is_finite():
            raise NotFinite(
                f"The weights are not finite after step {self.done} of {self.total}, with the learning rate {lr:.4g}. "
                f"{advice(self.stepper.recipe)}",
                step=self.done,
                lr=lr,
            )

    def _report(self, lr: float, *, score: bool, checkpoint: bool) -> None:
        is_best = self._score(lr) if score else False
        self._log(lr, self.loss, scored=score)
        if checkpoint or is_best:
            self._save()

    def _score(self, lr: float) -> bool:
        """Score the model, and return True if this is the best score so far."""
        stepper, split = self.stepper, self.split
        if split is None:
            return False
        self.reseed(derive_seed(self.seed, "score", self.done))  # the same if it is repeated after resuming
        stepper.model.eval()
        model = stepper.scored_model
        with torch.no_grad(), scoring(model, stepper.recipe, stepper.context.device):
            own = score_of(self.task, model, split)
        stepper.train_mode()
        self.runner.check_addresses()
        # Rounding may differ between processes. They use one score, so that they agree on the best.
        score = float(stepper.context.run_on_main(lambda: own))
        if not math.isfinite(score):
            raise NotFinite(
                f"The task's score is {score} after step {self.done} of {self.total}, expected a finite number. If the "
                f"model's outputs are not finite: {advice(stepper.recipe)}",
                step=self.done,
                lr=lr,
            )
        point = Point(step=self.done, loss=self.loss, score=score)
        self.curve = (*self.curve, point)
        if self.best is not None and score <= self.best.score:
            return False
        self.best = point
        if self.checkpoints is None and stepper.recipe.keep == "best":
            self.best_weights = {name: tensor.detach().clone() for name, tensor in stepper.scored_weights().items()}
        return True

    def _log(self, lr: float, loss: float, *, scored: bool) -> None:
        if self.checkpoints is None:
            return
        epochs = self.stepper.recipe.epochs
        self.checkpoints.log(
            {
                "step": self.done,
                "epoch": None if epochs is None else round(epochs * self.done / self.total, 6),
                "lr": lr,
                "loss": loss,
                "score": self.curve[-1].score if scored else None,
                "seconds": round(self._seconds(), 3),
                "execution": self.runner.execution,
            }
        )

    def _save(self) -> None:
        if self.checkpoints is None or self.identity is None:
            return
        scaler = self.stepper.scaler.state_dict()  # empty if it is disabled
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
        return self.seconds_before + time.perf_counter() - self.started


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
    capture: bool = True,
) -> Trained:
    """Train the model in place, and score it on `split`.

    - accelerate determines the device, and the other processes of an `accelerate launch`. With `device`, this process
      trains alone on that device. The model is left there; the teacher is moved back.
    - Model, task, recipe and seed (by default the recipe's) determine every step. The states of the global generators
      are restored.
    - With a `folder`, checkpoints and metrics are written there. A second call resumes from the last checkpoint, and
      ends with the same weights. `about` describes the model beyond its weights, for example the plan of a student.
    - On a CUDA device, the steps of a BatchTask are captured in a CUDA graph and replayed, which is faster. It gives
      the same weights, with fused kernels up to rounding. `Trained.execution` says whether they were, or why not. With
      `capture=False`, they never are.
    - If the model is in training mode, parts in evaluation mode stay so. If the whole model is in evaluation mode, all
      of it is trained.
    """
    _check(model, task, recipe, split, folder, tensorboard)
    context, total = device_context(device), total_steps(recipe, task)
    if recipe.batch % context.world_size:
        raise InvalidValue(
            f"The recipe's batch of {recipe.batch} cannot be divided evenly among {context.world_size} processes. Use "
            f"a multiple of {context.world_size}."
        )
    seed = recipe.seed if seed is None else seed
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserve_modes(model))
        stack.enter_context(channels_last(model.to(context.device), enabled=recipe.channels_last))
        stack.enter_context(torch.inference_mode(False))  # inference tensors do not record what computes them
        stack.enter_context(torch.enable_grad())
        stack.enter_context(disable_autocast(context.device))
        stack.enter_context(teacher_on(context.device, teacher, model, in_channels_last=recipe.channels_last))
        reseed = stack.enter_context(fork_rng(context.device))
        stepper = Stepper(model, recipe, context)
        if teacher is not None and recipe.features:
            for network in (model, teacher):
                check_features(network, recipe)
            matched = matched_features(model, teacher, recipe.features, context.mean)
            stepper.add_to_loss = stack.enter_context(matched)
        runner = StepRunner(stepper, task, teacher, total, capture=capture)
        stack.callback(runner.close)
        run = TrainingRun(
            task=task,
            stepper=stepper,
            runner=runner,
            total=total,
            split=split,
            losses=Losses(recipe, context, total),
            seed=seed,
            reseed=reseed,
        )
        if folder is not None:
            run.identity = Identity.of(
                model, task, recipe, teacher=teacher, steps=total, seed=seed, split=split, about=about
            )
            run.checkpoints = Checkpoints(folder, context, tensorboard)
            run.resume(stack.enter_context(run.checkpoints.resumed(run.identity, stepper)))
        return run.finish(teacher, progress)


def _check(model: object, task: object, recipe: object, split: object, folder: object, tensorboard: bool) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidValue(f"train() takes an nn.Module, found {type(model).__name__}.")
    check_task(task)
    if not isinstance(recipe, Recipe):
        raise InvalidValue(f'train() takes a Recipe, found {recipe!r:.80}. preset("quick") is one.')
    if split is None:
        check_keeps_last(recipe)
    if folder is not None:
        as_path("The folder of a training run", folder, InvalidValue)
    elif tensorboard:
        raise InvalidValue("TensorBoard's files are written into the folder of the training run. Pass folder=...")
