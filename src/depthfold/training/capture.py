"""Training steps that are captured once and then replayed, and the reasons why a training run takes them eagerly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from depthfold.tracing import fork_rng
from depthfold.tracing.weights import weights
from depthfold.training.contexts import outputs_of
from depthfold.training.cuda_graph import CannotCapture, record_cuda_graph
from depthfold.training.device import DeviceContext
from depthfold.training.forwards import FusedForwards
from depthfold.training.recipe import Recipe
from depthfold.training.stepper import Stepper
from depthfold.training.task import BatchTask, Step, Task

CAPTURED = "CUDA graph"
FEWEST = 4  # steps: capturing one takes about as long as two

Batch = tuple[Tensor, ...]


class Recording(Protocol):
    """A recorded function, for example a torch.cuda.CUDAGraph."""

    def replay(self) -> None: ...

    def reset(self) -> None:
        """Free the memory of the recording."""
        ...


# Runs the function at least once and returns its recording.
Recorder = Callable[[Callable[[], None], torch.device], Recording]
RECORDERS: dict[str, Recorder] = {"cuda": record_cuda_graph}  # by type of device


def why_eager(task: Task, recipe: Recipe, context: DeviceContext) -> str | None:
    """Return the reason why the steps of a training run cannot be captured, or None if they can."""
    if context.device.type not in RECORDERS:
        return f"the device is {context.device.type}"
    if context.world_size > 1:
        return f"{context.world_size} processes train together"
    if recipe.precision == "float16":
        return "in float16, a step may be skipped"
    if not isinstance(task, BatchTask):
        return "the task has no batch() and batch_loss()"
    # A subclass that overrides only loss() expects it to be called.
    defining = [cls for cls in type(task).__mro__ if "loss" in vars(cls)]
    if not defining or "batch_loss" not in vars(defining[0]):
        return "the class that defines the task's loss() has no batch_loss()"
    return None


class StepRunner:
    """Takes the steps of one training run: captured if possible, otherwise eagerly."""

    def __init__(
        self, stepper: Stepper, task: Task, teacher: nn.Module | None, total: int, *, capture: bool = True
    ) -> None:
        self._stepper, self._task, self._teacher, self._total = stepper, task, teacher, total
        self._why_eager = why_eager(task, stepper.recipe, stepper.context) if capture else "capture=False"
        self._captured: CapturedStep | None = None
        self._has_captured = False  # some step, which may be closed by now
        self._note = ""

    @property
    def execution(self) -> str:
        """How the steps are executed, for example "CUDA graph" or "eager: the device is cpu"."""
        return CAPTURED + self._note if self._why_eager is None else f"eager: {self._why_eager}"

    def take(self, step: Step, lr: float) -> Tensor:
        """Take one step and return its loss, still on the device."""
        stepper = self._stepper
        stepper.set_lr(lr)
        if self._why_eager is not None:
            return stepper.step(lambda model: self._task.loss(model, step))
        task = cast(BatchTask, self._task)  # see why_eager()
        with torch.autocast(**stepper.autocast):  # as in loss()
            batch = task.batch(step)
        if self._captured is None:
            self._capture(task, batch, step)
        if self._captured is not None and self._captured.fits(batch):
            return self._captured.replay(batch)
        return stepper.step(lambda model: task.batch_loss(model, batch, step))

    def check_addresses(self) -> None:
        """Capture the next step again if the tensors of the model were moved, for example by the task's score."""
        if self._captured is not None and not self._captured.is_valid():
            self.close()

    def close(self) -> None:
        """Free the captured step."""
        if self._captured is not None:
            self._captured.close()
            self._captured = None

    def _capture(self, task: BatchTask, batch: Batch, step: Step) -> None:
        """Capture this step, with fused kernels if they apply. If that fails, take the remaining steps eagerly."""
        if self._total - step.number < FEWEST:
            if not self._has_captured:
                self._why_eager = f"fewer than {FEWEST} steps are left"
            return
        problem, plain = None, FusedForwards((), step.recipe)
        try:
            forwards = FusedForwards((self._stepper.model, self._teacher), step.recipe)
        except Exception as error:  # noqa: BLE001 - Triton may be installed but not usable
            forwards, problem = plain, _text(error)
        if forwards:
            problem = self._try(task, batch, step, forwards)
            if problem is None:
                self._note = ", fused kernels"
                return
            forwards.close()
        self._note = f", without fused kernels: {problem}" if problem else ""
        self._why_eager = self._try(task, batch, step, plain)

    def _try(self, task: BatchTask, batch: Batch, step: Step, forwards: FusedForwards) -> str | None:
        """Capture this step, and return the reason if that fails. Take back what the steps of the capture changed."""
        before = self._stepper.snapshot()
        try:
            with fork_rng(step.device):
                self._captured = CapturedStep(self._stepper, forwards, task, batch, _fixed(step, self._teacher))
            self._has_captured = True
        except Exception as error:  # noqa: BLE001 - if it is an error of the user's code, the eager step raises it again
            return _text(error)
        finally:
            self._stepper.restore(before)
        return None


