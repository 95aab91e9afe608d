"""Write docs/results.md, its pictures and the results in the README from the committed results: make results

python -m experiments.equal_latency.page.write [FOLDER]  # by default the repository; README.md must be there
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from statistics import fmean

from depthfold.core import Profile
from experiments.equal_latency.candidates import FIXED, PLAIN, PRUNED, SEARCHES
from experiments.equal_latency.merging_steps import SHARES
from experiments.equal_latency.page.analyses import analyses, budget, cells, target
from experiments.equal_latency.page.missing import NO_PLAN, missing, why_missing
from experiments.equal_latency.page.predictions import predictions
from experiments.equal_latency.page.summary import CLOSE, DEPTHFOLD, best, candidates, most_accurate, summary
from experiments.equal_latency.page.text import LIMITS, METHOD, PAPER, SECTIONS, TITLE
from experiments.equal_latency.results import BASE, OURS, TITLES, WITHOUT, Measured, NetworkResults, load
from experiments.subjects import LONGER

TOO_FAST = "faster than all moves"
OTHER = " †"  # marks a network of another original
VARIANTS = {
    "without distillation": "with and without the original as the teacher (distillation)",
    "without features": "with and without matching the features of the original (`features` of the recipe)",
    LONGER: "for longer",
}
ROWS = re.compile(r"(?<=depthfold \| pruning \|\n\| --- \| --- (?:\| ---: ){6}\|\n)(?:\|.*\n)*")
README_SHARES = SHARES[:3]
UNFAVOURABLE = ("vgg19_bn", "resnet56", "efficientnet_lite0")  # to channel pruning: see the limitations
README_PLOTS = ("mobilenet_v2", "efficientnet_lite0-on-onnxruntime")
NONE, UNKNOWN = "none", "?"  # in the README's table: no network meets the budget; not measured


def page() -> str:
    """Return the text of docs/results.md."""
    found = list(_results())
    networks = map(_network, found)
    more = [*analyses(), predictions(found), _costs(found), PAPER, LIMITS, missing(found)]
    parts = [TITLE, summary(found), METHOD, *networks, *more]
    return "\n\n".join(parts).rstrip() + "\n"


def _results() -> Iterator[NetworkResults]:
    for name, section in SECTIONS.items():
        if (results := load(name, section.stopwatch)) is not None:
            yield results


def _network(results: NetworkResults) -> str:
    section, recipe = SECTIONS[results.name], results.recipe
    picture = f"pictures/results-{results.name}"
    return "\n".join([
        f"## {section.heading}",
        "",
        "<picture>",
        f'  <source media="(prefers-color-scheme: dark)" srcset="{picture}-dark.svg">',
        f'  <img alt="{section.name}: test accuracy against measured latency, by method" src="{picture}-light.svg">',
        "</picture>",
        "",
        f"The original: {section.origin}. Measured on {target(results.original.environment)}. Fine-tuning: "
        f"{recipe['epochs']:g} epochs of batch {recipe['batch']}, learning rate {recipe['lr']:g}, distillation "
        f"{recipe['distillation']:g}" + (f", features {recipe['features']:g}." if recipe.get("features") else "."),
        "",
        *_headline(results),
        *_table(results, plain=False),
        *_other_originals(results),
        "",
        *_differences(results),
        *([section.remark, ""] if section.remark else []),
        *_without_surrogate(results),
        *_variant_tables(results),
        f"    {section.command(results.name)}",
    ])  # fmt: skip


def _without_surrogate(results: NetworkResults) -> Iterator[str]:
    if results.has(f"{OURS}, {PLAIN}"):
        yield "Without a surrogate, that is with the sum of importances:"
        yield ""
        yield from _table(results, plain=True)
        yield ""


def _variant_tables(results: NetworkResults) -> Iterator[str]:
    section = SECTIONS[results.name]
    yield from _variant_table(results)
    if section.variants:
        found = load(section.variants, section.stopwatch)
        assert found is not None, f"{section.variants} has no results"
        yield from _variant_table(found, of=f" (networks of {section.variants})")


def _variant_table(results: NetworkResults, of: str = "") -> Iterator[str]:
    for variant, text in VARIANTS.items():
        both = [one for share in ("100%", *SHARES) for one in results.at(share) if variant in one.variants]
        if not both:
            continue
        yield f"Fine-tuned {text}, accuracy on both sets with the same seeds{of}:"
        yield ""
        usual, changed = ("with", "without")
        if variant == LONGER:
            usual, changed = f"{results.recipe['epochs']:g} epochs", variant.removeprefix("for ")
        yield cells("budget", "method", usual, changed, f"hold-out, {usual}", changed)
        yield "| --- | --- | ---: | ---: | ---: | ---: |"
        compared = [_compared(one, variant) for one in both]
        for one, scores in zip(both, compared, strict=True):
            yield cells(budget(one.at), TITLES[one.method], *(f"{score:.2f}" for score in scores))
        if len(both) > 1:
            yield cells("mean", "", *(f"{fmean(column):.2f}" for column in zip(*compared, strict=True)))
        yield ""


def _compared(one: Measured, variant: str) -> tuple[float, float, float, float]:
    """Return the accuracies of the usual recipe and of a variant on the test set, then on the hold-out set."""
    varied = one.variants[variant]
    tests, holdouts = (fmean(scores) for scores in zip(*varied.values(), strict=True))
    return fmean(one.scores[seed] for seed in varied), tests, fmean(one.holdout[seed] for seed in varied), holdouts


def _table(results: NetworkResults, *, plain: bool) -> Iterator[str]:
    measured = ("latency, ms", "times as fast", "convolutions", "MFLOPs per image", "parameters, M", "peak memory, MB")
    holdout = "hold-out | " if SECTIONS[results.name].holdout else ""
    yield f"| budget | method | accuracy | {holdout}{' | '.join(measured)} |"
    yield "| --- | --- | --- |" + " ---: |" * (len(measured) + bool(holdout))
    base = [f"{results.base['test']:.2f}", *([f"{results.base['holdout']:.2f}"] if holdout else [])]
    yield cells("100 %", "original", *base, *_measured(results.original, 1.0))
    for share in ("100%", *SHARES):
        for titles, one in _by_plan([one for one in results.at(share) if one.method.endswith(PLAIN) == plain]):
            yield _row(budget(share), titles, one, holdout=bool(holdout))
        absent = {one.method for one in results.measured} - {one.method for one in results.at(share)}
        for method in SEARCHES if share in SHARES and not plain else ():
            if method in absent:
                yield cells(budget(share), TITLES[method], why_missing(results, method, share))
    for one in results.measured:
        if one.at not in ("100%", *SHARES) and one.scores and one.profile and not plain:
            yield _row(one.at, TITLES[one.method], one, holdout=bool(holdout))


def _other_originals(results: NetworkResults) -> Iterator[str]:
    for key in dict.fromkeys(one.base for one in results.measured if one.base != BASE and one.profile):
        base = results.bases[key]
        yield ""
        yield (
            f"{OTHER.strip()} Fine-tuned from another training of the original, with {base['test']:.2f} % (hold-out "
            f"{base['holdout']:.2f}). The speed-ups of the summary are relative to that one."
        )


def _by_plan(found: list[Measured]) -> Iterator[tuple[str, Measured]]:
    """Yield the methods that chose the same plan together."""
    plans = dict.fromkeys(one.plan for one in found)
    for plan in plans:
        same = [one for one in found if one.plan == plan]
        yield " = ".join(_title(one.method) for one in same), max(same, key=lambda one: len(one.scores))


def _row(at: str, titles: str, one: Measured, *, holdout: bool) -> str:
    assert one.profile is not None
    seeds = ", ".join(
        " / ".join(f"{each:.2f}" for each in one.repeated.get(seed, [score]))
        for seed, score in sorted(one.scores.items())
    )
    scores = [f"{one.mean:.2f} ({seeds})", *([f"{one.accuracy('holdout'):.2f}"] if holdout else [])]
    return cells(at, titles + OTHER * (one.base != BASE), *scores, *_measured(one.profile, one.speed_up))


def _measured(profile: Profile, speed_up: float) -> tuple[str, ...]:
    memory = "" if profile.memory is None else f"{profile.memory / 1e6:.0f}"
    flops = profile.flops / 1e6 / (profile.environment.batch or 1)
    return (
        f"{profile.latency:.3f}", f"{speed_up:.2f}", f"{profile.depth}", f"{flops:.0f}",
        f"{profile.parameters / 1e6:.2f}", memory,
    )  # fmt: skip


def _title(method: str) -> str:
    """Return the title of a method in a table whose caption says whether there is a surrogate."""
    return TITLES[method].removesuffix(WITHOUT)


def _headline(results: NetworkResults) -> Iterator[str]:
    fastest = best(results, longer=True)
    if not (ours := candidates(results, longer=True)):
        yield "No network of depthfold is trained and timed yet."
    elif fastest is None:
        closest = max(ours, key=lambda one: one.mean)
        lost = results.lost(closest)
        yield (
            f"No network of depthfold is within {CLOSE} points of the original. The most accurate one loses {lost:.3f} "
            f"at {closest.speed_up:.2f} times the speed." + _against_tuned(results)
        )
    else:
        yield (
            f"The largest speed-up of depthfold within {CLOSE} points of the original, chosen "
            f"by test accuracy: {fastest.speed_up:.2f} times, at {fastest.mean:.2f} % ({_how(fastest)}; "
            f"{_seeds(fastest)})." + _against_tuned(results)
        )
    yield ""


def _against_tuned(results: NetworkResults) -> str:
    """Say what the speed-up is if the original is fine-tuned like the others, which may make it more accurate."""
    if (original := results.tuned) is None:
        return ""
    fastest = best(results, tuned=True)
    within = f" Within {CLOSE} points of the original fine-tuned with the same recipe ({original.mean:.2f} %)"
    return f"{within}: {fastest.speed_up:.2f} times." if fastest else f"{within}: none."


def _how(one: Measured) -> str:
    """Say in words how a plan makes the network shallower."""
    assert one.original is not None and one.profile is not None
    removed = one.original.depth - one.profile.depth
    ways = [f"{n} {way}" for way, n in (("dropped", one.dropped), ("merged away", removed - one.dropped)) if n > 0]
    return f"{one.original.depth} to {one.profile.depth} convolutions: {', '.join(ways)}"


def _seeds(one: Measured) -> str:
    seeds = f"{len(one.scores)} seed" + "s" * (len(one.scores) > 1)
    return f"{seeds}, fine-tuned {one.variant}" if one.variant else seeds


def readme_rows() -> str:
    """Return the rows of the README's table, without networks for which channel pruning was not measured."""
    compared = (results for results in _results() if any(map(results.has, PRUNED)))
    return "".join(f"{_readme_row(results)}\n" for results in compared)


