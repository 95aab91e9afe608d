"""Figures for plotly.js as plain data. Colours are the variables of page.css, so that plots follow light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from depthfold.core import Point
from depthfold.reporting import words
from depthfold.reporting.findings import Findings
from depthfold.reporting.plans import Shown

Figure = dict[str, Any]
SELECTED = 2  # the trace that the explorer moves
LEGEND = {"orientation": "h", "x": 0, "xanchor": "left", "y": -0.22, "yanchor": "top"}


def layout(x: str, y: str, **more: Any) -> Figure:
    """What all figures share: no background of their own, and axes that leave scrolling to the page."""
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "var(--muted)"},
        "hoverlabel": {
            "bgcolor": "var(--surface)",
            "bordercolor": "var(--line)",
            "font": {"family": "system-ui, sans-serif", "size": 13, "color": "var(--ink)"},
            "align": "left",
        },
        "margin": {"l": 64, "r": 16, "t": 16, "b": 52},
        "dragmode": False,
        "xaxis": axis(x),
        "yaxis": axis(y),
    } | more


def axis(title: str, **more: Any) -> Figure:
    return {
        "title": {"text": title, "standoff": 10},
        "fixedrange": True,
        "gridcolor": "var(--line)",
        "zerolinecolor": "var(--line)",
        "linecolor": "var(--line)",
        "automargin": True,
    } | more


def frontier_figure(findings: Findings, plans: Shown) -> Figure:
    """Importance over latency, with the chosen plan, the one that the slider shows, and the original's latency."""
    points, chosen = plans.points, plans.points[plans.chosen]
    original = findings.frontier.original
    hover = [_hover(n, point, original) for n, point in enumerate(points)]
    data = [
        _trace(points, "Plans", mode="lines+markers", text=hover, hoverinfo="text",
               line={"color": "var(--accent-soft)", "width": 2}, marker={"color": "var(--accent)", "size": 5}),
        _trace([chosen], "The chosen plan", mode="markers", hoverinfo="skip",
               marker={"color": "var(--second)", "size": 14, "symbol": "diamond"}),
        _trace([chosen], "The plan shown below", mode="markers", hoverinfo="skip",
               marker={"color": "rgba(0,0,0,0)", "size": 20, "line": {"color": "var(--ink)", "width": 2}}),
    ]  # fmt: skip
    shown = layout(
        "Predicted latency, ms",
        _importance(findings),
        showlegend=True,
        legend=LEGEND,
        hovermode="closest",
    )
    if original:
        _mark_original(data, shown, [point.latency for point in points], original)
    return {"data": data, "layout": shown}


def ablation_figure(findings: Findings, plans: Shown) -> Figure:
    """The same plans twice: merged along the cuts S, and merged along the activations A."""
    points = plans.points
    along_s = [f"Along S: {words.ms(point.latency)}" for point in points]
    along_a = [f"Along A: {words.ms(point.latency_by_activations)}" for point in points]
    data = [
        _trace(points, "Merged along S", mode="lines+markers", text=along_s, hoverinfo="text",
               line={"color": "var(--accent)", "width": 2}, marker={"color": "var(--accent)", "size": 5}),
        _trace(points, "Merged along A", mode="markers", text=along_a, hoverinfo="text",
               marker={"color": "var(--second)", "size": 6, "symbol": "diamond-open"})
        | {"x": [point.latency_by_activations for point in points]},
    ]  # fmt: skip
    shown = layout("Predicted latency, ms", _importance(findings), legend=LEGEND)
    return {"data": data, "layout": shown | {"showlegend": True, "hovermode": "closest"}}


def _importance(findings: Findings) -> str:
    """A sum of normalised importances is no change of a score any more, so the axis must not say so."""
    return "Importance, change of the score" if findings.frontier.alpha is None else "Importance, normalised"


def _trace(points: Sequence[Point], name: str, **more: Any) -> Figure:
    where = {"x": [point.latency for point in points], "y": [point.importance for point in points]}
    return {"type": "scatter", "name": name} | where | more


def _hover(n: int, point: Point, original: float | None) -> str:
    share = f", {words.per_cent(point.latency / original)} of the original" if original else ""
    return (
        f"Plan {n + 1}: {words.ms(point.latency)}{share}<br>importance {words.number(point.importance)}, "
        f"{len(point.cuts) + 1} convolutions"
    )


def _mark_original(data: list[Figure], shown: Figure, latencies: Sequence[float], original: float) -> None:
    """A line at the original's latency, and a second axis above that reads in shares of it.

    It is a line and not a point: importances are changes against the original's score, and their sum over the
    original's own blocks is a prediction for another network, one whose layers were trained afresh.
    """
    low, high = min(*latencies, original), max(*latencies, original)
    room = 0.04 * (high - low) or 1.0
    extent = [low - room, high + room]
    shares = [n / 10 for n in range(int(extent[0] / original * 10) + 1, int(extent[1] / original * 10) + 1)]
    shares = shares[:: max(1, len(shares) // 5)]
    shown["xaxis"]["range"] = extent
    shown["xaxis2"] = axis(
        "Share of the original's latency", overlaying="x", side="top", range=extent, showgrid=False, tickmode="array",
        tickvals=[share * original for share in shares], ticktext=[f"{share:.0%}" for share in shares],
    )  # fmt: skip
    shown["margin"] = shown["margin"] | {"t": 56}
    line = {"color": "var(--ink)", "width": 1.5, "dash": "dash"}
    shown["shapes"] = [{"type": "line", "x0": original, "x1": original, "yref": "paper", "y0": 0, "y1": 1,
                        "line": line}]  # fmt: skip
    shown["annotations"] = [
        {"x": original, "y": 0.03, "yref": "paper", "text": f"original, {words.ms(original)}", "showarrow": False,
         "xanchor": "right", "xshift": -6, "font": {"color": "var(--ink)"}}
    ]  # fmt: skip
    # plotly draws an axis only where some trace refers to it.
    data.append({"type": "scatter", "x": [original], "y": [None], "xaxis": "x2", "showlegend": False,
                 "hoverinfo": "skip"})  # fmt: skip
