"""The candidates that compare.py compares: for each method and latency, a traced network and a plan."""

from __future__ import annotations

import argparse
import bisect
import copy
import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

import depthfold as df
from depthfold import baselines
from depthfold.backends import Backend
from depthfold.core import Surrogate
from depthfold.errors import BudgetError
from depthfold.latency import Timer
from depthfold.tracing import TracedNetwork
from experiments.gpu_runs import short
from experiments.subjects import Subject

ORIGINAL, CONTROL = "original", "control: constant"
SEARCHES = ("paper", "all moves", "LayerMerge's rule")
PUBLISHED, SEARCHED = "DepthShrinker", "DepthShrinker, searched"
UNIFORM, AMC = "uniform width", "AMC"
FIXED = (PUBLISHED, SEARCHED, UNIFORM, AMC)  # methods with networks of sizes of their own
PLAIN = "plain sum"  # the end of the names of searches that maximise the sum of importances, without a surrogate
PRUNED = {"channels, magnitude": "magnitude", "channels, Taylor": "Taylor"}
PRUNED_SHARES = (0.8, 0.65, 0.5, 0.35)
# Channel pruning takes 40 steps, which remove at most 70 % of the channels of a layer, then more from what is left.
FURTHER = {"steps": 20, "max_ratio": 2 / 3}
KEPT_BLOCKS, SEARCH_EPOCHS = (12, 9, 7), 10  # of DepthShrinker's search; the blocks as published
UNIFORM_RATIOS = {"1.0": 0.75, "1.4": 0.65}  # of the paper, by the width of MobileNetV2
METHODS = (ORIGINAL, *SEARCHES, *PRUNED, CONTROL, *FIXED)
QUICK = Timer(warmup=0.2, rounds=3)  # for the many networks that pruning goes through


@dataclass(frozen=True)
class Candidate:
    """A network to be fine-tuned. `at` is a share of the original's latency, or the name of a published pattern."""

    method: str
    at: str
    traced: TracedNetwork
    plan: df.Plan
    predicted: float | None = None  # latency in ms, from the table