def _readme_row(results: NetworkResults) -> str:
    section = SECTIONS[results.name]
    changes = (_change(results, methods, share) for share in README_SHARES for methods in (DEPTHFOLD, PRUNED))
    mark = " †" if section.network in UNFAVOURABLE else ""
    return cells(section.title + mark, section.measured_on, *changes)


def _change(results: NetworkResults, methods: Collection[str], share: str) -> str:
    """Return the change of accuracy at a budget, in points, beside the original fine-tuned with the same recipe."""
    if found := most_accurate(results, methods, share):
        change = -Decimal(f"{found.lost:.4f}").quantize(Decimal("0.1"), ROUND_HALF_UP)  # -0.55 is not exact as a float
        return f"{change:+}".replace("-", "\N{MINUS SIGN}") if change else "0.0"
    known = [method for method in methods if results.has(method)]
    none = known and all(why_missing(results, method, share) == NO_PLAN for method in known)
    return NONE if none else UNKNOWN


def _differences(results: NetworkResults) -> Iterator[str]:
    """Yield a table of how far all moves are ahead of each other method, at the latency of the other."""
    measured = {one.method for share in SHARES for one in results.at(share)}
    others = [method for method in TITLES if method in measured - {OURS} and not method.endswith(PLAIN)]
    if OURS not in measured or not others:
        return
    yield (
        f'Accuracy of "{TITLES[OURS]}" minus that of each method, in points, at the latency of that method. Latencies '
        "are shares of that of the original, which was timed in turn with each network. The accuracy is interpolated "
        "linearly between the original and all networks of all moves in the table. In parentheses: seeds of the method."
    )
    yield ""
    yield cells("budget", *(TITLES[method] for method in others))
    yield "| --- |" + " ---: |" * len(others)
    for share in SHARES:
        yield cells(budget(share), *(_difference(results, method, share) for method in others))
    yield ""
    fixed = [one for one in results.measured if one.method in FIXED and one.scores and one.profile]
    if fixed:
        points = "; ".join(f"{TITLES[one.method]}, {one.at}: {_ahead(results, one)}" for one in fixed)
        yield f"The same against methods with networks of their own sizes: {points}."
        yield ""
    seeds = "Every plan was trained with one seed."
    if results.spread is not None:
        seeds = f"Seeds of one plan differ by up to {results.spread:.2f} points."
    yield f"{seeds} Differences in bold are larger than seeds explain; the others are within noise."
    yield ""


