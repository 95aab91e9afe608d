"""Options that save no time: leaving them out never changes an optimal plan, if importances are monotone."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import get_args

import pytest

from depthfold.core import (
    BlockOption,
    Drops,
    FlaggedSpan,
    ImportanceTable,
    LatencyTable,
    Move,
    Network,
    Score,
    Timing,
    block_options,
    span_options,
)
from depthfold.errors import TableError
from depthfold.stage_one import DROPS_SAVE_NO_TIME, useless_options
from depthfold.stage_one import useless as useless_module
from oracle_moves import frontier_with_moves
from structures import chain, mobilenet_v2, resnet34
from tables import only_outside, random_network, tables_with_moves

MOVES = get_args(Move)
Values = dict[BlockOption, float]


def random_times(rng: random.Random, network: Network, space: str) -> LatencyTable:
    """Quarter milliseconds with many ties. Merging and dropping usually save little or nothing."""
    single = [rng.randint(2, 8) for _ in network.layers]
    entries = []
    for span in network.spans(space):
        for shape, dropped in span_options(network, span, MOVES).items():
            if not (kept := dropped.kept(span)):
                continue
            time = sum(single[l - 1] for l in kept)
            if len(span) > 1:
                time = max(1, time + rng.randint(-4, 4))
            if dropped and rng.random() < 0.5:
                time = sum(single[l - 1] for l in span.layers) + rng.randint(-1, 1)
            times = (max(time - rng.choice((0, 0, 1)), 0) / 4, time / 4)
            entries.append(Timing(span=span, times=times, shape=shape if dropped else None))
    return LatencyTable(entries=tuple(entries), calibration=only_outside(0.0))


def best_unions(values: Values, i: int, j: int, a: bool, b: bool) -> dict[Drops, float]:
    """The best sum of the blocks between i and j without an activation between them, for all that they drop."""
    found: dict[Drops, float] = {}
    for (block, dropped), value in values.items():
        if (block.j, block.b) != (j, b) or block.i < i:
            continue
        if block.i == i:
            before = {Drops(): 0.0} if block.a == a else {}
        else:
            before = best_unions(values, i, block.i, a, False) if not block.a else {}
        for other, first in before.items():
            union = other | dropped
            found[union] = max(found.get(union, -1e9), first + value)
    return found


def is_part(one: Drops, two: Drops) -> bool:
    return set(one.layers) <= set(two.layers) and set(one.branches) <= set(two.branches)


def monotone_importances(rng: random.Random, network: Network, options: tuple[BlockOption, ...]) -> ImportanceTable:
    """Random importances, lowered until dropping less or keeping an activation never lowers a sum."""
    values: Values = {}

    def size(option: BlockOption) -> tuple[int, int]:
        return len(option.block.span), len(option.dropped.layers) + len(option.dropped.branches)

    for option in sorted(options, key=size):
        block, dropped = option
        bounds = [rng.randint(-12, 4) / 4]
        bounds += [value for other, value in values.items() if other.block == block and is_part(other.dropped, dropped)]
        for m in set(block.span.inner) & network.activations:
            parts = [
                [value for union, value in best_unions(values, *ends).items() if is_part(union, dropped)]
                for ends in ((block.i, m, block.a, True), (m, block.j, True, block.b))
            ]
            if all(parts):
                bounds.append(sum(min(part) for part in parts))
        values[option] = min(bounds)
    scores = (Score(span=block, dropped=dropped, samples=(value,)) for (block, dropped), value in values.items())
    return ImportanceTable(entries=tuple(scores))


def without(importance: ImportanceTable, options: frozenset[BlockOption]) -> ImportanceTable:
    entries = [
        replace(entry, samples=(), reason=DROPS_SAVE_NO_TIME) if (entry.span, entry.dropped) in options else entry
        for entry in importance.entries
    ]
    return replace(importance, entries=tuple(entries))


def instances(
    seeds: Iterable[int],
) -> Iterator[tuple[Network, LatencyTable, ImportanceTable, tuple[BlockOption, ...]]]:
    for seed in seeds:
        rng = random.Random(seed)
        network = random_network(rng, rng.randint(2, 5))
        space = rng.choice(("paper", "full"))
        options = block_options(network, space, MOVES)
        yield network, random_times(rng, network, space), monotone_importances(rng, network, options), options


def naive(network: Network, latency: LatencyTable, option: BlockOption) -> bool:
    """True if the span as one segment is as fast without the drops, whatever is beside it."""
    span, times = option.block.span, latency.shape_times
    shape = network.merged_shape(span, option.dropped)
    b, own = option.block.b, times.get((span, shape if shape != network.merged_shape(span) else None))
    return bool(option.dropped) and own is not None and times[span, None][b] <= own[b]


def test_leaving_them_out_never_changes_the_frontier() -> None:
    found, naive_fails, kinds = 0, 0, set()
    # In seed 401, an option is needed only because of what the block beside it drops.
    for network, latency, importance, options in instances([*range(200), 401]):
        useless = useless_options(network, latency, options)
        found += len(useless)
        kinds |= {(bool(o.dropped.layers), bool(o.dropped.branches), o.block.a and o.block.b) for o in useless}
        expected = frontier_with_moves(latency, importance, network)
        assert frontier_with_moves(latency, without(importance, useless), network) == expected
        # A cut inside a block, or a segment beyond its end, may make an option faster than its own entry is.
        simple = frozenset(option for option in options if naive(network, latency, option))
        naive_fails += frontier_with_moves(latency, without(importance, simple), network) != expected
    assert found > 250 and naive_fails
    # Without drops, with dropped layers and branches; with an activation at both ends or not.
    assert kinds >= {(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (0, 1, 1)}


def test_without_splits_only_alternatives_that_drop_less_count() -> None:
    found = 0
    for network, latency, importance, options in instances(range(150)):
        rng = random.Random(1)
        # Blocks of one layer cost something, and splitting a block may lower the sum.
        importance = replace(
            importance,
            entries=tuple(
                replace(e, samples=(e.samples[0] - rng.randint(2, 8),)) if len(e.span.span) == 1 else e
                for e in importance.entries
            ),
        )
        useless = useless_options(network, latency, options, splits=False)
        assert all(option.dropped and len(option.block.span) > 1 for option in useless)
        assert useless <= useless_options(network, latency, options)
        found += len(useless)
        table = without(importance, useless)
        assert frontier_with_moves(latency, table, network) == frontier_with_moves(latency, importance, network)
    assert found > 20


def test_large_networks_of_the_papers_space() -> None:
    """All surroundings are compared, and options whose drops save nothing are found."""
    for network in (mobilenet_v2(), resnet34()):
        latency, _ = tables_with_moves(network, "paper", MOVES, 0)
        options = block_options(network, "paper", MOVES)
        search = useless_module._OptionSearch(network, latency, options)
        assert all(search.contexts(option.block) is not None for option in options)
        some = useless_options(network, latency, options)
        whole = {entry.span: entry.times for entry in latency.entries if entry.shape is None}
        slow = replace(
            latency,
            entries=tuple(replace(e, times=whole[e.span]) if e.shape else e for e in latency.entries),
        )
        assert len(some) < len(useless_options(network, slow, options)) < len(options)


def test_too_many_surroundings_leave_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(useless_module, "MANY", 0)
    for network, latency, _, options in instances(range(20)):
        assert not useless_options(network, latency, options)


@pytest.mark.parametrize("other", [chain(3, 3, 3), chain(3, 3)])
def test_latency_table_of_another_network_is_an_error(other: Network) -> None:
    network = chain(1, 3, 3)
    entries = tuple(Timing(span=span, times=(1.0, 1.0)) for span in other.spans("full"))
    table = LatencyTable(entries=entries, fingerprint=other.fingerprint)
    with pytest.raises(TableError, match=r"^The latency table is not of the network 'chain': the network has 3 layers"):
        useless_options(network, table, [BlockOption(FlaggedSpan(0, 1, True, True))])
