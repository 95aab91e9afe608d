"""The frontier with dropped layers compared with a mixed-integer program, at the size and structure of MobileNetV2."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from depthfold.core import Budget, Drops, FlaggedSpan, Frontier, ImportanceTable, LatencyTable, Network, Span
from depthfold.core.options import Move
from depthfold.solver import solve
from oracle_moves import Segments
from structures import mobilenet_v2, resnet34
from tables import tables_with_moves

MILP_GAP = 1e-6


@pytest.mark.parametrize(
    "network", [pytest.param(mobilenet_v2(), marks=pytest.mark.slow), resnet34()], ids=lambda value: str(value)[:8]
)
def test_frontier_equals_a_mixed_integer_program(network: Network) -> None:
    # The seed is one of those with the shortest times of HiGHS, which differ by a factor of four.
    latency, importance = tables_with_moves(network, "paper", get_args(Move), 10)
    frontier = solve(latency, importance, network=network)
    program = Program(network, latency, importance)
    for budget in middle_of_gaps(frontier, 10):
        time, value = program.best(budget)
        plan = frontier.at(Budget.milliseconds(budget))
        assert time <= budget
        assert value <= plan.importance + 1e-12
        assert plan.importance <= value + MILP_GAP


def middle_of_gaps(frontier: Frontier, number: int) -> list[float]:
    """Budgets between two plans: HiGHS may overrun a budget by its own tolerance."""
    gaps = [(one.latency, two.latency) for one, two in pairwise(frontier.points) if two.latency - one.latency > 1e-3]
    chosen = [gaps[n * (len(gaps) - 1) // (number - 1)] for n in range(number)]
    return [(low + high) / 2 for low, high in chosen]


class Program:
    """A path of blocks, one variable for each option, and a path of segments, one for each set of drops.

    A segment with certain drops is possible only if for each layer the blocks chosen there agree: the layer is dropped
    in the segment if and only if it is dropped in the block, and the same for branches. Where the path of blocks passes
    an activation, the path of segments has one that ends with an activation, and nowhere else.
    """

    def __init__(self, network: Network, latency: LatencyTable, importance: ImportanceTable) -> None:
        self.L = network.depth
        self.blocks = list(importance.options.items())
        self.segments = list(every_segment(network, latency, importance))
        self.rows: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self._paths()
        for l in sorted({l for (_, dropped), _ in self.blocks for l in dropped.layers}):
            self._agree(lambda span, dropped, l=l: span.i < l <= span.j and l in dropped.layers)
        for branch in sorted({branch for (_, dropped), _ in self.blocks for branch in dropped.branches}):
            self._agree(lambda span, dropped, branch=branch: branch in dropped.branches)

    def best(self, budget: float) -> tuple[float, float]:
        size = len(self.segments) + len(self.blocks)
        times = np.array([time for *_, time in self.segments])
        values = np.array([value for _, value in self.blocks])
        rows = [*self.rows, *((len(self.low), n, time) for n, time in enumerate(times))]
        row, column, factor = zip(*rows, strict=True)
        matrix = coo_array((factor, (row, column)), shape=(len(self.low) + 1, size)).tocsr()
        result = milp(
            np.concatenate([np.zeros(len(times)), -values]),
            integrality=np.ones(size),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, [*self.low, 0.0], [*self.high, budget]),
            options={"mip_rel_gap": 0.0},
        )
        assert result.success, result.message
        chosen = result.x > 0.5
        time = math.fsum(times[chosen[: len(times)]])
        return time, math.fsum(values[chosen[len(times) :]])

    def _constrain(self, segments: dict[int, float], blocks: dict[int, float], equal: float) -> None:
        terms = segments | {len(self.segments) + n: factor for n, factor in blocks.items()}
        self.rows.extend((len(self.low), column, factor) for column, factor in terms.items())
        self.low.append(equal)
        self.high.append(equal)

    def _paths(self) -> None:
        spans = [(span, flag) for span, flag, *_ in self.segments]
        blocks = [block for (block, _), _ in self.blocks]
        for p in range(1, self.L + 1):
            active = {n: -1.0 for n, (span, flag) in enumerate(spans) if span.j == p and flag}
            self._constrain(active, {n: 1.0 for n, block in enumerate(blocks) if block.j == p and block.b}, 0.0)
        for p in range(self.L):
            out = {n: 1.0 for n, (span, _) in enumerate(spans) if span.i == p}
            self._constrain(out | {n: -1.0 for n, (span, _) in enumerate(spans) if span.j == p}, {}, float(p == 0))
            for flag in (False, True):
                out = {n: 1.0 for n, block in enumerate(blocks) if (block.i, block.a) == (p, flag)}
                into = {n: -1.0 for n, block in enumerate(blocks) if (block.j, block.b) == (p, flag)}
                self._constrain({}, out | into, float((p, flag) == (0, True)))

    def _agree(self, drops) -> None:
        in_segments = {n: 1.0 for n, (span, _, dropped, _) in enumerate(self.segments) if drops(span, dropped)}
        in_blocks = {n: -1.0 for n, ((block, dropped), _) in enumerate(self.blocks) if drops(block.span, dropped)}
        self._constrain(in_segments, in_blocks, 0.0)


def every_segment(network: Network, latency: LatencyTable, importance: ImportanceTable):
    """Every span with every set of drops that two neighbouring blocks can leave in it, both flags, and its time.

    In the paper's space, there are at most two blocks between two activations.
    """
    lookup = Segments(latency, network)
    options: dict[FlaggedSpan, list[Drops]] = {}
    for block, dropped in importance.options:
        options.setdefault(block, []).append(dropped)
    found: set[tuple[Span, Drops]] = set()
    spans = sorted({entry.span for entry in latency.entries})
    for one, drops in options.items():
        stretches = [(Span(one.i, one.j), dropped) for dropped in drops]
        if not one.b:
            for two, more in options.items():
                if two.i == one.j and not two.a:
                    stretches += [(Span(one.i, two.j), dropped | other) for dropped in drops for other in more]
        for stretch, dropped in stretches:
            for span in spans:
                if stretch.contains(span) and not any(
                    branch.i < p < branch.j for branch in dropped.branches for p in (span.i, span.j)
                ):
                    found.add((span, dropped.within(span)))
    for span, dropped in sorted(found, key=str):
        times = lookup.times(span.i, span.j, dropped)
        if times is not None:
            yield span, False, dropped, times[0] / 10**9
            yield span, True, dropped, times[1] / 10**9
