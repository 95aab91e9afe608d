"""frontier.plot(): a plotly figure of the plans."""

import dataclasses
import json
import sys

import pytest

from depthfold.core import Surrogate
from depthfold.errors import MissingDependency
from lacking import needs
from runs import dropping_run, measured_run


def plotted(frontier):
    """The figure as plotly writes it for a browser."""
    return json.loads(frontier.plot().to_json())


@needs("plotly")
def test_figure_has_every_plan_with_its_depth_and_speed_up():
    frontier = measured_run().frontier
    (trace,) = frontier.plot().data
    assert list(trace.x) == [plan.latency for plan in frontier]
    assert list(trace.y) == [plan.importance for plan in frontier]
    for text, plan in zip(trace.text, frontier, strict=True):
        assert f"speed-up: {plan.speedup:.2f}x" in text.split("<br>")
        assert f"convolutions: {plan.convolutions}" in text.split("<br>")


@needs("plotly")
def test_original_is_marked_if_it_is_known():
    frontier = measured_run().frontier
    layout = plotted(frontier)["layout"]
    (line,), (label,) = layout["shapes"], layout["annotations"]
    assert line["x0"] == line["x1"] == frontier.original
    assert label["text"] == f"original, {frontier.original:.4g} ms"
    unknown = plotted(dataclasses.replace(frontier, original=None))
    assert "shapes" not in unknown["layout"]
    assert "speed-up: ?" in unknown["data"][0]["text"][0]


@needs("plotly")
def test_axes_name_their_units():
    frontier = measured_run().frontier
    surrogate = Surrogate(intercept=71.25, slope=1.0, per_block=0.0, tau=1.0, plans=())
    points = dataclasses.replace(frontier, quantity="accuracy, in points")
    expected = {
        "predicted change of the score": frontier,
        "predicted change of accuracy, in points": points,
        "predicted change of the score, normalised with alpha = 1.6": dataclasses.replace(frontier, alpha=1.6),
        "prediction of accuracy, in points, less 71.25": dataclasses.replace(points, surrogate=surrogate),
    }
    for meaning, shown in expected.items():
        layout = plotted(shown)["layout"]
        assert layout["xaxis"]["title"]["text"] == "Predicted latency, ms"
        assert layout["yaxis"]["title"]["text"] == f"Importance: {meaning}"


@needs("plotly")
def test_hover_text_counts_dropped_layers():
    frontier = dropping_run().frontier
    texts = frontier.plot().data[0].text
    counts = [f"dropped layers: {len(plan.plan.dropped.missing)}" for plan in frontier]
    assert [text.split("<br>")[-1] for text in texts] == counts
    assert len(set(counts)) > 1


def test_without_plotly_the_error_names_the_extra(monkeypatch):
    for name in ("plotly", "plotly.graph_objects"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependency, match=r"In a clone of depthfold, run: pip install -e .\.\[plot\]."):
        measured_run().frontier.plot()
