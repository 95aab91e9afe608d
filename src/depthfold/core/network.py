"""The network as the method sees it: a chain of layers, numbered, with everything that limits merging."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, Literal, get_args

from depthfold.core.layer import Layer, Refusal, Skip
from depthfold.core.plan import Plan
from depthfold.core.shape import ConvShape, FixedPadding
from depthfold.core.span import FlaggedSpan, Position, Span
from depthfold.errors import InvalidValue, PlanError
from depthfold.support.digest import digest
from depthfold.support.document import Document, encode

# The table that a person reads when a network is printed.

HEADER = ("l", "layer", "convolution", "in", "activation", "note")


def network_table(network: Network) -> str:
    """Layers line by line, then the counts and the refusals by kind."""
    lines = [f"{network.name}: {summary(network)}"]
    if network.layers:
        lines += ["", *text_table(HEADER, [_row(network, l) for l in range(1, network.depth + 1)])]
    if network.refusals:
        lines += ["", "What does not merge, and why:"]
        lines += [f"  {line}" for line in refusals_by_kind(network)]
    if network.fixed_padding:
        lines += ["", "Padding that depends on the size of the map, fixed at the traced size:"]
        lines += [f"  {fixed}" for fixed in network.fixed_padding]
    return "\n".join(lines)


def summary(network: Network) -> str:
    if not network.layers:
        return "nothing to merge: no convolution of this network can be a layer"
    spans = {space: len(network.spans(space)) for space in ("paper", "full")}
    text = (
        f"{_count(network.depth, 'layer')}, {_count(len(network.activations), 'activation')}, "
        f"{_count(len(network.skips), 'skip')}, {_count(len(network.barriers), 'barrier')}; "
        f"{_count(spans['paper'], 'span')} in the paper's space, {spans['full']} in the full one"
    )
    return text if spans["full"] > network.depth else text + "; nothing to merge: every chain has a single layer"


def refusals_by_kind(network: Network, shown: int = 3) -> Iterator[str]:
    """One line per kind of refusal, the most frequent first, with a few of the places."""
    for code, count in Counter(refusal.code for refusal in network.refusals).most_common():
        of_kind = [refusal for refusal in network.refusals if refusal.code == code]
        places = ", ".join(dict.fromkeys(refusal.where for refusal in of_kind[:shown]))
        more = f" and {count - shown} more" if count > shown else ""
        yield f"{code} x{count}: {of_kind[0].why} [{places}{more}]"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, ["-" * width for width in widths], *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(network: Network, l: int) -> tuple[str, ...]:
    layer = network.layers[l - 1]
    notes = [f"+ {skip.source}{' through ' + str(skip.projection) if skip.projection else ''}"
             for skip in network.skips_into(l)]  # fmt: skip
    if l in network.barriers:
        kinds = dict.fromkeys(refusal.code for refusal in network.refusals if refusal.position == l)
        notes.append("barrier" + (f" ({', '.join(kinds)})" if kinds else ""))
    size = "x".join(map(str, layer.in_size))
    return (str(l), layer.where, str(layer.shape), size, layer.activation or "-", "; ".join(notes))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# The two search spaces: which spans the method may choose from.
#
# "paper" follows the rules of the paper, as its code and counts have them; "full" holds every span that merges exactly.

Space = Literal["paper", "full"]


def spans(network: Network, space: Space) -> Iterator[Span]:
    """All spans of the space, by i and then by j."""
    expect_space(space)
    stops = network.barriers if space == "full" else tuple(sorted({*network.barriers, *stride_barriers(network)}))
    # A span that starts inside a skip must end in it, and one that ends inside must have started in it.
    latest = [network.depth] * (network.depth + 1)
    earliest = [0] * (network.depth + 1)
    for skip in network.skips:
        for p in range(skip.source + 1, skip.target):
            latest[p] = min(latest[p], skip.target)
            earliest[p] = max(earliest[p], skip.source)
    for i in range(network.depth):
        end = min(next((p for p in stops if p > i), network.depth), latest[i])
        yield from (Span(i, j) for j in range(i + 1, end + 1) if earliest[j] <= i)


def stride_barriers(network: Network) -> Iterator[Position]:
    """Where the paper's space stops every span, because of a strided layer at or shortly before that position.

    The paper does not let a kernel larger than 1 follow a stride, because the merged kernel would grow. As its code
    has it, a strided layer may still take in the 1x1 layers after it up to the end of its own block. A block ends
    where a residual starts or ends, or where the network has no activation.
    """
    block_ends = {p for skip in network.skips for p in (skip.source, skip.target)}
    for l, layer in enumerate(network.layers, start=1):
        if max(layer.shape.stride) == 1:
            continue
        stop = l
        while (
            stop < network.depth
            and stop not in network.barriers
            and stop not in block_ends
            and stop in network.activations
            and max(network.layers[stop].shape.kernel) == 1
        ):
            stop += 1
        if stop < network.depth:
            yield stop


def flagged_spans(network: Network, space: Space, exclusion: bool | None = None) -> Iterator[FlaggedSpan]:
    """All (i, j, a, b): the spans with every choice of an activation at their ends.

    An activation of the network's own stays at a span's ends; where it has none, one may be inserted or not. At
    position 0 there is nothing to choose (a = 1), and at a barrier the network's own state stays, since nothing
    merges across it anyway. It also stays at L where that is the network's output: one inserted there would cut off a
    part of its range. `exclusion` is the paper's rule that a span which starts and ends where an activation may be
    inserted must end in one; it is on in the paper's space and off in the full one.
    """
    if exclusion is None:
        exclusion = space == "paper"
    native, free = network.activations, free_positions(network)

    def flags(position: Position) -> tuple[bool, ...]:
        if position in free:
            return (False, True)
        return (position == 0 or position in native,)

    for span in spans(network, space):
        starts_bare = span.i == 0 or span.i in free
        for a in flags(span.i):
            for b in flags(span.j):
                if exclusion and not b and starts_bare and span.j in free:
                    continue
                yield FlaggedSpan(span.i, span.j, a, b)


def free_positions(network: Network) -> frozenset[Position]:
    """Where an activation may be inserted. A network without any has no kind to insert."""
    native = network.activations
    if not native:
        return frozenset()
    ends = {network.depth} if network.ends_in_output else set()
    return frozenset(range(1, network.depth + 1)) - native - ends - set(network.barriers)


def expect_space(space: object) -> None:
    """Raise InvalidValue if this is not the name of a search space."""
    if space not in get_args(Space):
        raise InvalidValue(f"There is no search space {space!r}; there are {' and '.join(map(repr, get_args(Space)))}.")


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
        return digest(structure)

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

    def spans(self, space: Space = "paper") -> tuple[Span, ...]:
        """Every span of a search space: the keys of the latency table."""
        return tuple(spans(self, space))

    def flagged_spans(self, space: Space = "paper", exclusion: bool | None = None) -> tuple[FlaggedSpan, ...]:
        """Every flagged span of a search space: the keys of the importance table."""
        return tuple(flagged_spans(self, space, exclusion))

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
