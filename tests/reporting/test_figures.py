"""The figures as data: they draw what the tables and the frontier hold."""

import dataclasses

import pytest

from depthfold.core import Network, Span
from depthfold.reporting import figures, format
from depthfold.reporting.figures import ablation_figure, frontier_figure
from depthfold.reporting.view import FLAGS, scored_blocks, select_plans, timed_spans
from runs import made_up_run
from structures import chain, plain_chain
from tables import latency_table, plausible_tables


@pytest.fixture(scope="module")
def findings():
    return made_up_run(seed=3)


def latency_maps(findings):
    return figures.latency_maps(findings.network, timed_spans(findings))


def importance_maps(findings):
    return figures.importance_maps(findings.network, scored_blocks(findings))


def scatter_plots(findings):
    plans = select_plans(findings.frontier, findings.plan)
    return frontier_figure(findings, plans), ablation_figure(findings, plans)


def cells(heat_map):
    """Return the cells of a heat map that have a value, by span."""
    return {cell.span: cell for cell in heat_map.cells if cell.value is not None}


@pytest.mark.parametrize("network", [None, chain(3), chain(3, 3), plain_chain(12)])
def test_everything_lies_inside_its_axes(network):
    findings = made_up_run(network)
    for plot in scatter_plots(findings):
        for dot in (dot for series in plot.series for dot in series.dots):
            assert 0 < plot.x.place(dot.x) < 100
            assert 0 < plot.y.place(dot.y) < 100
        if plot.marked:
            assert 0 < plot.x.place(plot.marked[0]) < 100
    for heat_map in (*latency_maps(findings), *importance_maps(findings)):
        for cell in heat_map.cells:
            assert 0 < heat_map.x.place(cell.span.i) < 100
            assert 0 < heat_map.y.place(len(cell.span)) < 100
        for cell in cells(heat_map).values():
            assert 0 <= heat_map.scale.axis.place(heat_map.scale.level(cell.value)) <= 100


def all_axes(findings):
    plots = (*scatter_plots(findings), *latency_maps(findings), *importance_maps(findings))
    axes = [axis for plot in plots for axis in (plot.x, plot.y, getattr(plot, "top", None)) if axis]
    return axes + [plot.scale.axis for plot in plots if hasattr(plot, "scale")]


def test_every_axis_has_a_title_and_ticks(findings):
    axes = all_axes(findings)
    assert len(axes) > 12
    for axis in axes:
        assert axis.title
        assert 2 <= len(axis.ticks) <= 12
        assert all(0 <= axis.place(value) <= 100 and label for value, label in axis.ticks)


def test_ticks_have_the_values_of_their_labels(findings):
    for plot in scatter_plots(findings):
        for axis in (plot.x, plot.y):
            for value, label in axis.ticks:
                assert float(label.replace(format.MINUS, "-")) == pytest.approx(value)
    for heat_map in latency_maps(findings):
        for level, label in heat_map.scale.axis.ticks:
            assert heat_map.scale.level(float(label)) == pytest.approx(level)


@pytest.mark.parametrize("depth", [1, 2, 3, 12, 53])
def test_ticks_of_the_maps_are_few_whole_positions(depth):
    findings = made_up_run(plain_chain(depth))
    for heat_map in (*latency_maps(findings), *importance_maps(findings)):
        for axis in (heat_map.x, heat_map.y):
            assert all(value == int(value) == int(label) for value, label in axis.ticks)
            assert 1 <= len(axis.ticks) <= 18


def test_latency_map_has_every_time_and_nothing_else(findings):
    heat_map = latency_maps(findings)[0]
    drawn = cells(heat_map)
    assert {span: cell.value for span, cell in drawn.items()} == dict(findings.latency.times)
    for entry in findings.latency.entries:
        if entry.bare is not None:
            assert f"{format.ms(entry.bare)} without an activation" in drawn[entry.span].text
        if entry.active is not None:
            assert f"{format.ms(entry.active)} with an activation" in drawn[entry.span].text
    assert {entry.active is None for entry in findings.latency.entries} == {True, False}
    reasons = {entry.span: entry.reason for entry in findings.latency.entries if entry.reason}
    assert len(reasons) == 1
    blanks = [cell for cell in heat_map.cells if cell.value is None]
    assert {cell.span for cell in blanks} == set(reasons)
    for cell in blanks:
        assert cell.text.endswith(f"no time: {reasons[cell.span]}")
        assert cell.colour == "var(--absent)"


