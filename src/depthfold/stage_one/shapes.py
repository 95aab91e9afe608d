"""The shapes of all spans of a network with any set of dropped layers and branches, each composed once."""

from __future__ import annotations

from collections import defaultdict

from depthfold.core import ConvShape, Drops, Network, Position, Skip


class Shapes:
    """Caches merged shapes. Drops are sets of bits: bit l for layer l, and a bit above L for each branch.

    A shape is known by its number in `known`. Composing two shapes takes longer than everything else that the solver
    does with them, so a span extends the shape of the span that is one layer shorter.
    """

    def __init__(self, network: Network) -> None:
        self.network, self.L = network, network.depth
        self.branches = tuple(sorted(network.droppable_branches))
        self.known: list[ConvShape] = []
        self._numbers: dict[ConvShape, int] = {}
        self._skips: dict[Position, list[Skip]] = defaultdict(list)
        for skip in network.skips:
            self._skips[skip.target].append(skip)
        self._bits = {branch: 1 << self.L + 1 + n for n, branch in enumerate(self.branches)}
        self._layers = {branch: _layer_bits(branch.i, branch.j) for branch in self.branches}
        self._window = [[self._inside_bits(s, t) for t in range(self.L + 1)] for s in range(self.L + 1)]
        self._at: dict[tuple[Position, Position, int], int | None] = {}
        self._representatives: dict[tuple[Position, Position, int], int | None] = {}
        self._futures: dict[tuple[object, ...], int] = {}
        self._then: dict[tuple[int, int], int] = {}
        self._plus: dict[tuple[int, int, ConvShape | None], int | None] = {}
        self._of_mask: dict[int, tuple[frozenset[Position], int]] = {}

    def mask(self, dropped: Drops) -> int:
        """Return drops as bits."""
        return sum(1 << l for l in dropped.layers) | sum(self._bits[branch] for branch in dropped.branches)

    def drops(self, mask: int) -> Drops:
        """Return the drops of some bits."""
        layers, branches = [], []
        while mask:
            bit = mask.bit_length() - 1
            mask ^= 1 << bit
            if bit > self.L:
                branches.append(self.branches[bit - self.L - 1])
            else:
                layers.append(bit)
        return Drops(layers, branches)

    def shape(self, s: Position, t: Position, mask: int) -> ConvShape | None:
        """Return the shape of (s, t] with drops inside it, None if a skip does not fit."""
        number = self.at(s, t, mask)
        return None if number is None else self.known[number]

    def within(self, s: Position, t: Position, mask: int) -> int:
        """Return the drops inside (s, t]."""
        return mask & self._window[s][t]

    def no_cuts(self, mask: int) -> frozenset[Position]:
        """Return the positions strictly inside dropped branches."""
        return self._branches_of(mask)[0]

    def is_empty(self, s: Position, t: Position, mask: int) -> bool:
        """Return True if all layers of (s, t] are dropped."""
        layers = _layer_bits(s, t)
        return (mask | self._branches_of(mask)[1]) & layers == layers

    def leaves_alone(self, s: Position, t: Position, mask: int) -> bool:
        """Return True if only the addition of a residual is left inside an empty (s, t]."""
        dropped = [branch for branch in self.branches if mask & self._bits[branch]]
        inside = (skip for skip in self.network.skips if s <= skip.source and skip.target <= t)
        return any(not any(branch.contains(skip.span) for branch in dropped) for skip in inside)

    def at(self, s: Position, t: Position, mask: int) -> int | None:
        """Return the number of the shape of (s, t] with drops inside it, None if a skip does not fit."""
        key = (s, t, mask)
        if key not in self._at:
            self._at[key] = self._composed(s, t, mask)
        return self._at[key]

    def representative(self, s: Position, m: Position, mask: int) -> int | None:
        """Return one of the drops inside (s, m] after which all longer spans have the same shapes as after `mask`.

        Many sets of drops have the same shape at m and at the sources of the skips that are open there, and the solver
        need not tell them apart. None if a skip does not fit, so that no longer span is possible.
        """
        key = (s, m, mask)
        if key not in self._representatives:
            number = self.at(s, m, mask)
            empty = self.is_empty(s, m, mask)
            sources = {k.source for k in self.network.skips if s <= k.source < m < k.target}
            shapes = tuple(self.at(s, p, self.within(s, p, mask)) for p in sorted(sources))
            future = (s, m, number, empty, empty and self.leaves_alone(s, m, mask), shapes)
            self._representatives[key] = None if number is None else self._futures.setdefault(future, mask)
        return self._representatives[key]

    def _composed(self, s: Position, t: Position, mask: int) -> int | None:
        if s == t:
            return self.number(self.network.identity_shape(s))
        for branch in self.branches if mask >> self.L + 1 else ():  # of two that end here, the longer comes first
            if branch.j == t and mask & self._bits[branch]:
                return self.at(s, branch.i, self.within(s, branch.i, mask))
        shape = self.at(s, t - 1, self.within(s, t - 1, mask))
        if shape is not None and not mask >> t & 1:
            shape = self._extended(shape, t) if t > s + 1 else self.number(self.network.layers[t - 1].shape)
        for skip in self._skips[t]:
            if skip.source >= s and shape is not None:
                shape = self._added(shape, self.at(s, skip.source, self.within(s, skip.source, mask)), skip)
        return shape

    def _extended(self, shape: int, l: int) -> int:
        if (shape, l) not in self._then:
            self._then[shape, l] = self.number(self.known[shape].then(self.network.layers[l - 1].shape))
        return self._then[shape, l]

    def _added(self, shape: int, source: int | None, skip: Skip) -> int | None:
        if source is None:
            return None
        key = (shape, source, skip.projection)
        if key not in self._plus:
            start = self.known[source]
            added = start if skip.projection is None else start.then(skip.projection)
            fits = self.known[shape].offset(added) is not None
            self._plus[key] = self.number(self.known[shape].plus(added)) if fits else None
        return self._plus[key]

    def number(self, shape: ConvShape) -> int:
        """Return the number of a shape."""
        if shape not in self._numbers:
            self._numbers[shape] = len(self.known)
            self.known.append(shape)
        return self._numbers[shape]

    def _inside_bits(self, s: Position, t: Position) -> int:
        if s >= t:
            return 0
        return _layer_bits(s, t) | sum(bit for branch, bit in self._bits.items() if s <= branch.i and branch.j <= t)

    def _branches_of(self, mask: int) -> tuple[frozenset[Position], int]:
        """Return the positions inside the dropped branches, and their layers as bits."""
        key = mask >> self.L + 1
        if key not in self._of_mask:
            dropped = [branch for branch in self.branches if mask & self._bits[branch]]
            inside = frozenset(p for branch in dropped for p in branch.inner)
            self._of_mask[key] = inside, sum(1 << l for l in {l for branch in dropped for l in branch.layers})
        return self._of_mask[key]


def _layer_bits(s: Position, t: Position) -> int:
    return (1 << t + 1) - (1 << s + 1)
