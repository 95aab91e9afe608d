"""Importances by which a fraction of the network is better than all of it give a warning; others do not."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from depthfold.core import ImportanceTable, LatencyTable
from depthfold.solver import ImplausibleImportances, solve
from structures import mobilenet_v2
from tables import importance_table, latency_table, plausible_tables

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
L = 5
TIMES = {(i, j): 1.0 + 0.01 * (j - i) for i in range(L) for j in range(i + 1, L + 1)}


def table(single, merged, base=100.0, **fields):
    """Every layer costs `single`, and merging costs `merged` for every activation that is removed."""
    values = {(i, j, 1, 1): base + (single if j == i + 1 else merged * (j - i - 1)) for i, j in TIMES}
    return importance_table(values, base=base, **fields)


def warned(importance, latency=None, **given):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        solve(latency or latency_table(TIMES), importance, **given)
    return [str(each.message) for each in caught if each.category is ImplausibleImportances]


def test_unchanged_network_that_is_worse_than_two_fifths_of_it_gives_a_warning():
    """As measured with 800 images: reinitialised layers had not recovered after an epoch."""
    assert warned(table(single=-40.0, merged=-10.0)) == [
        "By these importances, a network at 41% of the latency is better than the unchanged one, whose importances sum "
        "to -200: each block probably lost something in its training. Measure again with "
        'method="brief" (--method brief) '
        "or longer trainings, or correct for the loss with alpha (--alpha) or a surrogate (--surrogate)."
    ]


def test_warning_names_the_line_that_calls_solve():
    with pytest.warns(ImplausibleImportances) as caught:
        solve(latency_table(TIMES), table(single=-40.0, merged=-10.0))
    assert {Path(each.filename).name for each in caught} == {Path(__file__).name}


@pytest.mark.parametrize(
    ("single", "merged"),
    [
        (0.0, -10.0),  # nothing is reinitialised
        (0.0, 0.5),  # every removal gains, but the unchanged network loses nothing
        (-0.5, -0.1),  # the paper's method: each training loses a little, 2.5 of 100 in sum
        (-3.0, -7.0),  # layers do not recover fully, but merging costs more
    ],
)
def test_plausible_importances_give_no_warning(single, merged):
    assert warned(table(single, merged)) == []


def test_one_slow_layer_whose_removal_gains_a_trifle_gives_no_warning():
    times = {(i, i + 1): 1.0 for i in range(L)} | {(2, 3): 20.0, (1, 3): 1.0}  # merged, the slow layer is gone
    values = {(i, i + 1, 1, 1): -0.2 for i in range(L)} | {(1, 3, 1, 1): 0.1}
    importance = importance_table({key: 90 + value for key, value in values.items()}, base=90.0)
    best = solve(latency_table(times), importance).plans[-1]
    assert best.latency < 0.3 * best.original and best.plan.cuts == (1, 3, 4)
    assert warned(importance, latency_table(times)) == []


def test_normalisation_that_favours_many_blocks_gives_no_warning():
    importance = table(single=-40.0, merged=-30.0)
    assert warned(importance) and not warned(importance, alpha=1.6)


def test_blocks_without_an_activation_inside_change_nothing():
    """Such a block is trained without reinitialised layers, so the unchanged network consists of these."""
    times = {(0, 1): 1.0, (1, 2): 1.0, (0, 2): 1.0, (2, 3): 1.0, (0, 3): 0.1}
    values = {(0, 1, 1, 0): -40.0, (0, 1, 1, 1): -40.0, (1, 2, 0, 1): -40.0, (1, 2, 1, 1): -40.0,
              (0, 2, 1, 1): 0.0, (2, 3, 1, 1): -1.0, (0, 3, 1, 1): 0.0}  # fmt: skip
    assert warned(importance_table(values, base=0.0), latency_table(times)) == []
    active = latency_table(times, activations={1, 2, 3})  # now (0, 2] removes the activation at 1
    assert warned(importance_table(values, base=0.0), active) != []


def test_plausible_tables_of_a_mobilenet_give_no_warning():
    network = mobilenet_v2()
    latency, importance = plausible_tables(network.spans(), network.flagged_spans(), seed=0)
    assert warned(importance, latency, network=network) == []


def read(kind, path):
    """The table without its entries that drop layers: those need the network."""
    found = kind.loads(path.read_text())
    what = "shape" if kind is LatencyTable else "dropped"
    return replace(found, entries=tuple(entry for entry in found.entries if not getattr(entry, what)))


def test_tables_of_the_experiments_give_no_warning():
    tables = sorted(EXPERIMENTS.glob("importance_methods/importance-*.json"))
    tables += sorted(EXPERIMENTS.glob("equal_latency/measured/*/importance.json"))
    assert len(tables) > 15
    for path in tables:
        folder = path.parent if (path.parent / "latency.json").exists() else None
        folder = folder or path.parent.with_name(path.parent.name.removesuffix("-earlier"))
        latency = read(LatencyTable, folder / "latency.json")
        assert warned(read(ImportanceTable, path), latency) == [], path
