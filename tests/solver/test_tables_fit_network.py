"""Checks of the tables against the network that is given with them."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest

from depthfold.core import FlaggedSpan, ImportanceTable, LatencyTable, Network
from depthfold.errors import TableError
from depthfold.solver import solve
from depthfold.solver.checks import check_fit
from structures import Builder, mobilenet_v2, plain_chain
from tables import importance_table, latency_table, plausible_tables

TIMES = {(0, 1): 1.0, (1, 2): 1.0, (0, 2): 1.5}
VALUES = {(0, 1, 1, 1): 0.0, (1, 2, 1, 1): 0.0, (0, 2, 1, 1): -1.0}


def latency(**fields: object) -> LatencyTable:
    return latency_table(TIMES, **fields)


def importance(values: dict[tuple[int, int, int, int], float] = VALUES, **fields: object) -> ImportanceTable:
    return importance_table(values, **fields)


def no_activation_at_the_end() -> Network:
    return Network(name="bare", layers=(plain_chain(1).layers[0], plain_chain(1, None).layers[0]))


def output_at_the_end() -> Network:
    return dataclasses.replace(no_activation_at_the_end(), ends_in_output=True)


def barrier_without_activation() -> Network:
    """Four layers: activations at 1 and 3, a barrier without an activation at 2, no activation at 4."""
    build = Builder(8, 16)
    for activation in ("relu", None, "relu", None):
        build.add(8, activation)
    return build.network("barriers", barriers=(2,))


def test_both_tables_must_have_the_fingerprint_of_the_network() -> None:
    mine = plain_chain(2)
    message = "table is not of the network 'chain': .* 2 layers and fingerprint .*, the table 2 and"
    with pytest.raises(TableError, match=f"The latency {message} 'abc'"):
        solve(latency(fingerprint="abc"), importance(), network=mine)
    with pytest.raises(TableError, match=f"The importance {message} 'abc'"):
        solve(latency(), importance(fingerprint="abc"), network=mine)
    own = mine.fingerprint
    assert solve(latency(fingerprint=own), importance(fingerprint=own), network=mine).fingerprint == own
    assert solve(latency(), importance(), network=mine).fingerprint == own
    assert solve(latency(), importance()).fingerprint == ""


def test_table_must_be_as_long_as_the_network() -> None:
    with pytest.raises(
        TableError, match=r"The latency table is not of the network 'chain': .* 1 layers .* table 2 and"
    ):
        solve(latency(), importance(), network=plain_chain(1))
    with pytest.raises(TableError, match=r"latency table has no entry for \(2, 3\], which the network has.* 2 of 3"):
        solve(latency(), importance(), network=plain_chain(3))


def test_span_that_does_not_merge_is_refused() -> None:
    cut = dataclasses.replace(plain_chain(2), barriers=(1,))
    with pytest.raises(
        TableError, match=r"has \(0, 2\], which does not merge in this network: there is a barrier at 1"
    ):
        solve(latency(), importance(), network=cut)


@pytest.mark.parametrize(
    ("network", "values", "message"),
    [
        (plain_chain(2), {(1, 2, 1, 0): 0.0}, r"\(1, 2\], flags 10, but the flag at 2 cannot be 0: .* own activation"),
        (plain_chain(2), {(1, 2, 0, 1): 0.0}, r"\(1, 2\], flags 01, but the flag at 1 cannot be 0: .* own activation"),
        (plain_chain(2, None), {}, r"\(0, 1\], flags 11, but the flag at 1 cannot be 1: .* no activation to copy"),
        (
            output_at_the_end(),
            {(0, 2, 1, 0): 0.0},
            r"\(0, 2\], flags 11, but the flag at 2 cannot be 1: it is the network's output",
        ),
    ],
)
def test_flag_that_the_network_cannot_have_is_refused(network: Network, values: dict, message: str) -> None:
    with pytest.raises(TableError, match=message):
        solve(latency(), importance(VALUES | values), network=network)


def test_every_block_of_the_plain_problem_lies_between_activations() -> None:
    """Also at an output: the table was measured with one there."""
    frontier = solve(latency(), importance(), network=output_at_the_end())
    assert frontier == solve(latency(), importance(), network=no_activation_at_the_end())
    assert all(2 in solved.plan.activations for solved in frontier)


@pytest.mark.parametrize(
    "network",
    [
        pytest.param(mobilenet_v2(), marks=pytest.mark.slow),
        barrier_without_activation(),
        no_activation_at_the_end(),
        output_at_the_end(),
        plain_chain(3, None),
    ],
)
def test_flags_of_an_extended_table_are_those_of_the_full_space(network: Network) -> None:
    """Every flagged span by itself, added to a table that has all that is needed."""
    blocks = set(network.flagged_spans("full", exclusion=False))
    times = latency_table({(s.i, s.j): 1.0 for s in network.spans("full")})
    full = {(f.i, f.j, f.a, f.b): 0.0 for f in blocks}
    check_fit(times, importance_table(full), network)
    for span in network.spans("full")[:: max(1, network.depth // 3)]:
        for a, b in product((False, True) if span.i else (True,), (False, True)):
            block = FlaggedSpan(span.i, span.j, a, b)
            table = importance_table(full | {(block.i, block.j, a, b): 0.0})
            if block in blocks:
                check_fit(times, table, network)
            else:
                with pytest.raises(TableError, match=r"the flag at .* cannot be"):
                    check_fit(times, table, network)


def test_extended_table_must_have_every_flag_of_the_network() -> None:
    values = VALUES | {(0, 2, 1, 0): 0.0}
    with pytest.raises(TableError, match=r"no entry for \(1, 2\], flags 10, which the network has. Measure it, or"):
        solve(latency(), importance(values), network=no_activation_at_the_end())
    assert solve(latency(), importance(values | {(1, 2, 1, 0): 0.0}), network=no_activation_at_the_end()).points


def test_plain_problem_is_solved_with_its_network() -> None:
    for network in (mobilenet_v2(), barrier_without_activation(), no_activation_at_the_end()):
        times, _ = plausible_tables(network.spans(), network.flagged_spans(), 3)
        values = {(span.i, span.j, 1, 1): -0.01 * (len(span) - 1) for span in network.spans()}
        frontier = solve(times, importance_table(values), network=network)
        for plan in frontier:
            assert network.segments(plan.plan)[0] == plan.segments[0].span
        assert all(set(point.boundaries) == set(point.activations) - {network.depth} for point in frontier.points)
