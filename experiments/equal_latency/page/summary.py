"""The summary of docs/results.md: one row per network and target, one column per method."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from experiments.equal_latency.candidates import CONTROL, FIXED, PLAIN, PRUNED
from experiments.equal_latency.merging_steps import SHARES
from experiments.equal_latency.page.analyses import cells
from experiments.equal_latency.page.missing import unmeasured
from experiments.equal_latency.page.text import SECTIONS, SUMMARY
from experiments.equal_latency.results import OURS, TITLES, Difference, Measured, NetworkResults

CLOSE = 0.2  # points below the original that count as none
ROUNDING = 1e-9  # of a difference between two accuracies
OTHER = "other original"  # of all networks of a method
DEPTHFOLD = (OURS, "paper")
RIVALS = ("LayerMerge's rule", *FIXED, *PRUNED, CONTROL)

SPEED_UPS = f"""\
The largest speed-up of each method within {CLOSE} points of the original, chosen by test accuracy. In parentheses:
within {CLOSE} points of the original fine-tuned with the same recipe."""

SELECTED = """\
The same for depthfold with all moves or the paper's, and what it is if the hold-out set selects the network and both
originals are scored on that set. It has 5,000 images of CIFAR-10 or 947 of Imagenette, and was also used to measure
importances."""

DIFFERENCES = """\
Accuracy of depthfold with all moves minus that of each method, at the latency of that method, in points: the lowest and
the highest difference, and the number of plans; "faster" are those that are faster than any of all moves. The sections
below have them one by one."""


def summary(found: list[NetworkResults]) -> str:
    """Return the text of the section."""
    measured = {one.method for results in found for one in finished(results)}
    rivals = [method for method in RIVALS if method in measured]
    return "\n\n".join([
        SUMMARY,
        SPEED_UPS,
        _table([*DEPTHFOLD, *rivals], found, lambda results, method: speed_ups(results, [method])),
        SELECTED,
        _by_holdout(found),
        DIFFERENCES,
        _table(["paper", *rivals], found, _range),
    ])  # fmt: skip


def best(
    results: NetworkResults,
    methods: Collection[str] = DEPTHFOLD,
    *,
    tuned: bool = False,
    longer: bool = False,
    split: str = "test",
) -> Measured | None:
    """Return the fastest network that loses at most CLOSE points to its original (`tuned`: to that one fine-tuned)."""
    found = candidates(results, methods, longer=longer)
    losses = [results.lost(one, split, tuned=tuned) for one in found]
    close = [one for one, lost in zip(found, losses, strict=True) if lost is not None and lost <= CLOSE + ROUNDING]
    return max(close, key=lambda one: one.speed_up, default=None)


def candidates(
    results: NetworkResults, methods: Collection[str] = DEPTHFOLD, *, longer: bool = False
) -> list[Measured]:
    """Return the networks of these methods. With `longer`, also those that were fine-tuned for longer than others."""
    found = [one for one in finished(results) if one.method in methods]
    return [*found, *(each for one in found if longer and (each := one.longer))]


def finished(results: NetworkResults) -> list[Measured]:
    """Return what was trained and timed with a surrogate: at the budgets, then at sizes of a method's own."""
    at_budgets = [one for share in SHARES for one in results.at(share) if not one.method.endswith(PLAIN)]
    return [*at_budgets, *(one for one in results.measured if one.method in FIXED and one.scores and one.profile)]


class Best(NamedTuple):
    """A network, and the points that it lost to its original fine-tuned with the same recipe."""

    network: Measured
    lost: float


def most_accurate(results: NetworkResults, methods: Collection[str], share: str) -> Best | None:
    """Return the network of these methods at a budget that loses least on the test set."""
    known = [
        Best(one, lost)
        for one in finished(results)
        if one.method in methods and one.at == share and (lost := results.lost(one, tuned=True)) is not None
    ]
    return min(known, key=lambda each: each.lost, default=None)


def differences(results: NetworkResults, method: str) -> list[Difference | None]:
    """Return how far all moves are ahead of each plan of a method that they did not choose for the same budget.

    None stands for a network that is faster than theirs.
    """
    ours = {one.at: one.plan for one in finished(results) if one.method == OURS}
    others = {one.plan: one for one in finished(results) if one.method == method and one.plan != ours.get(one.at)}
    return [results.ahead(one) for one in others.values()]


def speed_ups(results: NetworkResults, methods: Collection[str]) -> str:
    """Return the largest speed-ups of the best of these methods, and whether more are to be measured."""
    if not candidates(results, methods):
        return ""
    text = _both(results, methods)
    if any(each in methods for each, _ in unmeasured(results)):
        text += " so far"
    longer = best(results, methods, longer=True)
    return f"{text}; {longer.speed_up:.2f} {longer.variant}" if longer and longer.variant else text


def _both(results: NetworkResults, methods: Collection[str], split: str = "test") -> str:
    """Return the largest speed-up beside the original and, in parentheses, beside the fine-tuned original."""
    found = [best(results, methods, split=split, tuned=tuned) for tuned in (False, True)]
    first, second = (f"{one.speed_up:.2f}" if one else "none" for one in found)
    return f"{first} ({second})" if results.tuned else first


def _by_holdout(found: list[NetworkResults]) -> str:
    return "\n".join([
        cells("network", "selected by test accuracy", "selected by hold-out accuracy"),
        "| --- | ---: | ---: |",
        *(cells(SECTIONS[each.name].name, _both(each, DEPTHFOLD), _both(each, DEPTHFOLD, "holdout"))
          for each in found if SECTIONS[each.name].holdout),
    ])  # fmt: skip


def _range(results: NetworkResults, method: str) -> str:
    if not candidates(results, [method]):
        return ""
    found = differences(results, method)
    known = [each.points for each in found if each is not None and each.same_original]
    faster = found.count(None)
    if not known and len(found) > faster:
        return OTHER
    if not known:
        return f"{faster} faster" if faster else "same plans"
    lowest, highest = (f"{round(each, 1) + 0.0:+.1f}" for each in (min(known), max(known)))  # not "-0.0"
    points = lowest if lowest == highest else f"{lowest} to {highest}"
    return f"{points} ({len(known)}{f', {faster} faster' if faster else ''})"


def _table(methods: list[str], found: list[NetworkResults], cell: Callable[[NetworkResults, str], str]) -> str:
    return "\n".join([
        cells("network", *(TITLES[method] for method in methods)),
        "| --- |" + " ---: |" * len(methods),
        *(cells(SECTIONS[each.name].name, *(cell(each, method) for method in methods)) for each in found),
    ])  # fmt: skip