def _difference(results: NetworkResults, method: str, share: str) -> str:
    found = {one.method: one for one in results.at(share)}
    if method not in found:
        return why_missing(results, method, share)
    same = OURS in found and found[method].plan == found[OURS].plan
    return "same plan" if same else _ahead(results, found[method])


def _ahead(results: NetworkResults, other: Measured) -> str:
    """Return how far all moves are ahead at the latency of another network."""
    if (found := results.ahead(other)) is None:
        return TOO_FAST
    points = f"{round(found.points, 2) + 0.0:+.2f}"  # not "-0.00"
    if not found.same_original:
        return f"{points} ({len(other.scores)}){OTHER}"
    return f"{points if found.is_noise else f'**{points}**'} ({len(other.scores)})"


def _costs(found: list[NetworkResults]) -> str:
    lines = ["## The cost of the search", "",
             "For both tables with all moves. Latencies are measured on the target. For the importances and the plans "
             "to which the surrogate is fitted, eight processes share one H200. The solver takes less than a second.",
             "",
             "| network | latency table, entries | seconds | importance table, entries | seconds "
             "| surrogate, seconds | one fine-tuning, seconds | all of these, minutes |",
             "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for results in found:
        T, I = results.latency, results.importance
        fitted = SECTIONS[results.name].surrogate or f"{results.surrogate['seconds']:.0f}"
        latency = SECTIONS[results.name].latency or f"{T['seconds']:.0f}"
        finetuning = "" if results.seconds is None else f"{results.seconds:.0f}"
        numbers = (str(T["entries"]), latency, str(I["entries"]), f"{I['seconds']:.0f}", fitted, finetuning)
        known = all(each.isdecimal() for each in (latency, fitted, finetuning))
        lines.append(cells(SECTIONS[results.name].name, *numbers, f"{minutes(results):.0f}" if known else ""))
    return "\n".join(lines)


def minutes(results: NetworkResults) -> float:
    """Return the time for both tables, the surrogate and one fine-tuning."""
    parts = (results.latency, results.importance, results.surrogate)
    return (sum(part["seconds"] for part in parts) + (results.seconds or 0)) / 60


def main(root: Path) -> None:
    from experiments.equal_latency.page.plot import draw, draw_for_readme

    (root / "docs" / "results.md").write_text(page())
    for results in _results():
        draw(results, SECTIONS[results.name].heading, root / "docs" / "pictures")
        if results.name in README_PLOTS:
            draw_for_readme(results, SECTIONS[results.name].heading, root / "docs" / "pictures")
    readme = root / "README.md"
    readme.write_text(ROWS.sub(lambda _: readme_rows(), readme.read_text()))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[3])
