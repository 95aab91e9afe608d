"""The losses of the steps, on their way from the device, and what is said when one of them is no number."""

from __future__ import annotations

import math
from statistics import fmean

import torch
from torch import Tensor

from depthfold.errors import NotFinite
from depthfold.training.place import Place
from depthfold.training.recipe import Recipe

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
