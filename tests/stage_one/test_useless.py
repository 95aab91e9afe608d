"""Blocks whose merging saves no time: leaving them out never changes an optimal plan, if importances are monotone."""

from __future__ import annotations

import itertools
import random
import warnings
from dataclasses import replace

import pytest

import depthfold as df
from depthfold.core import BlockOption, FlaggedSpan, ImportanceTable, LatencyTable, Score, Span, Surrogate
from depthfold.errors import TableError
from depthfold.stage_one import SAVES_NO_TIME, useless_options
from oracle import exhaustive_frontier
from structures import Builder, chain, mobilenet_v2
from tables import importance_table, latency_table, plausible_tables, timing


def useless_blocks(network, latency, blocks):
    return frozenset(option.block for option in useless_options(network, latency, map(BlockOption, blocks)))


def random_network(rng):
    """Return up to 7 layers with some activations missing, and perhaps a residual and a barrier."""
    build = Builder(4, 16)
    depth = rng.randint(2, 7)
    source = rng.randrange(depth - 1) if rng.random() < 0.6 else None
    target = None if source is None else rng.randint(source + 2, depth)
    for l in range(1, depth + 1):
        build.add(4, kernel=rng.choice((1, 3)), activation="relu" if rng.random() < 0.6 or l == 1 else None)
        if l == target:
            build.skip(source)
    barriers = [p for p in range(1, depth) if rng.random() < 0.15 and (source is None or not source < p < target)]
    return build.network("random", barriers=tuple(barriers), ends_in_output=rng.random() < 0.5)


def random_times(rng, network):
    """Return quarter milliseconds with many ties. Merging usually saves little or nothing."""
    single = [rng.randint(2, 8) for _ in network.layers]
    entries = []
    for span in network.spans("full"):
        time = sum(single[span.i : span.j])
        if len(span) > 1:
            time = max(1, time + rng.randint(-4, 4))
        entries.append(timing(span.i, span.j, time / 4, max(time - rng.choice((0, 0, 1)), 0) / 4))
    return LatencyTable(entries=tuple(entries))


def monotone_importances(rng, network, blocks):
    """Return random importances, lowered until keeping one of the network's activations never lowers a sum."""
    values = {}

    def best(i, j, a, b):
        """Return the best sum over the blocks between i and j without an activation between them, or None."""
        sums = [values[key]] if (key := FlaggedSpan(i, j, a, b)) in values else []
        for m in range(i + 1, j):
            last = values.get(FlaggedSpan(m, j, False, b))
            first = None if last is None else best(i, m, a, False)
            if first is not None:
                sums.append(first + last)
        return max(sums, default=None)

    for block in sorted(blocks, key=lambda block: len(block.span)):
        bounds = [rng.randint(-12, 4) / 4]
        for m in set(range(block.i + 1, block.j)) & network.activations:
            parts = best(block.i, m, block.a, True), best(m, block.j, True, block.b)
            if None not in parts:
                bounds.append(sum(parts))
        values[block] = min(bounds)
    return importance_table({(f.i, f.j, f.a, f.b): value for f, value in values.items()})


def left_out(importance, blocks):
    entries = [
        Score(span=entry.span, reason=SAVES_NO_TIME) if entry.span in blocks else entry for entry in importance.entries
    ]
    return replace(importance, entries=tuple(entries))


def naive(network, latency, block):
    """Return True if the block alone is not faster than a split at one of the network's activations inside it."""

    def fastest(i, j, b):
        times = [latency.times[Span(i, j)][b]] if Span(i, j) in latency.times else []
        parts = ((fastest(i, m, 0), latency.times.get(Span(m, j))) for m in range(i + 1, j))
        return min((*times, *(one + two[b] for one, two in parts if two and one is not None)), default=None)

    whole = fastest(block.i, block.j, block.b)
    split = [
        (fastest(block.i, m, 1), fastest(m, block.j, block.b)) for m in set(block.span.inner) & network.activations
    ]
    return whole is not None and any(None not in parts and sum(parts) <= whole for parts in split)


def instances():
    for seed in range(200):
        rng = random.Random(seed)
        network = random_network(rng)
        blocks = network.flagged_spans("full", exclusion=rng.random() < 0.5)
        yield network, random_times(rng, network), monotone_importances(rng, network, blocks)


def test_leaving_them_out_never_changes_the_frontier():
    found = naive_fails = 0
    for network, latency, importance in instances():
        blocks = [entry.span for entry in importance.entries]
        useless = useless_blocks(network, latency, blocks)
        found += len(useless)
        assert all(len(block.span) > 1 for block in useless)
        expected = exhaustive_frontier(latency, importance)
        assert exhaustive_frontier(latency, left_out(importance, useless)) == expected
        # A block without an activation at an end may be part of a longer segment, so its own times are not enough.
        simple = {block for block in blocks if len(block.span) > 1 and naive(network, latency, block)}
        naive_fails += exhaustive_frontier(latency, left_out(importance, simple)) != expected
    assert found > 200
    assert naive_fails


def test_solver_copes_with_reasons_and_lists_the_blocks():
    network, latency, importance = next(
        each
        for each in instances()
        if len(useless_blocks(each[0], each[1], [e.span for e in each[2].entries])) > 2 and not each[0].barriers
    )
    useless = useless_blocks(network, latency, [entry.span for entry in importance.entries])
    table = left_out(importance, useless)
    assert ImportanceTable.loads(table.dumps()) == table
    full, short = df.solve(latency, importance, network=network), df.solve(latency, table, network=network)
    assert [(p.latency, p.importance) for p in short] == [(p.latency, p.importance) for p in full]
    assert set(short.unscored) == useless
    assert f"{len(useless)} blocks without a score, used by no plan: " in str(short)


