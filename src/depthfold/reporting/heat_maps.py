"""Heat maps of T[i, j] and I[i, j, a, b]: a column for every start i, a row for every number of layers j - i.

Spans are short beside the network, so T as a square would be a thin diagonal; by length it fills its place.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log10
from typing import Any

from depthfold.core import FlaggedSpan, Network, Score, Span, Timing
from depthfold.reporting import words
from depthfold.reporting.findings import Findings
from depthfold.reporting.plots import Figure, axis, layout

SEQUENTIAL = [[n / 4, f"var(--rising-{n})"] for n in range(5)]
DIVERGING = [[n / 4, f"var(--around-{n})"] for n in range(5)]
MOST_SHAPES = 1000  # composing a long span takes time for each of its layers; thousands of them would take a minute
FLAGS = {
    (True, True): "An activation at both ends",
    (True, False): "An activation at the start only",
    (False, True): "An activation at the end only",
    (False, False): "No activation at either end",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One span on a map: its value, or None where it has none, and what is said when it is pointed at."""

    span: Span
    value: float | None
    text: str


def latency_maps(findings: Findings) -> dict[str, Figure]:
    """T in milliseconds, and as a share of the layers that a span replaces: where that is below 1, merging pays."""
    network, entries = findings.network, findings.latency.entries
    layers = findings.latency.layers
    replaced = {entry.span: _replaced(entry.span, layers) for entry in entries}
    shapes = len(entries) <= MOST_SHAPES
    absolute = [
        Cell(e.span, e.times[1] if e.times else None, _latency_text(network, e, replaced[e.span], shapes))
        for e in entries
    ]
    relative = [Cell(c.span, _ratio(c.value, replaced[c.span]), c.text) for c in absolute if len(c.span) > 1]
    return {
        "Time as one convolution, ms": _map(absolute, _logarithmic(absolute, "ms"), network.depth),
        "Time as a multiple of the layers one by one": _map(
            relative, _logarithmic(relative, "times", DIVERGING) | {"zmid": 0, "reversescale": True}, network.depth
        ),
    }


def importance_maps(findings: Findings) -> dict[str, Figure]:
    """I for each pair of flags that occurs: the change of the score against the original's."""
    base, maps = findings.importance.base, {}
    for flags, title in FLAGS.items():
        entries = [e for e in findings.importance.entries if (e.span.a, e.span.b) == flags]
        cells = [
            Cell(e.span.span, e.mean - base if e.samples else None, _score_text(findings.network, e, base))
            for e in entries
        ]
        if cells:
            scale = {"colorscale": DIVERGING, "zmid": 0, "colorbar": _bar("change of the score")}
            maps[title] = _map(cells, scale, findings.network.depth)
    return maps


def _map(cells: Sequence[Cell], scale: Figure, depth: int) -> Figure:
    """`scale` says how values become colours; where it is logarithmic, `smallest` is the least value that has one."""
    smallest = scale.pop("smallest", None)
    longest = max((len(cell.span) for cell in cells), default=1)
    known = {cell.span: _level(cell.value, smallest) for cell in cells if cell.value is not None}
    unknown = {cell.span: 0.0 for cell in cells if cell.value is None}
    texts = {cell.span: cell.text for cell in cells}
    data = [_trace(known, texts, depth, longest, **scale)]
    if unknown:
        flat = {"colorscale": [[0, "var(--absent)"], [1, "var(--absent)"]], "zmin": 0, "zmax": 1, "showscale": False}
        data.append(_trace(unknown, texts, depth, longest, **flat))
    calm = {"showgrid": False, "zeroline": False}
    shown = layout("", "", margin={"l": 56, "r": 16, "t": 12, "b": 52})
    # Positions are whole numbers; left alone, plotly puts ticks between them where there are few.
    starts = {"range": [-0.5, depth - 0.5], "dtick": max(1, ceil(depth / 10))}
    shown["xaxis"] = axis("Start of the span, position i", **starts, **calm)
    shown["yaxis"] = axis("Layers in the span, j \N{MINUS SIGN} i", dtick=max(1, longest // 8), **calm)
    return {"data": data, "layout": shown}


def _logarithmic(cells: Iterable[Cell], unit: str, colours: Sequence[Any] = SEQUENTIAL) -> Figure:
    """Times span orders of magnitude: on a plain scale a single slow span would leave all others white."""
    values = [cell.value for cell in cells if cell.value]
    low, high = min(values, default=1.0), max(values, default=1.0)
    steps = [step * 10.0**power for power in range(-7, 10) for step in (1, 2, 5)]
    ticks = [tick for tick in steps if low <= tick <= high] or [low]
    ticks = ticks[:: len(ticks) // 6 + 1]
    named = {"tickvals": [log10(tick) for tick in ticks], "ticktext": [f"{tick:g}" for tick in ticks]}
    return {"colorscale": colours, "colorbar": _bar(unit) | named, "smallest": low}


def _level(value: float, smallest: float | None) -> float:
    return value if smallest is None else log10(max(value, smallest))


def _bar(unit: str) -> Figure:
    """Lying above the map, where it takes no width from it on a phone."""
    return {
        "title": {"text": unit, "side": "right"},
        "orientation": "h",
        "thickness": 10,
        "outlinewidth": 0,
        "len": 0.6,
        "x": 0,
        "xanchor": "left",
        "y": 1.02,
        "yanchor": "bottom",
    }


def _trace(levels: Mapping[Span, float], texts: Mapping[Span, str], depth: int, longest: int, **more: Any) -> Figure:
    grid = [[Span(i, i + n) for i in range(depth)] for n in range(1, longest + 1)]
    return {
        "type": "heatmap",
        "x": list(range(depth)),
        "y": list(range(1, longest + 1)),
        "z": [[levels.get(span) for span in row] for row in grid],
        "text": [[texts[span] if span in levels else "" for span in row] for row in grid],
        "hoverinfo": "text",
        "hoverongaps": False,
        "xgap": 1,
        "ygap": 1,
    } | more


def _replaced(span: Span, layers: Sequence[float | None]) -> float | None:
    """Return the time of a span's layers one by one, or None if one of them has no time."""
    singles = layers[span.i : span.j]
    known = [time for time in singles if time is not None]
    return sum(known) if len(known) == len(singles) else None


def _ratio(time: float | None, replaced: float | None) -> float | None:
    return time / replaced if time is not None and replaced else None


def _latency_text(network: Network, entry: Timing, replaced: float | None, with_shape: bool) -> str:
    lines = [_named(network, entry.span)]
    if entry.times is None:
        return _lines(*lines, f"no time: {entry.reason}")
    without, time = entry.times
    lines.append(words.ms(time) + (f" as {words.shape(network.merged_shape(entry.span))}" if with_shape else ""))
    if without != time:
        lines.append(f"{words.ms(without)} without an activation at its end")
    if replaced is not None and len(entry.span) > 1:
        lines.append(f"{words.ms(replaced)} one by one")
    return _lines(*lines)


def _score_text(network: Network, entry: Score, base: float) -> str:
    if not entry.samples:
        return _lines(_named(network, entry.span), f"no score: {entry.reason}")
    found = f"score {words.number(entry.mean)}, {words.number(entry.mean - base)} against the original"
    return _lines(_named(network, entry.span), found)


def _named(network: Network, span: Span | FlaggedSpan) -> str:
    plain = span if isinstance(span, Span) else span.span
    return f"{plain}: {words.layers(network, plain)}"


def _lines(*texts: str) -> str:
    """plotly reads a little HTML in its labels, so what comes from outside is escaped."""
    return "<br>".join(html.escape(text) for text in texts)