class Methods:
    """Makes the candidates of one network."""

    def __init__(
        self, subject: Subject, model: nn.Module, traced: TracedNetwork, task: df.ClassificationTask,
        stopwatch: Backend, batch: int, options: argparse.Namespace,
    ) -> None:  # fmt: skip
        self.subject, self.model, self.traced, self.task = subject, model, traced, task
        self.stopwatch, self.batch, self.options = stopwatch, batch, options
        self.run, self.device = options.run, options.device
        self.suffix = f", {PLAIN}" if options.plain_sum else ""
        self.searching = options.what != "profile"  # networks are only timed here if their search was run for training

    def solved(self, share: float) -> Iterator[Candidate]:
        """Yield the plan of each search that reaches a share of the original's latency."""
        yield from self._solved(self._wanted(*SEARCHES), f"{share:.0%}", f"{share:.0%}")

    def original(self) -> Iterator[Candidate]:
        """Yield the original network, which is fine-tuned like the others."""
        for method in self._wanted(ORIGINAL):
            yield Candidate(method, "100%", self.traced, self.traced.vanilla)

    def others(self, share: float) -> Iterator[Candidate]:
        """Yield the channel-pruned networks at this share, and the plan of the control."""
        for method in self._wanted(*PRUNED):
            if (model := self.pruned(PRUNED[method]).get(share)) is not None:
                traced = self.subject.trace(model)
                yield Candidate(method, f"{share:.0%}", traced, traced.vanilla)
        yield from self._solved(self._wanted(CONTROL), f"{share:.0%}", f"{share:.0%}")

    def published(self) -> Iterator[Candidate]:
        """Yield DepthShrinker's patterns for this network, our plans that are as fast, and the paper's other rivals."""
        width = {"mobilenet_v2": "1.0", "mobilenet_v2_1.4": "1.4"}.get(self.subject.name)
        if width is None:
            return
        for name in (name for name in baselines.PATTERNS if name.endswith(width)):
            plan = baselines.depthshrinker_plan(self.traced, name)
            latency = self.times.predict(self.traced.network, plan)
            for method in self._wanted(PUBLISHED):
                yield Candidate(method, name, self.traced, plan, latency)
            yield from self._solved(self._wanted("paper", "all moves"), f"{latency}ms", name)
        for method in self._wanted(SEARCHED):
            for kept in KEPT_BLOCKS:
                if (found := self.searched(kept)) is not None:
                    predicted = self.times.predict(self.traced.network, found)
                    yield Candidate(method, f"{kept} blocks", self.traced, found, predicted)
        for method in self._wanted(UNIFORM, *([AMC] if width == "1.0" else [])):
            yield self.narrower(method, width)

    def narrower(self, method: str, width: str) -> Candidate:
        """Return the network with a uniform ratio of the channels inside its blocks, or with AMC's channels."""
        if method == AMC:
            model, at = baselines.amc_mobilenet_v2(self.model, self.subject.example(1)), "70% of the FLOPs"
        else:
            ratio = UNIFORM_RATIOS[width]
            blocks = [block for block in baselines.inverted_residuals(self.traced.network) if len(block) == 3]
            expansions = [self.traced.network.layers[block.i].where for block in blocks]
            model = baselines.uniform_width(self.model, self.subject.example(1), ratio, layers=expansions)
            at = f"{ratio:.0%} of the channels"
        traced = self.subject.trace(model)
        return Candidate(method, at, traced, traced.vanilla)

    def _wanted(self, *methods: str) -> list[str]:
        return [method for method in methods if method in (self.options.methods or METHODS)]

    def searched(self, kept: int) -> df.Plan | None:
        """Return the plan of DepthShrinker's search on this task."""
        file = self.run / f"depthshrinker-{kept}.json"
        if not file.exists():
            if not self.searching:
                return None
            recipe = short(self.subject.finetuning.replace(epochs=SEARCH_EPOCHS), self.options)
            teacher = df.rewrite(self.traced, self.traced.vanilla).eval()
            plan = baselines.search_depthshrinker(
                self.traced, self.task, recipe, kept=kept, costs=self.times, teacher=teacher, device=self.device
            )
            file.write_text(plan.dumps())
        return df.Plan.loads(file.read_text())

    def _solved(self, methods: list[str], budget: str, at: str) -> Iterator[Candidate]:
        for method in methods:
            try:
                found = self.frontiers[method].at(budget)
            except BudgetError as error:
                print(f"{method}: {error}")
                continue
            yield Candidate(f"{method}{self.suffix}", at, self.traced, found.plan, found.latency)

    @functools.cached_property
    def times(self) -> df.LatencyTable:
        return df.LatencyTable.loads((self.run / "latency.json").read_text())

    @functools.cached_property
    def frontiers(self) -> dict[str, df.Frontier]:
        costs = df.ImportanceTable.loads((self.run / "importance.json").read_text())
        plain = self.options.plain_sum
        surrogate = None if plain else Surrogate.loads((self.run / "surrogate.json").read_text())
        return frontiers(self.times, costs, self.traced.network, surrogate)

    @functools.cache  # noqa: B019 - there is one object per process
    def pruned(self, kind: str) -> dict[float, nn.Module]:
        """Return the channel-pruned networks by share: a step whose latency just meets it."""
        file = self.run / f"channels-{kind}.json"
        if not file.exists() and not self.searching:
            return {}
        if not file.exists() and self.options.shared:
            raise SystemExit(f"{file} is missing, and nothing can be timed on a shared GPU. Run `pick` alone first.")
        if file.exists() and len(json.loads(file.read_text())) < len(PRUNED_SHARES):
            raise SystemExit(f"{file} names steps of an earlier version. Remove it, and the lines of channel pruning.")
        steps = self.pruning_steps(kind)
        if not file.exists():
            file.write_text(json.dumps(self._steps_by_share(kind, steps)))
        found: dict[str, int | None] = json.loads(file.read_text())
        return {float(share): steps[step].float().eval() for share, step in found.items() if step is not None}

    def pruning_steps(self, kind: str) -> list[nn.Module]:
        """Return the networks of all steps of pruning. Taking a step is faster than timing it."""
        file = self.run / f"channels-{kind}-steps.pt"
        if not file.exists():
            recipe = short(self.subject.finetuning, self.options)
            gradients = baselines.task_gradients(self.task, recipe) if kind == "Taylor" else None
            take = functools.partial(baselines.pruning_steps, example=self.subject.example(1), gradients=gradients)
            found = [_copy(step) for step in take(self.model.to(self.device))]
            self.model.cpu()
            further = take(copy.deepcopy(found[-1]).float().to(self.device), **FURTHER)
            torch.save([*found, *map(_copy, itertools.islice(further, 1, None))], file)
        return torch.load(file, weights_only=False)  # type: ignore[no-any-return]

    def _steps_by_share(self, kind: str, networks: list[nn.Module]) -> dict[float, int | None]:
        """Return the first step that meets each share, by bisection: later steps are faster. None if no step does."""
        example, inputs = self.subject.example(1), self.subject.example(self.batch)
        time = baselines.stopwatch(example, self.stopwatch, inputs=inputs, timer=QUICK)

        @functools.cache
        def measured(step: int) -> float:
            now = time(networks[step].float())
            print(f"channels, {kind}, step {step}: {now:.3f} ms", flush=True)
            return now

        found: dict[float, int | None] = {}
        for share in PRUNED_SHARES:
            target = share * measured(0)
            step = bisect.bisect_left(range(len(networks)), True, key=lambda step: measured(step) <= target)
            found[share] = step if step < len(networks) else None
        return found


def _copy(network: nn.Module) -> nn.Module:
    copied = copy.deepcopy(network).cpu().half()
    copied.zero_grad()
    return copied


def frontiers(
    times: df.LatencyTable, costs: df.ImportanceTable, network: df.Network, surrogate: Surrogate | None
) -> dict[str, df.Frontier]:
    """Return the frontier of each search, from tables that were measured with all moves."""
    merged = replace(times, entries=tuple(entry for entry in times.entries if entry.shape is None))
    kept = replace(costs, entries=tuple(entry for entry in costs.entries if not entry.dropped))
    return {
        "paper": df.solve(merged, kept, network=network, surrogate=surrogate),
        "all moves": df.solve(times, costs, network=network, surrogate=surrogate),
        "LayerMerge's rule": baselines.layermerge_frontier(
            times, costs, network, exponential=False, surrogate=surrogate
        ),
        CONTROL: df.solve(merged, baselines.constant_importance(network), network=network),
    }