def test_ratio_map_shows_where_merging_is_faster(findings):
    times = findings.latency.times
    heat_map = latency_maps(findings)[1]
    drawn = cells(heat_map)
    assert set(drawn) == {span for span in times if len(span) > 1}
    for span, cell in drawn.items():
        alone = sum(times[Span(l - 1, l)] for l in span.layers)
        assert cell.value == pytest.approx(times[span] / alone)
        assert (heat_map.scale.level(cell.value) < 0) == (times[span] < alone)
    assert heat_map.scale.axis.place(heat_map.scale.level(1.0)) == 50


def test_importance_maps_have_every_score_under_its_flags(findings):
    maps = {heat_map.title: heat_map for heat_map in importance_maps(findings)}
    importances = findings.importance.importances
    assert set(maps) == {FLAGS[span.a, span.b] for span in importances}
    drawn = {
        (span, flags): cell.value
        for flags, title in FLAGS.items()
        if title in maps
        for span, cell in cells(maps[title]).items()
    }
    assert drawn == {(s.span, (s.a, s.b)): value for s, value in importances.items()}
    assert all(heat_map.scale.axis.place(0) == 50 for heat_map in maps.values())
    texts = [cell.text for heat_map in maps.values() for cell in heat_map.cells if cell.value is None]
    assert len(texts) == 1
    assert texts[0].endswith("no score: the loss is NaN")


def test_colours_follow_the_values(findings):
    scale = latency_maps(findings)[0].scale
    low, high = 10**scale.axis.low, 10**scale.axis.high
    assert scale.colour(low) == "color-mix(in srgb,var(--rising-1) 0%,var(--rising-0))"
    assert scale.colour(high) == "color-mix(in srgb,var(--rising-4) 100%,var(--rising-3))"
    assert scale.colour((low * high) ** 0.5) == "color-mix(in srgb,var(--rising-3) 0%,var(--rising-2))"
    faster, slower = (latency_maps(findings)[1].scale.colour(ratio) for ratio in (0.99, 1.01))
    assert "var(--around-3)" in faster  # blue
    assert "var(--around-1)" in slower  # orange


def test_a_time_of_zero_has_the_colour_of_the_shortest_time():
    network = chain(3, 3)
    findings = made_up_run(network, latency=latency_table({(0, 1): 0.0, (1, 2): 2.0, (0, 2): 3.0}))
    known = cells(latency_maps(findings)[0])
    assert known[Span(0, 1)].colour == known[Span(1, 2)].colour


def test_frontier_marks_the_chosen_plan_and_the_original(findings):
    figure = frontier_figure(findings, select_plans(findings.frontier, findings.plan))
    everything, chosen = figure.series
    assert [(dot.x, dot.y) for dot in everything.dots] == [
        (point.latency, point.importance) for point in findings.frontier.points
    ]
    assert [(dot.x, dot.y) for dot in chosen.dots] == [(findings.plan.latency, findings.plan.importance)]
    assert figure.marked[0] == findings.frontier.original
    assert len(figure.top.ticks) > 2
    for value, label in figure.top.ticks:
        assert float(label.rstrip("%")) / 100 == pytest.approx(value / findings.frontier.original)
        assert figure.top.place(value) == figure.x.place(value)


def test_frontier_without_an_original_has_no_mark_and_no_second_axis(findings):
    frontier = dataclasses.replace(findings.frontier, original=None)
    changed = dataclasses.replace(findings, frontier=frontier)
    figure = frontier_figure(changed, select_plans(frontier, changed.plan))
    assert figure.marked is None
    assert figure.top is None


def test_ablation_has_both_latencies_of_every_plan(findings):
    by_cuts, by_activations = ablation_figure(findings, select_plans(findings.frontier, findings.plan)).series
    assert [dot.x for dot in by_cuts.dots] == [plan.latency for plan in findings.frontier]
    assert [dot.x for dot in by_activations.dots] == [plan.latency_by_activations for plan in findings.frontier]
    assert [dot.y for dot in by_cuts.dots] == [dot.y for dot in by_activations.dots]


def test_thousands_of_spans_are_drawn_without_their_shapes(monkeypatch):
    network = plain_chain(50)
    latency, importance = plausible_tables(network.spans("full"), network.flagged_spans("full"), 0)
    findings = dataclasses.replace(made_up_run(network), latency=latency, importance=importance)
    with_shapes = cells(latency_maps(made_up_run(chain(3, 3)))[0])
    assert "ms as 5×5, 4 → 4" in with_shapes[Span(0, 2)].text  # noqa: RUF001
    assert len(findings.latency.entries) > 1000
    monkeypatch.setattr(Network, "merged_shape", None)  # calling it would fail
    assert "ms\n" in cells(latency_maps(findings)[0])[Span(0, 2)].text
