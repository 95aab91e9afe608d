"""Remove operations whose results nothing reads, such as an auxiliary head that only training returns."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from depthfold.tracing.functional import FunctionalConv, FunctionalNorm
from depthfold.tracing.in_place import EXTERNAL, Observed, writes_in_place
from depthfold.tracing.modules import called_module, is_hooked, is_leaf
from depthfold.tracing.size_guard import SizeGuard

_KEPT = ("assert", "rand", "bernoulli")  # in names of functions, if no run tells


def erase_unused(graph: fx.GraphModule, run: Observed | None = None) -> bool:
    """Remove unused nodes, and return whether there were any.

    Assertions, modules with hooks, random numbers and operations that may write to a value that is read elsewhere stay.
    A `run` tells which write only to values that nothing else reads, and which draw random numbers.
    """
    run = run or Observed()
    order = {node: n for n, node in enumerate(graph.graph.nodes)}

    def needed(node: fx.Node) -> bool:
        if node.op in ("placeholder", "output"):
            return True
        module = called_module(graph, node)
        by_name = module is None and any(word in getattr(node.target, "__name__", "") for word in _KEPT)
        if by_name or node in run.random:
            return True  # without a random number, later ones would differ
        known = module is None or is_leaf(module) or isinstance(module, (FunctionalConv, FunctionalNorm, SizeGuard))
        if not known or (module is not None and is_hooked(module)):
            return True  # it may do anything
        return writes_in_place(node, module) and not _writes_for_itself(node, run, order)

    return bool(graph.graph.eliminate_dead_code(is_impure_node=needed))


def _writes_for_itself(node: fx.Node, run: Observed, order: Mapping[fx.Node, int]) -> bool:
    """Return True if nothing reads the values that the node has written to after it."""
    inputs = set().union(*(run.storages.get(each, ()) for each in node.all_input_nodes))
    written = run.writes.get(node, inputs)  # a dropout writes only in training
    if not written:
        return False
    names = [name for name in order if order[name] < order[node] and run.storages[name] & written]
    later = any(order[reader] > order[node] for name in names for reader in name.users)
    return not later and all(name.op not in EXTERNAL for name in names)
