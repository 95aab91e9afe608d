"""The sections that hold plots: each with its caption, and with its figures as a table for those who do not see it."""

from __future__ import annotations

from collections.abc import Iterable

from depthfold.reporting import words
from depthfold.reporting.findings import Findings
from depthfold.reporting.heat_maps import FLAGS
from depthfold.reporting.markup import Markup, details, element, escape, figure, joined, paragraph, selector, table
from depthfold.reporting.plans import Shown
from depthfold.support.text import count


def frontier_section(findings: Findings, plans: Shown) -> Markup:
    """The frontier: which plans there are. The controls below it are in page.html."""
    frontier, points = findings.frontier, plans.points
    chosen = points[plans.chosen]
    span = f"from {words.ms(points[0].latency)} to {words.ms(points[-1].latency)}"
    alternative = (
        f"Plot of importance over predicted latency: {count(len(points), 'plan')} {span}, importance from "
        f"{words.number(points[0].importance)} to {words.number(points[-1].importance)}. The chosen plan takes "
        f"{words.ms(chosen.latency)} at importance {words.number(chosen.importance)}. The table below has the figures."
    )
    caption = (
        "Each dot is a plan that no other plan beats in both latency and importance. Select one by the slider, or by "
        "a click on its dot."
    )
    if frontier.original:
        caption += f" The dashed line is the original's latency, {words.ms(frontier.original)}."
    rows = []
    for n, point in enumerate(points):
        share = words.per_cent(point.latency / frontier.original) if frontier.original else "unknown"
        mark = f"{n + 1} (chosen)" if n == plans.chosen else str(n + 1)
        numbers = str(len(point.activations)), str(len(point.cuts) + 1)
        rows.append((mark, words.ms(point.latency), share, words.number(point.importance), *numbers))
    header = ("Plan", "Predicted latency", "Share of original", "Importance", "Activations", "Convolutions")
    return joined([
        paragraph(_which_plans(plans)),
        figure("frontier", alternative, caption, size="tall"),
        details("The plans as a table", table("The plans of the plot, the fastest first", header, rows)),
    ])  # fmt: skip


def _which_plans(plans: Shown) -> str:
    text = f"The frontier has {count(plans.of, 'plan')}. "
    if plans.thinned:
        text += (
            f"Shown are {len(plans.points)} of them: the fastest, the slowest, the chosen one, and the best plan for "
            "each of many budgets at equal distances between. "
        )
    if not plans.on_frontier:
        text += "The chosen plan is not on the frontier and is shown in addition. "
    return text + "Move the slider to see what each one makes of the network."


def outside_note(findings: Findings) -> Markup:
    calibration = findings.latency.calibration
    if calibration is None:
        return Markup("")
    outside = words.ms(calibration.outside)
    return escape(f"The first block includes what everything outside the traced part costs, {outside}.")


def tables_section(findings: Findings, latency: Iterable[str], importance: Iterable[str]) -> Markup:
    """Both tables; `latency` and `importance` are the titles of their maps."""
    untimed = len(findings.latency.entries) - len(findings.latency.times)
    unscored = len(findings.importance.entries) - len(findings.importance.importances)
    return joined([
        element("h3", "Latency, T[i, j]"),
        selector("latency", "Show", latency),
        figure(
            "latency",
            f"Heat map of the latency table: {count(len(findings.latency.times), 'span')} with a time, {untimed} "
            "without. The table below has the figures.",
            "Each cell is a span of layers as one convolution; grey ones have no time. Where it is empty, the table "
            "holds no such span: it cannot be merged, or is not in the search space. As a multiple of its layers one "
            "by one, blue pays and orange costs.",
        ),
        details("The latency table", _latency_table(findings)),
        element("h3", "Importance, I[i, j, a, b]"),
        selector("importance", "Show blocks with", importance),
        figure(
            "importance",
            f"Heat map of the importance table: {count(len(findings.importance.importances), 'block')} with a score, "
            f"{unscored} without. The table below has the figures.",
            "Each cell is a block that loses the activations inside it: the change of the score against the "
            "original's, before any normalisation. Orange loses, blue gains; grey cells have no score.",
        ),
        details("The importance table", _importance_table(findings)),
    ])  # fmt: skip


def _latency_table(findings: Findings) -> Markup:
    rows = (
        (
            str(entry.span),
            words.layers(findings.network, entry.span),
            *("none" if (time := entry.takes(active)) is None else words.ms(time) for active in (True, False)),
            "unknown" if entry.stdev is None else words.ms(entry.stdev),
            entry.reason or "",
        )
        for entry in findings.latency.entries
    )
    times = "With an activation at its end", "Without one"
    header = ("Span", "Layers", *times, "Standard deviation", "Why it has no time")
    return table("Every span of the latency table", header, rows)


def _importance_table(findings: Findings) -> Markup:
    base = findings.importance.base
    rows = (
        (
            str(entry.span.span),
            FLAGS[entry.span.a, entry.span.b],
            words.number(entry.mean - base) if entry.samples else "none",
            str(len(entry.samples)),
            entry.reason or "",
        )
        for entry in findings.importance.entries
    )
    header = ("Block", "Activations", "Importance", "Trainings", "Why it has no score")
    return table("Every block of the importance table", header, rows)


def ablation_section(plans: Shown) -> Markup:
    chosen = plans.points[plans.chosen]
    saved = sum(point.latency < point.latency_by_activations for point in plans.points)
    text = (
        "A plan says which activations stand (A) and, apart from that, where merging stops (S). Merging everything "
        "between two activations is not always fastest, because a merged kernel grows. "
        f"{saved} of {count(len(plans.points), 'plan')} shown would be slower if merged along A. The chosen one is "
        f"predicted to take {words.ms(chosen.latency)} along S and {words.ms(chosen.latency_by_activations)} along A."
    )
    rows = (
        (str(n + 1), words.number(p.importance), words.ms(p.latency), words.ms(p.latency_by_activations),
         words.ms(p.latency_by_activations - p.latency))
        for n, p in enumerate(plans.points)
    )  # fmt: skip
    header = ("Plan", "Importance", "Along S", "Along A", "Saved by S")
    caption = "Predicted latency of each plan both ways, at the same importance: the distance to the right is lost."
    return joined([
        paragraph(text),
        figure("ablation", f"Plot of importance over latency for both ways of merging. {text}", caption),
        details("Both ways as a table", table("Predicted latency, merged along S and along A", header, rows)),
    ])  # fmt: skip
