"""merge(): replace every segment of a rewritten network with one convolution."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from depthfold.algebra import Kernel
from depthfold.core import Drops, Span, as_pad_argument
from depthfold.errors import InvalidValue, VerificationError
from depthfold.merging.cleaning import (
    drop_unused,
    fold_remaining_norms,
    remove_no_ops,
    remove_repeated_activations,
    replace_guards_with_assertions,
    use_plain_layers,
)
from depthfold.merging.kernels import as_module, random_module, segment_kernel
from depthfold.merging.shallow import SegmentNodes, Shallow
from depthfold.merging.verify import verify
from depthfold.tracing import Blueprint, student_parts
from depthfold.tracing.forward import exclude_unsaved_buffers
from depthfold.tracing.functional import replace_module, use_plain_convolutions
from depthfold.tracing.modules import activation_kind, called_module, fused_activation, weight_hook_removal
from depthfold.tracing.request import copy_model
from depthfold.tracing.shapes import module_padding, module_shape
from depthfold.tracing.traced import INSERTED


def fold_remaining_sums(graph: fx.GraphModule, nodes: Mapping[str, fx.Node], names: Iterable[str]) -> None:
    """Fold the named additions of parallel branches outside all segments, after batch norms are folded.

    An addition is folded if it adds two convolutions of the same value, or a convolution and the value itself, and the
    kernel of one fits into the kernel of the other. Other additions stay.
    """
    for addition in sorted((nodes[name] for name in set(names)), key=list(graph.graph.nodes).index):
        one, two = addition.all_input_nodes
        for main, other in ((one, two), (two, one)):
            layer = _convolution(graph, main)
            if layer is None:
                continue
            own, added = _kernel(layer), _branch(graph, main, other)
            if added is not None and own.shape.symmetric and own.shape.offset(added.shape) is not None:
                graph.set_submodule(str(main.target), as_module(own.plus(added), layer.weight))
                addition.replace_all_uses_with(main)
                graph.graph.erase_node(addition)
                break


def _convolution(graph: fx.GraphModule, node: fx.Node) -> _ConvNd | None:
    """Return the convolution that the node calls, or None if it is not a convolution or has several users."""
    module = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
    return module if isinstance(module, _ConvNd) and len(node.users) == 1 else None


def _branch(graph: fx.GraphModule, main: fx.Node, other: fx.Node) -> Kernel | None:
    """Return the kernel of the value that is added to a convolution, or None if it has another input."""
    source, layer = main.all_input_nodes[0], _convolution(graph, other)
    if other is source:
        like = _kernel(graph.get_submodule(str(main.target)))
        return Kernel.identity(like.shape.in_channels, like.shape.dims, like.weight)
    return _kernel(layer) if layer is not None and other.all_input_nodes[0] is source else None


def _kernel(conv: nn.Module) -> Kernel:
    assert isinstance(conv, _ConvNd)
    return Kernel.of(module_shape(conv, module_padding(conv)), conv.weight, conv.bias)


# Returns the module for a segment, on the device and in the dtype of the given weight.
ConvolutionFor = Callable[[Span, torch.Tensor], nn.Module]


@torch.inference_mode(False)  # inference tensors cannot be trained
def merge(student: nn.Module) -> nn.Module:
    """Return the shallow network, in which each segment is one convolution with bias, in evaluation mode.

    Batch norms, and skips inside a segment, are folded into the kernels. Kernels are composed in float64 and converted
    to the precision of the model. Raise VerificationError if the outputs differ from those of the student.
    """
    part, origin, _ = student_parts(student)
    blueprint = origin.blueprint
    nodes = {node.name: node for node in part.graph.nodes}
    _check_weights(part, nodes, blueprint)

    def exact(span: Span, like: torch.Tensor) -> nn.Module:
        return as_module(segment_kernel(part, nodes, blueprint, span, origin.plan.dropped), like)

    shallow = build_shallow(student, exact)
    verification = verify(student, shallow)
    if not verification.ok:
        raise VerificationError(
            f"The merged network does not compute the same function as the rewritten one: {verification}. If its "
            "activations are very large or very small, use verify() with your own inputs; otherwise please report the "
            "model."
        )
    return shallow


def _check_weights(part: fx.GraphModule, nodes: Mapping[str, fx.Node], blueprint: Blueprint) -> None:
    """Raise InvalidValue if a hook computes the weights of a layer, since they may be out of date until a forward."""
    for name in (name for site in blueprint.sites for name in (site.conv, *site.affine)):
        layer = called_module(part, nodes[name]) if name in nodes else None  # those of dropped branches are gone
        if layer is not None and (call := weight_hook_removal(layer)):
            raise InvalidValue(
                f"A hook computes the weights of {nodes[name].target}, which a merged layer would lose. Make them "
                f"plain parameters first: {call}."
            )


def sketch(student: nn.Module) -> nn.Module:
    """Return the traced part, merged, with random weights in the merged convolutions.

    It is as fast as the merged network but quick to build, so that a plan can be timed before training.
    """
    _, origin, path = student_parts(student)
    network = origin.blueprint.network

    def random(span: Span, like: torch.Tensor) -> nn.Module:
        return random_module(network.merged_shape(span, origin.plan.dropped), device=like.device, dtype=like.dtype)

    return build_shallow(student, random).get_submodule(path)


def build_shallow(student: nn.Module, convolution_for: ConvolutionFor) -> nn.Module:
    """Return the student with a convolution in place of every segment. Segments without layers disappear."""
    part, origin, path = student_parts(student)
    blueprint, dropped = origin.blueprint, origin.plan.dropped
    graph = copy_model(part).eval()
    ends = {name for site in blueprint.sites for name in (site.conv, *site.affine, *site.additions)}
    removed = remove_no_ops(graph, but=ends) | replace_guards_with_assertions(graph)
    use_plain_convolutions(graph)
    nodes = {node.name: node for node in graph.graph.nodes}
    merger = _SegmentMerger(graph, nodes, blueprint, dropped, convolution_for)
    segments = blueprint.network.segments(origin.plan)
    merged = {span: merger.merge_segment(span) for span in segments if dropped.kept(span)}
    removed |= remove_no_ops(graph) | remove_repeated_activations(graph)  # what is left of dropped layers and branches
    fold_remaining_norms(graph, except_after={str(convolution.target) for convolution, _ in merged.values()})
    outside = (site for site in blueprint.skip_sites if not any(span.contains(site.skip.span) for span in segments))
    fold_remaining_sums(graph, merger.nodes, (name for site in outside for name in site.sums))
    use_plain_layers(graph)
    drop_unused(graph)
    exclude_unsaved_buffers(graph)
    graph.eval()
    before = replace(merger, graph=part, nodes={node.name: node for node in part.graph.nodes})
    compared = tuple(_segment_nodes(before, span, removed, *found) for span, found in merged.items())
    graph.meta = {Shallow.KEY: Shallow(blueprint, origin.plan, compared)}
    if not path:
        return graph
    whole = copy_model(student).eval()
    whole.set_submodule(path, graph)
    return whole


def replace_segment(student: nn.Module, span: Span, convolution: nn.Module) -> None:
    """Replace one segment of a student that is not dropped completely with a convolution, in place.

    Skips inside the segment are replaced with it. Everything else stays as it is: the activation at the end of the
    segment, residuals that end there but start before it, and all batch norms outside.
    """
    graph, origin, _ = student_parts(student)
    blueprint, dropped = origin.blueprint, origin.plan.dropped
    first, last = blueprint.sites[dropped.kept(span)[0] - 1], blueprint.sites[span.j - 1]
    use_plain_convolutions(graph, {first.conv})
    nodes = {node.name: node for node in graph.graph.nodes}
    before = _ancestors(nodes[name] for name in (last.linear, *last.additions) if name in nodes)
    _SegmentMerger(graph, nodes, blueprint, dropped, lambda *_: convolution).merge_segment(span)
    for node in reversed(list(graph.graph.nodes)):
        if node in before and not node.users:
            graph.graph.erase_node(node)
    graph.graph.lint()
    graph.delete_all_unused_submodules()
    graph.recompile()


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes and everything that they are computed from, except for the inputs of the graph."""
    found: set[fx.Node] = set()
    reached = list(nodes)
    while reached:
        node = reached.pop()
        if node not in found and node.op != "placeholder":
            found.add(node)
            reached.extend(node.all_input_nodes)
    return found


