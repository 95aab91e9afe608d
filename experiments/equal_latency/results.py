"""Read the results of compare.py: for each method and latency, the scores by seed and the profile."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median_low
from typing import Any

import numpy as np

from depthfold.core import Profile
from experiments.equal_latency.candidates import AMC, CONTROL, PRUNED, PUBLISHED, SEARCHED, UNIFORM
from experiments.gpu_runs import rows
from experiments.subjects import LONGER

RESULTS = Path(__file__).parent / "measured"
OURS = "all moves"
BASE = "base"
WITHOUT = ", without a surrogate"
# Methods whose networks have fewer channels. In `train` rows they are named instead of a plan, which changes nothing.
NARROWER = (*PRUNED, UNIFORM, AMC)
SEED_DEVIATION = 0.16  # points between seeds of one plan: that of MobileNetV2-1.0 and ResNet-56, see the tests
SAME = 0.02  # relative difference of latencies that counts as none at the ends of an interpolation
# How each method is called on the page, in the order of its tables.
TITLES = {
    "original": "original, fine-tuned with the same recipe",
    OURS: "depthfold, all moves",
    "paper": "depthfold, the paper's moves",
    "LayerMerge's rule": "LayerMerge's rule",
    PUBLISHED: "DepthShrinker, published",
    SEARCHED: "DepthShrinker, searched",
    "channels, magnitude": "channel pruning, magnitude",
    "channels, Taylor": "channel pruning, Taylor",
    UNIFORM: "channel pruning, uniform width",
    AMC: "channel pruning, AMC's channels",
    CONTROL: "control: constant importance",
    "all moves, plain sum": f"depthfold, all moves{WITHOUT}",
    "paper, plain sum": f"depthfold, the paper's moves{WITHOUT}",
    "LayerMerge's rule, plain sum": f"LayerMerge's rule{WITHOUT}",
}


@dataclass
class Measured:
    """One method at one latency: the scores of the merged network by seed, and its profile beside the original's."""

    method: str
    at: str
    scores: dict[int, float] = field(default_factory=dict)  # by seed, fine-tuned with the recipe of the network
    holdout: dict[int, float] = field(default_factory=dict)  # like `scores`, on the hold-out set
    variants: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)  # both, fine-tuned differently
    profile: Profile | None = None
    original: Profile | None = None
    plan: str = ""
    variant: str = ""  # of the fine-tuning that the scores come from
    base: str = BASE  # the row of the original that it was fine-tuned from
    repeated: dict[int, list[float]] = field(default_factory=dict)  # of a seed that was trained several times

    @property
    def mean(self) -> float:
        return self.accuracy("test")

    def accuracy(self, split: str) -> float:
        """Return the mean over the seeds."""
        return fmean((self.scores if split == "test" else self.holdout).values())

    @property
    def longer(self) -> Measured | None:
        """The same network, fine-tuned for longer, if it was."""
        if (varied := self.variants.get(LONGER)) is None:
            return None
        scores, holdout = ({seed: both[n] for seed, both in varied.items()} for n in (0, 1))
        return replace(self, scores=scores, holdout=holdout, variant=LONGER, repeated={})

    @property
    def dropped(self) -> int:
        """The number of layers that the plan leaves out, alone or with a branch."""
        branches = [int(j) - int(i) for i, j in re.findall(r"\((\d+), (\d+)\]", self.plan)]
        layers = re.search(r"drops layers? ([\d, ]+)", self.plan)
        return sum(branches) + (len(layers[1].strip(", ").split(",")) if layers else 0)

    @property
    def share(self) -> float:
        """The latency as a share of that of the original, which was timed in turn with this network."""
        assert self.profile is not None and self.original is not None
        return self.profile.latency / self.original.latency

    @property
    def speed_up(self) -> float:
        return 1 / self.share


@dataclass(frozen=True)
class Difference:
    """How many points one network is ahead of another, and the standard deviation of that due to their seeds."""

    points: float
    deviation: float
    same_original: bool  # that both were fine-tuned from

    @property
    def is_noise(self) -> bool:
        return abs(self.points) < 1.96 * self.deviation


