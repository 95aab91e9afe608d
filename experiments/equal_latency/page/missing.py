"""What the results do not have yet: networks that no budget allows, and those that were not trained or not timed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

from experiments.equal_latency.candidates import (
    AMC,
    FIXED,
    KEPT_BLOCKS,
    ORIGINAL,
    PLAIN,
    PRUNED,
    PUBLISHED,
    SEARCHED,
    SEARCHES,
)
from experiments.equal_latency.merging_steps import SHARES
from experiments.equal_latency.page.analyses import budget, cells
from experiments.equal_latency.page.text import SECTIONS
from experiments.equal_latency.results import OURS, RESULTS, TITLES, NetworkResults
from experiments.gpu_runs import rows
from experiments.subjects import SUBJECTS

UNDISTILLED = "without distillation"
NO_PLAN, UNTRAINED, UNTIMED = "none meets the budget", "not trained yet", "not timed yet"


def why_missing(results: NetworkResults, method: str, share: str) -> str:
    """Say why a method has no network at a share of the latency."""
    one = next((one for one in results.measured if (one.method, one.at) == (method, share)), None)
    if one is not None:
        return UNTRAINED if one.profile else UNTIMED
    if method in PRUNED:
        steps = json.loads((RESULTS / results.name / f"channels-{PRUNED[method]}.json").read_text())
        reached = [f"{float(share):.0%}" for share, step in steps.items() if step is not None]
    else:
        reached = [one.at for one in results.measured if one.method == method]
    faster = SHARES[SHARES.index(share) :]
    return UNTRAINED if any(each in reached for each in faster) else NO_PLAN


def unmeasured(results: NetworkResults) -> Iterator[tuple[str, str]]:
    """Yield the methods that have some networks, with the budgets for which they could have one, but do not yet."""
    yield from ((one.method, one.at) for one in results.unfinished if results.has(one.method))
    known = {(one.method, one.at) for one in results.measured}
    for method, share in itertools.product(filter(results.has, (*SEARCHES, *PRUNED)), SHARES):
        if (method, share) not in known and why_missing(results, method, share) == UNTRAINED:
            yield method, share
    for size in (f"{kept} blocks" for kept in KEPT_BLOCKS if results.has(SEARCHED)):
        if (SEARCHED, size) not in known:
            yield SEARCHED, size


def missing(found: list[NetworkResults]) -> str:
    """Return the section about methods and networks that have commands but no results yet."""
    done = {results.name for results in found}
    lines = ["## Not measured yet", "", cells("network", "what"), "| --- | --- |"]
    for results in found:
        section = SECTIONS[results.name]
        wanted = [method for method in TITLES if not method.endswith(PLAIN)]
        if not section.network.startswith("mobilenet"):
            wanted = [method for method in wanted if method not in FIXED]
        elif section.network != "mobilenet_v2":
            wanted.remove(AMC)
        if results.tuned:
            wanted.remove(ORIGINAL)
        rest = [_absent(results, method) for method in wanted if not results.has(method)]
        rest += _budgets(results)
        if section.network == "mobilenet_v2":
            varied = {one.method for one in results.measured if UNDISTILLED in one.variants}
            rest += [f"{TITLES[method]} {UNDISTILLED}" for method in (OURS, "channels, Taylor") if method not in varied]
        rest += _at_patterns(results)
        rest += _seeds(results)
        if rest:
            lines.append(cells(section.name, "; ".join(rest)))
    rest = {name: section.heading for name, section in SECTIONS.items() if name not in done}
    trained = [name for name in rest if any(key.startswith("train ") for key in rows(RESULTS / name))]
    for what, names in (("measured", rest.keys() - trained), ("timed", trained)):
        if names:
            lines.append(cells("; ".join(sorted(rest[name] for name in names)), f"everything is to be {what}"))
    return "\n".join(lines)


def _absent(results: NetworkResults, method: str) -> str:
    """Name a method without a network that was trained and timed, with the accuracy of those that were trained."""
    trained = [one for one in results.unfinished if one.method == method and one.scores]
    listed = ", ".join(f"{one.mean:.2f} % at {budget(one.at)}" for one in trained)
    return f"{TITLES[method]} (trained, not timed: {listed})" if trained else TITLES[method]


def _budgets(results: NetworkResults) -> Iterator[str]:
    """Yield each method that has some networks with the budgets that it lacks."""
    trained = {(one.method, one.at): one.mean for one in results.measured if one.scores}
    lacking: dict[str, list[str]] = {}
    for method, at in unmeasured(results):
        score = trained.get((method, at))
        known = "" if score is None else f" (trained, not timed: {score:.2f} %)"
        lacking.setdefault(method, []).append(budget(at) + known)
    yield from (f"{TITLES[method]} at {', '.join(budgets)}" for method, budgets in lacking.items())


def _at_patterns(results: NetworkResults) -> Iterator[str]:
    """Yield our searches that have no network at the latency of some of DepthShrinker's patterns."""
    known = {(one.method, one.at) for one in results.measured if one.scores and one.profile}
    patterns = sorted(at for method, at in known if method == PUBLISHED)
    for method in ("paper", OURS):
        if lacking := [at for at in patterns if (method, at) not in known]:
            yield f"{TITLES[method]} at the latency of {', '.join(lacking)}"


def _seeds(results: NetworkResults) -> Iterator[str]:
    """Say how many networks lack a seed. The other methods have one seed, unless the searches have three."""
    wanted = SECTIONS[results.name].seeds or SUBJECTS[SECTIONS[results.name].network].seeds
    methods = SEARCHES if wanted < 3 else [method for method in TITLES if not method.endswith(PLAIN)]
    seeds = {one.plan: len(one.scores) for one in results.measured if one.scores and one.method in methods}
    if few := sum(number < wanted for number in seeds.values()):
        yield f"further seeds of {few} networks, which are to have {wanted}"
