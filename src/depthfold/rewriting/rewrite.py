"""The function rewrite(), which applies a plan to a traced network."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import fx, nn

from depthfold.core import Drops, Network, Plan, SolvedPlan, Span, plan_of
from depthfold.errors import PlanError
from depthfold.rewriting.activations import insert_activation, remove_activation
from depthfold.rewriting.dropping import drop_parts
from depthfold.rewriting.padding import compute_out_of_place, move_padding
from depthfold.tracing import Student, TracedNetwork, require_traced
from depthfold.tracing.forward import exclude_unsaved_buffers


@torch.inference_mode(False)  # inference tensors cannot be trained
def rewrite(traced: TracedNetwork, plan: Plan | SolvedPlan) -> nn.Module:
    """Return a trainable copy of the model with the plan applied. It can be merged exactly.

    Activations outside the plan's A are removed, except the network's own at L. Activations in A where
    the network has none are inserted after the addition, as copies of the network's most frequent one. Identities take
    the place of dropped layers, and a dropped branch leaves only its skip. The padding of every segment moves to its
    front, and skips inside a segment are cropped to match. Parameters keep their names. A SolvedPlan of another network
    is refused.
    """
    traced = require_traced(traced, "rewrite")
    _check_network(traced.network, plan)
    plan = plan_of(plan)
    segments = traced.network.segments(plan)
    _check_sizes(traced.network, segments, plan.dropped)
    # Together, so that tensors shared by the graph and the model stay shared.
    graph, whole = copy.deepcopy((traced.graph, traced.model))
    nodes = {node.name: node for node in graph.graph.nodes}
    compute_out_of_place(nodes, traced.blueprint)
    drop_parts(graph, nodes, traced.blueprint, plan.dropped)
    for span in segments:
        if len(span) > 1:
            move_padding(graph, nodes, traced.blueprint, span, plan.dropped)
    standing = traced.network.final_activations(plan)
    gone = {position for branch in plan.dropped.branches for position in branch.inner}
    for l in sorted((standing ^ traced.network.activations) - gone):
        if l in standing:
            insert_activation(graph, nodes, traced, l)
        else:
            remove_activation(graph, nodes, traced.blueprint.sites[l - 1])
    return _finish(graph, whole, traced, plan)


def _check_network(network: Network, plan: Plan | SolvedPlan) -> None:
    """Raise PlanError if a solved plan is of another network. One that does not know its network is accepted."""
    if isinstance(plan, SolvedPlan) and plan.fingerprint not in ("", own := network.fingerprint):
        raise PlanError(
            f"The plan was solved for another network or input size (fingerprint {plan.fingerprint}; this one is "
            f"{own}). Solve with the tables of this network, or apply its positions without the predictions: "
            "rewrite(traced, plan.plan)."
        )


def _check_sizes(network: Network, segments: Iterable[Span], dropped: Drops) -> None:
    """Raise PlanError if a merged convolution would be too large for memory."""
    shapes = {span: network.merged_shape(span, dropped) for span in segments if len(span) > 1}
    if large := {span: shape.too_large for span, shape in shapes.items() if shape.too_large}:
        span, why = next(iter(large.items()))
        raise PlanError(f"The plan merges {span}, and {why}. Add cuts inside it.")


def _finish(graph: fx.GraphModule, whole: nn.Module | None, traced: TracedNetwork, plan: Plan) -> nn.Module:
    """Clean up the graph, attach the metadata of the student, and put it into the whole model."""
    graph.graph.lint()
    graph.delete_all_unused_submodules()
    graph.recompile()
    exclude_unsaved_buffers(graph)
    graph.meta[Student.KEY] = Student(traced.blueprint, plan)
    if traced.blueprint.at is None or whole is None:
        return graph
    whole.set_submodule(traced.blueprint.at, graph)
    return whole