@dataclass(frozen=True, slots=True)
class _SegmentMerger:
    """Replaces the segments of a graph with convolutions."""

    graph: fx.GraphModule
    nodes: dict[str, fx.Node]
    blueprint: Blueprint
    dropped: Drops
    convolution_for: ConvolutionFor

    def merge_segment(self, span: Span) -> tuple[fx.Node, fx.Node]:
        """Replace a segment that is not dropped completely with one convolution.

        Return the node of the convolution, and the node before the segment's activation: the convolution itself, or the
        last addition that is not folded.
        """
        first, last = self.blueprint.sites[self.dropped.kept(span)[0] - 1], self.blueprint.sites[span.j - 1]
        shape = self.blueprint.network.merged_shape(span, self.dropped)
        target = str(self.nodes[first.conv].target)
        like = self.graph.get_submodule(target).weight
        assert isinstance(like, torch.Tensor)
        replace_module(self.graph, target, self.convolution_for(span, like))
        linear = self.linear_end(span)
        # At the start of the segment, because later operations may overwrite its input.
        with self.graph.graph.inserting_before(self.reader(span)):
            given = self.input_of(span)
            if not shape.symmetric:
                given = self.graph.graph.call_function(F.pad, (given, as_pad_argument(shape.padding)))
                given.meta[INSERTED] = True
            convolution = end = self.graph.graph.call_module(target, (given,))
            if last.activates_in_norm:
                end = self._activation_of_norm(linear, convolution)
        linear.replace_all_uses_with(end)
        self.graph.graph.erase_node(linear)
        folded = {site.add for site in self.blueprint.skips_inside(span, self.dropped)}
        for name in last.additions:
            if name in folded:
                self.nodes[name].replace_all_uses_with(end)
            elif self.nodes[name] is not linear:
                end = self.nodes[name]
        return convolution, end

    def reader(self, span: Span) -> fx.Node:
        """Return the first node of a segment after its padding: a convolution, or the addition of a dropped branch."""
        if branches := [branch for branch in self.dropped.branches if branch.i == span.i and span.contains(branch)]:
            return self.nodes[self.blueprint.skip_around(max(branches)).add]
        return self.nodes[self.blueprint.sites[span.i].conv]

    def input_of(self, span: Span, passed: Set[str] = frozenset()) -> fx.Node:
        """Return the value at the start of a segment, before its padding and before the nodes with these names."""
        return _before_padding(self.reader(span).all_input_nodes[0], passed | {self.blueprint.sites[span.i].pad})

    def linear_end(self, span: Span) -> fx.Node:
        """Return the last node of a segment before its additions, or the one that stands for a dropped branch."""
        if branches := [branch for branch in self.dropped.branches if branch.j == span.j and span.contains(branch)]:
            return self.nodes[self.blueprint.skip_around(min(branches)).add]
        return self.nodes[self.blueprint.sites[span.j - 1].linear]

    def _activation_of_norm(self, norm: fx.Node, convolution: fx.Node) -> fx.Node:
        """Return the activation inside a folded batch norm, applied to the convolution, or the convolution if it has
        none."""
        path, module = str(norm.target), self.graph.get_submodule(str(norm.target))
        if activation_kind(module) is None:  # otherwise the layer is dropped, and only its activation is left
            activation = fused_activation(module)
            if activation is None:
                return convolution
            self.graph.set_submodule(path, activation)
        return self.graph.graph.call_module(path, (convolution,))


def _before_padding(node: fx.Node, names: Set[str | None] = frozenset()) -> fx.Node:
    """Return the value before the padding that rewriting inserted, and before the nodes with these names."""
    while node.name in names or node.meta.get(INSERTED):
        node = node.all_input_nodes[0]
    return node


def _segment_nodes(
    student: _SegmentMerger, span: Span, removed: Set[str], convolution: fx.Node, end: fx.Node
) -> SegmentNodes:
    last = student.blueprint.sites[span.j - 1]
    return SegmentNodes(
        span,
        student=last.additions[-1] if last.additions else last.linear,
        # Also before a removed dropout: a skip may read the value before it, and must see the same value.
        student_source=student.input_of(span, removed).name,
        shallow=end.name,
        shallow_source=_before_padding(convolution.all_input_nodes[0]).name,
    )
