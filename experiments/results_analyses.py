"""The paper's analyses on docs/results.md: the effect of each step, and plans on other targets."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from equal_latency_candidates import SEARCHES
from equal_latency_results import RESULTS, TITLES
from gpu_runs import rows
from merging_steps import SHARES
from results_text import SECTIONS, Section

from depthfold.core import Environment, Profile

Rows = dict[str, dict[str, Any]]
STEPS = ("original", "without activations", "along A", "along S")

ABOUT_STEPS = """\
## The effect of each step

A plan is applied in three steps: activations are removed and layers dropped, the network is fine-tuned, and consecutive
convolutions are merged. "Along A" merges as much as possible between two activations, "along S" what the plan says
(Section 5.3 of the paper). Merging changes the accuracy by no more than rounding does."""

ABOUT_TRANSFER = """\
## Plans on another target

A plan is made for the machine, the runtime and the batch on which its latency table was measured. Below, plans of all
moves for one target are timed on another, next to plans that were made for the second target and have at least the same
predicted score. The latter were not fine-tuned, so their accuracy is unknown. On a CPU, a plan for a GPU can be slower
than the original."""


def analyses() -> Iterator[str]:
    """Yield the parts of the page."""
    titles = {section.network: section.title for section in SECTIONS.values()}
    steps = [part for name, section in SECTIONS.items() for part in _steps(section, rows(RESULTS / name))]
    if steps:
        yield "\n\n".join([ABOUT_STEPS, *steps])
    moved = [part for name, title in titles.items() for part in _transfer(name, title)]
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


def _transfer(name: str, title: str) -> Iterator[str]:
    """Yield a table per folder with the name of the network and another target."""
    for folder in sorted(RESULTS.glob(f"{name}-on-*")):
        found = [row for key, row in rows(folder).items() if key.startswith("transfer ")]
        if not found:
            continue
        yield "\n".join([
            f"{title} on {_target(found[0]['original'])}, times as fast as the original:",
            "",
            f"| made for {found[0]['made for']['device']} at | measured there | timed here | made for this target |",
            "| --- | ---: | ---: | ---: |",
            *(_moved(name, row) for share in SHARES for row in found if row["at"] == share),
        ])  # fmt: skip


def _moved(name: str, row: dict[str, Any]) -> str:
    original, moved, made = (Profile.from_json(row[each]).latency for each in ("original", "moved", "made"))
    there = rows(RESULTS / name).get(f"profile all moves {row['at']} cuda")
    faster = ""
    if there is not None:
        before, after = (Profile.from_json(there[each]).latency for each in ("original", "merged"))
        faster = f"{before / after:.2f}"
    return cells(budget(row["at"]), faster, f"{original / moved:.2f}", f"{original / made:.2f}")


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
