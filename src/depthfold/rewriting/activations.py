"""Remove activations, and insert them where the network has none."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx, nn

from depthfold.rewriting.protection import protect
from depthfold.tracing import TracedNetwork
from depthfold.tracing.in_place import out_of_place
from depthfold.tracing.modules import activation_kind, fused_activation
from depthfold.tracing.traced import LayerSite

Nodes = dict[str, fx.Node]


def remove_activation(graph: fx.GraphModule, nodes: Nodes, site: LayerSite) -> None:
    """Remove the activation of a layer."""
    assert site.activation is not None
    node = nodes[site.activation]
    if site.activates_in_norm:  # it is inside the batch norm, which stays unless it is dropped
        path = str(node.target)
        dropped = activation_kind(graph.get_submodule(path)) is not None
        graph.set_submodule(path if dropped else f"{path}.act", nn.Identity())
        return
    node.replace_all_uses_with(node.all_input_nodes[0])
    graph.graph.erase_node(node)


def insert_activation(graph: fx.GraphModule, nodes: Nodes, traced: TracedNetwork, l: int) -> None:
    """Insert an activation of the network's most frequent kind after layer l and its additions."""
    before = nodes[traced.blueprint.sites[l - 1].out]
    template = _template(traced, _most_frequent(traced))
    with graph.graph.inserting_after(before):
        if isinstance(template, nn.Module):
            target = f"depthfold_activation_{l}"
            graph.add_module(target, _copy_for(template, traced.network.layers[l - 1].shape.out_channels))
            node = graph.graph.call_module(target, (before,))
        elif template.op == "call_method":
            node = graph.graph.call_method(str(template.target).rstrip("_"), (before, *template.args[1:]))
        else:
            arguments = (before, *template.args[1:])
            node = graph.graph.call_function(out_of_place(template.target), arguments, _keyword_arguments(template))
    before.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)
    protect(graph, node, {site.activation for site in traced.blueprint.sites})  # its gradient needs its result


class _FunctionModule(nn.Module):
    """A module for an activation that the network calls as a function or a method."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__()
        self.target = out_of_place(node.target)
        self.args = node.args[1:]
        self.kwargs = _keyword_arguments(node)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.target, str):
            return getattr(x, self.target.rstrip("_"))(*self.args, **self.kwargs)  # type: ignore[no-any-return]
        return self.target(x, *self.args, **self.kwargs)  # type: ignore[no-any-return]


def activation_names(traced: TracedNetwork) -> tuple[str, ...]:
    """Return the name of the activation after each layer: the network's own, or the one that rewriting would insert.

    Activations that take the same time have the same name: the kind, followed by the settings if the network has
    activations of this kind with different settings (one parameter or one per channel, exact or approximate).
    """
    if not traced.network.activations:
        return ()
    names, inserted = _names(traced), _most_frequent(traced)
    return tuple(names.get(l, names[inserted]) for l in range(1, traced.depth + 1))


def activation_module(traced: TracedNetwork, name: str, channels: int) -> nn.Module:
    """Return the activation with a name of activation_names() as a module for this number of channels."""
    template = _template(traced, next(l for l, found in _names(traced).items() if found == name))
    return _copy_for(template, channels) if isinstance(template, nn.Module) else _FunctionModule(template)


def activation_at(traced: TracedNetwork, l: int) -> nn.Module:
    """Return a copy of the activation after layer l: the network's own, or the one that rewriting would insert."""
    own = l in traced.network.activations
    template = _template(traced, l if own else _most_frequent(traced))
    if not isinstance(template, nn.Module):
        return _FunctionModule(template)
    if not own:
        return _copy_for(template, traced.network.layers[l - 1].shape.out_channels)
    return _out_of_place(copy.deepcopy(template))


def _names(traced: TracedNetwork) -> dict[int, str]:
    """Return the name of each activation of the network, by its layer."""
    names: dict[int, str] = {}
    first: dict[str, str] = {}  # the settings of the first activation of each kind, whose name is just the kind
    for l, layer in enumerate(traced.network.layers, start=1):
        if (kind := layer.activation) is not None:
            settings = _settings(_template(traced, l))
            names[l] = kind if first.setdefault(kind, settings) == settings else f"{kind}({settings})"
    return names


def _settings(template: nn.Module | fx.Node) -> str:
    if isinstance(template, nn.Module):
        return _copy_for(template, channels=2).extra_repr()  # independent of the number of channels
    kwargs = _keyword_arguments(template)
    return ", ".join([*map(str, template.args[1:]), *(f"{name}={value}" for name, value in kwargs.items())])


def _keyword_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the settings of a functional activation."""
    return {name: value for name, value in node.kwargs.items() if name not in ("input", "inplace")}


def _most_frequent(traced: TracedNetwork) -> int:
    """Return the first layer with the network's most frequent kind of activation, which is copied for insertions."""
    kind = traced.network.main_activation
    return next(l for l, layer in enumerate(traced.network.layers, start=1) if layer.activation == kind)


def _template(traced: TracedNetwork, l: int) -> nn.Module | fx.Node:
    """Return the activation after layer l, to be copied."""
    name = traced.blueprint.sites[l - 1].activation
    node: fx.Node = next(node for node in traced.graph.graph.nodes if node.name == name)
    if node.op != "call_module":
        return node
    module = traced.graph.get_submodule(str(node.target))
    return fused_activation(module) or module


def _copy_for(template: nn.Module, channels: int) -> nn.Module:
    """Return a copy for a map with this number of channels that does not work in place."""
    module = copy.deepcopy(template)
    if isinstance(module, nn.PReLU) and module.num_parameters > 1:
        start = float(module.weight.detach().mean())
        like = {"device": module.weight.device, "dtype": module.weight.dtype}
        module = nn.PReLU(channels, init=start, **like)
    return _out_of_place(module)


def _out_of_place(module: nn.Module) -> nn.Module:
    if hasattr(module, "inplace"):
        module.inplace = False  # type: ignore[assignment]
    return module
