"""The network as the method sees it: a chain of layers, numbered, with everything that limits merging."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

from depthfold.core import space as search
from depthfold.core.describe import network_table, summary
from depthfold.core.document import Document, encode
from depthfold.core.layer import Layer, Skip
from depthfold.core.plan import Plan
from depthfold.core.refusal import Refusal
from depthfold.core.shape import ConvShape
from depthfold.core.sizes import FixedPadding
from depthfold.core.span import FlaggedSpan, Position, Span
from depthfold.errors import InvalidValue, PlanError


# No slots: the fingerprint is kept in the dictionary of the object.
@dataclass(frozen=True, kw_only=True, repr=False)
class Network(Document):
    """Layers 1..L, the skips across them, the barriers that no span crosses, and the reasons.

    A network with several chains (branches, stages parted by a pool) numbers them one after another, with a barrier
    between. Positions are 0..L, barriers lie strictly between. `fixed_padding` are modules that pad by the size of
    their input, as they pad at the traced size. `ends_in_output` says that nothing with weights reads the value at L:
    it is what the network gives, as it is, pooled or resized.
    """

    FORMAT: ClassVar[str] = "depthfold.network"

    name: str
    layers: tuple[Layer, ...]
    skips: tuple[Skip, ...] = ()
    barriers: tuple[Position, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    fixed_padding: tuple[FixedPadding, ...] = ()
    ends_in_output: bool = False

    def __post_init__(self) -> None:
        if list(self.barriers) != sorted(set(self.barriers)) or not all(0 < p < self.depth for p in self.barriers):
            raise InvalidValue(
                f"Barriers must be ascending positions strictly between 0 and {self.depth}, found {self.barriers}."
            )
        for before, after in self._neighbours():
            one, two = self.layers[before - 1], self.layers[after - 1]
            if one.shape.out_channels != two.shape.in_channels or one.out_size != two.in_size:
                raise InvalidValue(
                    f"Layer {after} ({two.where}) cannot follow layer {before} ({one.where}): "
                    f"{one.shape.out_channels} channels of size {one.out_size} do not fit "
                    f"{two.shape.in_channels} of size {two.in_size}. Is a barrier missing at {before}?"
                )
        for skip in self.skips:
            if skip.target > self.depth or any(skip.source < p < skip.target for p in self.barriers):
                raise InvalidValue(f"The skip {skip.where} leaves its chain: {skip.source} -> {skip.target}.")
            if self.path_shape(skip.span).offset(self.skip_shape(skip)) is None:
                raise InvalidValue(f"The skip {skip.where} cannot join the kernel of the branch that it spans.")

    @property
    def depth(self) -> int:
        """L, the number of layers."""
        return len(self.layers)

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that change with shapes, sizes, activations, skips and barriers. A table remembers them,
        so that a table of another network is noticed.

        What is around the layers does not count, because tables travel. Names of modules and the text of refusals do
        not count either: the same network traced by a newer depthfold keeps its tables.
        """
        structure = {
            "layers": [
                (encode(layer.shape), layer.in_size, layer.norm is not None, layer.activation) for layer in self.layers
            ],
            "skips": sorted((s.source, s.target, str(encode(s.projection))) for s in self.skips),
            "barriers": self.barriers,
        }
        return hashlib.sha256(json.dumps(structure, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def activations(self) -> frozenset[Position]:
        """The positions where the network has an activation of its own."""
        return frozenset(l for l, layer in enumerate(self.layers, start=1) if layer.activation is not None)

    @property
    def own_activation(self) -> str | None:
        """The kind of activation that the network uses most, None if it has none: inserted ones are of this kind."""
        kinds = Counter(layer.activation for layer in self.layers if layer.activation is not None)
        return kinds.most_common(1)[0][0] if kinds else None

    @property
    def chains(self) -> tuple[Span, ...]:
        """The runs of layers between barriers."""
        return tuple(self._between(self.barriers))

    @property
    def vanilla(self) -> Plan:
        """The plan that changes nothing: every activation stays and nothing is merged."""
        return Plan(activations=self.activations, cuts=range(1, self.depth))

    def spans(self, space: search.Space = "paper") -> tuple[Span, ...]:
        """Every span of a search space: the keys of the latency table."""
        return tuple(search.spans(self, space))

    def flagged_spans(self, space: search.Space = "paper", exclusion: bool | None = None) -> tuple[FlaggedSpan, ...]:
        """Every flagged span of a search space: the keys of the importance table. See `core.space`."""
        return tuple(search.flagged_spans(self, space, exclusion))

    def why_not(self, span: Span) -> Refusal | None:
        """The reason why a span cannot become one convolution, or None if it can."""
        if not isinstance(span, Span):
            raise InvalidValue(f"why_not() takes a Span, found {span!r:.80}. Write Span(0, 2), say.")
        if span.j > self.depth:
            return Refusal(str(span), "outside", f"the network ends at position {self.depth}")
        for barrier in self.barriers:
            if span.i < barrier < span.j:
                reason = next((r.why for r in self.refusals if r.position == barrier), "a new chain starts there")
                return Refusal(str(span), "barrier", f"there is a barrier at {barrier}: {reason}", barrier)
        for skip in self.skips:
            if skip.crosses(span):
                return Refusal(
                    str(span),
                    "crosses-skip",
                    f"it crosses one end of the residual {skip.source} -> {skip.target}; a span may hold a residual "
                    "whole, lie inside it, or lie outside it",
                )
        return None

    def merged_shape(self, span: Span) -> ConvShape:
        """The shape of the one convolution that the span becomes, with the skips that it holds folded in."""
        if refusal := self.why_not(span):
            raise PlanError(f"The span {span} cannot be merged: {refusal.why}.")
        dims, channels = self.layers[span.i].shape.dims, self.layers[span.i].shape.in_channels
        at = {span.i: ConvShape.identity(channels, dims)}
        for l in span.layers:
            # The identity at the front has no taps to add: composing with it would only cost time.
            shape = self.layers[l - 1].shape
            at[l] = shape if l == span.i + 1 else at[l - 1].then(shape)
            for skip in self.skips_into(l):
                if skip.source >= span.i:
                    projected = at[skip.source] if skip.projection is None else at[skip.source].then(skip.projection)
                    at[l] = at[l].plus(projected)
        return at[span.j]

    def path_shape(self, span: Span) -> ConvShape:
        """The shape of the layers of the span composed, without any skip."""
        shape = self.layers[span.i].shape
        for l in span.layers[1:]:
            shape = shape.then(self.layers[l - 1].shape)
        return shape

    def skip_shape(self, skip: Skip) -> ConvShape:
        """The convolution that a skip is: its projection, or the identity."""
        first = self.layers[skip.source].shape
        return skip.projection or ConvShape.identity(first.in_channels, first.dims)

    def skips_into(self, target: Position) -> Iterator[Skip]:
        return (skip for skip in self.skips if skip.target == target)

    def segments(self, plan: Plan) -> tuple[Span, ...]:
        """The spans that the plan merges: the layers between its cuts. Barriers are always cuts.

        Raises PlanError with everything that does not fit.
        """
        last = max((*plan.cuts, *plan.activations), default=0)
        if last > self.depth or self.depth in plan.cuts:
            raise PlanError(
                f"The plan has position {last}, but the network has {self.depth} layers: cuts lie strictly between 0 "
                f"and {self.depth}, and the only activation beyond the last cut can be at {self.depth}."
            )
        cuts = {*plan.cuts, *self.barriers}
        if homeless := sorted(plan.activations - cuts - {self.depth}):
            raise PlanError(f"The activations {homeless} are no cuts of the plan: add them to cuts.")
        if not self.activations and plan.activations:
            raise PlanError("The plan inserts activations, but the network has none whose kind could be taken.")
        segments = tuple(self._between(tuple(sorted(cuts))))
        if problems := [f"{span}: {refusal.why}" for span in segments if (refusal := self.why_not(span))]:
            raise PlanError("The plan merges what cannot be merged. " + "; ".join(problems) + ". Add cuts there.")
        return segments

    def standing(self, plan: Plan) -> frozenset[Position]:
        """Where an activation stands once the plan is applied. The network's own at its end stays, whatever the plan
        says: nothing is merged beyond it."""
        return plan.activations | (self.activations & {self.depth})

    def __str__(self) -> str:
        return network_table(self)

    def __repr__(self) -> str:
        return f"<Network {self.name}: {summary(self)}>"

    def _between(self, cuts: tuple[Position, ...]) -> Iterator[Span]:
        bounds = (0, *cuts, self.depth) if self.depth else ()
        return (Span(i, j) for i, j in pairwise(bounds))

    def _neighbours(self) -> Iterator[tuple[int, int]]:
        return ((l, l + 1) for l in range(1, self.depth) if l not in self.barriers)
