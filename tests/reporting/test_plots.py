"""The figures as data: what they draw is what the tables and the frontier hold."""

import dataclasses

import pytest

from depthfold.core import Network, Span
from depthfold.reporting import words
from depthfold.reporting.heat_maps import FLAGS, importance_maps, latency_maps
from depthfold.reporting.plans import shown
from depthfold.reporting.plots import SELECTED, ablation_figure, frontier_figure
from lacking import library, needs
from runs import made_up_run
from structures import chain, plain_chain
from tables import latency_table, plausible_tables

go = library("plotly.graph_objects")
pytestmark = needs("plotly")


@pytest.fixture(scope="module")
def findings():
    return made_up_run(seed=3)


def all_figures(findings):
    plans = shown(findings.frontier, findings.plan)
    maps = (*latency_maps(findings).values(), *importance_maps(findings).values())
    return (frontier_figure(findings, plans), ablation_figure(findings, plans), *maps)


def test_plotly_knows_every_property(findings):
    for figure in all_figures(findings):
        go.Figure(figure)  # refuses names and values that plotly does not have
    with pytest.raises(ValueError, match="Invalid property"):
        go.Figure({"data": [], "layout": {"xaxes": {}}})


def test_every_axis_has_a_title(findings):
    for figure in all_figures(findings):
        axes = [axis for name, axis in figure["layout"].items() if name.startswith(("xaxis", "yaxis"))]
        assert len(axes) >= 2
        assert all(axis["title"]["text"] for axis in axes)


@pytest.mark.parametrize("depth", [1, 2, 3, 12, 53])
def test_ticks_of_the_maps_stand_at_whole_positions_and_are_not_many(depth):
    findings = made_up_run(plain_chain(depth))
    for figure in (*latency_maps(findings).values(), *importance_maps(findings).values()):
        for name in ("xaxis", "yaxis"):
            step = figure["layout"][name]["dtick"]
            assert isinstance(step, int) and step >= 1
            assert depth / step <= 18


def cells(trace):
    """The cells that a heat map fills: the span and its level, and what it says."""
    return {
        Span(i, i + n): (level, text)
        for n, levels, texts in zip(trace["y"], trace["z"], trace["text"], strict=True)
        for i, level, text in zip(trace["x"], levels, texts, strict=True)
        if level is not None
    }


def test_the_map_of_T_has_every_time_and_nothing_else(findings):
    known, unknown = latency_maps(findings)["Time as one convolution, ms"]["data"]
    drawn = {span: 10**level for span, (level, _) in cells(known).items()}
    times = findings.latency.times
    assert drawn == pytest.approx({span: with_one for span, (_, with_one) in times.items()})
    for span, (without, with_one) in times.items():
        text = f"{words.ms(without)} without an activation at its end"
        assert (text in cells(known)[span][1]) == (without != with_one)
    assert {without == with_one for without, with_one in times.values()} == {True, False}
    blanks = {entry.span: entry.reason for entry in findings.latency.entries if entry.reason}
    assert len(blanks) == 1
    assert set(cells(unknown)) == set(blanks)
    for span, (_, text) in cells(unknown).items():
        assert text.endswith(f"no time: {blanks[span]}")


def test_the_map_of_ratios_says_where_merging_pays(findings):
    times = {span: with_one for span, (_, with_one) in findings.latency.times.items()}
    known = latency_maps(findings)["Time as a multiple of the layers one by one"]["data"][0]
    drawn = cells(known)
    assert set(drawn) == {span for span in times if len(span) > 1}
    for span, (level, _) in drawn.items():
        alone = sum(findings.latency.layers[span.i : span.j])
        assert 10**level == pytest.approx(times[span] / alone)
        assert (level < 0) == (times[span] < alone)


def test_the_maps_of_I_have_every_score_under_its_flags(findings):
    maps = importance_maps(findings)
    importances = findings.importance.importances
    assert set(maps) == {FLAGS[span.a, span.b] for span in importances}
    drawn = {
        (span, flags): level
        for flags, title in FLAGS.items()
        if title in maps
        for span, (level, _) in cells(maps[title]["data"][0]).items()
    }
    assert drawn == pytest.approx({(s.span, (s.a, s.b)): value for s, value in importances.items()})
    texts = [text for figure in maps.values() for trace in figure["data"][1:] for _, text in cells(trace).values()]
    assert len(texts) == 1
    assert texts[0].endswith("no score: the loss is NaN")


def test_a_time_of_zero_has_a_colour():
    network = chain(3, 3)
    findings = made_up_run(network, latency=latency_table({(0, 1): 0.0, (1, 2): 2.0, (0, 2): 3.0}))
    known = cells(latency_maps(findings)["Time as one convolution, ms"]["data"][0])
    assert known[Span(0, 1)][0] == known[Span(1, 2)][0]  # as light as the shortest that took any time


def test_the_frontier_marks_the_chosen_plan_and_the_original(findings):
    plans = shown(findings.frontier, findings.plan)
    figure = frontier_figure(findings, plans)
    everything, chosen, selected = figure["data"][:3]
    assert list(zip(everything["x"], everything["y"], strict=True)) == [
        (point.latency, point.importance) for point in findings.frontier.points
    ]
    assert (chosen["x"], chosen["y"]) == ([findings.plan.latency], [findings.plan.importance])
    assert figure["data"][SELECTED] is selected
    assert figure["layout"]["shapes"][0]["x0"] == findings.frontier.original
    for place, text in zip(*(figure["layout"]["xaxis2"][key] for key in ("tickvals", "ticktext")), strict=True):
        assert float(text.rstrip("%")) / 100 == pytest.approx(place / findings.frontier.original)


def test_the_ablation_has_both_latencies_of_every_plan(findings):
    along_s, along_a = ablation_figure(findings, shown(findings.frontier, findings.plan))["data"]
    assert along_s["x"] == [plan.latency for plan in findings.frontier]
    assert along_a["x"] == [plan.latency_by_activations for plan in findings.frontier]
    assert along_s["y"] == along_a["y"]


def test_names_are_escaped_where_plotly_would_read_tags():
    findings = made_up_run(chain(3, 3, 3))
    layers = tuple(dataclasses.replace(layer, where="<b>x</b>") for layer in findings.network.layers)
    renamed = dataclasses.replace(findings, network=dataclasses.replace(findings.network, layers=layers))
    texts = [text for _, text in cells(latency_maps(renamed)["Time as one convolution, ms"]["data"][0]).values()]
    assert all("&lt;b&gt;x&lt;/b&gt;" in text and "<b>" not in text for text in texts)


def test_thousands_of_spans_are_drawn_without_their_shapes(monkeypatch):
    network = plain_chain(50)
    latency, importance = plausible_tables(network.spans("full"), network.flagged_spans("full"), 0)
    findings = dataclasses.replace(made_up_run(network), latency=latency, importance=importance)
    with_shapes = cells(latency_maps(made_up_run(chain(3, 3)))["Time as one convolution, ms"]["data"][0])
    assert "ms as 5×5, 4 → 4" in with_shapes[Span(0, 2)][1]  # noqa: RUF001
    assert len(findings.latency.entries) > 1000
    monkeypatch.setattr(Network, "merged_shape", None)  # nobody asks for it
    assert "ms<br>" in cells(latency_maps(findings)["Time as one convolution, ms"]["data"][0])[Span(0, 2)][1]
