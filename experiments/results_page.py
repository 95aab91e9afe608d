"""Write docs/results.md, its pictures and the results in the README from the committed results: make results

python experiments/results_page.py [FOLDER]        # the repository unless FOLDER is given; README.md must be there
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from equal_latency_candidates import PLAIN
from equal_latency_results import OURS, TITLES, Measured, NetworkResults, difference, load
from results_analyses import analyses, device, target
from results_text import INTRODUCTION, LIMITS, PAPER, SECTIONS

SHARES = ("80%", "65%", "50%", "35%")
CLOSE = 0.2  # points below the original that count as none
ROWS = re.compile(r"(?<=\| speed-up \|\n\| --- \| --- \| --- \| --- \| --- \|\n)(?:\|.*\n)*?(?=\|.*`make demo`)")


def page() -> str:
    """Return the text of docs/results.md."""
    found = list(_results())
    parts = [INTRODUCTION, *map(_network, found), *analyses(), _costs(found), PAPER, LIMITS]
    return "\n\n".join(parts) + "\n"


def _results() -> Iterator[NetworkResults]:
    for name, section in SECTIONS.items():
        if (results := load(name, section.stopwatch)) is not None:
            yield results


def _network(results: NetworkResults) -> str:
    section = SECTIONS[results.name]
    first = next(one for one in results.measured if one.original is not None)
    assert first.original is not None
    recipe = results.recipe
    picture = f"pictures/results-{results.name}"
    return "\n".join([
        f"## {section.heading}",
        "",
        "<picture>",
        f'  <source media="(prefers-color-scheme: dark)" srcset="{picture}-dark.svg">',
        f'  <img alt="{section.title}: test accuracy against measured latency, by method" src="{picture}-light.svg">',
        "</picture>",
        "",
        f"The original, {section.origin}, has {results.base['test']:.2f} % on the test set and takes "
        f"{first.original.latency:.2f} ms. Target: {target(first.original.environment)}. "
        f"Fine-tuning: {recipe['epochs']:g} epochs of batch {recipe['batch']}, learning rate {recipe['lr']:g}, "
        f"distillation {recipe['distillation']:g}.",
        "",
        *_table(results),
        "",
        *_headline(results),
        *_differences(results, OURS),
        *_differences(results, f"{OURS}, {PLAIN}"),
        *([section.remark, ""] if section.remark else []),
        f"    {section.command}",
        *([f"    {section.command} --plain-sum"] if results.has(f"{OURS}, {PLAIN}") else []),
    ])  # fmt: skip


def _table(results: NetworkResults) -> Iterator[str]:
    measured = ("latency, ms", "times as fast", "GFLOPs", "parameters, M", "peak memory, MB")
    yield f"| target | method | accuracy | hold-out | {' | '.join(measured)} |"
    yield "| --- | --- | --- | ---: |" + " ---: |" * len(measured)
    for share in SHARES:
        for one in results.at(share):
            yield _row(share.replace("%", " %"), one)
    for one in results.measured:
        if one.at not in SHARES and one.scores and one.profile:
            yield _row(one.at, one)


def _row(target: str, one: Measured) -> str:
    assert one.profile is not None
    profile = one.profile
    seeds = ", ".join(f"{score:.2f}" for _, score in sorted(one.scores.items()))
    holdout = f"{fmean(one.holdout.values()):.2f}" if one.holdout else ""
    memory = "" if profile.memory is None else f"{profile.memory / 1e6:.0f}"
    return (
        f"| {target} | {TITLES[one.method]} | {one.mean:.2f} ({seeds}) | {holdout} | "
        f"{profile.latency:.3f} | {one.speed_up:.2f} | "
        f"{profile.flops / 1e9:.1f} | {profile.parameters / 1e6:.2f} | {memory} |"
    )


def _best(results: NetworkResults) -> Measured | None:
    """Return the fastest network of ours that costs at most CLOSE points."""
    ours = [one for share in SHARES for one in results.at(share) if one.method.startswith((OURS, "paper"))]
    close = [one for one in ours if one.mean >= results.base["test"] - CLOSE]
    return max(close, key=lambda one: one.speed_up, default=None)


def _headline(results: NetworkResults) -> Iterator[str]:
    if (best := _best(results)) is not None:
        yield (
            f"The largest speed-up of depthfold within {CLOSE} points of the original: {best.speed_up:.2f} times, at "
            f"{best.mean:.2f} %."
        )
        yield ""


def readme_rows() -> str:
    """Return the rows of the README's table: the headline of each section."""
    return "".join(f"{_readme_row(results, best)}\n" for results in _results() if (best := _best(results)) is not None)


def _readme_row(results: NetworkResults, best: Measured) -> str:
    assert best.original is not None and best.profile is not None
    section, environment = SECTIONS[results.name], best.original.environment
    before, after = (
        f"{profile.latency:.2f} ms, {score:.2f} %"
        for profile, score in ((best.original, results.base["test"]), (best.profile, best.mean))
    )
    network, machine = f"{section.title}, {section.data}", f"{device(environment)}, batch {environment.batch}"
    return f"| {network} | {machine} | {before} | {after} | **{best.speed_up:.2f} times** |"


def _differences(results: NetworkResults, ours: str) -> Iterator[str]:
    """Yield a table of how far all moves are ahead of each other method, with or without a surrogate."""
    measured = {one.method for share in SHARES for one in results.at(share)}
    others = [m for m in TITLES if m in measured - {ours} and m.endswith(PLAIN) == ours.endswith(PLAIN)]
    if ours not in measured or not others:
        return
    yield f'Points by which "{TITLES[ours]}" is ahead (± standard error, from two seeds on):'
    yield ""
    yield "| target | " + " | ".join(TITLES[method] for method in others) + " |"
    yield "| --- |" + " ---: |" * len(others)
    for share in SHARES:
        found = {one.method: one for one in results.at(share)}
        if ours in found:
            cells = (_difference(found[ours], found.get(method)) for method in others)
            yield f"| {share.replace('%', ' %')} | " + " | ".join(cells) + " |"
    yield ""


def _difference(ours: Measured, other: Measured | None) -> str:
    if other is None:
        return ""
    if other.plan == ours.plan:
        return "same plan"
    value, error = difference(ours, other)
    return f"{value:+.2f}" + ("" if error is None else f" ± {error:.2f}")


def _costs(found: list[NetworkResults]) -> str:
    lines = ["## The cost of the search", "",
             "Seconds on one GPU, for both tables with all moves. The solver takes less than a second.", "",
             "| network | latency entries | seconds | importance entries | seconds | fine-tuning, seconds per seed |",
             "| --- | ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for results in found:
        T, I = results.latency, results.importance
        cells = (T["entries"], T["seconds"], I["entries"], I["seconds"], results.seconds)
        lines.append(f"| {SECTIONS[results.name].title} | " + " | ".join(f"{cell:.0f}" for cell in cells) + " |")
    return "\n".join(lines)


def main(root: Path) -> None:
    from results_plot import draw

    (root / "docs" / "results.md").write_text(page())
    for results in _results():
        draw(results, SECTIONS[results.name].heading, root / "docs" / "pictures")
    readme = root / "README.md"
    readme.write_text(ROWS.sub(lambda _: readme_rows(), readme.read_text()))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1])
