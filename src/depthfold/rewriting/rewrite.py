"""rewrite(): the network as the plan wants it, still deep, still trainable, and mergeable without any error."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from torch import fx, nn

from depthfold.core import Network, Plan, Span
from depthfold.errors import PlanError
from depthfold.rewriting.activations import insert_activation, remove_activation
from depthfold.rewriting.padding import additions_out_of_place, move_padding
from depthfold.tracing import Student, TracedNetwork, expect_traced
from depthfold.tracing.forward import leave_out_of_state


def rewrite(traced: TracedNetwork, plan: Plan) -> nn.Module:
    """A trainable copy of the model as the plan wants it.

    Activations outside the plan's A become identities, and those in A where the network has none are inserted, of the
    network's own kind, after the addition. The padding of every segment between cuts moves to its front, and skips
    inside a segment are cropped to match. Parameters keep the names that they have in the user's model.
    """
    traced = expect_traced(traced, "rewrite")
    if not isinstance(plan, Plan):
        raise PlanError(
            f"rewrite() takes a plan, found {type(plan).__name__}. Give a Plan(activations, cuts), or the one that "
            "choose() returns."
        )
    segments = traced.network.segments(plan)
    _check_sizes(traced.network, segments)
    # In one go: what the traced part shares with the rest of the model stays shared.
    graph, whole = copy.deepcopy((traced.graph, traced.model))
    nodes = {node.name: node for node in graph.graph.nodes}
    for span in segments:
        if len(span) > 1:
            move_padding(graph, nodes, traced.blueprint, span)
    additions_out_of_place(nodes, traced.blueprint)
    standing = traced.network.standing(plan)
    for l in sorted(standing ^ traced.network.activations):
        if l in standing:
            insert_activation(graph, nodes, traced, l)
        else:
            remove_activation(graph, nodes, traced.blueprint.sites[l - 1])
    return _finish(graph, whole, traced, plan)


def _check_sizes(network: Network, segments: Iterable[Span]) -> None:
    """Refuse a plan whose merged convolutions would not fit into memory, before anything is composed."""
    shapes = {span: network.merged_shape(span) for span in segments if len(span) > 1}
    if large := {span: shape.too_large for span, shape in shapes.items() if shape.too_large}:
        span, why = next(iter(large.items()))
        raise PlanError(f"The plan merges {span}, and {why}. Add cuts inside it.")


def _finish(graph: fx.GraphModule, whole: nn.Module | None, traced: TracedNetwork, plan: Plan) -> nn.Module:
    graph.graph.lint()
    graph.delete_all_unused_submodules()
    graph.recompile()
    leave_out_of_state(graph)
    graph.meta[Student.KEY] = Student(traced.blueprint, plan)
    if traced.blueprint.at is None or whole is None:
        return graph
    whole.set_submodule(traced.blueprint.at, graph)
    return whole
