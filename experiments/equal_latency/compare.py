"""Compare methods at equal latency on one GPU, and time what they give on other targets.

    python -m experiments.equal_latency.compare train DATA RUN --network mobilenet_v2 [--weights FILE] [--seconds 1500]
    python -m experiments.equal_latency.compare latency DATA RUN --network efficientnet_lite0 --stopwatch onnxruntime
    python -m experiments.equal_latency.compare prune DATA RUN --network efficientnet_lite0
    python -m experiments.equal_latency.compare pick DATA RUN --network efficientnet_lite0 --stopwatch onnxruntime
    python -m experiments.equal_latency.compare profile DATA RUN --network mobilenet_v2 --stopwatch onnxruntime

DATA is CIFAR-10 in its binary layout, or the folder of Imagenette for efficientnet_lite0. RUN keeps the weights of the
original network, both tables and a line per result. `train` goes through a list of measurements in order and leaves out
those that RUN already has. With `--seconds`, it starts none that would end later, going by the longest training so far,
so that a long comparison can be measured in pieces. `python -m experiments.equal_latency` does this for all networks.
After that of the original, several `train --shared` with different `--methods` can run at the same time. Run `pick`
before them and `profile` after them.
If the search space has grown since the importances were measured, run `extend` alone before `train`: it measures what
is missing, and forgets the results of plans that are no longer chosen.
resnet56 needs WEIGHTS: resnet56-4bfd9763.th of github.com/akamaster/pytorch_resnet_cifar10.

To compress for another machine, use the same RUN and stopwatch on both: `latency` on the other machine; on the GPU
`train --no-profiles --methods original`, which also makes the weights of the original, the importances and the
surrogate, and `prune`, which takes all steps of channel pruning; on the other machine `pick`, which times them and
picks those that meet the targets; `train --no-profiles` on the GPU; and `profile` on the other machine.

Every candidate is a traced network and a plan: for channel pruning, the pruned network and the plan that changes
nothing. All are fine-tuned alike with the original as their teacher, then merged. The merged network is scored on the
test set. It is timed in the same rounds as the original, once for all seeds. `--variant` changes the fine-tuning:
"without features" does not match the teacher's, "without distillation" has no teacher.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

import depthfold as df
from depthfold.core import Move, Surrogate
from depthfold.importance import measure_importance
from depthfold.latency import profile_all
from depthfold.pipeline import fit_surrogate
from depthfold.tracing import TracedNetwork, free_weights
from depthfold.training import preset, train
from experiments.cifar_networks import save_base
from experiments.equal_latency.candidates import METHODS, PRUNED, SEARCHES, Candidate, Methods
from experiments.equal_latency.known_importances import Known
from experiments.equal_latency.pruned_teacher import show_kept_features
from experiments.gpu_runs import executor, forget, record, rows, short, train_and_score
from experiments.importance_methods.compare import refitted
from experiments.subjects import STOPWATCHES, SUBJECTS, VARIANTS, timed_batch

MOVES = get_args(Move)
SHARES = (0.65, 0.5, 0.35, 0.8)  # of the original's latency, in the order in which they are measured
Row = dict[str, Any]


class OutOfTime(Exception):
    """The next measurement would end after the time that was given."""


class Experiment:
    """The comparison on one network."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.run, self.device = options, options.run, options.device
        self.subject = SUBJECTS[options.network]
        self.weights: Path = options.weights or self.run / "base.safetensors"
        self.deadline = time.perf_counter() + options.seconds
        self.longest = 0.0  # seconds of one training run so far

    @functools.cached_property
    def task(self) -> df.ClassificationTask:
        return self.subject.task(self.options.data)

    def train(self) -> None:
        """Measure everything that is missing, until the time is up."""
        if self.options.shared and (rest := {"base", "latency", "importance", "surrogate"} - rows(self.run).keys()):
            raise SystemExit(f"{self.run} has no results yet for {', '.join(sorted(rest))}: train the original first.")
        self.measure("base", self.base)
        model, traced = self.loaded()
        self.table_of_latencies(model)
        self.measure("importance", lambda: self.importance(traced))
        if not self.options.plain_sum:
            self.measure("surrogate", lambda: self.fitted(traced))
        text = f" {self.options.variant}" if self.options.variant else ""
        alike = [row for row in rows(self.run).values() if row.get("variant") == self.options.variant]
        self.longest = max((row["seconds"] for row in alike if "seconds" in row), default=0.0)
        for candidate, seed in self.order(self.methods(model, traced)):
            name, started = f"{candidate.method} {candidate.at}", time.perf_counter()
            self.measure(f"train {name} {seed}{text}", lambda c=candidate, s=seed: self.candidate(traced, c, s))
            self.longest = max(self.longest, time.perf_counter() - started)
            if self.options.profiles and not self.options.shared:
                key = f"profile {name} {self.options.stopwatch}"
                self.measure(key, lambda c=candidate: self.timing(traced, c))

    def table_of_latencies(self, model: torch.nn.Module) -> None:
        self.measure("latency", lambda: self.latency(self.timed(model)))

    def profile(self) -> None:
        """Time all candidates that were not timed with this stopwatch, those that were trained first."""
        model, traced = self.loaded()
        known, candidates = rows(self.run), [candidate for candidate, _ in self.order(self.methods(model, traced))]
        for candidate in sorted(candidates, key=lambda one: f"train {one.method} {one.at} 0" not in known):
            key = f"profile {candidate.method} {candidate.at} {self.options.stopwatch}"
            self.measure(key, lambda c=candidate: self.timing(traced, c))

    def prune(self) -> None:
        """Take all steps of channel pruning, for `pick` on another machine."""
        methods = self.methods(*self.loaded())
        for kind in PRUNED.values():
            methods.pruning_steps(kind)

    def pick(self) -> None:
        """Pick the steps of channel pruning that meet the targets according to this stopwatch. `train` uses them."""
        methods = self.methods(*self.loaded())
        for kind in PRUNED.values():
            methods.pruned(kind)

    def loaded(self) -> tuple[torch.nn.Module, TracedNetwork]:
        """Return the original network, and its trace."""
        if not self.weights.exists():
            raise SystemExit(
                f"{self.weights} is missing. To train the original and all that follows again, use a new RUN."
            )
        model = self.subject.load(self.weights)
        return model, self.subject.trace(model)

    def measure(self, key: str, work: Callable[[], Row]) -> None:
        """Record the result of one measurement unless it is known."""
        if key in rows(self.run):
            return
        if time.perf_counter() + self.longest > self.deadline:
            raise OutOfTime(key)
        record(self.run, key, work())

    def order(self, methods: Methods) -> Iterator[tuple[Candidate, int]]:
        """Yield what is trained, and its seed: two seeds of the searches, the other methods, then more seeds."""

        def searches(seed: int) -> Iterator[tuple[Candidate, int]]:
            for share in SHARES:
                yield from ((candidate, seed) for candidate in methods.solved(share))

        def rivals(seed: int) -> Iterator[tuple[Candidate, int]]:
            yield from ((candidate, seed) for candidate in methods.original())
            for share in SHARES:
                yield from ((candidate, seed) for candidate in methods.others(share))
            if not self.options.variant:  # only networks at a share of the latency are on the page
                yield from ((candidate, seed) for candidate in methods.published())

        seeds = 1 if self.options.variant else self.options.seeds or self.subject.seeds
        for part in map(searches, range(min(seeds, 2))):
            yield from part
        if self.options.plain_sum:
            return
        yield from rivals(0)
        if seeds > 2:
            for part in (rivals(1), searches(2), rivals(2)):
                yield from part

    def timed(self, model: torch.nn.Module) -> TracedNetwork:
        return self.subject.trace(model, timed_batch(self.options.stopwatch, self.subject))

    def methods(self, model: torch.nn.Module, traced: TracedNetwork) -> Methods:
        stopwatch, batch = STOPWATCHES[self.options.stopwatch], timed_batch(self.options.stopwatch, self.subject)
        return Methods(self.subject, model, traced, self.task, stopwatch, batch, self.options)

    def base(self) -> Row:
        """Train the original network unless its weights are there, and score it."""
        row: Row = {}
        if not self.weights.exists():
            assert self.subject.base is not None, "--weights is missing"
            model, recipe = self.subject.build(), short(self.subject.base, self.options)
            result = train(model, self.task, recipe, device=self.device)
            save_base(model, self.weights)
            row = {"recipe": recipe.to_json(), "seconds": result.seconds}
        model = self.subject.load(self.weights).to(self.device).eval()
        return row | {split: self.task.score(model, split) for split in ("holdout", "test")}  # type: ignore[arg-type]

    def latency(self, timed: TracedNetwork) -> Row:
        started = time.perf_counter()
        table = df.measure_latency(timed, STOPWATCHES[self.options.stopwatch], moves=MOVES, run=self.run / "journals")
        (self.run / "latency.json").write_text(table.dumps())
        return {"seconds": time.perf_counter() - started, "entries": len(table.entries)}

    def extend(self) -> None:
        """Measure the importances that the table lacks, and forget the results of plans that are no longer chosen."""
        model, traced = self.loaded()
        known, before = df.ImportanceTable.loads((self.run / "importance.json").read_text()), rows(self.run)
        row = self.importance(traced, known)
        record(self.run, "importance", row | {"seconds": before["importance"]["seconds"] + row["seconds"]})
        self.options.methods, chosen = SEARCHES, {}
        for plain in (False, True):
            self.options.plain_sum = plain
            chosen |= {(c.method, c.at): str(c.plan) for c, _ in self.order(self.methods(model, traced))}
        trained = {(row["method"], row["at"]): row["plan"] for row in before.values() if "plan" in row}
        changed = {at for at, plan in trained.items() if chosen.get(at, plan) != plan}
        forget(self.run, [key for key, row in before.items() if (row.get("method"), row.get("at")) in changed])
        print("forgotten:", *(f"{method} {at}" for method, at in sorted(changed)), sep="\n", flush=True)

    def importance(self, traced: TracedNetwork, known: df.ImportanceTable | None = None) -> Row:
        given, workers = self.subject.finetuning, executor(self.options)
        recipe = preset("brief").replace(
            precision=given.precision, channels_last=given.channels_last, crop=given.crop, flip=given.flip
        )
        recipe = short(recipe, self.options)
        started = time.perf_counter()
        table = measure_importance(
            traced, self.task, recipe, method="brief", moves=MOVES, run=self.run / "journals",
            executor=workers if known is None else Known(known, workers),
        )  # fmt: skip
        (self.run / "importance.json").write_text(table.dumps())
        return {"seconds": time.perf_counter() - started, "entries": len(table.entries), "recipe": recipe.to_json()}

    def fitted(self, traced: TracedNetwork) -> Row:
        """Fit the surrogate to plans that are trained now, or to those of another run of the same network."""
        times = df.LatencyTable.loads((self.run / "latency.json").read_text())
        costs = df.ImportanceTable.loads((self.run / "importance.json").read_text())
        started, recipe = time.perf_counter(), short(self.subject.plans, self.options)
        if self.options.trained_plans:
            kept = replace(costs, entries=tuple(entry for entry in costs.entries if not entry.dropped))
            surrogate = refitted(kept, Surrogate.loads(self.options.trained_plans.read_text()))
        else:
            surrogate = fit_surrogate(
                traced, self.task, times, costs, recipe, plans=24, executor=executor(self.options),
                run=self.run / "journals",
            )  # fmt: skip
        (self.run / "surrogate.json").write_text(surrogate.dumps())
        return {"seconds": time.perf_counter() - started, "fit": str(surrogate), "recipe": recipe.to_json()}

    def candidate(self, original: TracedNetwork, candidate: Candidate, seed: int) -> Row:
        """Fine-tune and merge a candidate, and score the merged network. Methods that choose the same plan share it."""
        variant = self.options.variant
        plan = str(candidate.plan) if candidate.traced is original else f"{candidate.method} {candidate.at}"
        named = {"method": candidate.method, "at": candidate.at, "seed": seed, "variant": variant, "plan": plan}
        for row in rows(self.run).values():
            if all(row.get(name) == named[name] for name in ("plan", "seed", "variant")):
                return row | named
        recipe = self.subject.finetuning.replace(seed=seed, **VARIANTS.get(variant, {}))
        teacher = df.rewrite(original, original.vanilla).eval() if recipe.distillation else None
        student = df.rewrite(candidate.traced, candidate.plan)
        if teacher is not None and recipe.features and candidate.traced is not original:
            show_kept_features(teacher, student)
        before = self.task.score(student.to(self.device).eval(), "test")
        row = train_and_score(student, teacher, self.task, short(recipe, self.options), self.device)
        merged = df.merge(student.cpu().eval())
        row |= {"before": before, "merged": self.task.score(merged.to(self.device), "test")}
        if self.options.shared:
            del row["seconds"]
        free_weights(student, merged)
        return row | named

    def timing(self, original: TracedNetwork, candidate: Candidate) -> Row:
        """Time the merged network beside the original. The weights do not matter."""
        inputs = self.subject.example(timed_batch(self.options.stopwatch, self.subject))
        modules = {
            "original": df.merge(df.rewrite(original, original.vanilla).eval()),
            "merged": df.merge(df.rewrite(candidate.traced, candidate.plan).eval()),
        }
        found = profile_all(modules, inputs, STOPWATCHES[self.options.stopwatch])
        print(f"{candidate.method} at {candidate.at}: {found['merged'].latency:.3f} of "
              f"{found['original'].latency:.3f} ms", flush=True)  # fmt: skip
        return {
            "method": candidate.method, "at": candidate.at, "stopwatch": self.options.stopwatch,
            "plan": str(candidate.plan), "predicted": candidate.predicted,
            **{name: profile.to_json() for name, profile in found.items()},
        }  # fmt: skip


