"""Section one: before and after, as large figures and as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from depthfold.core import Profile
from depthfold.reporting import words
from depthfold.reporting.findings import Evaluation, Findings
from depthfold.reporting.markup import Markup, element, joined, paragraph, table

UNKNOWN = "not measured"
Row = tuple[str, str, str, str]


def outcome_section(findings: Findings) -> Markup:
    parts = [
        element("div", *_cards(findings), class_="cards"),
        table(
            "What was measured and predicted, side by side", ("", "Original", "Compressed", "Change"), _rows(findings)
        ),
        *(paragraph(sentence) for sentence in _remarks(findings)),
    ]
    return joined(parts)


def _cards(findings: Findings) -> Iterator[Markup]:
    before, after, plan = findings.before, findings.after, findings.plan
    if before and after:
        yield _card(words.times(before.latency / after.latency), "as fast", "measured end to end", accent=True)
        yield _card(words.ms(after.latency), "latency", f"was {words.ms(before.latency)}")
    elif plan.original and plan.latency:
        faster = plan.original / findings.predicted_latency
        yield _card(words.times(faster), "as fast", "predicted, not measured", accent=True)
        yield _card(words.ms(findings.predicted_latency), "latency", f"predicted; was {words.ms(plan.original)}")
    else:
        yield _card(words.ms(findings.predicted_latency), "latency", "predicted, not measured", accent=True)
    one, two = findings.score_before, findings.score_after
    if two:
        against = f"{words.change(one, two)}, was {words.score(one)}" if one else f"on the {two.split}"
        yield _card(words.score(two), two.metric, against)
    yield _card(str(len(plan.segments)), "convolutions", f"was {findings.network.depth}, in what was traced")


def _card(figure: str, name: str, remark: str, *, accent: bool = False) -> Markup:
    return element(
        "div",
        element("p", figure, class_="figure"),
        element("p", name, class_="name"),
        element("p", remark, class_="remark"),
        class_="card accent" if accent else "card",
    )


def _rows(findings: Findings) -> Iterator[Row]:
    before, after = findings.before, findings.after
    if before or after:
        yield ("Latency, median", *_both(before, after, lambda p: words.ms(p.latency)), _faster(before, after))
        spread = _both(before, after, lambda p: f"{words.ms(p.spread[0])} to {words.ms(p.spread[1])}")
        yield ("Latency, middle half", *spread, "")
    yield _predicted(findings)
    if findings.score_before or findings.score_after:
        yield _scores(findings.score_before, findings.score_after)
    if before or after:
        yield _counted("Multiply-adds", before, after, lambda p: p.flops, lambda p: words.amount(p.flops / 2))
        yield _counted("Parameters", before, after, lambda p: p.parameters, lambda p: words.amount(p.parameters))
        yield _counted("Peak memory", before, after, lambda p: p.memory, _memory)
        yield _counted("Convolutions in the whole network", before, after, lambda p: p.depth, lambda p: str(p.depth))
    depth, left = findings.network.depth, len(findings.plan.segments)
    yield ("Convolutions in what was traced", str(depth), str(left), _share(depth, left))
    own, kept = len(findings.network.activations), len(findings.plan.plan.activations)
    yield ("Activations in what was traced", str(own), str(kept), _share(own, kept))


def _predicted(findings: Findings) -> Row:
    original, latency = findings.frontier.original, findings.predicted_latency
    texts = words.ms(original) if original else "unknown", words.ms(latency)
    faster = f"{words.times(original / latency)} as fast" if original and latency else ""
    where = " of another environment" if findings.elsewhere else ""
    return (f"Latency, predicted from the table{where}", *texts, faster)


def _scores(before: Evaluation | None, after: Evaluation | None) -> Row:
    def cell(evaluation: Evaluation | None) -> str:
        if evaluation is None:
            return UNKNOWN
        sure = words.uncertainty(evaluation)
        return f"{words.score(evaluation)} ({sure})" if sure else words.score(evaluation)

    named = after or before
    name = f"{named.metric[:1].upper()}{named.metric[1:]} on the {named.split}" if named else ""
    change = words.change(before, after) if before and after else ""
    return (name, cell(before), cell(after), change)


def _both(before: Profile | None, after: Profile | None, show: Callable[[Profile], str]) -> tuple[str, str]:
    one, two = (UNKNOWN if each is None else show(each) for each in (before, after))
    return one, two


def _counted(
    name: str,
    before: Profile | None,
    after: Profile | None,
    value: Callable[[Profile], int | None],
    show: Callable[[Profile], str],
) -> Row:
    change = _share(value(before), value(after)) if before and after else ""
    return (name, *_both(before, after, show), change)


def _memory(profile: Profile) -> str:
    if profile.memory is None:
        return f"{UNKNOWN}: {profile.memory_reason}" if profile.memory_reason else UNKNOWN
    return words.megabytes(profile.memory)


def _faster(before: Profile | None, after: Profile | None) -> str:
    return f"{words.times(before.latency / after.latency)} as fast" if before and after else ""


def _share(before: int | None, after: int | None) -> str:
    return words.signed_per_cent(after / before - 1) if before and after is not None else ""


def _remarks(findings: Findings) -> Iterator[str]:
    """What must be said beside the figures, so that nobody reads more into them than they hold."""
    if findings.elsewhere:
        yield (
            "The latency table, by which the plan was chosen, was measured in another environment than these networks "
            f"({'; '.join(findings.elsewhere)}). So its predictions, here and in the explorer, are not compared with "
            "what was measured, and the budget was met there, not here."
        )
    elif findings.after:
        predicted, measured = findings.predicted_latency, findings.after.latency
        yield (
            f"Predicted against measured: {words.ms(predicted)} were predicted for the compressed network and "
            f"{words.ms(measured)} were measured, so the prediction is off by "
            f"{words.signed_per_cent(predicted / measured - 1)}."
        )
    if differences := _differences(findings):
        yield f"The two were measured in different environments, so compare with care: {'; '.join(differences)}."
    if findings.verification:
        said = "computes what the trained one computes" if findings.verification.ok else "DOES NOT compute the same"
        yield f"The merged network {said}: {findings.verification.text}."
    if findings.missing:
        yield f"Not in this report, because it was not given: {words.listed(findings.missing)}."


def _differences(findings: Findings) -> tuple[str, ...]:
    if not (findings.before and findings.after):
        return ()
    return findings.before.environment.differences(findings.after.environment)
