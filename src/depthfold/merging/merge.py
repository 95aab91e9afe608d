"""merge(): every segment of a rewritten network as one convolution."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import fx, nn

from depthfold.core import Span
from depthfold.errors import VerificationError
from depthfold.merging.cleaning import drop_unused, fold_remaining_norms, take_out_nothing
from depthfold.merging.kernels import as_module, segment_kernel
from depthfold.merging.verify import Seam, Shallow, verify
from depthfold.tracing import Blueprint, student_parts
from depthfold.tracing.modules import fused_activation
from depthfold.tracing.traced import INSERTED


def merge(student: nn.Module) -> nn.Module:
    """The shallow network: each segment one convolution with bias, batch norms folded, skips inside a segment folded
    into its kernel. Composed in float64, returned in the model's precision, in evaluation mode, and verified: raises
    VerificationError if it does not compute what the student computes.
    """
    part, remembered, path = student_parts(student)
    network = remembered.network
    graph = copy.deepcopy(part).eval()
    take_out_nothing(graph)
    nodes = {node.name: node for node in graph.graph.nodes}
    seams = tuple(_merge_segment(graph, nodes, part, network, span) for span in network.segments(remembered.plan))
    fold_remaining_norms(graph)
    drop_unused(graph)
    graph.meta = {Shallow.KEY: Shallow(network, remembered.plan, seams)}
    shallow: nn.Module = graph
    if path:
        shallow = copy.deepcopy(student).eval()
        shallow.set_submodule(path, graph)
    verification = verify(student, shallow)
    if not verification.ok:
        raise VerificationError(
            f"The merged network does not compute what the rewritten one computes: {verification}. If its activations "
            "are very large or very small, verify() with inputs of your own; otherwise please report the model."
        )
    return shallow


def _merge_segment(
    graph: fx.GraphModule, nodes: dict[str, fx.Node], student: fx.GraphModule, network: Blueprint, span: Span
) -> Seam:
    """Put one convolution where the segment was. Returns where the two networks can be compared."""
    first, last = network.sites[span.i], network.sites[span.j - 1]
    conv = nodes[first.conv]
    kernel = segment_kernel(student, network, span)
    target = str(conv.target)
    like = graph.get_submodule(target).weight
    assert isinstance(like, torch.Tensor)
    source = _behind_padding(conv.all_input_nodes[0], first.pad)
    with graph.graph.inserting_before(nodes[last.linear]):
        given = source
        if not kernel.shape.symmetric:
            flat = tuple(width for pair in reversed(kernel.shape.padding) for width in pair)
            given = graph.graph.call_function(F.pad, (source, flat))
        graph.set_submodule(target, as_module(kernel, like))
        merged = graph.graph.call_module(target, (given,))
        end = _activation_of_norm(graph, nodes[last.linear], merged) if last.norm == last.activation else merged
    nodes[last.linear].replace_all_uses_with(end)
    held = {site.add for site in network.skip_sites if span.contains(site.skip.span)}
    for name in last.additions:
        if name in held:
            nodes[name].replace_all_uses_with(end)
        else:
            end = nodes[name]
    reached = last.additions[-1] if last.additions else last.linear
    return Seam(span, student=reached, shallow=end.name, source=source.name)


def _behind_padding(node: fx.Node, pad: str | None) -> fx.Node:
    """The value before the padding that rewriting put in or the layer had: the merged convolution pads itself."""
    while node.name == pad or node.meta.get(INSERTED):
        node = node.all_input_nodes[0]
    return node


def _activation_of_norm(graph: fx.GraphModule, norm: fx.Node, merged: fx.Node) -> fx.Node:
    """What is left of a batch norm with an activation inside, once the norm is folded: the activation, if it stands."""
    activation = fused_activation(graph.get_submodule(str(norm.target)))
    if activation is None:
        return merged
    graph.set_submodule(str(norm.target), activation)
    return graph.graph.call_module(str(norm.target), (merged,))
