"""Padding reordering (Appendix E.2): move padding to the front of a segment, and crop the skips inside it to match.

A merged convolution pads once, at its input. The rewritten network does the same: the front of the segment pads by the
sum of the paddings times the strides before them, and the other layers do not pad. Every map inside the segment then
has a margin, which the layers after it remove. A skip starts at a map with a larger margin than its target, and is
cropped by the difference.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch.nn.functional as F
from torch import fx

from depthfold.core import ConvShape, Drops, Padding, Span, as_pad_argument
from depthfold.tracing import Blueprint
from depthfold.tracing.shapes import function_arguments
from depthfold.tracing.size_guard import SizeCheck, SizeGuard
from depthfold.tracing.traced import INSERTED, SkipSite

Nodes = dict[str, fx.Node]

_OUT_OF_PLACE: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    "add_": "add",
    "mul_": "mul",
    "div_": "div",
    "neg_": "neg",
}


def move_padding(graph: fx.GraphModule, nodes: Nodes, blueprint: Blueprint, span: Span, dropped: Drops) -> None:
    """Move the padding and the size guards of a segment to its front, and crop its skips."""
    kept, front = dropped.kept(span), front_layer(blueprint, span, dropped)
    if front is None:
        return
    _move_guards(graph, nodes, blueprint, span, dropped)
    for layer in (blueprint.sites[l - 1] for l in kept):
        if layer.pad:
            bypass(graph, nodes[layer.pad])
        _set_padding(graph, nodes[layer.conv], None)
    first, padding = nodes[blueprint.sites[front - 1].conv], blueprint.network.path_shape(span, dropped).padding
    if front in kept:
        _set_padding(graph, first, padding)
    elif any(map(any, padding)):
        _insert_pad(graph, first, first.all_input_nodes[0], padding)
    for site in blueprint.skips_inside(span, dropped):
        _crop_skip(graph, nodes, blueprint, span, site, dropped)


def front_layer(blueprint: Blueprint, span: Span, dropped: Drops) -> int | None:
    """Return the layer whose input is padded for the whole segment, or None if no layer of it is left.

    This is the first layer that is left. If a projection ends before it, this is the dropped layer at its end: a
    projection adds a bias, and zeros must be padded before that.
    """
    kept = dropped.kept(span)
    projected = (site.skip.target for site in blueprint.skips_inside(span, dropped) if site.steps)
    return min((*kept[:1], *projected)) if kept else None


def _move_guards(graph: fx.GraphModule, nodes: Nodes, blueprint: Blueprint, span: Span, dropped: Drops) -> None:
    """Move guards inside a segment to its front, because the maps inside have margins."""
    at = front_layer(blueprint, span, dropped)
    assert at is not None
    front = nodes[blueprint.sites[at - 1].conv]
    for name, path in _inner_guards(blueprint, span, at, dropped).items():
        if not nodes[name].users:
            continue  # it was erased with a dropped branch
        node, target = nodes[name], str(nodes[name].target)
        inner: Any = graph.get_submodule(target)
        checks = []
        for check in inner.checks:
            dim = check.dim - 2
            shift = sum(path.padding[dim]) - path.extent[dim]
            checks.append(SizeCheck(check.dim, check.rule, shift, path.stride[dim]))
        bypass(graph, node)
        graph.set_submodule(target, SizeGuard(inner.where, tuple(checks)))
        with graph.graph.inserting_before(front):
            guard = graph.graph.call_module(target, (front.all_input_nodes[0],))
        front.replace_input_with(front.all_input_nodes[0], guard)


def _inner_guards(blueprint: Blueprint, span: Span, front: int, dropped: Drops) -> dict[str, ConvShape]:
    """Return the guards after the front of a segment, each with the convolution from the front to its map."""
    found: dict[str, ConvShape] = {}

    def path_to(position: int) -> ConvShape:
        return blueprint.network.path_shape(Span(span.i, position), dropped)

    for l in span.layers:
        if l > front:
            found |= dict.fromkeys(blueprint.sites[l - 1].guards, path_to(l - 1))
    for site in blueprint.skips_inside(span, dropped):
        path = path_to(site.skip.source) if site.skip.source >= front else None
        for step in site.steps:
            if path is not None:
                found |= dict.fromkeys(step.guards, path)
            path = step.shape if path is None else path.then(step.shape)
    return found


def compute_out_of_place(nodes: Nodes, blueprint: Blueprint) -> None:
    """Replace x += y by x + y, because x may be a part of a map that is read later, and x *= 2 in skips by x * 2."""
    layers = (name for site in blueprint.sites for name in site.additions)
    sums = (name for site in blueprint.skip_sites for name in site.sums)
    steps = (name for site in blueprint.skip_sites for step in site.steps for name in step.affine)
    for node in (nodes[name] for name in (*layers, *sums, *steps)):
        if node.op != "call_module":
            node.target = _OUT_OF_PLACE.get(node.target, node.target)


def skip_crop(blueprint: Blueprint, span: Span, site: SkipSite, dropped: Drops) -> Padding:
    """Return the widths by which to crop the input of a skip on each side, so that it matches its target.

    Negative widths mean padding: a skip over the front of the segment reads a map that has not been padded yet.
    """
    branch, skip = blueprint.network.path_shape(site.skip.span, dropped), blueprint.network.skip_shape(site.skip)
    over_front = front_layer(blueprint, span, dropped) in site.skip.span.layers
    front = blueprint.network.path_shape(span, dropped).padding if over_front else ((0, 0),) * branch.dims
    crops = []
    for (before, _), (own, _), reach, width, (lead, trail) in zip(
        branch.padding, skip.padding, branch.extent, skip.extent, front, strict=True
    ):
        start = before - own
        # The skip must have as many outputs as the branch at every size. This determines the end.
        crops.append((start - lead, reach - width - start - trail))
    return tuple(crops)


def _crop_skip(
    graph: fx.GraphModule, nodes: Nodes, blueprint: Blueprint, span: Span, site: SkipSite, dropped: Drops
) -> None:
    crop = skip_crop(blueprint, span, site, dropped)
    reader, operand = _entry(graph, nodes, site)
    if any(before or after for before, after in crop):
        _insert_pad(graph, reader, operand, tuple((-before, -after) for before, after in crop))


def _entry(graph: fx.GraphModule, nodes: Nodes, site: SkipSite) -> tuple[fx.Node, fx.Node]:
    """Remove the padding of a skip. Return the node that reads the value at its start, and that value."""
    if not site.steps:
        return nodes[(site.add, *site.sums)[-1]], nodes[site.operand]
    # Only the first step pads. A crop goes before its batch norm, as do the zeros at the front of a segment.
    first = site.steps[0]
    if first.pad:
        bypass(graph, nodes[first.pad])
    if first.conv is not None:
        _set_padding(graph, nodes[first.conv], None)
    if first.pool is not None:
        _remove_pool_padding(graph, nodes[first.pool])
    name = first.conv or first.pool or first.affine[0]
    return nodes[name], nodes[name].all_input_nodes[0]


def _remove_pool_padding(graph: fx.GraphModule, pool: fx.Node) -> None:
    """Set the padding of an average pool to zero."""
    if pool.op == "call_module":
        # The same pool module may be called in several places.
        module: Any = copy.deepcopy(graph.get_submodule(str(pool.target)))
        module.padding = 0
        pool.target = f"depthfold_{pool.name}"
        graph.add_module(str(pool.target), module)
    else:
        pool.args, pool.kwargs = pool.args[:1], function_arguments(pool) | {"padding": 0}


def bypass(graph: fx.GraphModule, node: fx.Node) -> None:
    """Remove a node, and let its readers read its input."""
    node.replace_all_uses_with(node.all_input_nodes[0])
    graph.graph.erase_node(node)


def _set_padding(graph: fx.GraphModule, conv: fx.Node, padding: Padding | None) -> None:
    """Set the padding of a convolution, with a padding node before it if the padding is not symmetric."""
    module: Any = graph.get_submodule(str(conv.target))
    module.padding_mode = "zeros"  # without padding, it may be any other
    symmetric = padding is not None and all(before == after for before, after in padding)
    module.padding = tuple(p[0] for p in padding or ()) if symmetric else (0,) * len(module.kernel_size)
    if padding is not None and not symmetric:
        _insert_pad(graph, conv, conv.all_input_nodes[0], padding)


def _insert_pad(graph: fx.GraphModule, reader: fx.Node, operand: fx.Node, widths: Padding) -> None:
    with graph.graph.inserting_before(reader):
        node = graph.graph.call_function(F.pad, (operand, as_pad_argument(widths)))
    node.meta[INSERTED] = True
    reader.replace_input_with(operand, node)
