"""The paper's analyses on docs/results.md: the effect of each step, and plans on other targets."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from depthfold.core import Environment, MeasuredSpeedup, Profile
from experiments.equal_latency.candidates import SEARCHES
from experiments.equal_latency.merging_steps import SHARES
from experiments.equal_latency.page.text import SECTIONS, Section
from experiments.equal_latency.results import OURS, RESULTS, TITLES, Measured, NetworkResults, load
from experiments.gpu_runs import rows

Rows = dict[str, dict[str, Any]]
STEPS = ("original", "without activations", "along A", "along S")

ABOUT_STEPS = """\
## The effect of each step

A plan is applied in three steps: activations are removed and layers dropped, the network is fine-tuned, and
consecutive convolutions are merged. "Along A" merges as much as possible between two activations, "along S" what the
plan says (Section 5.3 of the paper). Merging changes the accuracy by no more than rounding does. The commands of this
section and of the next are in the last rows of [the paper's tables](#the-papers-tables)."""

ABOUT_TRANSFER = """\
## Plans on another target

A plan is made for the machine, the runtime and the batch on which its latency table was measured. Below, plans of all
moves for one target are timed on another. The accuracy of a network does not depend on the target: "points lost" are
those to the original, in parentheses to the original fine-tuned with the same recipe. The last column has the plans
that were made for the second target and have at least the same predicted score. They were not fine-tuned, so their
accuracy is unknown. A speed-up in italics is unreliable, because the times of a network vary too much
([latency.md](latency.md#profiles)). On a CPU, a plan for a GPU can be slower than the original."""


def analyses() -> Iterator[str]:
    """Yield the parts of the page."""
    steps = [part for name, section in SECTIONS.items() for part in _steps(section, rows(RESULTS / name))]
    if steps:
        yield "\n\n".join([ABOUT_STEPS, *steps])
    moved = [part for name, section in SECTIONS.items() for part in _transfer(section, name)]
    if moved:
        yield "\n\n".join([ABOUT_TRANSFER, *moved])


def _steps(section: Section, known: Rows) -> Iterator[str]:
    """Yield a table of the accuracy after each step, and one of the latency per stopwatch."""
    if accuracies := [line for share in SHARES for method in SEARCHES[:2] for line in _accuracy(method, share, known)]:
        yield "\n".join([
            f"{section.name}, accuracy on the test set (means over seeds):",
            "",
            "| budget | method | removed and dropped | fine-tuned | merged |",
            "| --- | --- | ---: | ---: | ---: |",
            *accuracies,
        ])  # fmt: skip
    for stopwatch in dict.fromkeys(row["stopwatch"] for key, row in known.items() if key.startswith("steps ")):
        found = [row for key, row in known.items() if key.startswith("steps ") and row["stopwatch"] == stopwatch]
        origin = "" if stopwatch == section.stopwatch else ". The plans were made for the H200"
        yield "\n".join([
            f"{section.title}, latency in ms on {_target(found[0]['original'])}{origin}:",
            "",
            "| budget | method | original | removed and dropped | merged along A | merged along S |",
            "| --- | --- |" + " ---: |" * len(STEPS),
            *(_latencies(row) for share in SHARES for row in found if row["at"] == share),
        ])  # fmt: skip


def _accuracy(method: str, share: str, known: Rows) -> Iterator[str]:
    plans = [row["plan"] for seed in range(3) if (row := known.get(f"train {method} {share} {seed}"))]
    if plans:
        # All training runs of the plan, as in the tables of accuracies: another method may have trained it again.
        trained = {
            (row["seed"], *(row[step] for step in ("before", "test", "merged")))
            for key, row in known.items()
            if key.startswith("train ") and row["plan"] == plans[0] and not row["variant"]
        }
        means = (fmean(column) for column in list(zip(*trained, strict=True))[1:])
        yield cells(budget(share), TITLES[method], *(f"{mean:.2f}" for mean in means))


def _latencies(row: dict[str, Any]) -> str:
    latencies = (f"{Profile.from_json(row[step]).latency:.3f}" for step in STEPS)
    return cells(budget(row["at"]), TITLES[row["method"]], *latencies)


def _transfer(section: Section, name: str) -> Iterator[str]:
    """Yield a table per target on which the plans of a comparison were timed."""
    results = load(name, section.stopwatch)
    for folder in sorted(RESULTS.glob(f"{section.network}-on-*")):
        found = [row for row in rows(folder).values() if row.get("from") == name]
        if not found or results is None:
            continue
        yield "\n".join([
            f"{section.title} on {_target(found[0]['original'])}:",
            "",
            f"| made for {section.measured_on}, at | points lost | times as fast there | here | made for this target |",
            "| --- | ---: | ---: | ---: | ---: |",
            *(_moved(results, row) for share in SHARES for row in found if row["at"] == share),
        ])  # fmt: skip


def _moved(results: NetworkResults, row: dict[str, Any]) -> str:
    ours = (one for one in results.measured if one.method == OURS and one.plan == row.get("plan"))
    one = next((one for one in ours if one.scores and one.profile), None)
    trained = ("", "") if one is None else (_lost(results, one), f"{one.speed_up:.2f}")
    original, moved, made = (Profile.from_json(row[each]).quartiles for each in ("original", "moved", "made"))
    timed = (MeasuredSpeedup(original=original, network=each) for each in (moved, made))
    factors = (f"*{each.factor:.2f}*" if each.unreliable else f"{each.factor:.2f}" for each in timed)
    return cells(budget(row["at"]), *trained, *factors)


def _lost(results: NetworkResults, one: Measured) -> str:
    """Return the points lost to the original, and in parentheses to the original after the same fine-tuning."""
    lost, tuned = results.lost(one), results.lost(one, tuned=True)
    assert lost is not None
    return f"{lost:z.1f}" if tuned is None else f"{lost:z.1f} ({tuned:z.1f})"


def cells(*texts: str) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(texts)} |"


def budget(share: str) -> str:
    return share.replace("%", " %")


def device(environment: Environment) -> str:
    """Return the GPU of a measurement, or the processor."""
    if "NVIDIA" in (environment.device or ""):
        return str(environment.device)
    return f"{environment.machine}, {environment.threads} threads"


def target(environment: Environment) -> str:
    """Return the device, the runtime and the batch of a measurement in words."""
    runtime, _, options = (environment.runtime or "").partition(":")
    settings = ", ".join(each for each in (environment.precision, options.replace(",", ", ")) if each)
    return f"{device(environment)}, {runtime} {environment.runtime_version} ({settings}), batch {environment.batch}"


def _target(profile: dict[str, Any]) -> str:
    return target(Profile.from_json(profile).environment)
