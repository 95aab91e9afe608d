"""Run the comparisons of docs/results.md on one GPU, all of them or a few, at once or in pieces.

    python -m experiments.equal_latency RUNS --cifar10 DIR --imagenette DIR [--only FOLDER ...] [--seconds 1500]

RUNS gets a folder per network and target, named as in measured/, and what is in it already is not
measured again. One comparison is finished before the next: its tables are measured with nothing else on the GPU, then
all methods are trained, by `--streams` processes at a time (on an H200, three at a time are not faster than one), then
everything is timed, again alone. `--timing` seconds of those that are given are kept for that, and no training is
started that would end later. The weights of ResNet-56,
resnet56-4bfd9763.th, must be in the root of the repository.

A target on another machine (ONNX Runtime on ARM) takes turns with the GPU. With the same RUNS on both:

    python -m experiments.equal_latency.compare latency none RUNS/FOLDER --network NETWORK --stopwatch onnxruntime
    python -m experiments.equal_latency RUNS --imagenette DIR --only FOLDER  # on the GPU
    python -m experiments.equal_latency.compare pick DIR RUNS/FOLDER --network NETWORK --stopwatch onnxruntime
    python -m experiments.equal_latency RUNS --imagenette DIR --only FOLDER  # on the GPU
    python -m experiments.equal_latency.compare profile DIR RUNS/FOLDER --network NETWORK --stopwatch onnxruntime

The first turn on the GPU trains the plans and takes all steps of channel pruning; the second trains the pruned networks
that were picked. Options that are not known here go to compare.py. Dry run on a CPU: `--device cpu --stopwatch
cpu --steps 1 --workers 0`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from experiments.equal_latency.candidates import CONTROL, FIXED, ORIGINAL, PRUNED
from experiments.equal_latency.page.text import IMAGENETTE, SECTIONS
from experiments.gpu_runs import rows
from experiments.subjects import LONGER, ON_GPU

ROOT = Path(__file__).parents[2]
HERE = tuple(name for name, section in SECTIONS.items() if section.stopwatch in ON_GPU)
# What one process trains: methods that take about equally long.
STREAMS = (("all moves",), ("paper", "LayerMerge's rule"), (*PRUNED, CONTROL))
# Further runs of a network, beyond the comparison at equal latency.
MORE = {
    "mobilenet_v2": (
        ("--methods", *FIXED),
        ("--plain-sum",),
        ("--variant", "without distillation", "--methods", "all moves", "channels, Taylor"),
    ),
    "mobilenet_v2_1.4": (("--methods", *FIXED),),
    "efficientnet_lite0-on-onnxruntime": (("--variant", LONGER, "--methods", "all moves"),),
}
# These do not depend on the target, except that the surrogate is fitted to plans for the first one.
SHARED = ("base", "importance", "surrogate", f"train {ORIGINAL} 100% 0")


class Comparison:
    """One network on one target."""

    def __init__(self, name: str, options: argparse.Namespace, rest: list[str]) -> None:
        self.name, self.section, self.run, self.rest = name, SECTIONS[name], options.runs / name, rest
        self.data: Path | None = options.imagenette if self.section.data == IMAGENETTE else options.cifar10
        if self.data is None:
            raise SystemExit(f"{name} needs --{'imagenette' if self.section.data == IMAGENETTE else 'cifar10'} DIR.")
        self.here = name in HERE
        own, given = self.section.stopwatch, options.stopwatch
        self.stopwatch = ["--stopwatch", given if self.here and given else own]

    def prepare(self, seconds: float) -> bool:
        """Measure the tables and the original, and pick the steps of channel pruning that meet the budgets."""
        limit = ("--seconds", f"{seconds:.0f}")
        self.run.mkdir(parents=True, exist_ok=True)
        if (main := self.run.with_name(self.section.network)) != self.run:
            _share(main, self.run)
        if self.here:
            return self.call("train", "--methods", ORIGINAL, *limit) and self.call("pick")
        if "latency" not in rows(self.run):
            print(f"{self.run} has no latency table. Measure it on its target first: see --help.")
            return False
        return self.call("train", "--methods", ORIGINAL, "--no-profiles", *limit) and self.call("prune")

    def trainings(self) -> list[tuple[str, ...]]:
        """Return the options of the processes that train the other methods."""
        missing = [method for method, kind in PRUNED.items() if not (self.run / f"channels-{kind}.json").exists()]
        streams = [[method for method in methods if method not in missing] for methods in STREAMS]
        return [*(("--methods", *methods) for methods in streams), *MORE.get(self.name, ())]

    def time(self, seconds: float) -> bool:
        """Time what was trained, and what each step of a plan buys."""
        if not self.here:
            return True
        limit = ("--seconds", f"{seconds:.0f}")
        done = self.call("profile", *limit)
        if ("--plain-sum",) in MORE.get(self.name, ()):
            done &= self.call("profile", "--plain-sum", *limit)
        weights = ["--weights", self.section.weights] if self.section.weights else []
        network = ["--network", self.section.network]
        return done & _run("merging_steps", str(self.run), *network, *self.stopwatch, *weights)

    def call(self, what: str, *more: str) -> bool:
        options = ["--network", self.section.network, *self.stopwatch, *self.section.options, *more, *self.rest]
        return _run("compare", what, str(self.data), str(self.run), *options)


def _share(main: Path, run: Path) -> None:
    """Take what targets share from the folder of the network, unless it is there."""
    steps = [f"channels-{kind}-steps.pt" for kind in PRUNED.values()]
    for file in ("base.safetensors", "importance.json", "surrogate.json", *steps):
        if not (run / file).exists() and (main / file).exists():
            shutil.copy(main / file, run / file)
    known = rows(run)
    with (run / "results.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(row)}\n" for key, row in rows(main).items() if key in SHARED and key not in known)


def _run(script: str, *arguments: str) -> bool:
    """Run a script of this folder, and return whether it succeeded."""
    command = f"{script} {' '.join(arguments)}"
    print(f"{time.strftime('%H:%M:%S')} {command}", flush=True)
    module = f"experiments.equal_latency.{script}"
    done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, check=False)
    if done.returncode:
        print(f"exit status {done.returncode}: {command}", flush=True)
    return done.returncode == 0


def main() -> None:
    options, rest = _arguments()
    end = time.monotonic() + options.seconds
    done = True
    for comparison in [Comparison(name, options, rest) for name in options.only]:
        if time.monotonic() + options.timing > end:
            print(f"no time for: {comparison.name}")
            done = False
            continue
        done &= _compare(comparison, end, options)
    if not done:
        raise SystemExit("Not everything was measured, see above. The same command measures what is missing.")


def _compare(comparison: Comparison, end: float, options: argparse.Namespace) -> bool:
    """Measure what one comparison lacks, and return whether all commands succeeded."""

    def left() -> float:
        return end - options.timing - time.monotonic()

    if not comparison.prepare(left()):
        return False

    def train(more: tuple[str, ...]) -> bool:
        return comparison.call("train", "--shared", "--seconds", f"{left():.0f}", *more)

    with ThreadPoolExecutor(options.streams) as pool:
        trained = list(pool.map(train, comparison.trainings()))
    return comparison.time(end - time.monotonic()) and all(trained)


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=lambda text: Path(text).resolve())
    parser.add_argument("--cifar10", type=lambda text: Path(text).resolve())
    parser.add_argument("--imagenette", type=lambda text: Path(text).resolve())
    parser.add_argument(
        "--only",
        nargs="+",
        choices=tuple(SECTIONS),
        default=HERE,
        metavar="FOLDER",
        help=f"of {', '.join(SECTIONS)}; by default all but those for ARM",
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after about so many seconds")
    parser.add_argument("--timing", type=float, default=250, help="seconds of these that are kept for timing")
    parser.add_argument("--streams", type=int, default=1, help="processes that train at the same time")
    parser.add_argument("--stopwatch", help="of targets on this machine; `cpu` for a dry run")
    return parser.parse_known_args()


if __name__ == "__main__":
    main()
