"""Where the figures come from: environments, calibration, normalisation, versions, and how to run it again."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from depthfold.core import Environment
from depthfold.reporting import words
from depthfold.reporting.findings import Findings
from depthfold.reporting.markup import Markup, bullets, element, joined, paragraph, table
from depthfold.support.text import at_most


def provenance_section(findings: Findings) -> Markup:
    parts = [*_environments(findings), *_tables(findings), *_versions(findings), *_again(findings)]
    if findings.notes:
        parts += [element("h3", "Notes"), bullets(findings.notes)]
    return joined(parts)


def _environments(findings: Findings) -> Iterator[Markup]:
    yield element("h3", "Environments")
    before, after = findings.before, findings.after
    given: dict[str, Environment | None] = {
        "Latency table": findings.latency.environment,
        "Importance table": findings.importance.environment,
        "Original, measured": before.environment if before else None,
        "Compressed, measured": after.environment if after else None,
        "The run": findings.environment,
    }
    stated = {what: environment.stated for what, environment in given.items() if environment is not None}
    stated = {what: fields for what, fields in stated.items() if fields}
    if not stated:
        yield paragraph("No environment is stated, so nobody can tell where these figures hold.")
        return
    names = dict.fromkeys(name for fields in stated.values() for name in fields)
    rows = [
        (name.replace("_", " "), *(_shown(fields.get(name)) for fields in stated.values())) for name in names
    ]  # fmt: skip
    yield table("Where each was measured", ("", *stated), rows)


def _tables(findings: Findings) -> Iterator[Markup]:
    frontier, latency, importance = findings.frontier, findings.latency, findings.importance
    timed, scored = len(latency.times), len(importance.importances)
    yield element("h3", "The tables")
    text = f"Latency: {timed} of {len(latency.entries)} spans have a time. "
    if latency.calibration:
        text += f"The table is {latency.calibration}. What the network costs outside the spans, "
        text += f"{words.ms(latency.calibration.outside)}, is in the spans that start at 0."
    else:
        text += "Its times are not calibrated in context, so their sum need not be the latency of a whole network."
    yield paragraph(text)
    text = f"Importance: {scored} of {len(importance.entries)} blocks have a score; the original scores "
    text += f"{words.number(importance.base)}. "
    text += f"Provenance: {importance.provenance}." if importance.provenance else "Its provenance is not stated."
    yield paragraph(text)
    if frontier.alpha is None:
        yield paragraph("Normalisation: none is stated; the importances were taken as they are.")
    else:
        yield paragraph(
            f"Normalisation: alpha = {words.number(frontier.alpha)} times a mean importance was subtracted from every "
            f"entry before solving; the mean is over the entries called “{frontier.normalisation}”."
        )
    how = "exact" if frontier.exact else f"thinned: at most {at_most(frontier.lost)} of importance is lost anywhere"
    yield paragraph(f"The frontier has {len(frontier):,} plans and is {how}.")


def _versions(findings: Findings) -> Iterator[Markup]:
    yield element("h3", "Versions")
    # By name: whoever imports the package imports all its rooms, in the eyes of import-linter.
    written = ("depthfold, which wrote this page", importlib.import_module("depthfold").__version__)
    yield table("Versions", ("Package", "Version"), (written, *findings.versions))


def _again(findings: Findings) -> Iterator[Markup]:
    yield element("h3", "Run it again")
    if findings.command:
        yield element("pre", element("code", findings.command), tabindex="0")
        return
    yield paragraph("No command is stated. From the tables, the chosen plan is found again by:")
    alpha, normalisation = findings.frontier.alpha, findings.frontier.normalisation
    options = "" if alpha is None else f", alpha={alpha!r}, normalisation={normalisation!r}"
    lines = (
        f"frontier = df.solve(latency, importance, network=traced.network{options})",
        f"plan = frontier.at({findings.plan.latency!r})  # milliseconds",
        "student = df.rewrite(traced, plan)",
    )
    yield element("pre", element("code", "\n".join(lines)), tabindex="0")


def _shown(value: object) -> str:
    if value is None:
        return "not stated"
    return "\N{MULTIPLICATION SIGN}".join(map(str, value)) if isinstance(value, tuple) else str(value)
