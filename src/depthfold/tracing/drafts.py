"""Data classes for layers that are being assembled, and the data flow between the nodes of the graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from torch import fx

from depthfold.core import ConvShape
from depthfold.tracing.roles import Kind, Role


@dataclass(slots=True, eq=False)
class Draft:
    """One convolution and the operations after it that join its layer.

    `source` is the value that the layer reads. `affine` are the batch norms and constant factors after the convolution.
    `tail` is the last node that joined: the value at the layer's position.
    """

    conv: fx.Node
    pad: fx.Node | None
    source: fx.Node
    tail: fx.Node
    affine: list[fx.Node] = field(default_factory=list)
    activation: fx.Node | None = None
    additions: list[Addition] = field(default_factory=list)

    @property
    def linear(self) -> fx.Node:
        """The node before the additions."""
        return self.affine[-1] if self.affine else self.conv


@dataclass(slots=True, eq=False)
class Addition:
    """An addition that joins a layer: `main` is the operand that the layer computes, `other` the second operand.

    `skips` are the branches whose sum is `other`, if they start at a value on the path to the layer; otherwise empty.
    """

    node: fx.Node
    main: fx.Node
    other: fx.Node
    skips: tuple[SkipDraft, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One linear operation: a convolution, an average pool (and its divisor) or neither.

    Batch norms and constant factors may follow it.
    """

    shape: ConvShape
    conv: Draft | None = None
    pool: fx.Node | None = None
    divisor: int = 1
    affine: tuple[fx.Node, ...] = ()

    @property
    def entry(self) -> fx.Node | None:
        """The node that reads the input of the step."""
        return (self.conv.pad or self.conv.conv) if self.conv else self.pool or next(iter(self.affine), None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SkipDraft:
    """A linear branch from `source`, the input of the draft `first`, to an addition.

    `steps` are its operations in order, empty for the identity. `operand` is the value that the branch adds. `sums` are
    the additions inside the operand on the way to the branch, outermost first.
    """

    source: fx.Node
    first: Draft
    steps: tuple[Step, ...]
    operand: fx.Node
    sums: tuple[fx.Node, ...]

    @property
    def projection(self) -> ConvShape | None:
        """The shape of all steps as one convolution, None for the identity."""
        return reduce(ConvShape.then, (step.shape for step in self.steps)) if self.steps else None

    def reader(self, addition: fx.Node) -> fx.Node:
        """Return the node that reads the source, given the addition of the whole operand."""
        entry = self.steps[0].entry if self.steps else None
        return entry or (self.sums[-1] if self.sums else addition)


class DataFlow:
    """The readers of each value, looking through no-ops. No skip can start at an `overwritten` value."""

    def __init__(
        self, roles: Mapping[fx.Node, Role], modules: Mapping[str, Any], overwritten: frozenset[fx.Node] = frozenset()
    ) -> None:
        self.roles = roles
        self.modules = modules
        self.overwritten = overwritten
        self.order = {node: n for n, node in enumerate(roles)}

    def origin(self, node: fx.Node) -> fx.Node:
        """Return the node that computes this value, before any no-ops."""
        while self.roles[node].kind is Kind.NO_OP:
            node = node.all_input_nodes[0]
        return node

    def readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the nodes that read this value, directly or after no-ops."""
        for user in node.users:
            if self.roles[user].kind is Kind.NO_OP:
                yield from self.readers(user)
            else:
                yield user

    def has_one_reader(self, node: fx.Node) -> bool:
        """Return True if exactly one node reads this value."""
        return len(set(self.readers(node))) == 1
