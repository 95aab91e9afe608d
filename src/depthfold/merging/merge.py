"""merge(): every segment of a rewritten network as one convolution."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from depthfold.algebra import Kernel
from depthfold.core import Span
from depthfold.core.shape import as_pad_argument
from depthfold.errors import VerificationError
from depthfold.merging.cleaning import (
    drop_unused,
    fold_remaining_norms,
    guards_as_assertions,
    take_out_nothing,
    use_plain_layers,
)
from depthfold.merging.kernels import as_module, random_module, segment_kernel
from depthfold.merging.verification import Seam, Shallow
from depthfold.merging.verify import verify
from depthfold.tracing import Blueprint, student_parts
from depthfold.tracing.forward import leave_out_of_state
from depthfold.tracing.functional import hold_weights, replace_module
from depthfold.tracing.modules import fused_activation
from depthfold.tracing.shapes import module_padding, module_shape
from depthfold.tracing.traced import INSERTED

# Sums of convolutions that no segment holds, as one convolution: parallel branches beside a path that a plan cuts.


def fold_remaining_sums(graph: fx.GraphModule, nodes: Mapping[str, fx.Node], names: Iterable[str]) -> None:
    """Fold each of these additions, once batch norms are folded: of two convolutions of one value, or of a convolution
    and the value itself, the one within the kernel of the other. An addition of anything else stays."""
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
    """The convolution that the node calls, if only one addition reads it."""
    module = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
    return module if isinstance(module, _ConvNd) and len(node.users) == 1 else None


def _branch(graph: fx.GraphModule, main: fx.Node, other: fx.Node) -> Kernel | None:
    """The kernel of what is added to a convolution, if it starts at the same value."""
    source, layer = main.all_input_nodes[0], _convolution(graph, other)
    if other is source:
        like = _kernel(graph.get_submodule(str(main.target)))
        return Kernel.identity(like.shape.in_channels, like.shape.dims, like.weight)
    return _kernel(layer) if layer is not None and other.all_input_nodes[0] is source else None


def _kernel(conv: nn.Module) -> Kernel:
    assert isinstance(conv, _ConvNd)
    return Kernel.of(module_shape(conv, module_padding(conv)), conv.weight, conv.bias)


# A layer for a segment, on the device and in the precision of the given weight.
ConvolutionFor = Callable[[Span, torch.Tensor], nn.Module]


def merge(student: nn.Module) -> nn.Module:
    """The shallow network: each segment one convolution with bias, batch norms folded, skips inside a segment folded
    into its kernel. Composed in float64, returned in the model's precision, in evaluation mode, and verified: raises
    VerificationError if it does not compute what the student computes.
    """
    part, remembered, _ = student_parts(student)
    blueprint = remembered.blueprint
    nodes = {node.name: node for node in part.graph.nodes}

    def exact(span: Span, like: torch.Tensor) -> nn.Module:
        return as_module(segment_kernel(part, nodes, blueprint, span), like)

    shallow = build_shallow(student, exact)
    verification = verify(student, shallow)
    if not verification.ok:
        raise VerificationError(
            f"The merged network does not compute what the rewritten one computes: {verification}. If its activations "
            "are very large or very small, verify() with inputs of your own; otherwise please report the model."
        )
    return shallow


def sketch(student: nn.Module) -> nn.Module:
    """Return the traced part as one merged network with random weights in its merged convolutions: as fast as the real
    one, but made at once. It is for timing a plan before anyone trains it."""
    _, remembered, path = student_parts(student)
    network = remembered.blueprint.network

    def random(span: Span, like: torch.Tensor) -> nn.Module:
        return random_module(network.merged_shape(span), device=like.device, dtype=like.dtype)

    return build_shallow(student, random).get_submodule(path)


def build_shallow(student: nn.Module, convolution_for: ConvolutionFor) -> nn.Module:
    """The student with a convolution in the place of every segment."""
    part, remembered, path = student_parts(student)
    blueprint = remembered.blueprint
    graph = copy.deepcopy(part).eval()
    nothing = take_out_nothing(graph) | guards_as_assertions(graph)
    hold_weights(graph)
    workshop = _Workshop(graph, {node.name: node for node in graph.graph.nodes}, blueprint, convolution_for)
    segments = blueprint.network.segments(remembered.plan)
    merged = {span: workshop.merge_segment(span) for span in segments}
    fold_remaining_norms(graph, except_after={str(convolution.target) for convolution, _ in merged.values()})
    outside = (site for site in blueprint.skip_sites if not any(span.contains(site.skip.span) for span in segments))
    fold_remaining_sums(graph, workshop.nodes, (name for site in outside for name in site.sums))
    use_plain_layers(graph)
    drop_unused(graph)
    leave_out_of_state(graph)
    graph.eval()
    student_nodes = {node.name: node for node in part.graph.nodes}
    seams = tuple(_seam(blueprint, span, student_nodes, nothing, *nodes) for span, nodes in merged.items())
    graph.meta = {Shallow.KEY: Shallow(blueprint, remembered.plan, seams)}
    if not path:
        return graph
    whole = copy.deepcopy(student).eval()
    whole.set_submodule(path, graph)
    return whole


@dataclass(frozen=True, slots=True)
class _Workshop:
    """The graph in which segments are replaced."""

    graph: fx.GraphModule
    nodes: dict[str, fx.Node]
    blueprint: Blueprint
    convolution_for: ConvolutionFor

    def merge_segment(self, span: Span) -> tuple[fx.Node, fx.Node]:
        """Put one convolution where the segment was. Returns it, and the node that ends the layer before its
        activation: the convolution itself, or the last addition that stays."""
        first, last = self.blueprint.sites[span.i], self.blueprint.sites[span.j - 1]
        shape = self.blueprint.network.merged_shape(span)
        target = str(self.nodes[first.conv].target)
        like = self.graph.get_submodule(target).weight
        assert isinstance(like, torch.Tensor)
        replace_module(self.graph, target, self.convolution_for(span, like))
        linear = self.nodes[last.linear]
        # Where the segment began: what follows may overwrite its input.
        with self.graph.graph.inserting_before(self.nodes[first.conv]):
            given = _behind(self.nodes[first.conv].all_input_nodes[0], {first.pad})
            if not shape.symmetric:
                given = self.graph.graph.call_function(F.pad, (given, as_pad_argument(shape.padding)))
                given.meta[INSERTED] = True
            convolution = end = self.graph.graph.call_module(target, (given,))
            if last.norm is not None and last.norm == last.activation:
                end = self._activation_of_norm(linear, convolution)
        linear.replace_all_uses_with(end)
        self.graph.graph.erase_node(linear)
        held = {site.add for site in self.blueprint.skip_sites if span.contains(site.skip.span)}
        for name in last.additions:
            if name in held:
                self.nodes[name].replace_all_uses_with(end)
            else:
                end = self.nodes[name]
        return convolution, end

    def _activation_of_norm(self, norm: fx.Node, convolution: fx.Node) -> fx.Node:
        """What is left of a batch norm with an activation inside once it is folded: the activation, if it stands."""
        activation = fused_activation(self.graph.get_submodule(str(norm.target)))
        if activation is None:
            return convolution
        self.graph.set_submodule(str(norm.target), activation)
        return self.graph.graph.call_module(str(norm.target), (convolution,))


def _behind(node: fx.Node, names: Set[str | None] = frozenset()) -> fx.Node:
    """The value before the padding that rewriting put in, and before the nodes with these names: the padding that the
    layer had, because the merged convolution pads itself."""
    while node.name in names or node.meta.get(INSERTED):
        node = node.all_input_nodes[0]
    return node


def _seam(
    blueprint: Blueprint,
    span: Span,
    student: Mapping[str, fx.Node],
    nothing: Set[str],
    convolution: fx.Node,
    end: fx.Node,
) -> Seam:
    first, last = blueprint.sites[span.i], blueprint.sites[span.j - 1]
    # Before a dropout, too: a skip may read the value before it, and must see the same as the segment.
    passed = nothing | {first.pad}
    return Seam(
        span,
        student=last.additions[-1] if last.additions else last.linear,
        student_source=_behind(student[first.conv].all_input_nodes[0], passed).name,
        shallow=end.name,
        shallow_source=_behind(convolution.all_input_nodes[0]).name,
    )
