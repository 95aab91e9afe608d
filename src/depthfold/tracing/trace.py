"""trace(): a model that we have never seen, as a Network."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from depthfold.errors import TraceError
from depthfold.tracing.chains import link_chains
from depthfold.tracing.drafts import Values, draft_layers
from depthfold.tracing.gates import refuse_gates
from depthfold.tracing.inputs import Inputs, inputs_at
from depthfold.tracing.modules import is_hooked_inside
from depthfold.tracing.numbering import number
from depthfold.tracing.outputs import is_output, part_is_output
from depthfold.tracing.request import by_name, check_ignore, check_model, copy_model, modules_outside, refuse_hooks
from depthfold.tracing.roles import assign_roles, home
from depthfold.tracing.rules import Ignore
from depthfold.tracing.traced import TracedNetwork
from depthfold.tracing.tracer import explain, trace_graph

_DROPOUTS: dict[Any, Any] = {
    F.dropout: nn.Dropout,
    F.dropout1d: nn.Dropout1d,
    F.dropout2d: nn.Dropout2d,
    F.dropout3d: nn.Dropout3d,
    F.alpha_dropout: nn.AlphaDropout,
    F.feature_alpha_dropout: nn.FeatureAlphaDropout,
}


def trace(model: nn.Module, example_inputs: Any, ignore: Ignore = (), at: str | None = None) -> TracedNetwork:
    """Find what can be merged in a model, and why the rest cannot.

    `example_inputs` is what the model takes: a tuple of positional arguments, a dict of named ones, or the single
    argument. `ignore` lists modules that are to be no layers, by name ("features.0"), glob ("features.0.*") or type:
    they keep their convolutions and activations, only their batch norms are folded when merging. `at` names a submodule
    to trace instead of the whole model. The model itself is not changed: a copy is traced, in evaluation mode. What its
    forward does only in training (auxiliary outputs, for example) is no part of the network.
    """
    check_model(model, at)
    snapshot = copy_model(model)
    modes = {path: module.training for path, module in snapshot.named_modules(remove_duplicate=False)}
    snapshot.eval()
    inputs = Inputs.of(example_inputs).map(Tensor.clone)  # a forward may write to its input
    example, given = inputs.map(lambda tensor: tensor.to("meta")), inputs
    if at:
        inputs = inputs_at(snapshot, at, given)
    part = snapshot.get_submodule(at) if at else snapshot
    name = type(part).__name__
    refuse_hooks(part, name)
    ignore = check_ignore(part, ignore, at)
    graph, opaque = trace_graph(part, inputs, f"{name} (at={at!r})" if at else name)
    _dropouts_as_modules(graph)
    _name_afresh(graph)
    sizes, output = _sizes(graph, inputs)
    _refuse_collectors(part, output, inputs)
    roles = refuse_gates(assign_roles(graph, sizes, opaque, ignore, modules_outside(snapshot, at)), sizes)
    values = Values(roles, dict(graph.named_modules()))
    numbered = number(link_chains(draft_layers(values), values), values, sizes)
    ends_in_output = bool(numbered.sites) and is_output(graph, numbered.sites[-1].out)
    if at and ends_in_output:
        ends_in_output = part_is_output(snapshot, at, given)
    _restore_modes(snapshot, graph, modes, at)
    return TracedNetwork(
        name=name,
        layers=numbered.layers,
        skips=tuple(site.skip for site in numbered.skip_sites),
        barriers=numbered.barriers,
        refusals=numbered.refusals,
        ends_in_output=ends_in_output,
        graph=graph,
        sites=numbered.sites,
        skip_sites=numbered.skip_sites,
        inputs=inputs,
        model=snapshot if at else None,
        at=at or None,
        ignore=by_name(ignore, graph, at),
        example=example,
    )


def _dropouts_as_modules(graph: fx.GraphModule) -> None:
    """F.dropout(x, training=self.training) is frozen by tracing; as a module it follows train() and eval() again.

    We trace in evaluation mode, so a dropout that is on has nothing to do with the mode: it stays as it is.
    """
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target in _DROPOUTS:
            given = inspect.signature(node.target).bind(*node.args, **node.kwargs)
            given.apply_defaults()
            if given.arguments["training"] is not False:
                continue
            target = f"depthfold_{node.name}"
            graph.add_module(target, _DROPOUTS[node.target](given.arguments["p"]).eval())
            with graph.graph.inserting_before(node):
                module = graph.graph.call_module(target, (given.arguments["input"],))
            module.meta = dict(node.meta)
            node.replace_all_uses_with(module)
            graph.graph.erase_node(node)
    graph.recompile()


def _name_afresh(graph: fx.GraphModule) -> None:
    """Number the nodes without gaps. A node that was erased leaves one, and unpickling, which records the forward
    anew, would close it: the names by which we know the layers would then be those of other nodes."""
    fresh, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.graph.nodes:
        args, kwargs = (fx.map_arg(part, lambda n: copies[n]) for part in (node.args, node.kwargs))
        copies[node] = fresh.create_node(node.op, node.target, args, kwargs, type_expr=node.type)
        copies[node].meta = dict(node.meta)
    graph.graph = fresh


class _Sizes(fx.Interpreter):
    """Runs the graph once and notes the size of every tensor."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.sizes: dict[fx.Node, torch.Size] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.sizes[n] = value.shape
        return value


def _sizes(graph: fx.GraphModule, inputs: Inputs) -> tuple[dict[fx.Node, torch.Size], Any]:
    """The size of every tensor in the graph, and its output."""
    interpreter = _Sizes(graph)
    try:
        with torch.no_grad():
            output = interpreter.run(*inputs.map(Tensor.clone).for_graph(graph))
    except Exception as error:
        raise TraceError(
            f"The model does not run on its example inputs: {explain(error)}. Give the inputs that it takes, on its "
            "device and in its precision: a tuple of positional arguments, a dict of named ones, or a single argument."
        ) from error
    return interpreter.sizes, output


def _refuse_collectors(part: nn.Module, output: Any, inputs: Inputs) -> None:
    """A forward may return what hooks have put aside. They do not run while torch.fx records, so nothing is there."""
    if not is_hooked_inside(part):
        return
    with torch.no_grad():
        wanted = inputs.map(Tensor.clone).call(part)
    one, two = (sum(isinstance(leaf, Tensor) for leaf in tree_leaves(value)) for value in (wanted, output))
    if one != two:
        raise TraceError(
            f"The forward of {type(part).__name__} returns {one} tensors, but {two} when torch.fx has recorded it: it "
            "reads what its hooks have collected, which cannot be recorded. Return these values from the forward, "
            "without hooks."
        )


def _restore_modes(snapshot: nn.Module, graph: fx.GraphModule, modes: dict[str, bool], at: str | None) -> None:
    """Every module back to the mode in which the user had it."""
    for path, module in snapshot.named_modules():
        module.training = modes[path]
    homes = {str(node.target): home(node) for node in graph.graph.nodes if node.op == "call_module"}
    for path, module in graph.named_modules():
        # A dropout that was a function is no module of the user's: it has the mode of the one that called it.
        found = (".".join(name for name in (at, place) if name) for place in (path, homes.get(path), None))
        module.training = next(modes[whole] for whole in found if whole in modes)