class CapturedStep:
    """One step of training, recorded with its own tensors for batch, learning rate and loss."""

    def __init__(self, stepper: Stepper, forwards: FusedForwards, task: BatchTask, batch: Batch, step: Step) -> None:
        _check_batch(batch)
        self._stepper, self._forwards = stepper, forwards
        self._batch = inputs = tuple(torch.empty_like(tensor, device=step.device) for tensor in batch)
        self._loss = output = torch.zeros((), device=step.device)
        stepper.keep_lr_on_device()
        self._load(batch)

        def body() -> None:
            with forwards:
                output.copy_(stepper.step(lambda model: task.batch_loss(model, inputs, step)))

        before = _addresses(weights(stepper.model))
        self._recording = RECORDERS[step.device.type](body, step.device)
        self._body = body  # a graph has only the addresses of its tensors; the function keeps them alive
        if _addresses(weights(stepper.model)) != before:
            self.close()
            raise CannotCapture("the forward replaces tensors of the model")
        self._addresses = _addresses(stepper.tensors())

    def fits(self, batch: Batch) -> bool:
        """Return True if the batch has the shapes and dtypes of the captured one."""
        return [(t.shape, t.dtype) for t in batch] == [(t.shape, t.dtype) for t in self._batch]

    def is_valid(self) -> bool:
        """Return False if a tensor is no longer where it was when the step was captured."""
        return self._addresses == _addresses(self._stepper.tensors())

    def replay(self, batch: Batch) -> Tensor:
        """Take the step with another batch, and return its loss."""
        self._load(batch)
        self._recording.replay()
        return self._loss.clone()

    def close(self) -> None:
        self._recording.reset()
        self._forwards.close()

    @torch.no_grad()
    def _load(self, batch: Batch) -> None:
        for mine, given in zip(self._batch, batch, strict=True):
            mine.copy_(given, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedStep(Step):
    """The step that a captured loss sees. It has no number, because it stands for all steps."""

    def __getattribute__(self, name: str) -> object:
        if name == "number":
            raise CannotCapture("batch_loss() depends on the number of the step")
        return object.__getattribute__(self, name)


def _fixed(step: Step, teacher: nn.Module | None) -> FixedStep:
    return FixedStep(
        number=step.number,
        seed=step.seed,
        recipe=step.recipe,
        device=step.device,
        teacher=outputs_of(teacher),
        rank=step.rank,
        world_size=step.world_size,
    )


def _check_batch(batch: object) -> None:
    if not isinstance(batch, tuple | list) or not all(isinstance(tensor, Tensor) for tensor in batch):
        raise CannotCapture("batch() does not return a tuple of tensors")


def _addresses(tensors: dict[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def _text(error: Exception) -> str:
    if isinstance(error, CannotCapture):
        return str(error)
    first = next(iter(str(error).splitlines()), "")
    return f"the capture failed with {type(error).__name__}: {first}"
