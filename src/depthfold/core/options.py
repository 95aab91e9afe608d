"""The options of a span: which of its convolutions and residual branches can be left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple, get_args

from depthfold.core.drops import NOTHING, Drops
from depthfold.core.network import Network
from depthfold.core.shape import ConvShape
from depthfold.core.space import Space
from depthfold.core.span import FlaggedSpan, Position, Span
from depthfold.errors import InvalidValue
from depthfold.support.text import did_you_mean

# What a search may do: merge layers (the paper), leave out convolutions, leave out branches of residuals.
Move = Literal["merge", "drop-layers", "drop-branches"]
MERGE: tuple[Move, ...] = ("merge",)

Options = dict[ConvShape, Drops]
_Kept = tuple[int, ...]
_State = tuple[tuple[Position, ConvShape], ...]


class BlockOption(NamedTuple):
    """A block and what it drops: the key of an entry of the importance table."""

    block: FlaggedSpan
    dropped: Drops = NOTHING

    def __str__(self) -> str:
        return f"{self.block} without {self.dropped}" if self.dropped else str(self.block)


def block_options(
    network: Network, space: Space = "paper", moves: Iterable[Move] = MERGE, weights: Mapping[int, float] | None = None
) -> tuple[BlockOption, ...]:
    """Return every flagged span of a search space with all options of its span: the keys of the importance table.

    The exclusion rule of Appendix B.2 leaves out blocks that longer blocks replace. Longer blocks do not drop single
    branches, so a span that is dropped as a whole may end without an activation. Otherwise, dropping an inverted
    residual would always insert one.
    """
    moves = require_moves(moves)
    spans = {span: tuple(span_options(network, span, moves, weights).values()) for span in network.spans(space)}
    merged = frozenset(network.flagged_spans(space))
    return tuple(
        BlockOption(block, dropped)
        for block in network.flagged_spans(space, exclusion=False)
        for dropped in spans[block.span]
        if block in merged or dropped.missing.issuperset(block.span.layers)
    )


def span_options(
    network: Network, span: Span, moves: Iterable[Move] = MERGE, weights: Mapping[int, float] | None = None
) -> Options:
    """Return the shapes that a merged span can have, each with what must be dropped for it.

    Many sets of dropped layers give the same shape, and so the same latency. Of these, the one that keeps the largest
    sum of `weights` (1 for each layer by default) is taken, and among equal ones the one that keeps the earliest
    layers. At least one convolution stays, or all layers belong to dropped branches: then the shape is the identity.
    The first option drops nothing.
    """
    chosen = require_moves(moves)
    found = {network.merged_shape(span): NOTHING}
    if "drop-layers" in chosen:
        for shape, dropped in _ShapeSearch(network, span, weights or {}).options():
            found.setdefault(shape, dropped)
    if "drop-branches" in chosen and (branches := _tiling(network, span)):
        # The shape is that of all layers only if these are depth-wise 1x1 convolutions.
        found.setdefault(network.merged_shape(span, Drops(branches=branches)), Drops(branches=branches))
    return found


def left_of(network: Network, span: Span, dropped: Drops) -> tuple[ConvShape | None, bool]:
    """Return the key of a segment in the latency table if a part of it is dropped, and True if nothing is left of it.

    The key is the shape of the merged convolution, None if it is that of all layers.
    """
    if not dropped:
        return None, False
    shape = network.merged_shape(span, dropped)
    if dropped.missing.issuperset(span.layers):
        return shape, True
    return (None if shape == network.merged_shape(span) else shape), False


def require_moves(moves: Iterable[str]) -> tuple[Move, ...]:
    """Return the moves, each once and in a fixed order, with "merge", which every search makes.

    Raise InvalidValue if there is another one.
    """
    known: tuple[Move, ...] = get_args(Move)
    if not isinstance(moves, Iterable):
        raise InvalidValue(f"The moves must be some of {', '.join(map(repr, known))}, found {moves!r}.")
    given = (moves,) if isinstance(moves, str) else tuple(moves)
    if wrong := [move for move in given if move not in known]:
        several = "," in str(wrong[0])
        hint = "Name each move separately. " if several else did_you_mean(str(wrong[0]), known)
        raise InvalidValue(f"There is no move {wrong[0]!r}. {hint}The moves are {', '.join(map(repr, known))}.")
    return tuple(move for move in known if move in (*MERGE, *given))


def _tiling(network: Network, span: Span) -> tuple[Span, ...]:
    """Return the droppable branches that together have exactly the layers of a span, or nothing."""
    starts: dict[Position, Span] = {}
    for branch in network.droppable_branches:  # the longest from each position: it contains the others
        if span.contains(branch) and (branch.i not in starts or branch.j > starts[branch.i].j):
            starts[branch.i] = branch
    tiles, at = [], span.i
    while at in starts:
        tiles.append(starts[at])
        at = starts[at].j
    return tuple(tiles) if at == span.j else ()


class _ShapeSearch:
    """Finds all shapes of a span with dropped layers, layer by layer.

    A state is the shape at the current position and at the sources of the skips that are open there; two sets of
    dropped layers in the same state have the same shapes from there on.
    """

    def __init__(self, network: Network, span: Span, weights: Mapping[int, float]) -> None:
        self.network, self.span, self.weights = network, span, weights
        self.skips = [skip for skip in network.skips if span.contains(skip.span)]

    def options(self) -> Iterator[tuple[ConvShape, Drops]]:
        """Yield the shapes in which at least one convolution stays, those that keep more first."""
        start = self.network.identity_shape(self.span.i)
        states: dict[_State, _Kept] = {((self.span.i, start),): ()}
        for l in self.span.layers:
            states = self._after(l, states)
        every = frozenset(self.span.layers)
        found = [(dict(state)[self.span.j], kept) for state, kept in states.items() if kept]
        for shape, kept in sorted(found, key=lambda item: (-len(item[1]), item[1])):
            yield shape, Drops(every - set(kept))

    def _after(self, l: int, states: Mapping[_State, _Kept]) -> dict[_State, _Kept]:
        """Extend all states by layer l, kept or dropped. Of equal states, the best one stays."""
        after: dict[_State, _Kept] = {}
        for state, kept in states.items():
            for keeps in (True, False) if l in self.network.droppable_layers else (True,):
                new, mine = self._step(l, dict(state), keeps), (*kept, l) if keeps else kept
                if new is not None and (new not in after or self._better(mine, after[new])):
                    after[new] = mine
        return after

    def _step(self, l: int, at: dict[Position, ConvShape], keeps: bool) -> _State | None:
        """Return the state after layer l, or None if a skip does not fit into the kernel of its branch."""
        shape = at[l - 1].then(self.network.layers[l - 1].shape) if keeps else at[l - 1]
        for skip in self.skips:
            if skip.target == l:
                added = at[skip.source].then(self.network.skip_shape(skip))
                if shape.offset(added) is None:
                    return None
                shape = shape.plus(added)
        at[l] = shape
        still_read = {l, *(skip.source for skip in self.skips if skip.source <= l < skip.target)}
        return tuple((position, at[position]) for position in sorted(still_read))

    def _better(self, one: _Kept, two: _Kept) -> bool:
        """Compare two sets of kept layers with the same shapes."""
        weight = [sum(self.weights.get(l, 1.0) for l in kept) for kept in (one, two)]
        return (weight[0], [-l for l in one]) > (weight[1], [-l for l in two])
