"""Record a forward as a graph, and repeat with opaque submodules until the graph agrees with the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from depthfold.core import FixedPadding
from depthfold.errors import TraceError
from depthfold.tracing.additions import use_plain_additions
from depthfold.tracing.checking import Fault, find_fault, run_model, working_copy, working_graph
from depthfold.tracing.diagnosis import reads_training_mode
from depthfold.tracing.fixed_sizes import guard_for
from depthfold.tracing.formulas import replace_formulas
from depthfold.tracing.forward import record
from depthfold.tracing.functional import functional_batch_norms, functions_as_modules
from depthfold.tracing.in_place import Observed, observe, redirect_reads, writes_to_weights
from depthfold.tracing.inputs import ExampleInputs
from depthfold.tracing.modules import called_module, is_no_op, mark_no_op
from depthfold.tracing.request import copy_model
from depthfold.tracing.roles import enclosing_module
from depthfold.tracing.rules import Reason
from depthfold.tracing.size_guard import SizeGuard
from depthfold.tracing.unused import erase_unused


@dataclass(frozen=True, slots=True)
class Recording:
    """The graph of a module, with the reasons for its opaque submodules, and its overwritten values."""

    graph: fx.GraphModule
    opaque: Mapping[str, Reason]
    fixed: tuple[FixedPadding, ...]
    sizes: Mapping[fx.Node, torch.Size]
    overwritten: frozenset[fx.Node]


@dataclass(slots=True)
class _Known:
    """The results of earlier recordings."""

    opaque: dict[str, Reason] = field(default_factory=dict)
    guards: dict[str, SizeGuard] = field(default_factory=dict)
    fixed: dict[str, FixedPadding] = field(default_factory=dict)


def record_and_check(part: nn.Module, inputs: ExampleInputs, where: str) -> Recording:
    """Record a module, and compare the graph with the module itself.

    If they differ, the smallest submodule at fault becomes one opaque operation. Raise TraceError if that is the module
    itself.
    """
    known = _Known()
    graph = _record(part, inputs, where, known)
    while True:
        functions_as_modules(graph, _batch_norms_following_mode(part, graph, inputs, where, known))
        _renumber_nodes(graph)
        try:
            run = observe(graph, working_graph(graph), inputs)
        except Exception:  # noqa: BLE001 - the model may fail as well, or its recording may be wrong
            run_model(part, inputs)
            run = Observed()
        if erase_unused(graph, run):
            _renumber_nodes(graph)
            run = observe(graph, working_graph(graph), inputs) if run.storages else run
        _separate_guards(graph)
        fault: Fault | None
        overwritten: frozenset[fx.Node] = frozenset()
        if (written := writes_to_weights(graph, run)) is not None:
            fault = Fault.of_state(part, enclosing_module(written[0]), written[1])
        else:
            overwritten = redirect_reads(graph, run)
            fault = find_fault(part, graph, inputs, known.opaque, _record_submodule)
        # What replaces formulas and subtractions rounds differently, so the graph is compared with the model before.
        if fault is None and replace_formulas(graph, run, overwritten) | use_plain_additions(graph, run.sizes):
            _renumber_nodes(graph)
            run = observe(graph, working_graph(graph), inputs)
            overwritten = redirect_reads(graph, run)
        if fault is None:
            # After every change of the graph: an addition that no longer writes in place has another name, for example.
            copies = _renumber_nodes(graph)
            sizes = {copies[node]: size for node, size in run.sizes.items()}
            fixed = tuple(known.fixed.values())
            return Recording(graph, known.opaque, fixed, sizes, frozenset(copies[node] for node in overwritten))
        if not fault.path or fault.path in known.opaque:
            raise TraceError(
                f"The forward of {where} cannot be recorded: {fault.reason[1]}. Change that code, or trace a submodule "
                'without it, with at="...".'
            )
        known.opaque[fault.path] = fault.reason
        graph = _record(part, inputs, where, known)


def _record(part: nn.Module, inputs: ExampleInputs, where: str, known: _Known) -> fx.GraphModule:
    """Record the module, and fix the map size for submodules whose padding depends on it."""
    while True:
        working = working_copy(part)
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
            if is_no_op(module) and not is_no_op(part.get_submodule(path)):
                mark_no_op(part.get_submodule(path))  # it returned its input while it was recorded
        return recorded.with_modules(part)


def _separate_guards(graph: fx.GraphModule) -> None:
    """Let only the first reader of a size guard read it, and the others its input, so that no skip starts at a guard.

    Rewriting moves a guard together with the layer that reads it.
    """
    for node in graph.graph.nodes:
        if isinstance(called_module(graph, node), SizeGuard):
            for reader in sorted(node.users)[1:]:
                reader.replace_input_with(node, node.all_input_nodes[0])


def _batch_norms_following_mode(
    part: nn.Module, graph: fx.GraphModule, inputs: ExampleInputs, where: str, known: _Known
) -> Mapping[str, bool]:
    """Record again in training mode. Return whether each functional batch norm uses batch statistics there."""
    names = functional_batch_norms(graph.graph)
    if not names:
        return {}
    try:
        recorded = record(copy_model(part).train(), inputs, where, known.opaque, known.guards)
    except TraceError:  # it may require a target in training: then search the code of the batch norm
        return {name: reads_training_mode(part.get_submodule(name.rpartition(".")[0])) for name in names}
    return functional_batch_norms(recorded.graph)


def _record_submodule(module: nn.Module, inputs: ExampleInputs, opaque: Collection[str]) -> fx.GraphModule:
    return record(working_copy(module), inputs, type(module).__name__, opaque).with_modules(module)


def _renumber_nodes(graph: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Name the nodes after their operations, without gaps in their numbers, and return what takes the place of each.

    Unpickling names them anew, and has to give the same names. Drop the annotations of forward(): with `from __future__
    import annotations` they are strings, which torch.fx cannot pickle.
    """
    fresh, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.graph.nodes:
        args, kwargs = (fx.map_arg(part, lambda n: copies[n]) for part in (node.args, node.kwargs))
        copies[node] = fresh.create_node(node.op, node.target, args, kwargs)
        copies[node].meta = dict(node.meta)
    graph.graph = fresh
    return copies
