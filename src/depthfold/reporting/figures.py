"""The figures of the report as data: scatter plots and heat maps, which templates/figures.html draws as SVG.

Colours are CSS variables of page.css, so that figures follow the light and the dark theme.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import TypeVar

from depthfold.core import Network, Point, Span
from depthfold.reporting import format
from depthfold.reporting.findings import Findings
from depthfold.reporting.view import FLAGS, ScoredBlock, ShownPlans, TimedSpan

RISING = tuple(f"var(--rising-{n})" for n in range(5))
DIVERGING = tuple(f"var(--around-{n})" for n in range(5))
MOST_SHAPES = 1000  # the shape of a merged span is composed layer by layer, which is slow for thousands of spans
MOST_OPTIONS = 8  # lines of a tooltip
Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis from `low` to `high`; `ticks` are pairs of (value, label)."""

    title: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def place(self, value: float) -> float:
        """Return the place of a value in per cent of the axis."""
        return round(100 * (value - self.low) / (self.high - self.low), 3)

    @property
    def widest_label(self) -> str:
        return max((label for _, label in self.ticks), key=len, default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A point of a scatter plot, with the text that is shown when the pointer is near it."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Dots with one name and one style: a CSS class of page.css."""

    name: str
    style: str
    dots: tuple[Dot, ...]
    line: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """A scatter plot. `marked` is a value of x with a vertical line and a label; `top` is a second axis for x."""

    x: Axis
    y: Axis
    series: tuple[Series, ...]
    top: Axis | None = None
    marked: tuple[float, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ColourScale:
    """A map from values to colours, interpolated between the `colours`, which are at equal distances."""

    axis: Axis
    colours: tuple[str, ...]
    logarithmic: bool = False

    def level(self, value: float) -> float:
        """Return the place of a value on the axis of the scale. A time of 0 is at the lower end."""
        if not self.logarithmic:
            return value
        return self.axis.low if value <= 0 else log10(value)

    def colour(self, value: float) -> str:
        position = self.axis.place(self.level(value)) / 100 * (len(self.colours) - 1)
        n = min(max(floor(position), 0), len(self.colours) - 2)
        return f"color-mix(in srgb,{self.colours[n + 1]} {position - n:.0%},{self.colours[n]})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One span of a heat map: its value, None if it has none, its colour, and the text that describes it."""

    span: Span
    value: float | None
    colour: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Spans as cells: a column for every start i, a row for every number of layers j - i.

    Spans are short compared with the network, so T as a square matrix would be a thin diagonal.
    """

    title: str
    x: Axis
    y: Axis
    scale: ColourScale
    cells: tuple[Cell, ...]


def frontier_figure(findings: Findings, plans: ShownPlans) -> Scatter:
    """Return importance over latency for every plan, with the chosen plan and the original's latency marked."""
    points, chosen, original = plans.points, plans.points[plans.chosen], findings.frontier.original
    dots = tuple(
        Dot(x=point.latency, y=point.importance, text=_plan_text(n, point, findings)) for n, point in enumerate(points)
    )
    series = (
        Series(name="Plans", style="plans", dots=dots, line=True),
        Series(name="Chosen plan", style="chosen", dots=(Dot(x=chosen.latency, y=chosen.importance, text=""),)),
    )
    latencies = [point.latency for point in points] + ([original] if original else [])
    x = _axis("Predicted latency, ms", latencies)
    marked = (original, f"original, {format.ms(original)}") if original else None
    return Scatter(
        x=x, y=_importance_axis(findings, points), series=series, top=_share_axis(x, original), marked=marked
    )


def ablation_figure(findings: Findings, plans: ShownPlans) -> Scatter:
    """Return the latency of every plan twice: merged by the cuts S, and merged by the activations A."""
    points = plans.points
    by_cuts = tuple(
        Dot(x=point.latency, y=point.importance, text=f"Merged by S: {format.ms(point.latency)}") for point in points
    )
    by_activations = tuple(
        Dot(
            x=point.latency_by_activations,
            y=point.importance,
            text=f"Merged by A: {format.ms(point.latency_by_activations)}",
        )
        for point in points
    )
    series = (
        Series(name="Merged by S", style="plans", dots=by_cuts, line=True),
        Series(name="Merged by A", style="open", dots=by_activations),
    )
    x = _axis("Predicted latency, ms", [dot.x for one in series for dot in one.dots])
    return Scatter(x=x, y=_importance_axis(findings, points), series=series)


def training_figures(findings: Findings) -> tuple[Scatter, ...]:
    """Return the loss over the steps of the fine-tuning, and the score if it was taken more than once."""
    share = findings.score_after is None or findings.score_after.share
    metric = findings.score_after.metric if findings.score_after else "accuracy"
    score = f"{metric[:1].upper()}{metric[1:]} on the hold-out set{', %' if share else ''}"
    curves = {
        "Loss": [(point.step, point.loss) for point in findings.training],
        score: [(point.step, point.score) for point in findings.training if point.score is not None],
    }
    return tuple(_curve(title, points) for title, points in curves.items() if len(points) > 1)


def _curve(title: str, points: Sequence[tuple[int, float]]) -> Scatter:
    dots = tuple(Dot(x=step, y=value, text=f"After step {step:,}: {format.number(value)}") for step, value in points)
    series = Series(name=title, style="plans", dots=dots, line=True)
    x = _axis("Step", [0, *(step for step, _ in points)])
    return Scatter(x=x, y=_axis(title, [value for _, value in points]), series=(series,))


def latency_maps(network: Network, entries: Sequence[TimedSpan]) -> tuple[HeatMap, ...]:
    """Return T in milliseconds, and T as a multiple of the layers that a span replaces: below 1, merging is faster.

    If entries have dropped layers, a third map has the shortest time of each span with dropped layers.
    """
    with_shapes = len(entries) <= MOST_SHAPES
    whole = [entry for entry in entries if entry.shape is None]
    texts = {entry.span: _latency_text(network, entry, with_shapes) for entry in whole}
    times = {entry.span: entry.predicted for entry in whole}
    ratios = {entry.span: entry.ratio for entry in whole if len(entry.span) > 1}
    maps = [
        _heat_map("Time as one convolution, ms", network, times, _log_scale("ms", times.values(), RISING), texts),
        _heat_map(
            "Time as a multiple of the separate layers", network, ratios, _ratio_scale(ratios.values()), texts
        ),
    ]  # fmt: skip
    if dropping := _by_span((entry.span, entry) for entry in entries if entry.shape is not None):
        least = {span: min(_known(entry.predicted for entry in some), default=None) for span, some in dropping.items()}
        texts = {span: _options_text(network, span, map(_shape_text, some)) for span, some in dropping.items()}
        scale = _log_scale("ms", least.values(), RISING)
        maps.append(_heat_map("Shortest time with dropped layers, ms", network, least, scale, texts))
    return tuple(maps)


def importance_maps(
    network: Network, blocks: Sequence[ScoredBlock], quantity: str = "the score"
) -> tuple[HeatMap, ...]:
    """Return I for each pair of flags that occurs: the change of the `quantity` compared with the original.

    If blocks have dropped layers or branches, there is a second map for their flags, with the best of them.
    """
    maps = []
    for flags, title in FLAGS.items():
        entries = [block for block in blocks if (block.block.a, block.block.b) == flags]
        if whole := [entry for entry in entries if not entry.dropped]:
            values = {entry.block.span: entry.importance for entry in whole}
            texts = {entry.block.span: _score_text(network, entry) for entry in whole}
            maps.append(_heat_map(title, network, values, _change_scale(values.values(), quantity), texts))
        if dropping := _by_span((entry.block.span, entry) for entry in entries if entry.dropped):
            best = {span: max(_known(e.importance for e in some), default=None) for span, some in dropping.items()}
            texts = {span: _options_text(network, span, map(_drop_text, some)) for span, some in dropping.items()}
            title = f"{title}, the best with dropped layers"
            maps.append(_heat_map(title, network, best, _change_scale(best.values(), quantity), texts))
    return tuple(maps)


def _by_span(entries: Iterable[tuple[Span, Entry]]) -> dict[Span, list[Entry]]:
    groups: dict[Span, list[Entry]] = {}
    for span, entry in entries:
        groups.setdefault(span, []).append(entry)
    return groups


def _known(values: Iterable[float | None]) -> Iterator[float]:
    return (value for value in values if value is not None)


def _heat_map(
    title: str, network: Network, values: dict[Span, float | None], scale: ColourScale, texts: dict[Span, str]
) -> HeatMap:
    longest = max(map(len, values), default=1)
    cells = tuple(
        Cell(span=span, value=value, colour="var(--absent)" if value is None else scale.colour(value), text=texts[span])
        for span, value in values.items()
    )
    x = _position_axis("Start of the span, position i", range(network.depth), most=10)
    y = _position_axis("Layers in the span, j \N{MINUS SIGN} i", range(1, longest + 1), most=8)
    return HeatMap(title=title, x=x, y=y, scale=scale, cells=cells)


def _position_axis(title: str, positions: range, most: int) -> Axis:
    """Return an axis with a cell for each position and about `most` ticks, in the middle of their cells."""
    ticks = tuple((float(n), str(n)) for n in positions[:: ceil(len(positions) / most)])
    return Axis(title=title, low=positions[0] - 0.5, high=positions[-1] + 0.5, ticks=ticks)


def _axis(title: str, values: Sequence[float]) -> Axis:
    """Return an axis with some space around the values."""
    low, high = min(values), max(values)
    space = 0.04 * (high - low) or 0.5 * abs(high) or 1.0
    low, high = low - space, high + space
    return Axis(title=title, low=low, high=high, ticks=_ticks(low, high))


def _importance_axis(findings: Findings, points: Sequence[Point]) -> Axis:
    return _axis(findings.frontier.importance_meaning, [point.importance for point in points])


def _share_axis(x: Axis, original: float | None) -> Axis | None:
    """Return the axis `x` with ticks at shares of the original's latency."""
    if not original:
        return None
    shares = [share for share, _ in _ticks(x.low / original, x.high / original)]
    ticks = tuple((share * original, f"{100 * share:.10g}%") for share in shares)
    return Axis(title="Share of the original's latency", low=x.low, high=x.high, ticks=ticks)


def _ticks(low: float, high: float, most: int = 7) -> tuple[tuple[float, str], ...]:
    """Return at most `most` round values between `low` and `high`."""
    power = 10.0 ** floor(log10((high - low) / most))
    step = next(power * n for n in (1, 2, 5, 10) if (high - low) / (power * n) <= most)
    values = [n * step for n in range(ceil(low / step), floor(high / step) + 1)]
    return tuple((value, f"{value:.10g}".replace("-", format.MINUS)) for value in values)


def _log_scale(unit: str, values: Iterable[float | None], colours: tuple[str, ...]) -> ColourScale:
    """Return a logarithmic scale: on a linear one, a single slow span would make all others look alike."""
    known = [value for value in values if value] or [1.0]
    low, high = min(known), max(known)
    axis = _log_axis(unit, low, high if high > low else low * 10)
    return ColourScale(axis=axis, colours=colours, logarithmic=True)


def _ratio_scale(values: Iterable[float | None]) -> ColourScale:
    """Return a logarithmic scale around 1: blue is faster than the separate layers, orange is slower."""
    extreme = max((max(value, 1 / value) for value in values if value), default=1.0)
    extreme = max(extreme, 1.1)
    axis = _log_axis("times the separate layers", 1 / extreme, extreme)
    return ColourScale(axis=axis, colours=DIVERGING[::-1], logarithmic=True)


def _change_scale(values: Iterable[float | None], quantity: str) -> ColourScale:
    """Return a linear scale around 0: blue is better than the original, orange is worse."""
    extreme = max((abs(value) for value in values if value is not None), default=0.0) or 1.0
    axis = Axis(title=f"change of {quantity}", low=-extreme, high=extreme, ticks=_ticks(-extreme, extreme, most=5))
    return ColourScale(axis=axis, colours=DIVERGING)


def _log_axis(title: str, low: float, high: float) -> Axis:
    steps = [step * 10.0**power for power in range(floor(log10(low)), ceil(log10(high)) + 1) for step in (1, 2, 5)]
    inside = [step for step in steps if low <= step <= high] or [low]
    ticks = tuple((log10(tick), f"{tick:.3g}") for tick in inside[:: len(inside) // 6 + 1])
    return Axis(title=title, low=log10(low), high=log10(high), ticks=ticks)


def _plan_text(n: int, point: Point, findings: Findings) -> str:
    original = findings.frontier.original
    share = f", {format.percent(point.latency / original)} of the original" if original else ""
    return (
        f"Plan {n + 1}: {format.ms(point.latency)}{share}\nimportance {format.number(point.importance)}, "
        f"{point.convolutions(findings.network.depth)} convolutions"
        + (f"\ndrops {point.dropped}" if point.dropped else "")
    )


def _latency_text(network: Network, entry: TimedSpan, with_shape: bool) -> str:
    lines = [f"{entry.span}: {format.layers(entry.span, network)}"]
    if entry.time is None or entry.bare is None:
        return "\n".join([*lines, f"no time: {entry.reason}"])
    shape = f" as {format.shape(network.merged_shape(entry.span))}" if with_shape else ""
    lines.append(format.entry_time(entry.time, entry.floored[1]) + shape)
    if entry.bare != entry.time:
        lines.append(f"{format.entry_time(entry.bare, entry.floored[0])} without an activation")
    if entry.replaced is not None and len(entry.span) > 1:
        lines.append(f"{format.ms(entry.replaced)} as separate layers")
    return "\n".join(lines)


def _score_text(network: Network, entry: ScoredBlock) -> str:
    name = f"{entry.block.span}: {format.layers(entry.block.span, network)}"
    if entry.score is None or entry.importance is None:
        return f"{name}\nno score: {entry.reason}"
    change = format.number(entry.importance)
    return f"{name}\nscore {format.number(entry.score)}, {change} compared with the original"


def _options_text(network: Network, span: Span, lines: Iterable[str]) -> str:
    """Return the first options of a span, one in each line."""
    every = list(lines)
    more = [f"and {len(every) - MOST_OPTIONS} more"] if len(every) > MOST_OPTIONS else []
    return "\n".join([f"{span}: {format.layers(span, network)}", *every[:MOST_OPTIONS], *more])


def _shape_text(entry: TimedSpan) -> str:
    time = f"no time: {entry.reason}" if entry.time is None else format.entry_time(entry.time, entry.floored[1])
    return f"as {format.shape(entry.shape)}: {time}" if entry.shape else time


def _drop_text(entry: ScoredBlock) -> str:
    found = f"no score: {entry.reason}" if entry.importance is None else format.number(entry.importance)
    return f"without {entry.dropped}: {found}"
