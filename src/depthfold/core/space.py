"""The two search spaces: which spans the method may choose from.

"paper" follows the rules of the paper, as its code and counts have them; "full" holds every span that merges exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, get_args

from depthfold.core.span import FlaggedSpan, Position, Span
from depthfold.errors import InvalidValue

if TYPE_CHECKING:
    from depthfold.core.network import Network

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
