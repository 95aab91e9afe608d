"""Leave out convolutions and residual branches: identities take their place, which merging removes.

Nodes keep their names, so that everything that looks up a node of a layer still finds it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx, nn

from depthfold.core import Drops, Span
from depthfold.rewriting.padding import Nodes, bypass
from depthfold.rewriting.protection import protect
from depthfold.tracing import Blueprint
from depthfold.tracing.modules import called_module, fused_activation
from depthfold.tracing.size_guard import SizeGuard
from depthfold.tracing.traced import LayerSite, SkipSite


def drop_parts(graph: fx.GraphModule, nodes: Nodes, blueprint: Blueprint, dropped: Drops) -> None:
    """Replace the dropped layers with identities, and the additions after dropped branches with their skips."""
    activations = {site.activation for site in blueprint.sites}
    for l in dropped.layers:
        if not dropped.covers(Span(l - 1, l)):
            _drop_layer(graph, nodes, blueprint.sites[l - 1])
            protect(graph, nodes[blueprint.sites[l - 1].linear], activations)
    for branch in dropped.branches:
        if not any(other.contains(branch) for other in dropped.branches if other != branch):
            addition = _drop_branch(graph, nodes, blueprint.skip_around(branch))
            protect(graph, addition, activations)


def _drop_layer(graph: fx.GraphModule, nodes: Nodes, site: LayerSite) -> None:
    if site.pad is not None:
        bypass(graph, nodes[site.pad])  # a guard stays, because it may also be about the layers after it
    for name in (site.conv, *site.affine):
        if nodes[name].op == "call_module":
            _compute_identity(graph, nodes[name])
        else:  # a constant factor
            _return(graph, nodes[name], nodes[name].all_input_nodes[0], f"depthfold_dropped_{name}")


def _return(graph: fx.GraphModule, node: fx.Node, value: fx.Node, target: str) -> None:
    """Let a node return a value, as the call of an identity with this path."""
    graph.add_module(target, nn.Identity().train(graph.training))
    node.op, node.target, node.args, node.kwargs = "call_module", target, (value,), {}


def _compute_identity(graph: fx.GraphModule, node: fx.Node) -> None:
    """Let the node of a convolution or batch norm return its input, or the activation of it that is inside the norm."""
    path, old = str(node.target), graph.get_submodule(str(node.target))
    source, *tensors = node.all_input_nodes
    node.args, node.kwargs = (source,), {}
    used = [f"{other.target}." for other in graph.graph.nodes if other.op in _NAMED and other is not node]
    activation = fused_activation(old)
    identity = nn.Identity().train(old.training)
    for name, child in old.named_children():  # detectron2 has the batch norm inside the convolution
        if child is activation or any(target.startswith(f"{path}.{name}.") for target in used):
            identity.add_module(name, child)
    graph.set_submodule(path, identity)
    if activation is not None:
        node.target = f"{path}.act"
        if hasattr(activation, "inplace"):
            activation.inplace = False  # type: ignore[assignment]
    _erase_unused(graph, tensors)


_NAMED = ("call_module", "get_attr")


def _drop_branch(graph: fx.GraphModule, nodes: Nodes, site: SkipSite) -> fx.Node:
    """Let the addition return the value of its skip, and remove what only the branch computes. Return the addition."""
    addition, first = nodes[site.add], site.steps[0] if site.steps else None
    entry = addition if first is None else nodes[first.pad or first.conv or first.pool or first.affine[0]]
    before = addition.all_input_nodes
    _return(graph, addition, nodes[site.operand], f"depthfold_dropped_{site.skip.target}")
    for guard in [node for node in graph.graph.nodes if isinstance(called_module(graph, node), SizeGuard)]:
        # It may be about layers after the branch, although the branch reads it.
        if guard < entry:
            entry.replace_input_with(guard.all_input_nodes[0], guard)
    _erase_unused(graph, before)
    return addition


def _erase_unused(graph: fx.GraphModule, nodes: Iterable[fx.Node]) -> None:
    """Erase the nodes that nothing reads, what is computed only for them, and the parameters that only they read."""
    reached, erased = list(nodes), set[fx.Node]()
    while reached:
        node = reached.pop()
        if node.users or node in erased or node.op == "placeholder":
            continue
        reached.extend(node.all_input_nodes)
        graph.graph.erase_node(node)
        erased.add(node)
        inside = [f"{other.target}." for other in graph.graph.nodes if other.op in _NAMED]
        if node.op == "get_attr" and not any(f"{node.target}.".startswith(target) for target in inside):
            path, _, name = str(node.target).rpartition(".")
            delattr(graph.get_submodule(path), name)
