"""Read the results of equal_latency.py: for each method and latency, the scores by seed and the profile."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from equal_latency_candidates import CONTROL
from gpu_runs import rows

from depthfold.core import Profile

RESULTS = Path(__file__).parent / "equal-latency"
OURS = "all moves"
# How each method is called on the page, in the order of its tables.
TITLES = {
    OURS: "depthfold, all moves",
    "paper": "depthfold, the paper's moves",
    "LayerMerge's rule": "LayerMerge's rule",
    "DepthShrinker": "DepthShrinker, published",
    "DepthShrinker, searched": "DepthShrinker, searched",
    "channels, magnitude": "channel pruning, magnitude",
    "channels, Taylor": "channel pruning, Taylor",
    CONTROL: "control: constant importance",
    "all moves, plain sum": "depthfold, all moves, without a surrogate",
    "paper, plain sum": "depthfold, the paper's moves, without a surrogate",
    "LayerMerge's rule, plain sum": "LayerMerge's rule, without a surrogate",
}


@dataclass
class Measured:
    """One method at one latency: the scores of the merged network by seed, and its profile beside the original's."""

    method: str
    at: str
    scores: dict[int, float] = field(default_factory=dict)  # by seed, fine-tuned with the original as the teacher
    alone: dict[int, float] = field(default_factory=dict)  # the same without a teacher
    holdout: dict[int, float] = field(default_factory=dict)  # like `scores`, on the hold-out set
    profile: Profile | None = None
    original: Profile | None = None
    plan: str = ""

    @property
    def mean(self) -> float:
        return fmean(self.scores.values())

    @property
    def speed_up(self) -> float:
        assert self.profile is not None and self.original is not None
        return self.original.latency / self.profile.latency


@dataclass(frozen=True)
class NetworkResults:
    """The results of one network on one target."""

    name: str
    base: dict[str, Any]
    latency: dict[str, Any]
    importance: dict[str, Any]
    measured: tuple[Measured, ...]
    recipe: dict[str, Any]
    seconds: float  # of one fine-tuning, the median

    def has(self, method: str) -> bool:
        return any(one.method == method for one in self.measured)

    def at(self, share: str) -> list[Measured]:
        """Return what was trained and timed at a latency, in the order of TITLES."""
        found = {one.method: one for one in self.measured if one.at == share and one.scores and one.profile}
        return [found[method] for method in TITLES if method in found]


def load(name: str, stopwatch: str = "cuda") -> NetworkResults | None:
    """Return the results of a network, or None if nothing was trained yet."""
    known = rows(RESULTS / name)
    found: dict[tuple[str, str], Measured] = {}
    recipe: dict[str, Any] = {}
    seconds: list[float] = []
    for key, row in known.items():
        what = key.split()[0]
        if what not in ("train", "profile"):
            continue
        one = found.setdefault((row["method"], row["at"]), Measured(row["method"], row["at"]))
        if what == "train":
            (one.scores if row["distilled"] else one.alone)[row["seed"]] = row["merged"]
            if row["distilled"]:
                one.holdout[row["seed"]] = row["holdout"]
            recipe = row["recipe"]
            seconds.append(row["seconds"])
        elif row["stopwatch"] == stopwatch:
            one.profile, one.original = (Profile.from_json(row[each]) for each in ("merged", "original"))
            one.plan = row["plan"]
    if not recipe:
        return None
    tables = known["base"], known["latency"], known["importance"]
    return NetworkResults(name, *tables, tuple(found.values()), recipe, median(seconds))


def difference(one: Measured, other: Measured) -> tuple[float, float | None]:
    """Return the difference of the mean scores and its standard error, which takes two seeds of each."""
    error = None
    if min(len(one.scores), len(other.scores)) > 1:
        error = sqrt(sum(stdev(each.scores.values()) ** 2 / len(each.scores) for each in (one, other)))
    return one.mean - other.mean, error
