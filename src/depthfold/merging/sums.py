"""Sums of convolutions that no segment holds, as one convolution: parallel branches beside a path that a plan cuts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from depthfold.algebra import Kernel
from depthfold.merging.kernels import as_module
from depthfold.tracing.shapes import module_padding, module_shape


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
