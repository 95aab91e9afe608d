"""report(): write the findings of a run as one HTML file that works offline."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from depthfold.core.calibration import LEAST
from depthfold.core.network import summary
from depthfold.errors import InvalidValue
from depthfold.reporting import figures, format, view
from depthfold.reporting.findings import Findings
from depthfold.store import put_in_place
from depthfold.support.optional import load
from depthfold.version import __version__


def report(findings: Findings, path: str | Path) -> Path:
    """Write a page with the results, an explorer of the plans, both tables, the refusals and the provenance.

    The page is a single file. Its content security policy forbids all network requests.
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
            "its free space, or choose another path."
        ) from error
    return path


def page(findings: Findings) -> str:
    """Return the page as text."""
    scripts = [_resource("page.js"), _resource("explorer.js")]
    template = _templates(load("jinja2", "report")).get_template("page.html")
    style = _resource("page.css")
    text = template.render(
        _contents(findings), policy=_policy(scripts), scripts=scripts, style=style, version=__version__
    )
    return str(text)


def _contents(findings: Findings) -> dict[str, Any]:
    """Return the variables of the templates."""
    plans = view.select_plans(findings.frontier, findings.plan)
    timed, scored = view.timed_spans(findings), view.scored_blocks(findings)
    environments = view.environments(findings)
    return {
        "findings": findings,
        "network": findings.network,
        "summary": summary(findings.network),
        "plans": plans,
        "timed": timed,
        "scored": scored,
        "listed_times": view.listed_times(findings, plans, timed),
        "listed_scores": view.listed_scores(findings, plans, scored),
        "explorer": view.explorer_data(findings, plans),
        "frontier_figure": figures.frontier_figure(findings, plans),
        "ablation_figure": figures.ablation_figure(findings, plans),
        "training_figures": figures.training_figures(findings),
        "latency_maps": figures.latency_maps(findings.network, timed),
        "importance_maps": figures.importance_maps(
            findings.network, scored, findings.importance.quantity or "the score"
        ),
        "refusals": view.refusals(findings.network),
        "barriers": view.barriers(findings.network),
        "unusable": view.unusable_blocks(timed, scored),
        "environments": environments,
        "least": LEAST,
        "field_names": list(dict.fromkeys(name for fields in environments.values() for name in fields)),
    }


@functools.cache  # compiling the templates takes longer than filling them
def _templates(jinja2: Any) -> Any:
    """Return the Jinja2 environment of the page. It escapes every value, so that a name from a model is never a tag."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("depthfold.reporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= format.FILTERS
    environment.globals |= format.FUNCTIONS
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment


def _policy(scripts: Iterable[str]) -> str:
    """Return a content security policy that allows these scripts and inline styles, and no network request."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; connect-src 'none'; "
        "base-uri 'none'; form-action 'none'"
    )


def _resource(name: str) -> str:
    return resources.files("depthfold.reporting").joinpath("templates", name).read_text(encoding="utf-8")
