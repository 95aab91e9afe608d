"""Networks: numbered layers with skips and barriers, and how they are printed."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

from depthfold.core.drops import NOTHING, Drops
from depthfold.core.layer import Layer, Refusal, Skip
from depthfold.core.plan import Plan
from depthfold.core.shape import ConvShape, FixedPadding
from depthfold.core.space import Space, flagged_spans, spans
from depthfold.core.span import FlaggedSpan, Position, Span
from depthfold.errors import InvalidValue, PlanError
from depthfold.support.digest import digest
from depthfold.support.document import Document, encode
from depthfold.support.table import Table
from depthfold.support.text import count, listed

HEADER = ("l", "layer", "convolution", "in", "activation", "note")


def network_table(network: Network) -> Table:
    """Return a summary, a row per layer, and the refusals by kind."""
    title, rows = f"{network.name}: {summary(network)}", tuple(_row(network, l) for l in range(1, network.depth + 1))
    notes = []
    if network.refusals:
        notes += ["", "What does not merge, and why:", *(f"  {line}" for line in refusals_by_kind(network))]
    if network.fixed_padding:
        notes += ["", "Padding that depends on the size of the map, fixed at the traced size:"]
        notes += [f"  {fixed}" for fixed in network.fixed_padding]
    return Table((title, "") if rows else (title,), HEADER, rows, tuple(notes))


def summary(network: Network) -> str:
    if not network.layers:
        return "nothing to merge: no convolution of this network can be a layer"
    spans = {space: len(network.spans(space)) for space in ("paper", "full")}
    text = (
        f"{count(network.depth, 'layer')}, {count(len(network.activations), 'activation')}, "
        f"{count(len(network.skips), 'skip')}, {count(len(network.barriers), 'barrier')}; "
        f"{count(spans['paper'], 'span')} in the paper's space, {spans['full']} in the full one"
    )
    return text if spans["full"] > network.depth else text + "; nothing to merge: every chain has a single layer"


def refusals_by_kind(network: Network, shown: int = 3) -> Iterator[str]:
    """Yield a line per kind of refusal, the most frequent first, with a few locations."""
    for code, number in Counter(refusal.code for refusal in network.refusals).most_common():
        of_kind = [refusal for refusal in network.refusals if refusal.code == code]
        places = list(dict.fromkeys(refusal.where for refusal in of_kind))
        yield f"{code} x{number}: {of_kind[0].why} [{listed(places, shown)}]"


def _row(network: Network, l: int) -> tuple[str, ...]:
    layer = network.layers[l - 1]
    notes = [f"+ {skip.source}{' through ' + str(skip.projection) if skip.projection else ''}"
             for skip in network.skips_into(l)]  # fmt: skip
    if l in network.barriers:
        kinds = dict.fromkeys(refusal.code for refusal in network.refusals if refusal.position == l)
        notes.append("barrier" + (f" ({', '.join(kinds)})" if kinds else ""))
    size = "x".join(map(str, layer.in_size))
    return (str(l), layer.where, str(layer.shape), size, layer.activation or "-", "; ".join(notes))


# No slots, because the fingerprint is a cached property.
@dataclass(frozen=True, kw_only=True, repr=False)
class Network(Document):
    """Layers 1..L, the skips across them, the barriers that no span crosses, and the refusals that explain them.

    If a network has several chains of layers (branches, or stages separated by a pool), they are numbered one after
    another, with barriers between them. Positions are 0..L, and barriers lie strictly between. `fixed_padding` lists
    modules whose padding depends on the input size. `ends_in_output` is True if no module with weights reads the value
    at L, so that it is the network's output, possibly pooled or resized.
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
        for before, after in ((l, l + 1) for l in range(1, self.depth) if l not in self.barriers):
            one, two = self.layers[before - 1], self.layers[after - 1]
            if one.shape.out_channels != two.shape.in_channels or one.out_size != two.in_size:
                raise InvalidValue(
                    f"Layer {after} ({two.where}) cannot follow layer {before} ({one.where}): "
                    f"{one.shape.out_channels} channels of size {one.out_size} do not fit "
                    f"{two.shape.in_channels} channels of size {two.in_size}. Add a barrier at {before}."
                )
        for skip in self.skips:
            if skip.target > self.depth or any(skip.source < p < skip.target for p in self.barriers):
                raise InvalidValue(f"The skip {skip.where} leaves its chain: {skip.source} -> {skip.target}.")
            if self.path_shape(skip.span).offset(self.skip_shape(skip)) is None:
                raise InvalidValue(f"The skip {skip.where} cannot be folded into the kernel of its branch.")

    @property
    def depth(self) -> int:
        """L, the number of layers."""
        return len(self.layers)

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that depend on shapes, sizes, activations, skips and barriers.

        Tables store it, so that a table of another network is detected. It does not depend on modules around the
        layers, on names of modules, or on the text of refusals, so that a network traced by a newer depthfold keeps its
        tables.
        """
        structure = {
            "layers": [
                (encode(layer.shape), layer.in_size, layer.norm is not None, layer.activation) for layer in self.layers
            ],
            "skips": sorted((s.source, s.target, str(encode(s.projection))) for s in self.skips),
            "barriers": self.barriers,
        }
        return digest(structure)

    @cached_property
    def activations(self) -> frozenset[Position]:
        """The positions where the network has an activation."""
        return frozenset(l for l, layer in enumerate(self.layers, start=1) if layer.activation is not None)

    @property
    def main_activation(self) -> str | None:
        """The most frequent kind of activation, which is used for inserted ones, or None if there is none."""
        kinds = Counter(layer.activation for layer in self.layers if layer.activation is not None)
        return kinds.most_common(1)[0][0] if kinds else None

    @property
    def vanilla(self) -> Plan:
        """The plan that keeps all activations and merges nothing."""
        return Plan(activations=self.activations, cuts=range(1, self.depth))

    def spans(self, space: Space = "paper") -> tuple[Span, ...]:
        """Return all spans of a search space: the keys of the latency table."""
        return tuple(spans(self, space))

    def flagged_spans(self, space: Space = "paper", exclusion: bool | None = None) -> tuple[FlaggedSpan, ...]:
        """Return all flagged spans of a search space: the keys of an importance table without drops."""
        return tuple(flagged_spans(self, space, exclusion))

    def why_not(self, span: Span) -> Refusal | None:
        """Return the reason why a span cannot be merged, or None if it can."""
        if not isinstance(span, Span):
            raise InvalidValue(f"why_not() needs a Span, found {span!r:.80}. Use, for example, Span(0, 2).")
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
                    f"it crosses one end of the residual {skip.source} -> {skip.target}; a span must contain a "
                    "residual completely, lie inside it, or lie outside it",
                )
        return None

    @cached_property
    def droppable_layers(self) -> frozenset[int]:
        """The layers whose convolution can be replaced by the identity: they keep channels and size.

        A layer with a skip of its own is not among them: such skips are parallel branches of one layer.
        """
        alone = {skip.target for skip in self.skips if len(skip.span) == 1}
        return frozenset(l for l, layer in enumerate(self.layers, 1) if layer.shape.keeps_shape and l not in alone)

    @cached_property
    def droppable_branches(self) -> frozenset[Span]:
        """The spans of the residuals whose branch can be left out: the identity is the only value added to it."""
        return frozenset(
            skip.span
            for skip in self.skips
            if not (skip.projection or skip.side)
            and len([*self.skips_into(skip.target)]) == 1
            and not any(other.crosses(skip.span) for other in self.skips)
        )

    def merged_shape(self, span: Span, dropped: Drops = NOTHING) -> ConvShape:
        """Return the shape of the merged convolution of a span, including the skips inside it.

        If nothing of it is left, this is the shape of the identity.
        """
        if refusal := self.why_not(span):
            raise PlanError(f"The span {span} cannot be merged: {refusal.why}.")
        start = self.identity_shape(span.i)
        at = {span.i: start}
        for l in span.layers:
            if branch := next((branch for branch in dropped.branches if branch.i < l <= branch.j), None):
                at[l] = at[branch.i]  # read only at its end
                continue
            shape = self.layers[l - 1].shape
            if l in dropped.layers:
                at[l] = at[l - 1]
            else:  # composing with the identity at the front would only take time
                at[l] = shape if at[l - 1] is start else at[l - 1].then(shape)
            for skip in self.skips_into(l):
                if skip.source >= span.i:
                    projected = at[skip.source] if skip.projection is None else at[skip.source].then(skip.projection)
                    if at[l].offset(projected) is None:
                        raise PlanError(f"The skip {skip.source} -> {l} exceeds what is left of its branch. Drop less.")
                    at[l] = at[l].plus(projected)
        return at[span.j]

    def path_shape(self, span: Span, dropped: Drops = NOTHING) -> ConvShape:
        """Return the shape of the composed layers of a span, without skips."""
        missing = dropped.missing
        kept = [self.layers[l - 1].shape for l in span.layers if l not in missing]
        return functools.reduce(ConvShape.then, kept) if kept else self.identity_shape(span.i)

    def skip_shape(self, skip: Skip) -> ConvShape:
        """Return the shape of a skip: its projection, or the identity."""
        return skip.projection or self.identity_shape(skip.source)

    def skips_into(self, target: Position) -> Iterator[Skip]:
        return (skip for skip in self.skips if skip.target == target)

    def segments(self, plan: Plan) -> tuple[Span, ...]:
        """Return the spans between the cuts of a plan. Barriers are always cuts.

        Raise PlanError with all problems if the plan does not fit.
        """
        last = max((*plan.cuts, *plan.activations), default=0)
        if last > self.depth or self.depth in plan.cuts:
            raise PlanError(
                f"The plan has position {last}, but the network has {self.depth} layers. Cuts must lie strictly "
                f"between 0 and {self.depth}, and activations must be at cuts or at {self.depth}."
            )
        cuts = {*plan.cuts, *self.barriers}
        if missing := sorted(plan.activations - cuts - {self.depth}):
            raise PlanError(f"The activations {missing} must also be cuts.")
        if not self.activations and plan.activations:
            raise PlanError(
                "The plan inserts activations, but the network has no activation to copy. Use a plan without any."
            )
        self._check_dropped(plan, cuts)
        segments = tuple(self._between(tuple(sorted(cuts))))
        if problems := [f"{span}, because {refusal.why}" for span in segments if (refusal := self.why_not(span))]:
            raise PlanError(f"The plan merges spans that cannot be merged: {'; '.join(problems)}. Add cuts there.")
        for span in segments if plan.dropped else ():
            self.merged_shape(span, plan.dropped)  # skips fit into what is left
            if alone := plan.dropped.left_alone(span, (skip.span for skip in self.skips)):
                without = self.droppable_branches.issuperset(alone)  # not if there is a projection
                fix = "Drop the branch of the residual, or" if without else "Remove the cut before or after it, or"
                raise PlanError(
                    f"The plan drops all layers of the segment {span}, so that only the addition of its residual would "
                    f"be left. {fix} keep a layer."
                )
        return segments

    def _check_dropped(self, plan: Plan, cuts: Set[Position]) -> None:
        if wrong := [l for l in plan.dropped.layers if l not in self.droppable_layers]:
            why = "which has a parallel branch"
            if (l := wrong[0]) > self.depth:
                why = f"but the network has {self.depth} layers"
            elif not self.layers[l - 1].shape.keeps_shape:
                why = "which changes the number of channels or the size"
            raise PlanError(f"The plan drops layer {l}, {why}. Drop only layers of network.droppable_layers.")
        for branch in plan.dropped.branches:
            if branch not in self.droppable_branches:
                raise PlanError(
                    f"The plan drops the branch {branch}, which is not that of a residual that adds only the identity. "
                    "Drop only those of network.droppable_branches."
                )
            if inside := sorted(cuts & set(branch.inner)):
                raise PlanError(f"The plan drops the branch {branch}, but cuts it at {inside[0]}. Remove the cut.")

    def final_activations(self, plan: Plan) -> frozenset[Position]:
        """Return the positions that have an activation after the plan is applied.

        The network's own activation at L always stays, because nothing is merged after it.
        """
        return plan.activations | (self.activations & {self.depth})

    def __str__(self) -> str:
        return network_table(self).text()

    def _repr_html_(self) -> str:
        return network_table(self).html()

    def __repr__(self) -> str:
        return f"<Network {self.name}: {summary(self)}>"

    def identity_shape(self, position: Position) -> ConvShape:
        """Return the shape of the identity at a position before the last one."""
        after = self.layers[position].shape
        return ConvShape.identity(after.in_channels, after.dims)

    def _between(self, cuts: tuple[Position, ...]) -> Iterator[Span]:
        bounds = (0, *cuts, self.depth) if self.depth else ()
        return (Span(i, j) for i, j in pairwise(bounds))