@dataclass(frozen=True)
class NetworkResults:
    """The results of one network on one target."""

    name: str
    base: dict[str, Any]
    latency: dict[str, Any]
    importance: dict[str, Any]
    surrogate: dict[str, Any]
    measured: tuple[Measured, ...]
    recipe: dict[str, Any]
    # Of one fine-tuning, the median of those that had the GPU for themselves. The lower one of two: the first
    # fine-tuning of a process also compiles its kernels.
    seconds: float | None
    # Other originals, trained alike, from which some networks were fine-tuned: scores on both sets, before and after.
    bases: dict[str, dict[str, Any]] = field(default_factory=dict)

    def lost(self, one: Measured, split: str = "test", *, tuned: bool = False) -> float | None:
        """The points that a network lost to the original that it was fine-tuned from.

        With `tuned`, to that original fine-tuned with the same recipe; None if it was not.
        """
        base: dict[str, float] | None = self.base if one.base == BASE else self.bases[one.base]
        if tuned and one.base == BASE:
            base = None if self.tuned is None else {split: self.tuned.accuracy(split)}
        elif tuned:
            base = self.bases[one.base].get("tuned")
        return None if base is None else base[split] - one.accuracy(split)

    @property
    def original(self) -> Profile:
        """The profile of the original that has the median latency of all that were timed beside a network."""
        timed = sorted((one.original for one in self.measured if one.original), key=lambda profile: profile.latency)
        return timed[len(timed) // 2]

    @property
    def tuned(self) -> Measured | None:
        """The original, fine-tuned like the other networks. It may not have been timed again."""
        return next((one for one in self.measured if one.method == "original" and one.scores), None)

    @property
    def spread(self) -> float | None:
        """The largest difference between two seeds of one plan. None if there is one seed of each."""
        several = [one.scores.values() for one in self.measured if len(one.scores) > 1]
        return max((max(scores) - min(scores) for scores in several), default=None)

    def has(self, method: str) -> bool:
        return any(one.method == method and one.scores and one.profile for one in self.measured)

    def ahead(self, other: Measured) -> Difference | None:
        """How far all moves are ahead of another network at its latency. None if it is faster than they are.

        Their accuracy at that latency is interpolated between their networks and the original.
        """
        ours = [one for one in self.measured if one.method == OURS and one.scores and one.profile]
        known = [(one.share, one.mean, 1 / len(one.scores)) for one in ours]
        points = sorted([*known, (1.0, self.base["test"], 0.0)], key=lambda point: point[0])
        shares, scores, variances = zip(*points, strict=True)
        if not ours or not shares[0] * (1 - SAME) <= other.share <= 1 + SAME:
            return None
        weights = [np.interp(other.share, shares, row) for row in np.eye(len(shares))]
        deviation = SEED_DEVIATION * np.sqrt(np.dot(np.square(weights), variances) + 1 / len(other.scores))
        ahead = np.dot(weights, scores) - other.mean
        return Difference(float(ahead), float(deviation), other.base == BASE)

    @property
    def unfinished(self) -> list[Measured]:
        """What was trained or timed, but not both."""
        return [one for one in self.measured if bool(one.profile) != bool(one.scores)]

    def at(self, share: str) -> list[Measured]:
        """Return what was trained and timed at a latency, in the order of TITLES."""
        found = {one.method: one for one in self.measured if one.at == share and one.scores and one.profile}
        return [found[method] for method in TITLES if method in found]


def load(name: str, stopwatch: str = "cuda") -> NetworkResults | None:
    """Return the results of a network, or None if nothing was trained and timed yet."""
    known = rows(RESULTS / name)
    timed: dict[tuple[str, str], str] = {}
    found: dict[tuple[str, str], Measured] = {}
    recipe: dict[str, Any] = {}
    seconds: dict[tuple[str, int], float] = {}  # of each plan and seed; methods share plans
    for key, row in known.items():
        what = key.split()[0]
        if what not in ("train", "profile"):
            continue
        one = found.setdefault((row["method"], row["at"]), Measured(row["method"], row["at"]))
        if what == "train":
            one.plan, one.base = row["plan"], row.get("base", BASE)
            if row["variant"]:
                one.variants.setdefault(row["variant"], {})[row["seed"]] = row["merged"], row["holdout"]
            else:
                one.scores[row["seed"]], one.holdout[row["seed"]] = row["merged"], row["holdout"]
                recipe = row["recipe"]
                seconds |= {(row["plan"], row["seed"]): row["seconds"]} if "seconds" in row else {}
        elif row["stopwatch"] == stopwatch:
            one.profile, one.original = (Profile.from_json(row[each]) for each in ("merged", "original"))
            timed[row["method"], row["at"]] = row.get("base", BASE)
            if row["method"] not in NARROWER:
                one.plan = one.plan or row["plan"]
    for key, base in timed.items():
        if found[key].method in NARROWER and found[key].scores and base != found[key].base:
            found[key].profile = found[key].original = None  # pruned from other weights, so it is another network
    if not recipe or not any(one.profile for one in found.values()):
        return None
    _share_repeated(list(found.values()))
    tables = known["base"], known["latency"], known["importance"], known["surrogate"]
    median = median_low(seconds.values()) if seconds else None
    bases = {key: row for key, row in known.items() if key.startswith(f"{BASE},")}
    return NetworkResults(name, *tables, tuple(found.values()), recipe, median, bases)


def _share_repeated(measured: list[Measured]) -> None:
    """Give methods that chose the same plan all of its scores: per seed the mean, if it was trained more than once.

    This happens if two processes train the plan at the same time.
    """
    for each in measured:
        for seed in each.scores:
            same = {one.scores[seed] for one in measured if one.plan == each.plan and seed in one.scores}
            if len(same) > 1:
                each.repeated[seed] = sorted(same, reverse=True)
    for scores in (lambda one: one.scores, lambda one: one.holdout):
        by_plan: dict[str, dict[int, set[float]]] = {}
        for one in measured:
            for seed, score in scores(one).items():
                by_plan.setdefault(one.plan, {}).setdefault(seed, set()).add(score)
        for one in measured:
            scores(one).update({seed: fmean(found) for seed, found in by_plan.get(one.plan, {}).items()})
