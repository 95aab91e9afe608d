"""Activations: taken out, or put in where the network has none."""

from __future__ import annotations

import copy

import torch
from torch import fx, nn

from depthfold.tracing import TracedNetwork
from depthfold.tracing.in_place import out_of_place
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


def insert_activation(graph: fx.GraphModule, nodes: Nodes, traced: TracedNetwork, l: int) -> None:
    """Put an activation of the network's own kind after layer l, that is, after its additions."""
    before = nodes[traced.blueprint.sites[l - 1].out]
    pattern = _pattern(traced, _likeliest(traced))
    with graph.graph.inserting_after(before):
        if isinstance(pattern, nn.Module):
            target = f"depthfold_activation_{l}"
            graph.add_module(target, _fitting(pattern, traced.network.layers[l - 1].shape.out_channels))
            node = graph.graph.call_module(target, (before,))
        elif pattern.op == "call_method":
            node = graph.graph.call_method(str(pattern.target).rstrip("_"), (before, *pattern.args[1:]))
        else:
            kwargs = {name: value for name, value in pattern.kwargs.items() if name not in ("input", "inplace")}
            node = graph.graph.call_function(out_of_place(pattern.target), (before, *pattern.args[1:]), kwargs)
    before.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)


class _Function(nn.Module):
    """An activation that the network calls as a function or a method, as a module."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__()
        self.target = out_of_place(node.target)
        self.args = node.args[1:]
        self.kwargs = {name: value for name, value in node.kwargs.items() if name not in ("input", "inplace")}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.target, str):
            return getattr(x, self.target.rstrip("_"))(*self.args, **self.kwargs)  # type: ignore[no-any-return]
        return self.target(x, *self.args, **self.kwargs)  # type: ignore[no-any-return]


def standing_activations(traced: TracedNetwork) -> tuple[str, ...]:
    """What stands after each layer where an activation stands there: the network's own one, or else the one that is
    inserted. Activations that take the same time have the same name: the kind, and its settings where the network has
    several kinds with one name (a parameter for each channel or a single one, exact or approximate).
    """
    if not traced.network.activations:
        return ()
    names, inserted = _names(traced), _likeliest(traced)
    return tuple(names.get(l, names[inserted]) for l in range(1, traced.depth + 1))


def activation_named(traced: TracedNetwork, name: str, channels: int) -> nn.Module:
    """The activation with a name of standing_activations(), as a module for a map with so many channels."""
    pattern = _pattern(traced, next(l for l, found in _names(traced).items() if found == name))
    return _fitting(pattern, channels) if isinstance(pattern, nn.Module) else _Function(pattern)


def _names(traced: TracedNetwork) -> dict[int, str]:
    """The name of each activation that the network has, by its layer."""
    names: dict[int, str] = {}
    plain: dict[str, str] = {}  # the settings of the first activation of each kind, which has the plain name
    for l, layer in enumerate(traced.network.layers, start=1):
        if (kind := layer.activation) is not None:
            settings = _settings(_pattern(traced, l))
            names[l] = kind if plain.setdefault(kind, settings) == settings else f"{kind}({settings})"
    return names


def _settings(pattern: nn.Module | fx.Node) -> str:
    if isinstance(pattern, nn.Module):
        return _fitting(pattern, channels=2).extra_repr()  # so that those for each channel are alike wherever they are
    kwargs = {name: value for name, value in pattern.kwargs.items() if name not in ("input", "inplace")}
    return ", ".join([*map(str, pattern.args[1:]), *(f"{name}={value}" for name, value in kwargs.items())])


def _likeliest(traced: TracedNetwork) -> int:
    """The layer whose activation is inserted elsewhere: the first one of the kind that the network uses most."""
    kind = traced.network.own_activation
    return next(l for l, layer in enumerate(traced.network.layers, start=1) if layer.activation == kind)


def _pattern(traced: TracedNetwork, l: int) -> nn.Module | fx.Node:
    """The activation after layer l, to copy."""
    name = traced.blueprint.sites[l - 1].activation
    node: fx.Node = next(node for node in traced.graph.graph.nodes if node.name == name)
    if node.op != "call_module":
        return node
    module = traced.graph.get_submodule(str(node.target))
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
