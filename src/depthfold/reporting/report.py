"""report(): one HTML file that works offline, for a person who has just compressed a network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from string import Template

from depthfold.core.network import summary
from depthfold.errors import InvalidValue
from depthfold.reporting.exhibits import ablation_section, frontier_section, outside_note, tables_section
from depthfold.reporting.findings import Findings
from depthfold.reporting.heat_maps import importance_maps, latency_maps
from depthfold.reporting.markup import embedded, escape
from depthfold.reporting.outcome import outcome_section
from depthfold.reporting.plans import explorer_data, shown
from depthfold.reporting.plots import SELECTED, ablation_figure, frontier_figure
from depthfold.reporting.provenance import provenance_section
from depthfold.reporting.refusals import refusals_section
from depthfold.store.files import put_in_place
from depthfold.support.optional import load


def report(findings: Findings, path: str | Path) -> Path:
    """Write the findings as a page: before and after, an explorer of every plan, both tables, reasons, provenance.

    The file holds all that it needs, plotly.js included (five megabytes), and its policy forbids the browser every
    connection.
    """
    if not isinstance(findings, Findings):
        raise InvalidValue(
            f"report() takes Findings, found {type(findings).__name__}. Build them with Findings(title=..., "
            "network=..., latency=..., importance=..., frontier=..., plan=...)."
        )
    path, text = Path(path), page(findings)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with put_in_place(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidValue(
            f"The report {str(path)!r} cannot be written: {error.strerror}. Check the folder, its permissions and "
            "its free space, or name another file."
        ) from error
    return path


def page(findings: Findings) -> str:
    """The whole page as text."""
    plans = shown(findings.frontier, findings.plan)
    latency, importance = latency_maps(findings), importance_maps(findings)
    figures = {
        "frontier": [frontier_figure(findings, plans)],
        "latency": list(latency.values()),
        "importance": list(importance.values()),
        "ablation": [ablation_figure(findings, plans)],
    }
    data = {"explorer": explorer_data(findings, plans), "figures": figures, "selected": SELECTED}
    scripts = {
        "plotly": str(load("plotly.offline", "report").get_plotlyjs()),
        "page_script": _resource("page.js"),
        "explorer_script": _resource("explorer.js"),
    }
    return Template(_resource("page.html")).substitute(
        scripts,
        policy=_policy(scripts.values()),
        title=escape(findings.title),
        lead=escape(f"{findings.network.name}: {summary(findings.network)}."),
        style=_resource("page.css"),
        outcome=outcome_section(findings),
        frontier=frontier_section(findings, plans),
        outside=outside_note(findings),
        last=len(plans.points) - 1,
        chosen=plans.chosen,
        plan=escape(str(findings.plan)),
        tables=tables_section(findings, latency, importance),
        ablation=ablation_section(plans),
        refusals=refusals_section(findings),
        provenance=provenance_section(findings),
        data=embedded(data),
    )


def _policy(scripts: Iterable[str]) -> str:
    """Nothing may be loaded or sent, and only these very scripts run: text that slipped in as a tag stays dead."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    # plotly sets styles on what it draws; images are what it makes of a plot, inside the page.
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'"
    )


def _resource(name: str) -> str:
    return resources.files("depthfold.reporting").joinpath(name).read_text(encoding="utf-8")
