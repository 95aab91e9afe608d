"""DepthShrinker's search on the user's task: a learnable gate per block, and a penalty on the time of kept blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from depthfold.baselines.depthshrinker import COSTS, check_blocks, inverted_residuals, plan_without
from depthfold.core import LatencyTable, Network, Plan, Span
from depthfold.errors import InvalidValue
from depthfold.progress import Progress, progress_bars
from depthfold.rewriting import activation_at, rewrite
from depthfold.support.coerce import as_float, as_whole
from depthfold.tracing import TracedNetwork, require_traced, student_parts
from depthfold.training import BatchTask, Recipe, Split, Step, Task, device_context, has_holdout, task_name, train
from depthfold.training.capture import why_eager

GATES = "depthfold_gates"
TYPICAL = sum(COSTS["1.0"]) / len(COSTS["1.0"])  # the mean cost of a block in the published search


def search_depthshrinker(
    traced: TracedNetwork,
    task: Task,
    recipe: Recipe,
    *,
    kept: int,
    costs: Sequence[float] | LatencyTable,
    blocks: Iterable[Span] | None = None,
    penalty: float = 1e-4,
    teacher: nn.Module | None = None,
    device: str | torch.device | None = None,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Train one gate per block together with the weights, and return the plan that removes all but `kept` blocks.

    The blocks are the inverted residual blocks of the network, or the given spans, which must not overlap. The forward
    keeps the `kept` blocks with the largest gates. Every other block computes what its plan computes: no activation
    inside, one at its end. Only its padding stays in place. Gates start at 1 and get the gradients of their hard
    decisions (straight-through). The loss grows by `penalty` times the sum of all gates, each times the cost of its
    block: the milliseconds that merging saves. Those from a latency table are scaled so that the mean of their
    absolute values is the mean of the published costs, and `penalty` has the same effect on fast and slow machines.

    This sign of the penalty pushes out expensive blocks, as the DepthShrinker paper intends; the released code has
    the opposite sign. The weights of the search are not kept: fine-tuning starts from the original ones.
    """
    traced = require_traced(traced, "search_depthshrinker")
    spans = _checked_blocks(traced.network, blocks)
    if as_whole("The number of kept blocks", kept, InvalidValue, 0) > len(spans):
        raise InvalidValue(f"{kept} blocks cannot be kept, because the network has {len(spans)}. Keep fewer.")
    gates = Gates([penalty * cost for cost in _checked_costs(traced.network, spans, costs)], kept)
    penalised = (_PenalisedBatchTask if isinstance(task, BatchTask) else _PenalisedTask)(task, gates)
    with contextlib.ExitStack() as stack:
        train(
            _gated(traced, spans, gates),
            penalised,
            recipe,
            teacher=teacher,
            split="holdout" if has_holdout(task) else None,
            folder=folder,
            about=f"search for {kept} of {', '.join(map(str, spans))}, network {traced.network.fingerprint}",
            device=device,
            progress=progress or stack.enter_context(progress_bars("DepthShrinker's search")),
            # A task that overrides only loss() has to be asked itself whether its steps can be captured.
            capture=why_eager(task, recipe, device_context(device)) is None,
        )
    decisions = gates().tolist()
    return plan_without(traced.network, [span for span, on in zip(spans, decisions, strict=True) if not on])


def _checked_blocks(network: Network, blocks: Iterable[Span] | None) -> tuple[Span, ...]:
    spans = inverted_residuals(network) if blocks is None else tuple(sorted(blocks))
    if not spans:
        raise InvalidValue(
            f"{network.name} has no inverted residual blocks. Give the spans to search over: blocks=[Span(i, j), ...]."
        )
    check_blocks(network, spans)
    if idle := [span for span in spans if network.activations.isdisjoint(span.inner)]:
        raise InvalidValue(f"The block {idle[0]} has no activation inside, so there is nothing to search for.")
    return spans


def _checked_costs(network: Network, spans: Sequence[Span], costs: Sequence[float] | LatencyTable) -> tuple[float, ...]:
    if isinstance(costs, LatencyTable):
        original = costs.predict(network, network.vanilla)
        saved = [original - costs.predict(network, plan_without(network, [span])) for span in spans]
        if not any(saved):
            raise InvalidValue("By this latency table, merging saves no time in any block. Give costs=[...] instead.")
        scale = TYPICAL * len(saved) / sum(map(abs, saved))
        return tuple(scale * each for each in saved)
    found = tuple(as_float("The cost of a block", cost, InvalidValue) for cost in costs)
    if len(found) != len(spans):
        raise InvalidValue(f"There are {len(found)} costs for {len(spans)} blocks. Give one for each block.")
    return found


