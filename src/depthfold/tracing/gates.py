"""Squeeze-and-excite and its kin: a value is pooled, runs through a few layers and gates the value itself."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from depthfold.core import Refusal
from depthfold.tracing.roles import Kind, Role, Sizes, owner


def refuse_gates(roles: Mapping[fx.Node, Role], sizes: Sizes) -> dict[fx.Node, Role]:
    """The same roles, but convolutions that compute a gate from a pooled value are no layers.

    They work on a single pixel: merging them gains nothing, and their gate stays a barrier anyway.
    """
    refused = dict(roles)
    for node, role in roles.items():
        if role.refusal is None or role.refusal.code != "multiplication" or len(node.all_input_nodes) != 2:
            continue
        one, two = node.all_input_nodes
        for gate, gated in ((one, two), (two, one)):
            convolutions, pooled = _line_from_pool(gate, roles)
            if pooled is not None and (pooled is gated or _broadcast(gate, gated, sizes)):
                why = f"it computes the gate of a squeeze-and-excite from a pooled value ({owner(node)})"
                for conv in convolutions:
                    refused[conv] = Role(Kind.OTHER, refusal=Refusal(owner(conv), "squeeze-excite", why))
    return refused


def _line_from_pool(node: fx.Node, roles: Mapping[fx.Node, Role]) -> tuple[list[fx.Node], fx.Node | None]:
    """The convolutions on the straight line from a pool to this node, and what is pooled; None if there is no pool."""
    convolutions: list[fx.Node] = []
    while len(given := [operand for operand in node.all_input_nodes if operand.op != "get_attr"]) == 1:
        role, before = roles[node], given[0]
        if role.refusal is not None and role.refusal.code == "pooling":
            return convolutions, before
        if role.kind is Kind.CONVOLUTION:
            convolutions.append(node)
        node = before
    return [], None


def _broadcast(gate: fx.Node, gated: fx.Node, sizes: Sizes) -> bool:
    """Whether one pixel of the gate multiplies a whole map."""
    if gate not in sizes or gated not in sizes:
        return False
    return set(sizes[gate][2:]) <= {1} and not set(sizes[gated][2:]) <= {1}
