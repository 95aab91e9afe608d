"""A forward as a graph that was seen to compute the same: recorded, tidied and proved, until nothing is at fault."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from depthfold.core.shape import FixedPadding
from depthfold.errors import TraceError
from depthfold.tracing.fixed_sizes import guard_for
from depthfold.tracing.forward import record
from depthfold.tracing.functional import batch_norms, functions_as_modules
from depthfold.tracing.in_place import Run, read_what_is_written, watch, writes_to_weights
from depthfold.tracing.inputs import ExampleInputs
from depthfold.tracing.modules import is_no_operation, mark_no_operation
from depthfold.tracing.proof import Fault, find_fault, run_model, spare, to_run
from depthfold.tracing.request import copy_model
from depthfold.tracing.roles import home
from depthfold.tracing.rules import Reason
from depthfold.tracing.size_guard import SizeGuard
from depthfold.tracing.suspects import asks_for_mode


@dataclass(frozen=True, slots=True)
class Recording:
    """The graph of a module, and what one run of it shows. `opaque` says why submodules are called as they are, and
    `changing` are the values that are written to while others can read them."""

    graph: fx.GraphModule
    opaque: Mapping[str, Reason]
    fixed: tuple[FixedPadding, ...]
    sizes: Mapping[fx.Node, torch.Size]
    changing: frozenset[fx.Node]


@dataclass(slots=True)
class _Known:
    """What earlier recordings have shown."""

    opaque: dict[str, Reason] = field(default_factory=dict)
    guards: dict[str, SizeGuard] = field(default_factory=dict)
    fixed: dict[str, FixedPadding] = field(default_factory=dict)


def record_faithfully(part: nn.Module, inputs: ExampleInputs, where: str) -> Recording:
    """Record a module, and compare the graph with the module itself.

    A submodule that does something else than was recorded of it becomes one opaque operation, the smallest one that is
    at fault; where that is the whole module, raise TraceError.
    """
    known = _Known()
    graph = _record(part, inputs, where, known)
    while True:
        functions_as_modules(graph, _follow_the_mode(part, graph, inputs, where, known))
        _number_nodes(graph)
        try:
            run = watch(graph, to_run(graph), inputs)
        except Exception:  # noqa: BLE001 - perhaps the model does not run, perhaps it was recorded as something else
            run_model(part, inputs)
            run = Run()
        fault: Fault | None
        changing: frozenset[fx.Node] = frozenset()
        if (written := writes_to_weights(graph, run)) is not None:
            fault = Fault.of_state(part, home(written[0]), written[1])
        else:
            changing = read_what_is_written(graph, run)
            fault = find_fault(part, graph, inputs, known.opaque, _plainly)
        if fault is None:
            return Recording(graph, known.opaque, tuple(known.fixed.values()), run.sizes, changing)
        if not fault.path or fault.path in known.opaque:
            raise TraceError(
                f"The forward of {where} cannot be recorded: {fault.reason[1]}. Change that in the model, or trace a "
                'submodule that does not do it, with at="...".'
            )
        known.opaque[fault.path] = fault.reason
        graph = _record(part, inputs, where, known)


def _record(part: nn.Module, inputs: ExampleInputs, where: str, known: _Known) -> fx.GraphModule:
    """Record the module as it is known so far. Where the size of a map is all that cannot be recorded, fix it."""
    while True:
        working = spare(part)
        recorded = record(working, inputs, where, known.opaque, known.guards)
        new = [path for path in recorded.failures if path not in known.guards]
        for path in new:
            if found := guard_for(part.get_submodule(path), path, recorded.failures[path]):
                known.guards[path], known.fixed[path] = found
        if any(path in known.guards for path in new):
            continue
        for path, failure in recorded.failures.items():
            known.opaque[path] = ("opaque", f"its forward cannot be traced: {failure.why}")
            known.fixed.pop(path, None)
        for path, module in working.named_modules():
            if is_no_operation(module) and not is_no_operation(part.get_submodule(path)):
                mark_no_operation(part.get_submodule(path))  # recording has seen it
        return recorded.with_modules(part)


def _follow_the_mode(
    part: nn.Module, graph: fx.GraphModule, inputs: ExampleInputs, where: str, known: _Known
) -> Mapping[str, bool]:
    """Return which functional batch norms use the statistics of the batch in training: a second recording, in training
    mode, shows it."""
    if not batch_norms(graph.graph):
        return {}
    try:
        recorded = record(copy_model(part).train(), inputs, where, known.opaque, known.guards)
    except TraceError:  # it wants a target, perhaps: then the code of the batch norm must say it
        return {name: asks_for_mode(part.get_submodule(name.rpartition(".")[0])) for name in batch_norms(graph.graph)}
    return batch_norms(recorded.graph)


def _plainly(module: nn.Module, inputs: ExampleInputs, opaque: Collection[str]) -> fx.GraphModule:
    return record(spare(module), inputs, type(module).__name__, opaque).with_modules(module)


def _number_nodes(graph: fx.GraphModule) -> None:
    """Number the nodes without gaps. A node that was erased leaves one, and unpickling, which records the forward
    anew, would close it: the names by which we know the layers would then be those of other nodes."""
    fresh, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.graph.nodes:
        args, kwargs = (fx.map_arg(part, lambda n: copies[n]) for part in (node.args, node.kwargs))
        copies[node] = fresh.create_node(node.op, node.target, args, kwargs, type_expr=node.type)
        copies[node].meta = dict(node.meta)
    graph.graph = fresh
