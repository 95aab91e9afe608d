"""Draw accuracy against measured latency, for a light and a dark page."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from experiments.equal_latency.candidates import AMC, CONTROL, ORIGINAL, PRUNED, PUBLISHED, SEARCHED, UNIFORM
from experiments.equal_latency.merging_steps import SHARES
from experiments.equal_latency.page.summary import DEPTHFOLD, finished, most_accurate
from experiments.equal_latency.results import OURS, TITLES, Measured, NetworkResults
from experiments.subjects import LONGER

RULE, MAGNITUDE = "LayerMerge's rule", "channels, magnitude"
Series = tuple[str, str, list[Measured]]  # its label, the method whose style it has, and its networks

# Lines join the networks of a method at several budgets. The colour-blind can tell the colours apart (Okabe and Ito).
STYLES = {
    OURS: ("#0072b2", "o", "-"),
    "paper": ("#56b4e9", "o", "--"),
    RULE: ("#009e73", "s", ":"),
    PUBLISHED: ("#d55e00", "^", "none"),
    SEARCHED: ("#d55e00", "v", "none"),
    UNIFORM: ("#8c6d31", "<", "none"),
    AMC: ("#8c6d31", ">", "none"),
    MAGNITUDE: ("#cc79a7", "D", ":"),
    "channels, Taylor": ("#e69f00", "D", ":"),
    CONTROL: ("#8c959f", "x", "none"),
    ORIGINAL: ("#8c959f", "P", "none"),
}
THEMES = {"light": ("#1d2227", "#d0d7de"), "dark": ("#e6edf3", "#3d444d")}
STEADY = {"svg.fonttype": "none", "svg.hashsalt": "depthfold", "font.family": "sans-serif", "font.size": 10}


def draw(results: NetworkResults, title: str, folder: Path) -> None:
    """Write results-NAME-light.svg and -dark.svg, with all methods."""
    trained = [one for one in results.measured if one.scores and one.profile]
    series = [(TITLES[method], method, [one for one in trained if one.method == method]) for method in STYLES]
    _draw(results, series, title, folder / f"results-{results.name}")


def draw_for_readme(results: NetworkResults, title: str, folder: Path) -> None:
    """Write readme-NAME-light.svg and -dark.svg: as in the README's table, the best at each budget, and rivals."""
    both = (("depthfold", OURS, DEPTHFOLD), ("channel pruning", MAGNITUDE, PRUNED))
    series = [
        (label, style, [one.network for share in SHARES if (one := most_accurate(results, methods, share))])
        for label, style, methods in both
    ]
    rest = [(method, [one for one in finished(results) if one.method == method]) for method in (RULE, PUBLISHED)]
    tuned = [results.tuned] if results.tuned and results.tuned.profile else []
    series += [(TITLES[method], method, found) for method, found in [*rest, (ORIGINAL, tuned)]]
    _draw(results, series, title, folder / f"readme-{results.name}")


def _draw(results: NetworkResults, series: list[Series], title: str, path: Path) -> None:
    for theme, (ink, grid) in THEMES.items():
        with mpl.rc_context(
            STEADY | {"text.color": ink, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink}
        ):
            figure = Figure(figsize=(5.2, 4.3), layout="constrained")
            axes = figure.subplots()
            _lines(axes, results, series)
            axes.set(
                xlabel="measured latency, ms (further left: faster)",
                ylabel="test accuracy, % (bars: range of the seeds)",
            )
            axes.set_title(title.replace(", ", ",\n"))
            axes.grid(color=grid, linewidth=0.6)
            axes.spines[:].set_color(grid)
            axes.set_facecolor("none")
            figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=2)
            figure.savefig(f"{path}-{theme}.svg", transparent=True, metadata={"Date": None, "Creator": None})


def _lines(axes: mpl.axes.Axes, results: NetworkResults, series: list[Series]) -> None:
    for label, style, unsorted in series:
        colour, marker, line = STYLES[style]
        if not (found := sorted(unsorted, key=_latency)):
            continue
        x, y = [_latency(one) for one in found], [one.mean for one in found]
        spread = [[m - min(one.scores.values()) for m, one in zip(y, found, strict=True)],
                  [max(one.scores.values()) - m for m, one in zip(y, found, strict=True)]]  # fmt: skip
        axes.errorbar(x, y, spread, color=colour, marker=marker, linestyle=line, markersize=5, linewidth=1.4,
                      elinewidth=1, label=label, zorder=3 if style == OURS else 2)  # fmt: skip
        if longer := [each for one in found if (each := one.longer)]:  # hollow, beside the line of the usual recipe
            axes.errorbar([_latency(one) for one in longer], [one.mean for one in longer], color=colour, marker=marker,
                          markersize=5, linestyle="none", markerfacecolor="none",
                          label=f"{label}, {LONGER}")  # fmt: skip
    axes.plot([results.original.latency], [results.base["test"]], "*", color="#8c959f", markersize=13, label="original")


def _latency(one: Measured) -> float:
    assert one.profile is not None
    return one.profile.latency
