"""Channel pruning with Torch-Pruning until a clock reads the target: its advice for MobileNets, our stopwatch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from depthfold.backends import Backend, backend_errors, get
from depthfold.baselines.channels import output_layers, output_shapes, trainable_copy
from depthfold.errors import BudgetError, InvalidValue
from depthfold.latency import Timer
from depthfold.latency.candidates import build_plan, closing_all
from depthfold.latency.timer import Rounds, milliseconds
from depthfold.support.optional import load
from depthfold.support.text import count
from depthfold.tracing import ExampleInputs, device_of, trace
from depthfold.training import Recipe, Step, Task

Clock = Callable[[nn.Module], float]  # returns the time of a whole network in milliseconds


def prune_channels(
    model: nn.Module,
    example: Any,
    target: float,
    clock: Clock,
    *,
    gradients: Callable[[nn.Module], None] | None = None,
    keep: Iterable[str] = (),
    steps: int = 40,
    max_ratio: float = 0.7,
    round_to: int = 8,
) -> nn.Module:
    """Return a copy of the model with as many channels removed as it takes to bring the clock down to `target`.

    The other arguments are those of pruning_steps().
    """
    times: list[float] = []
    for pruned in pruning_steps(
        model, example, gradients=gradients, keep=keep, steps=steps, max_ratio=max_ratio, round_to=round_to
    ):
        times.append(clock(pruned))
        if times[-1] <= target:
            pruned.zero_grad()
            return pruned
    raise BudgetError(
        f"The pruned network takes {times[-1]:.4g} ms after {count(steps, 'step')}, not {target:.4g} ms; the original "
        f"takes {times[0]:.4g} ms. Use a larger target or max_ratio.",
        fastest=times[-1] / times[0],
    )


def pruning_steps(
    model: nn.Module,
    example: Any,
    *,
    gradients: Callable[[nn.Module], None] | None = None,
    keep: Iterable[str] = (),
    steps: int = 40,
    max_ratio: float = 0.7,
    round_to: int = 8,
) -> Iterator[nn.Module]:
    """Yield a copy of the model, then the same copy again after each step of pruning.

    In each of `steps` small steps, Torch-Pruning removes the least important channels of all groups of the same
    structure together (isomorphic), at most `max_ratio` of each layer before rounding. What is kept of a layer is
    rounded to the nearest multiple of `round_to`. A channel is important if the weights of its group have a large L2
    norm, or, with `gradients`, a large first-order Taylor term. `gradients` is called before each step, to add the
    gradients of a loss to the parameters of the model; see task_gradients(). `keep` are the names of modules that keep
    their channels; those that compute the output always do.
    """
    pruned = trainable_copy(model)
    inputs = ExampleInputs.of(example).like(pruned).args
    kept = [*output_layers(pruned, inputs), *(pruned.get_submodule(name) for name in keep)]
    pruner = _pruner(
        pruned, inputs, kept, taylor=gradients is not None, iterative_steps=steps, round_to=round_to, ratio=max_ratio
    )
    shapes = output_shapes(pruned, inputs)
    yield pruned
    for _ in range(steps):
        if gradients is not None:
            for parameter in pruned.parameters():
                parameter.grad = torch.zeros_like(parameter)  # Torch-Pruning also reads those that a loss does not use
            gradients(pruned)
        pruner.step()
        if (found := output_shapes(pruned, inputs)) != shapes:
            raise InvalidValue(
                f"Pruning changed the shape of the output from {shapes} to {found}. Name the layer that computes it in "
                "keep=[...]."
            )
        yield pruned


def _pruner(
    model: nn.Module, inputs: tuple[Any, ...], kept: list[nn.Module], *, taylor: bool, ratio: float, **given: int
) -> Any:
    """Return a pruner with the options that Torch-Pruning recommends for MobileNets."""
    pruning = load("torch_pruning", "baselines")
    importance = pruning.importance

    class Pruner(pruning.pruner.BasePruner):  # type: ignore[misc, name-defined]
        def _round_to(self, removed: int, channels: int, multiple: int) -> int:
            """Return how many channels to remove. Torch-Pruning rounds those that are kept down, in every step.

            A layer of 16 channels would then lose half of them as soon as one of them is among the least important.
            """
            kept = (channels - removed + multiple // 2) // multiple * multiple
            return channels - min(max(kept, multiple), channels)

    with backend_errors("Torch-Pruning cannot follow the channels of this model"):
        return Pruner(
            model,
            inputs,
            importance=importance.GroupTaylorImportance() if taylor else importance.GroupMagnitudeImportance(p=2),
            global_pruning=True,
            isomorphic=True,
            pruning_ratio=ratio,
            max_pruning_ratio=ratio,
            ignored_layers=kept,
            in_channel_groups={},  # its defaults are shared between all pruners
            out_channel_groups={},
            **given,
        )


def stopwatch(example: Any, target: str | Backend, *, inputs: Any = None, timer: Timer | None = None) -> Clock:
    """Return a clock that measures whole networks on a target as choose() does: batch norms folded, in rounds.

    Networks are traced with the example and timed with `inputs`, by default the same. Tracing runs a network several
    times where it is, so with a large batch as the example it takes longer than timing.
    """
    backend, rule, given = get(target), timer or Timer(rounds=10), ExampleInputs.of(inputs)

    def clock(model: nn.Module) -> float:
        traced, rounds = trace(model, example), dict[str, Rounds]()
        timed = traced.example_tensors() if inputs is None else tuple(given.for_graph(traced.graph))
        compiled = {"network": build_plan(traced, backend, traced.vanilla, timed)}
        with closing_all(compiled):
            rule.measure(compiled, rounds)
        return milliseconds(rounds["network"])

    return clock


def task_gradients(task: Task, recipe: Recipe, *, batches: int = 8) -> Callable[[nn.Module], None]:
    """Return a function that adds the gradients of the task's loss, over the first batches of a recipe, to a model."""

    def gradients(model: nn.Module) -> None:
        for number in range(batches):
            step = Step(number=number, seed=recipe.seed, recipe=recipe, device=device_of(model))
            (task.loss(model, step) / batches).backward()  # type: ignore[no-untyped-call]

    return gradients