class Gates(nn.Module):
    """A learnable number per block. The forward returns 1 for the `kept` largest and 0 for the others.

    Of equal gates, those of the later blocks are kept. The gradient of a decision is that of its gate. Each kept block
    adds its cost to the penalty.
    """

    costs: Tensor

    def __init__(self, costs: Sequence[float], kept: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.ones(len(costs)))
        self.register_buffer("costs", torch.tensor(costs))
        self.kept = kept

    def forward(self) -> Tensor:
        order = self.values.detach().sort(stable=True).indices
        hard = torch.zeros_like(self.values).index_fill(0, order[len(order) - self.kept :], 1.0)
        return hard.add(self.values - self.values.detach())

    def penalty(self) -> Tensor:
        return (self.costs * self.forward()).sum()


class _Mix(nn.Module):
    """An activation behind a gate: applied if the gate is 1, or if `inserted` if it is 0."""

    def __init__(self, activation: nn.Module, number: int, inserted: bool) -> None:
        super().__init__()
        self.activation, self.number, self.inserted = activation, number, inserted

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        gate = gates[self.number].to(x.dtype)
        share = 1 - gate if self.inserted else gate
        active: Tensor = self.activation(x)
        return share * active + (1 - share) * x


def _gated(traced: TracedNetwork, spans: Sequence[Span], gates: Gates) -> nn.Module:
    """Return a trainable copy of the model with a gate at each activation that the removal of a block changes."""
    network = traced.network
    inner = {l for span in spans for l in span.inner} & network.activations
    student = rewrite(traced, Plan(network.activations - inner, network.vanilla.cuts))
    graph, _, _ = student_parts(student)
    graph.add_module(GATES, gates)
    nodes = {node.name: node for node in graph.graph.nodes}
    with graph.graph.inserting_before(next(node for node in nodes.values() if node.op != "placeholder")):
        decisions = graph.graph.call_module(GATES)
    for number, span in enumerate(spans):
        changed = plan_without(network, [span]).activations ^ network.activations
        for l in sorted(changed):
            target = f"depthfold_gate_{l}"
            graph.add_module(target, _Mix(activation_at(traced, l), number, inserted=l == span.j))
            value = nodes[_value_before_activation(traced, l)]
            with graph.graph.inserting_after(value):
                mixed = graph.graph.call_module(target, (value, decisions))
            value.replace_all_uses_with(mixed, delete_user_cb=lambda user, mixed=mixed: user is not mixed)
    graph.graph.lint()
    graph.recompile()
    return student


def _value_before_activation(traced: TracedNetwork, l: int) -> str:
    """Return the name of the node that computes the value of layer l without its activation."""
    site = traced.blueprint.sites[l - 1]
    if site.activation is None or site.activates_in_norm:
        return site.out
    node: fx.Node = next(node for node in traced.graph.graph.nodes if node.name == site.activation)
    return node.all_input_nodes[0].name


class _PenalisedTask:
    """The user's task with the penalty of the gates added to its loss."""

    def __init__(self, task: Task, gates: Gates) -> None:
        self._task, self._gates = task, gates
        self.identity, self.has_holdout = task_name(task), has_holdout(task)

    def loss(self, model: nn.Module, step: Step) -> Tensor:
        return self._task.loss(model, step) + self._gates.penalty()

    def score(self, model: nn.Module, split: Split) -> float:
        return self._task.score(model, split)

    def steps_per_epoch(self, recipe: Recipe) -> int:
        return self._task.steps_per_epoch(recipe)


class _PenalisedBatchTask(_PenalisedTask):
    """The same for a task that makes its batch separately."""

    _task: BatchTask

    def batch(self, step: Step) -> tuple[Tensor, ...]:
        return self._task.batch(step)

    def batch_loss(self, model: nn.Module, batch: tuple[Tensor, ...], step: Step) -> Tensor:
        return self._task.batch_loss(model, batch, step) + self._gates.penalty()

    # Repeated on purpose: steps are only captured if one class defines both losses (training/capture.py).
    def loss(self, model: nn.Module, step: Step) -> Tensor:
        return self._task.loss(model, step) + self._gates.penalty()
