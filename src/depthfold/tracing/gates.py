"""Squeeze-and-excite and its kin: a value is pooled, runs through a few layers and multiplies itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import fx

from depthfold.core import Refusal
from depthfold.tracing.roles import Kind, Role, owner


def refuse_gates(roles: Mapping[fx.Node, Role]) -> dict[fx.Node, Role]:
    """The same roles, but convolutions on the way from a pool to a multiplication are no layers.

    They work on a single pixel: merging them gains nothing, and their gate stays a barrier anyway.
    """
    refused = dict(roles)
    for node, role in roles.items():
        if role.refusal is None or role.refusal.code != "multiplication":
            continue
        for operand in node.all_input_nodes:
            for conv in _convolutions_of_gate(operand, roles):
                why = f"it computes the gate of a squeeze-and-excite from a pooled value ({owner(node)})"
                refused[conv] = Role(Kind.OTHER, refusal=Refusal(owner(conv), "squeeze-excite", why))
    return refused


def _convolutions_of_gate(node: fx.Node, roles: Mapping[fx.Node, Role]) -> Iterator[fx.Node]:
    """The convolutions between a pool and this node, if a straight line leads back to a pool."""
    found: list[fx.Node] = []
    while len(node.all_input_nodes) == 1:
        role = roles[node]
        if role.refusal is not None and role.refusal.code == "pooling":
            yield from found
            return
        if role.kind is Kind.CONVOLUTION:
            found.append(node)
        node = node.all_input_nodes[0]