def test_solver_warns_if_a_block_that_was_left_out_would_save_time_now():
    network = chain(3, 3, 3)
    blocks = network.flagged_spans("full")
    slow, fast = (
        latency_table({(s.i, s.j): time(len(s)) for s in network.spans("full")}) for time in (float, lambda n: 1)
    )
    table = left_out(
        importance_table({(f.i, f.j, f.a, f.b): -1.0 for f in blocks}), useless_blocks(network, slow, blocks)
    )
    assert sum(entry.reason is not None for entry in table.entries) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        df.solve(slow, table, network=network)
    text = r"leaves out 3 blocks that saved no time .*; the first is \(0, 2\], flags 11\. Measure the importances again"
    with pytest.warns(UserWarning, match=text) as caught:
        df.solve(fast, table, network=network)
    assert caught[0].filename == __file__


@pytest.mark.filterwarnings("ignore:The importance table leaves out")
def test_leaving_them_out_may_change_the_frontier_if_every_block_costs_something():
    surrogate = Surrogate(intercept=0.0, slope=1.0, per_block=-2.0, tau=1.0, plans=())
    changed = 0
    for network, latency, importance in itertools.islice(instances(), 50):
        useless = useless_blocks(network, latency, [entry.span for entry in importance.entries])
        fronts = (df.solve(latency, t, surrogate=surrogate) for t in (importance, left_out(importance, useless)))
        full, short = ([(plan.latency, plan.importance) for plan in front] for front in fronts)
        changed += full != short
    assert changed


def test_solver_warns_if_blocks_were_left_out_and_the_surrogate_prefers_fewer_blocks():
    network = chain(3, 3, 3)
    blocks, slow = network.flagged_spans("full"), latency_table({(s.i, s.j): len(s) for s in network.spans("full")})
    whole = importance_table({(f.i, f.j, f.a, f.b): -1.0 for f in blocks})
    table = left_out(whole, useless_blocks(network, slow, blocks))
    more, fewer = (Surrogate(intercept=0.0, slope=1.0, per_block=value, tau=1.0, plans=()) for value in (0.25, -0.25))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        df.solve(slow, table, surrogate=more)
        df.solve(slow, whole, surrogate=fewer)
    text = r"leaves out 3 blocks whose merging saves no time, .* lower scores for more blocks \(per_block = -0.25\)"
    with pytest.warns(UserWarning, match=text) as caught:
        df.solve(slow, table, surrogate=fewer)
    assert caught[0].filename == __file__


def test_solver_warns_if_blocks_were_left_out_and_alpha_prefers_fewer_blocks():
    """The mean is above 0. The surrogate that adds as much to each block finds the same plans."""
    network = chain(3, 3, 3)
    blocks, slow = network.flagged_spans("full"), latency_table({(s.i, s.j): len(s) for s in network.spans("full")})
    whole = importance_table({(f.i, f.j, f.a, f.b): 0.2 if len(f.span) == 1 else -0.1 * len(f.span) for f in blocks})
    table = left_out(whole, useless_blocks(network, slow, blocks))
    lower = importance_table({(f.i, f.j, f.a, f.b): -0.1 * len(f.span) for f in blocks})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        full = df.solve(slow, whole, alpha=2.5)
        df.solve(slow, left_out(lower, useless_blocks(network, slow, blocks)), alpha=2.5)
    same = Surrogate(intercept=0.0, slope=1.0, per_block=-2.5 * 0.2, tau=1.0, plans=())
    assert full.points[-1].importance == pytest.approx(df.solve(slow, whole, surrogate=same).points[-1].importance)
    text = r"leaves out 3 blocks .* alpha = 2.5 lowers the importance of every block by 0.5, so plans"
    with pytest.warns(UserWarning, match=text) as caught:
        short = df.solve(slow, table, alpha=2.5)
    assert caught[0].filename == __file__
    assert [full.points[-1].importance, short.points[-1].importance] == pytest.approx([-0.8, -0.9])


def test_all_flags_of_the_papers_space():
    network = mobilenet_v2()
    latency, importance = plausible_tables(network.spans("paper"), network.flagged_spans("paper"), seed=0)
    blocks = network.flagged_spans("paper")
    faster = {(s.i, s.j): 0.5 ** len(s) for s in network.spans("paper")}
    assert not useless_blocks(network, latency_table(faster), blocks)
    slower = {(s.i, s.j): float(len(s) ** 2) for s in network.spans("paper")}
    useless = useless_blocks(network, latency_table(slower), blocks)
    assert useless == {block for block in blocks if set(block.span.inner) & network.activations}
    some = useless_blocks(network, latency, blocks)
    assert 0 < len(some) < len(useless)
    assert len(df.solve(latency, left_out(importance, some), network=network).unscored) == len(some)


@pytest.mark.parametrize("other", [chain(3, 3, 3), chain(3, 3)])
def test_latency_table_of_another_network_is_an_error(other):
    network = chain(1, 3, 3)
    table = latency_table({(s.i, s.j): len(s) for s in other.spans("full")}, fingerprint=other.fingerprint)
    with pytest.raises(TableError, match=r"^The latency table is not of the network 'chain': the network has 3 layers"):
        useless_blocks(network, table, network.flagged_spans("full"))