def main() -> None:
    options = _arguments()
    options.run.mkdir(parents=True, exist_ok=True)
    if options.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    experiment = Experiment(options)
    if options.what == "latency":  # latencies do not depend on the weights
        experiment.table_of_latencies(experiment.subject.build())
        return
    try:
        getattr(experiment, options.what)()
    except OutOfTime as what:
        raise SystemExit(f"no time for: {what}") from None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "latency", "prune", "pick", "profile", "extend"))
    parser.add_argument("data", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--network", choices=tuple(SUBJECTS), required=True)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--trained-plans", type=Path, help="surrogate.json of another run, whose plans are used again")
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", help=f"only these of {METHODS}")
    parser.add_argument("--plain-sum", action="store_true", help="train the searches without a surrogate")
    parser.add_argument("--seeds", type=int, help="train so many seeds, instead of those on the page")
    parser.add_argument("--variant", choices=tuple(VARIANTS), default="", help="change the recipe of the fine-tuning")
    parser.add_argument("--stopwatch", choices=tuple(STOPWATCHES), default="cuda")
    parser.add_argument("--no-profiles", dest="profiles", action="store_false", help="train without timing the results")
    parser.add_argument("--shared", action="store_true", help="train beside other processes, and time nothing")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing that would end later")
    parser.add_argument("--workers", type=int, default=8, help="processes that share the GPU; 0: this process")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, help="at most so many steps of batch 8, for a dry run")
    options = parser.parse_args()
    if options.variant == "without features" and not SUBJECTS[options.network].finetuning.features:
        parser.error(f"The recipe of {options.network} does not match features. Leave out --variant.")
    return options


if __name__ == "__main__":
    main()
