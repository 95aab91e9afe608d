"""Method "local": train only the layers of a block, so that they reproduce the original's values at the block's end."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from depthfold.backends import disable_autocast
from depthfold.core import BlockOption, FlaggedSpan
from depthfold.importance.pieces import ValueRecorder, cut_out, end_of, start_of
from depthfold.rewriting import rewrite
from depthfold.tracing import TracedNetwork, device_of, fork_rng, free_weights, student_parts
from depthfold.training import (
    Recipe,
    Step,
    Task,
    autocast,
    batch_norms,
    derive_seed,
    learning_rate,
    loss_without_gradients,
    preserve_modes,
    total_steps,
)

SMALLEST = 1e-12  # the least mean square of a target, so that a map of zeros does not divide by zero


class LocalBlock:
    """A block in training, and the student that it is a part of.

    Its batch norms use the statistics of the batch, except for frozen ones. Dropout is off.
    """

    def __init__(self, student: nn.Module, traced: TracedNetwork, block: FlaggedSpan) -> None:
        graph, origin, _ = student_parts(student)
        end = end_of(graph, origin.blueprint, origin.plan, block.j)
        self.piece = cut_out(graph, start_of(traced, block.i), end)
        self.target = origin.blueprint.sites[block.j - 1].out
        self.parameters = [p for p in self.piece.module.parameters() if p.requires_grad]
        self.loss: Tensor | None = None
        self._optimizer = torch.optim.Adam(self.parameters) if self.parameters else None
        self._norms = {id(norm) for norm in batch_norms(student)}

    def step(self, values: Mapping[str, Any], recipe: Recipe, lr: float) -> None:
        """Take one step that lowers E|g(x_i) - x_j|^2 / E|x_j|^2, where x are the values of the original."""
        if self._optimizer is None:
            return
        for module in self.piece.module.modules():
            module.training = id(module) in self._norms
        target = values[self.target]
        exact = torch.float64 if target.dtype == torch.float64 else torch.float32
        target = target.to(exact)
        with autocast(recipe, target.device):
            value = self.piece(values)
        loss = (value.to(exact) - target).square().mean() / target.square().mean().clamp_min(SMALLEST)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        torch.clear_autocast_cache()
        self.loss = loss.detach()


def train_locally(
    traced: TracedNetwork, students: Mapping[BlockOption, nn.Module], task: Task, recipe: Recipe, seed: int
) -> dict[BlockOption, float]:
    """Train the blocks of the students in place, and return their last losses.

    The students are on one device. One forward of the original per step feeds all blocks, but the training of a block
    does not depend on the others. A block of which no layer is left is not trained, and its loss is 0.
    """
    device = device_of(next(iter(students.values())))
    original = rewrite(traced, traced.vanilla).eval().to(device)
    blocks = {option: LocalBlock(student, traced, option.block) for option, student in students.items()}
    for student, block in zip(students.values(), blocks.values(), strict=True):
        _share_parameters(student, original, except_for=block.parameters)
    names = [name for block in blocks.values() for name in (*block.piece.inputs, block.target)]
    recorder = ValueRecorder(student_parts(original)[0], names)
    total = total_steps(recipe, task)
    with contextlib.ExitStack() as stack:
        for student in students.values():
            stack.enter_context(preserve_modes(student))
        stack.enter_context(disable_autocast(device))
        reseed = stack.enter_context(fork_rng(device))
        for number in range(total):
            reseed(derive_seed(seed, "step", number, 0))
            with autocast(recipe, device):
                loss_without_gradients(task, original, Step(number=number, seed=seed, recipe=recipe, device=device))
            values, lr = recorder.take(), learning_rate(recipe, number, total)
            with torch.enable_grad():
                for block in blocks.values():
                    block.step(values, recipe, lr)
    free_weights(original)  # all but what the students share
    return {key: 0.0 if block.loss is None else block.loss.item() for key, block in blocks.items()}


def _share_parameters(student: nn.Module, original: nn.Module, except_for: list[nn.Parameter]) -> None:
    """Let the student use the memory of the original for all parameters that are not trained.

    A job has many students, and together they may be too large for the memory of a device.
    """
    kept, known = {id(parameter) for parameter in except_for}, dict(original.named_parameters())
    for name, parameter in student.named_parameters():
        if id(parameter) not in kept and name in known:
            parameter.data = known[name].data
