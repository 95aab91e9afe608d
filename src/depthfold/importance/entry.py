"""The jobs of a table: the score of one block and seed, or of a group of blocks, and of the original network."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import torch
from torch import Tensor, nn

from depthfold.backends import disable_autocast
from depthfold.core import BlockOption
from depthfold.errors import NotFinite, lacks_memory, spoils_device
from depthfold.importance.definition import importance_student
from depthfold.importance.fit import fit_block
from depthfold.importance.local import train_locally
from depthfold.importance.methods import RECALIBRATION, Method
from depthfold.jobs import Job, Work
from depthfold.rewriting import rewrite
from depthfold.tracing import TracedNetwork, fork_rng, free_weights
from depthfold.training import (
    OutputTask,
    Step,
    Task,
    autocast,
    derive_seed,
    device_context,
    recalibrate,
    score_of,
    scoring,
    total_steps,
    train,
)


@dataclass(frozen=True, slots=True)
class Group:
    """The argument of a job that measures several blocks with one seed."""

    options: tuple[BlockOption, ...]
    seed: int


# The argument of a job: a block and a seed, a group of blocks, or a seed alone for the original network.
Payload = tuple[BlockOption, int] | Group | int

BASE = "base"  # the key of the original network starts with it
TOGETHER = 16  # blocks in a group


def job_key(option: BlockOption, seed: int) -> str:
    """Return the key of a job, such as "2-6-1-0 without 3 5 seed 0"."""
    block, dropped = option
    without = f"without {dropped.key} " if dropped else ""
    return f"{block.i}-{block.j}-{int(block.a)}-{int(block.b)} {without}seed {seed}"


def base_job(seed: int, first: int) -> Job:
    """Return the job that scores the original network, with the first or another seed."""
    return Job(key=BASE if seed == first else f"{BASE} seed {seed}", payload=seed)


def make_job(option: BlockOption, seed: int) -> Job:
    payload: Payload = (option, seed)
    return Job(key=job_key(option, seed), payload=payload)


def make_groups(options: Sequence[BlockOption], seed: int) -> list[Job]:
    """Return the jobs that measure these blocks in groups of neighbours."""
    parts = [tuple(options[start : start + TOGETHER]) for start in range(0, len(options), TOGETHER)]
    return [Job(key=f"group of {job_key(part[0], seed)}", payload=Group(part, seed)) for part in parts]


def jobs_of(group: Group) -> list[Job]:
    """Return a job for each block of a group."""
    return [make_job(option, group.seed) for option in group.options]


class Result(TypedDict):
    """The score on the hold-out set, the learning curve (step, loss, score) and the duration in seconds.

    `error` is the standard error of a score that compares outputs, and `inputs` the number of inputs compared.
    """

    score: float
    curve: list[tuple[int, float, float]]
    seconds: float
    error: NotRequired[float]
    inputs: NotRequired[int]


class Comparison(TypedDict):
    """The parts of a result that are known only if outputs are compared."""

    error: float
    inputs: int


@dataclass(frozen=True, slots=True)
class EntrySetup:
    """The setup of a worker: the traced network, the task without its data, and the method.

    The network is moved to the CPU, because the worker may have no other device.
    """

    traced: TracedNetwork
    task: Task
    method: Method

    def __post_init__(self) -> None:
        object.__setattr__(self, "traced", self.traced.cpu())

    def __call__(self) -> Work:
        return EntryWorker(self.traced, self.task, self.method).result


class EntryWorker:
    """The work of one worker. A result depends only on the payload."""

    def __init__(self, traced: TracedNetwork, task: Task, method: Method) -> None:
        self.traced, self.task, self.method = traced, task, method
        self._teacher: nn.Module | None = None
        self._reference: Tensor | None = None  # the outputs of the original on the hold-out set

    @property
    def device(self) -> torch.device:
        return device_context().device

    def result(self, payload: Payload) -> Result | list[Result | str]:
        """Return the result of a block or of the original network, or those of a group.

        A block of a group whose loss or score is not finite has the reason instead of a result.
        """
        if isinstance(payload, int):
            return self._measure_unchanged(payload)
        if isinstance(payload, Group):
            return self._measure_group(payload.options, payload.seed)
        return self._measure(*payload)

    def _measure_unchanged(self, seed: int) -> Result:
        """Return the result that importances refer to.

        It is the original network for "trained". The other methods change every network a little, so they refer to the
        unchanged network after recalibration and, for "brief", the same steps before it.
        """
        if self.method.name == "trained":
            score, _ = self._score(self._original(), "original", seed)
            return Result(score=score, curve=[], seconds=0.0)
        started, student = time.perf_counter(), rewrite(self.traced, self.traced.vanilla).to(self.device)
        try:
            with self._what_a_loss_needs(seed):
                loss = self._distil(student, seed) if self.method.name == "brief" else None
                self._recalibrate(student, seed, loss)
            return self._scored(student, seed, loss, started)
        finally:
            free_weights(student)

    @contextlib.contextmanager
    def _what_a_loss_needs(self, seed: int) -> Iterator[None]:
        """Add to an error of the task's loss what this method needs and "trained" does not."""
        try:
            yield
        except Exception as error:
            if lacks_memory(error) or spoils_device(error) or not self._can_train(seed):
                raise
            teacher = " and with a teacher" if self.method.name == "brief" else ""
            error.add_note(
                f'With the method "{self.method.name}", the loss also runs on a network in evaluation mode{teacher}, '
                'which "trained" does not need (--method trained)'
            )
            raise

    def _can_train(self, seed: int) -> bool:
        """Return whether the task's loss runs as in "trained": in training mode, and without a teacher."""
        model, recipe = rewrite(self.traced, self.traced.vanilla).to(self.device).train(), self.method.recipe
        try:
            with fork_rng(self.device), autocast(recipe, self.device):
                self.task.loss(model, Step(number=0, seed=seed, recipe=recipe, device=self.device))
        except Exception:  # noqa: BLE001 - whatever the loss raises
            return False
        finally:
            free_weights(model)
        return True

    def _measure(self, option: BlockOption, seed: int) -> Result:
        started, name, (block, dropped) = time.perf_counter(), self.method.name, option
        reset = derive_seed(seed, "reset", (block.i, block.j, block.a, block.b))
        student = importance_student(self.traced, block, reset, dropped=dropped, reinit=self.method.reinit)
        try:
            if name == "trained":
                return self._train(student, seed)
            student.to(self.device)
            loss = None
            if name == "brief":
                loss = self._distil(student, seed)
            elif name == "local":
                loss = train_locally(self.traced, {option: student}, self.task, self.method.recipe, seed)[option]
            elif name == "fit":
                fit_block(self.traced, student, block, self.task, self.method.recipe, seed)
            self._recalibrate(student, seed, loss)
            return self._scored(student, seed, loss, started)
        finally:
            free_weights(student)

    def _measure_group(self, options: Sequence[BlockOption], seed: int) -> list[Result | str]:
        started = time.perf_counter()
        students: dict[BlockOption, nn.Module] = {}
        try:
            for option in options:
                student = importance_student(self.traced, option.block, 0, dropped=option.dropped, reinit=False)
                students[option] = student.to(self.device)
            losses = train_locally(self.traced, students, self.task, self.method.recipe, seed)
            shared = (time.perf_counter() - started) / len(options)
            results: list[Result | str] = []
            for option, student in students.items():
                try:
                    since = time.perf_counter() - shared
                    self._recalibrate(student, seed, losses[option])
                    results.append(self._scored(student, seed, losses[option], since))
                except NotFinite as error:
                    results.append(str(error))
            return results
        finally:
            free_weights(*students.values())

    def _distil(self, student: nn.Module, seed: int) -> float:
        """Train the student with the original as its teacher, and return the last loss."""
        return train(student, self.task, self.method.recipe, seed=seed, teacher=self._original(), split=None).loss

    def _train(self, student: nn.Module, seed: int) -> Result:
        trained = train(student, self.task, self.method.recipe, seed=seed)
        assert trained.score is not None
        curve = [(point.step, point.loss, point.score) for point in trained.curve]
        return Result(score=trained.score, curve=curve, seconds=trained.seconds)

    def _recalibrate(self, student: nn.Module, seed: int, loss: float | None) -> None:
        """Recalibrate the batch norms of a student, on batches after those that it was trained on."""
        recipe, done = self.method.recipe, total_steps(self.method.recipe, self.task)
        steps = range(done) if self.method.name == "recalibrated" else range(done, done + RECALIBRATION)
        if loss is not None and not math.isfinite(loss):
            raise NotFinite(
                f"The loss is {loss} after {done} steps. Use a smaller learning rate than {recipe.lr:g} (lr)."
            )
        recalibrate(student, self.task, recipe, steps=steps, seed=seed)

    def _scored(self, student: nn.Module, seed: int, loss: float | None, started: float) -> Result:
        score, comparison = self._score(student, "score", seed)
        curve = [] if loss is None else [(total_steps(self.method.recipe, self.task), loss, score)]
        found = Result(score=score, curve=curve, seconds=time.perf_counter() - started)
        return found if comparison is None else {**found, **comparison}

    def _score(self, model: nn.Module, purpose: str, seed: int) -> tuple[float, Comparison | None]:
        """Return the score on the hold-out set, and its standard error if it compares outputs."""
        model.eval()
        comparison = None
        with torch.no_grad(), disable_autocast(self.device), fork_rng(self.device) as reseed:
            if self.method.compares_outputs and isinstance(self.task, OutputTask):
                if self._reference is None:
                    # With its own seed, so that no result depends on which one is the first of this worker.
                    reseed(derive_seed(self.method.recipe.seed, "original"))
                    self._reference = self._outputs(self._original(), self.task)
                reseed(derive_seed(seed, purpose))
                score, comparison = _closeness(self.task, self._outputs(model, self.task), self._reference)
            else:
                reseed(derive_seed(seed, purpose))
                with scoring(model, self.method.recipe, self.device):
                    score = score_of(self.task, model, "holdout")
        if not math.isfinite(score):
            whose = "the original network" if purpose == "original" else "the network"
            raise NotFinite(f"The score of {whose} is {score}; expected a finite number.")
        return score, comparison

    def _outputs(self, model: nn.Module, task: OutputTask) -> Tensor:
        with scoring(model, self.method.recipe, self.device):
            return task.outputs(model, "holdout")

    def _original(self) -> nn.Module:
        """Return the original network on the device, which is also the teacher of "brief"."""
        if self._teacher is None:
            self._teacher = rewrite(self.traced, self.traced.vanilla).eval().to(self.device)
        return self._teacher


def _closeness(task: OutputTask, outputs: Tensor, reference: Tensor) -> tuple[float, Comparison]:
    """Return minus the mean divergence of the outputs from the reference, and its standard error."""
    found = task.divergences(outputs, reference)
    error = (found.std(correction=0) / math.sqrt(len(found))).item()
    return -found.mean().item(), Comparison(error=error, inputs=len(found))
