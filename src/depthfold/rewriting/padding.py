"""Padding moved to the front of a segment, and skips inside it cropped to match.

A merged convolution pads once, before everything. So does the rewritten network: the front pads by the sum of the
paddings times the strides before them, and the layers of the segment pad no more. Inside, every map is then larger by
what the layers after it will eat: its margin. A skip reads the map at its source, whose margin is larger than that of
its target, and is cropped by the difference.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch.nn.functional as F
from torch import fx

from depthfold.core import Span
from depthfold.core.shape import ConvShape, Padding, as_pad_argument
from depthfold.tracing import Blueprint
from depthfold.tracing.shapes import function_arguments
from depthfold.tracing.size_guard import SizeCheck, SizeGuard
from depthfold.tracing.traced import INSERTED, SkipSite

Nodes = dict[str, fx.Node]


def move_padding(graph: fx.GraphModule, nodes: Nodes, blueprint: Blueprint, span: Span) -> None:
    _move_guards(graph, nodes, blueprint, span)
    for layer in blueprint.sites[span.i : span.j]:
        _take_out_pad(graph, nodes, layer.pad)
        _set_padding(graph, nodes[layer.conv], None)
    front = blueprint.network.path_shape(span).padding
    _set_padding(graph, nodes[blueprint.sites[span.i].conv], front)
    for site in blueprint.skip_sites:
        if span.contains(site.skip.span):
            _crop_skip(graph, nodes, blueprint, span, site)


def _move_guards(graph: fx.GraphModule, nodes: Nodes, blueprint: Blueprint, span: Span) -> None:
    """Check at the front of a segment what guards inside it would check: there the maps have their margins."""
    front = nodes[blueprint.sites[span.i].conv]
    for name, path in _inner_guards(blueprint, span).items():
        node, target = nodes[name], str(nodes[name].target)
        inner: Any = graph.get_submodule(target)
        checks = []
        for check in inner.checks:
            dim = check.dim - 2
            shift = sum(path.padding[dim]) - path.extent[dim]
            checks.append(SizeCheck(check.dim, check.rule, shift, path.stride[dim]))
        _take_out(graph, node)
        graph.set_submodule(target, SizeGuard(inner.where, tuple(checks)))
        with graph.graph.inserting_before(front):
            guard = graph.graph.call_module(target, (front.all_input_nodes[0],))
        front.replace_input_with(front.all_input_nodes[0], guard)


def _inner_guards(blueprint: Blueprint, span: Span) -> dict[str, ConvShape]:
    """The guards behind the front of a segment, each with the convolution from the front to what it checks."""
    found: dict[str, ConvShape] = {}
    for l in span.layers[1:]:
        found |= dict.fromkeys(blueprint.sites[l - 1].guards, blueprint.network.path_shape(Span(span.i, l - 1)))
    for site in blueprint.skip_sites:
        if span.contains(site.skip.span):
            source = site.skip.source
            path = blueprint.network.path_shape(Span(span.i, source)) if source > span.i else None
            for step in site.steps:
                if path is not None:
                    found |= dict.fromkeys(step.guards, path)
                path = step.shape if path is None else path.then(step.shape)
    return found


def additions_out_of_place(nodes: Nodes, blueprint: Blueprint) -> None:
    """x += y as x + y: what is added in place may be a part of a map that somebody else still needs."""
    layers = (name for site in blueprint.sites for name in site.additions)
    inside = (name for site in blueprint.skip_sites for name in site.sums)
    for name in (*layers, *inside):
        node = nodes[name]
        if node.target is operator.iadd:
            node.target = operator.add
        elif node.target == "add_":
            node.target = "add"


def crop_of(blueprint: Blueprint, span: Span, site: SkipSite) -> Padding:
    """How much to take off each side of what a skip reads, so that it lies on the grid of its target.

    Negative where it must be padded instead: a skip from the very front of the segment reads a map that has not been
    padded yet.
    """
    branch, skip = blueprint.network.path_shape(site.skip.span), blueprint.network.skip_shape(site.skip)
    front = blueprint.network.path_shape(span).padding if site.skip.source == span.i else ((0, 0),) * branch.dims
    crops = []
    for (before, _), (own, _), reach, width, (lead, trail) in zip(
        branch.padding, skip.padding, branch.extent, skip.extent, front, strict=True
    ):
        start = before - own
        # Whatever the size of the map, the skip must give as many outputs as the branch: so the end follows.
        crops.append((start - lead, reach - width - start - trail))
    return tuple(crops)


def _crop_skip(graph: fx.GraphModule, nodes: Nodes, blueprint: Blueprint, span: Span, site: SkipSite) -> None:
    crop = crop_of(blueprint, span, site)
    reader, operand = _entry(graph, nodes, site)
    if any(before or after for before, after in crop):
        _insert_pad(graph, reader, operand, tuple((-before, -after) for before, after in crop))


def _entry(graph: fx.GraphModule, nodes: Nodes, site: SkipSite) -> tuple[fx.Node, fx.Node]:
    """The node that reads the value at the start of a skip, and that value, once the skip pads no more."""
    if not site.steps:
        return nodes[(site.add, *site.sums)[-1]], nodes[site.operand]
    # Only the first step pads. Before a batch norm, not after it: the zeros at the front of a segment go through it.
    first = site.steps[0]
    _take_out_pad(graph, nodes, first.pad)
    if first.conv is not None:
        _set_padding(graph, nodes[first.conv], None)
    if first.pool is not None:
        _take_out_padding_of_pool(graph, nodes[first.pool])
    name = first.conv or first.pool or first.norm
    assert name is not None
    return nodes[name], nodes[name].all_input_nodes[0]


def _take_out_padding_of_pool(graph: fx.GraphModule, pool: fx.Node) -> None:
    if pool.op == "call_module":
        # A pool has no weights, so one module may be called in several places.
        module: Any = copy.deepcopy(graph.get_submodule(str(pool.target)))
        module.padding = 0
        pool.target = f"depthfold_{pool.name}"
        graph.add_module(str(pool.target), module)
    else:
        pool.args, pool.kwargs = pool.args[:1], function_arguments(pool) | {"padding": 0}


def _take_out_pad(graph: fx.GraphModule, nodes: Nodes, name: str | None) -> None:
    if name is not None:
        _take_out(graph, nodes[name])


def _take_out(graph: fx.GraphModule, node: fx.Node) -> None:
    node.replace_all_uses_with(node.all_input_nodes[0])
    graph.graph.erase_node(node)


def _set_padding(graph: fx.GraphModule, conv: fx.Node, padding: Padding | None) -> None:
    """Give a convolution a padding of its own where it can hold it, and a padding before it where it cannot."""
    module: Any = graph.get_submodule(str(conv.target))
    symmetric = padding is not None and all(before == after for before, after in padding)
    module.padding = tuple(p[0] for p in padding or ()) if symmetric else (0,) * len(module.kernel_size)
    if padding is not None and not symmetric:
        _insert_pad(graph, conv, conv.all_input_nodes[0], padding)


def _insert_pad(graph: fx.GraphModule, reader: fx.Node, operand: fx.Node, widths: Padding) -> None:
    with graph.graph.inserting_before(reader):
        node = graph.graph.call_function(F.pad, (operand, as_pad_argument(widths)))
    node.meta[INSERTED] = True
    reader.replace_input_with(operand, node)
