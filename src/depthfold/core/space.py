"""The search spaces: which spans may become one convolution, and with which activations at their ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol, get_args

from depthfold.core.layer import Layer, Skip
from depthfold.core.span import FlaggedSpan, Position, Span
from depthfold.errors import InvalidValue

# "paper" follows the rules of the authors' code; "full" has every span that merges exactly.
Space = Literal["paper", "full"]


class Numbered(Protocol):
    """What the rules read of a Network. Networks call them, so this module cannot import Network."""

    @property
    def depth(self) -> int: ...
    @property
    def layers(self) -> tuple[Layer, ...]: ...
    @property
    def skips(self) -> tuple[Skip, ...]: ...
    @property
    def barriers(self) -> tuple[Position, ...]: ...
    @property
    def activations(self) -> frozenset[Position]: ...
    @property
    def ends_in_output(self) -> bool: ...


def spans(network: Numbered, space: Space) -> Iterator[Span]:
    """Yield all spans of the space, ordered by i and then by j."""
    check_space(space)
    stops = network.barriers if space == "full" else tuple(sorted({*network.barriers, *stride_stops(network)}))
    # A span that starts inside a skip must end at or before its target; one that ends inside must start at or after its
    # source.
    latest = [network.depth] * (network.depth + 1)
    earliest = [0] * (network.depth + 1)
    for skip in network.skips:
        for p in range(skip.source + 1, skip.target):
            latest[p] = min(latest[p], skip.target)
            earliest[p] = max(earliest[p], skip.source)
    for i in range(network.depth):
        end = min(next((p for p in stops if p > i), network.depth), latest[i])
        yield from (Span(i, j) for j in range(i + 1, end + 1) if earliest[j] <= i)


def stride_stops(network: Numbered) -> Iterator[Position]:
    """Yield the positions that no span of the paper's space crosses because of a strided layer.

    In the paper, no kernel larger than 1 follows a stride in a span, because the merged kernel would grow. The
    authors' code allows only the 1x1 layers after a strided layer, up to the end of its module: 171 spans of
    MobileNetV2 instead of 196. Here a module ends where a residual starts or ends, or where the network has no
    activation.
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


def flagged_spans(network: Numbered, space: Space, exclusion: bool | None = None) -> Iterator[FlaggedSpan]:
    """Yield all (i, j, a, b): the spans with every allowed combination of flags (Appendix B.1).

    The network's own activations stay at the ends of a span; at other positions an activation may be inserted. Nothing
    is inserted at position 0 (a = 1), at a barrier, because nothing is merged across it, or at L if it is the network's
    output, because an activation would restrict its range. `exclusion` is the rule of Appendix B.2: a span that starts
    at 0 or where an activation may be inserted, and ends where one may be inserted, must end with one. It is on by
    default only in the paper's space. A layer that stays as it is may always end without one.
    """
    if exclusion is None:
        exclusion = space == "paper"
    own, free = network.activations, free_positions(network)

    def flags(position: Position) -> tuple[bool, ...]:
        if position in free:
            return (False, True)
        return (position == 0 or position in own,)

    for span in spans(network, space):
        starts_free = span.i == 0 or span.i in free
        for a in flags(span.i):
            for b in flags(span.j):
                unchanged = len(span) == 1 and a == (span.i == 0)
                if unchanged or b or not (exclusion and starts_free and span.j in free):
                    yield FlaggedSpan(span.i, span.j, a, b)


def free_positions(network: Numbered) -> frozenset[Position]:
    """Return the positions where an activation may be inserted: none if the network has no activation to copy."""
    own = network.activations
    if not own:
        return frozenset()
    ends = {network.depth} if network.ends_in_output else set()
    return frozenset(range(1, network.depth + 1)) - own - ends - set(network.barriers)


def check_space(space: object) -> None:
    """Raise InvalidValue if this is not the name of a search space."""
    if space not in get_args(Space):
        raise InvalidValue(f"There is no search space {space!r}. Use {' or '.join(map(repr, get_args(Space)))}.")
