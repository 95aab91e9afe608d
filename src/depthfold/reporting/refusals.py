"""What does not merge, and why: refusals, barriers, and blocks without a time or a score."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from depthfold.core import Network, Span
from depthfold.reporting import words
from depthfold.reporting.findings import Findings
from depthfold.reporting.markup import Markup, element, joined, paragraph, table
from depthfold.support.text import count

MOST = 40  # places of one reason that are named
Key = TypeVar("Key")


def refusals_section(findings: Findings) -> Markup:
    return joined([*_refusals(findings.network), *_barriers(findings.network), *_blanks(findings)])


def _refusals(network: Network) -> Iterator[Markup]:
    yield element("h3", "Refusals")
    if not network.refusals:
        yield paragraph("Nothing in this network was refused: everything that was traced can take part.")
        return
    groups = _grouped(((refusal.code, refusal.why), refusal.where) for refusal in network.refusals)
    rows = ((code.replace("-", " "), why, _places(where)) for (code, why), where in groups.items())
    yield table(f"{count(len(network.refusals), 'refusal')}, by reason", ("What", "Why", "Where"), rows)


def _barriers(network: Network) -> Iterator[Markup]:
    yield element("h3", "Barriers")
    if not network.barriers:
        yield paragraph("There is no barrier: the network is one chain.")
        return
    rows = []
    for position in network.barriers:
        refusal = network.why_not(Span(position - 1, position + 1))
        why = refusal.why.partition(": ")[2] if refusal else ""
        rows.append((f"after layer {position}", network.layers[position - 1].where, why))
    yield table("Positions that nothing merges across", ("Position", "Layer before it", "Why"), rows)


def _blanks(findings: Findings) -> Iterator[Markup]:
    """Entries that have a reason instead of a number; no plan can use them."""
    yield element("h3", "Blocks without a time or a score")
    untimed = [(e.reason, str(e.span)) for e in findings.latency.entries if e.reason]
    unscored = [(e.reason, str(e.span)) for e in findings.importance.entries if e.reason]
    if not untimed and not unscored:
        yield paragraph("Every block has a time and a score.")
        return
    rows = [
        (f"no {what}", reason, _places(where))
        for what, entries in (("time", untimed), ("score", unscored))
        for reason, where in _grouped(entries).items()
    ]
    yield table("No plan uses these blocks", ("What", "Why", "Blocks"), rows)


def _grouped(pairs: Iterable[tuple[Key, str]]) -> dict[Key, list[str]]:
    """The places of each reason, in the order in which they come."""
    groups: dict[Key, list[str]] = {}
    for key, place in pairs:
        groups.setdefault(key, []).append(place)
    return groups


def _places(where: Iterable[str]) -> str:
    places = list(dict.fromkeys(where))
    return words.listed(places) if len(places) <= MOST else f"{', '.join(places[:MOST])} and {len(places) - MOST} more"
