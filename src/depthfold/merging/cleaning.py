"""What surrounds the segments: batch norms folded, operations that do nothing and whatever is left over taken out."""

from __future__ import annotations

from collections.abc import Set

from torch import fx, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from depthfold.algebra import Kernel, NormStatistics, fold_norm
from depthfold.tracing.functional import FunctionalNorm, norm_statistics_at
from depthfold.tracing.in_place import writes_in_place
from depthfold.tracing.modules import (
    CONVOLUTIONS,
    computes_batch_norm,
    computes_convolution,
    fused_activation,
    is_batch_norm,
    is_leaf,
    is_no_operation,
    is_plain,
)
from depthfold.tracing.shapes import module_padding, module_shape
from depthfold.tracing.uses import count_calls, read_by_code


def take_out_nothing(graph: fx.GraphModule) -> set[str]:
    """Dropout, drop-path and identities do nothing in evaluation, and a shallow network is for evaluation. Returns the
    names of their nodes."""
    names = set()
    for node in list(graph.graph.nodes):
        module = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        idle = module is not None and is_no_operation(module) and is_plain(module)
        if idle and not module.training:  # type: ignore[union-attr]
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.graph.erase_node(node)
            names.add(node.name)
    return names


def fold_remaining_norms(graph: fx.GraphModule, except_after: Set[str]) -> None:
    """Batch norms outside the segments (stem, head, projections) into the convolutions before them.

    Also those of modules that the user asked to leave alone: they are no layers of the network, but need not be slower
    for it. A batch norm that follows a merged convolution and is no part of its segment was ignored without it, and
    stays: `except_after` names the merged convolutions. What others call too, or whose weights other code reads,
    must keep its weights.
    """
    calls, read = count_calls(graph), read_by_code(graph)
    for node in list(graph.graph.nodes):
        if node.op != "call_module" or not node.all_input_nodes:
            continue
        before = node.all_input_nodes[0]
        if before.op != "call_module" or len(before.users) != 1 or before.target in except_after:
            continue
        conv, norm = graph.get_submodule(str(before.target)), graph.get_submodule(str(node.target))
        if not isinstance(conv, _ConvNd):
            continue
        shared = calls[id(conv)] > 1 or calls[id(norm)] > 1 or not read.isdisjoint((before.target, node.target))
        if shared or not _foldable(conv, norm):
            continue
        _fold(conv, norm_statistics_at(graph, node))
        activation = fused_activation(norm)
        if activation is not None:
            graph.set_submodule(str(node.target), activation)
        else:
            node.replace_all_uses_with(before)
            graph.graph.erase_node(node)


def _foldable(conv: _ConvNd, norm: nn.Module) -> bool:
    if isinstance(norm, FunctionalNorm):
        return computes_convolution(conv) and is_plain(conv) and not parametrize.is_parametrized(conv)
    if not (computes_convolution(conv) and is_batch_norm(norm)) or norm.training:  # some stay so in evaluation
        return False
    plain = all(is_plain(module) and not parametrize.is_parametrized(module) for module in (conv, norm))
    return plain and computes_batch_norm(norm) and getattr(norm, "running_mean", None) is not None


def _fold(conv: _ConvNd, norm: NormStatistics) -> None:
    like = conv.weight
    kernel = fold_norm(Kernel.of(module_shape(conv, module_padding(conv)), like, conv.bias), norm)
    conv.weight = nn.Parameter(kernel.weight.to(like.device, like.dtype))
    conv.bias = nn.Parameter(kernel.bias.to(like.device, like.dtype))


def drop_unused(graph: fx.GraphModule) -> None:
    """Nodes that nobody reads any more, and their modules. Assertions stay, and what writes to its input."""

    def needed(node: fx.Node) -> bool:
        module = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        asserts = "assert" in getattr(node.target, "__name__", "")
        unknown = module is not None and not is_leaf(module)  # it may write to what it receives
        return node.op in ("placeholder", "output") or asserts or unknown or writes_in_place(node, module)

    graph.graph.eliminate_dead_code(is_impure_node=needed)
    graph.graph.lint()
    graph.delete_all_unused_submodules()
    _drop_leftovers(graph)
    graph.recompile()


def _drop_leftovers(graph: fx.GraphModule) -> None:
    """Drop parameters and buffers that only functions have read, and what was inside convolutions that are merged."""
    read = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    called = {str(node.target) for node in graph.graph.nodes if node.op == "call_module"}
    for path in called:  # a convolution does not call what a wrapper had inside it
        module = graph.get_submodule(path)
        children = module._modules if type(module) in CONVOLUTIONS else {}
        for name in list(children):
            if not any(f"{other}.".startswith(f"{path}.{name}.") for other in called):
                del children[name]
    for path, module in graph.named_modules():
        inside = any(path == name or path.startswith(f"{name}.") for name in called)
        for name in [*module._parameters, *module._buffers]:
            if not inside and (f"{path}.{name}" if path else name) not in read:
                delattr(module, name)
