"""Activations: taken out, or put in where the network has none."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx, nn

from depthfold.tracing import TracedNetwork
from depthfold.tracing.modules import fused_activation
from depthfold.tracing.traced import LayerSite

Nodes = dict[str, fx.Node]


def remove_activation(graph: fx.GraphModule, nodes: Nodes, site: LayerSite) -> None:
    assert site.activation is not None
    node = nodes[site.activation]
    if site.activation == site.norm:  # it lives inside the batch norm, which stays
        graph.get_submodule(str(node.target)).act = nn.Identity()
        return
    node.replace_all_uses_with(node.all_input_nodes[0])
    graph.graph.erase_node(node)


def insert_activation(graph: fx.GraphModule, nodes: Nodes, network: TracedNetwork, l: int) -> None:
    """Put an activation of the network's own kind after layer l, that is, after its additions."""
    before = nodes[network.sites[l - 1].out]
    pattern = _pattern(network)
    with graph.graph.inserting_after(before):
        if isinstance(pattern, nn.Module):
            target = f"depthfold_activation_{l}"
            graph.add_module(target, _fitting(pattern, network.layers[l - 1].shape.out_channels))
            node = graph.graph.call_module(target, (before,))
        elif pattern.op == "call_method":
            node = graph.graph.call_method(str(pattern.target).rstrip("_"), (before, *pattern.args[1:]))
        else:
            kwargs = {name: value for name, value in pattern.kwargs.items() if name not in ("input", "inplace")}
            node = graph.graph.call_function(_out_of_place(pattern.target), (before, *pattern.args[1:]), kwargs)
    before.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)


class _Function(nn.Module):
    """An activation that the network calls as a function or a method, as a module."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__()
        self.target = _out_of_place(node.target)
        self.args = node.args[1:]
        self.kwargs = {name: value for name, value in node.kwargs.items() if name not in ("input", "inplace")}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.target, str):
            return getattr(x, self.target.rstrip("_"))(*self.args, **self.kwargs)  # type: ignore[no-any-return]
        return self.target(x, *self.args, **self.kwargs)  # type: ignore[no-any-return]


def own_activation(network: TracedNetwork, channels: int) -> nn.Module:
    """An activation of the network's own kind, as a module for a map with so many channels."""
    pattern = _pattern(network)
    return _fitting(pattern, channels) if isinstance(pattern, nn.Module) else _Function(pattern)


def _pattern(network: TracedNetwork) -> nn.Module | fx.Node:
    """The activation to copy: the first one of the kind that the network uses most."""
    kind = network.own_activation
    site = next(s for s, layer in zip(network.sites, network.layers, strict=True) if layer.activation == kind)
    node: fx.Node = next(node for node in network.graph.graph.nodes if node.name == site.activation)
    if node.op != "call_module":
        return node
    module = network.graph.get_submodule(str(node.target))
    return fused_activation(module) or module


def _fitting(pattern: nn.Module, channels: int) -> nn.Module:
    """A copy of the activation for another place: not in place, and with a parameter per channel where it has such."""
    module = copy.deepcopy(pattern)
    if isinstance(module, nn.PReLU) and module.num_parameters > 1:
        start = float(module.weight.detach().mean())
        like = {"device": module.weight.device, "dtype": module.weight.dtype}
        module = nn.PReLU(channels, init=start, **like)
    if hasattr(module, "inplace"):
        module.inplace = False  # type: ignore[assignment]
    return module


def _out_of_place(function: Any) -> Any:
    """F.relu_ and torch.relu_ as F.relu and torch.relu."""
    name = getattr(function, "__name__", "")
    if not name.endswith("_"):
        return function
    for home in (torch.nn.functional, torch):
        if hasattr(home, name.rstrip("_")):
            return getattr(home, name.rstrip("_"))
    return function
