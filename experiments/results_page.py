"""Write docs/results.md, its pictures and the results in the README from the committed results: make results

python experiments/results_page.py [FOLDER]        # the repository unless FOLDER is given; README.md must be there
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from equal_latency_results import OURS, TITLES, Measured, NetworkResults, difference, load
from results_analyses import analyses

SHARES = ("80%", "65%", "50%", "35%")
NETWORKS = {
    "mobilenet_v2": ("MobileNetV2-1.0", "trained here for 160 epochs"),
    "mobilenet_v2_1.4": ("MobileNetV2-1.4", "trained here for 160 epochs"),
    "vgg19_bn": ("VGG19-BN", "trained here for 160 epochs"),
    "resnet56": ("ResNet-56", "with the weights of github.com/akamaster/pytorch_resnet_cifar10"),
}
PLAIN = "plain sum"  # the end of the names of methods that maximise the sum of importances
REMARKS = {
    "mobilenet_v2": """\
More moves do not help this network: where the plans differ, all moves are mostly behind on the test set, and the
hold-out set does not agree on which method is best. The surrogate predicts that all moves are ahead, but it is fitted
to plans that were trained for five epochs; after 60 epochs of fine-tuning the choice of the plan counts less.""",
    "resnet56": """\
More moves help this network, most where it is compressed most. Merging the two 3x3 convolutions of a block into one
5x5 saves less than half of their time, merging three blocks saves nothing in most places, and so the paper's moves do
not reach 35 % at all; dropping a layer saves all of its time. The published weights were trained on all 50,000 images,
among them those of the hold-out set, whose scores are therefore too high.""",
}  # fmt: skip
CLOSE = 0.2  # points below the original that count as none

INTRODUCTION = """\
# Results

Methods at the same measured latency. Made by `make results` from the measurements in
[experiments/equal-latency](../experiments/equal-latency/README.md); do not edit.

Every method starts from the same trained network. What it makes of it is fine-tuned alike, merged if there is
something to merge, scored on the test set, and timed in the same rounds as the original. Accuracies are means over
seeds, in per cent; the values are in brackets. Latencies are medians. The hold-out set has 5,000 images on which no
network was trained, but importances were measured. Where the two sets disagree about the better of two methods, the
difference is smaller than these sets and seeds can show.

The searches maximise the score that a surrogate predicts, which is fitted to 24 briefly trained plans
([solver.md](solver.md#the-fitted-surrogate)), or without a surrogate the sum of importances."""

PAPER = """\
## The paper's tables

The paper measured on ImageNet with TensorRT in float32 on four older GPUs, at batch 128. Here: CIFAR-10, whose images
fit the machines that were available; PyTorch with CUDA graphs in TF32, at a batch that fills an H200. DATA is CIFAR-10
in its binary layout, RUN a folder for the results.

| table of the paper | command here |
| --- | --- |
| accuracy and latency, MobileNetV2-1.0 and -1.4, against DepthShrinker's patterns and its search | `python experiments/equal_latency.py train DATA RUN --network mobilenet_v2`, or `mobilenet_v2_1.4` |
| the same plans on other GPUs | `python experiments/equal_latency.py profile DATA RUN --network mobilenet_v2 --stopwatch float16`, on that GPU |
| knowledge distillation | the first command; the searches and channel pruning are also trained without it |
| channel pruning | the first command: Torch-Pruning by magnitude and by Taylor expansion, down to the same measured latency |
| VGG19-BN | `python experiments/equal_latency.py train DATA RUN --network vgg19_bn` |
| FLOPs and peak memory | columns of the tables above |
| latency on a CPU | `python experiments/equal_latency.py profile DATA RUN --network mobilenet_v2 --stopwatch onnxruntime` |
| latency without activations, then merged (Section 5.3) | `python experiments/merging_steps.py RUN --network mobilenet_v2` |"""  # noqa: E501

LIMITS = """\
## What was not shown

- ImageNet and TensorRT were not available. This compresses a network with both:

      depthfold compress torchvision:mobilenet_v2 --weights DEFAULT --data imagefolder:IMAGENET \\
          --input 3x224x224 --target tensorrt --budget 60% --run out

- The fine-tuning is shorter than that of the paper, whose networks for ImageNet were trained for 180 epochs.
- The plans were chosen with importances of one seed."""


def page() -> str:
    """Return the text of docs/results.md."""
    found = [results for name in NETWORKS if (results := load(name)) is not None]
    titles = {name: title for name, (title, _) in NETWORKS.items()}
    parts = [INTRODUCTION, *(_network(results) for results in found), *analyses(titles), _costs(found), PAPER, LIMITS]
    return "\n\n".join(parts) + "\n"


def _network(results: NetworkResults) -> str:
    title, origin = NETWORKS[results.name]
    first = next(one for one in results.measured if one.original is not None)
    assert first.original is not None
    environment, recipe = first.original.environment, results.recipe
    picture = f"pictures/results-{results.name}"
    return "\n".join([
        f"## {title} on CIFAR-10",
        "",
        "<picture>",
        f'  <source media="(prefers-color-scheme: dark)" srcset="{picture}-dark.svg">',
        f'  <img alt="{title}: test accuracy against measured latency, by method" src="{picture}-light.svg">',
        "</picture>",
        "",
        f"The original, {origin}, has {results.base['test']:.2f} % on the test set and takes "
        f"{first.original.latency:.2f} ms per batch of {environment.batch} on one {environment.device} "
        f"({environment.precision}, {environment.runtime}, PyTorch {environment.runtime_version}). "
        f"Fine-tuning: {recipe['epochs']:g} epochs of batch {recipe['batch']}, learning rate {recipe['lr']:g}, "
        f"distillation {recipe['distillation']:g}.",
        "",
        *_table(results),
        "",
        *_headline(results),
        *_differences(results, OURS),
        *_differences(results, f"{OURS}, {PLAIN}"),
        *([REMARKS[results.name], ""] if results.name in REMARKS else []),
        f"    python experiments/equal_latency.py train CIFAR10 RUN --network {results.name}",
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


def readme_row() -> str:
    """Return the row of MobileNetV2-1.0 in the table of the README."""
    results = load("mobilenet_v2")
    assert results is not None
    best = _best(results)
    assert best is not None and best.original is not None and best.profile is not None
    machine = f"{best.original.environment.device}, batch {best.original.environment.batch}"
    before, after = (
        f"{profile.latency:.2f} ms, {score:.2f} %"
        for profile, score in ((best.original, results.base["test"]), (best.profile, best.mean))
    )
    return f"| MobileNetV2-1.0, CIFAR-10 | {machine} | {before} | {after} | **{best.speed_up:.2f} times** |"


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
        lines.append(f"| {NETWORKS[results.name][0]} | " + " | ".join(f"{cell:.0f}" for cell in cells) + " |")
    return "\n".join(lines)


def main(root: Path) -> None:
    from results_plot import draw

    (root / "docs" / "results.md").write_text(page())
    for name, (title, _) in NETWORKS.items():
        if (results := load(name)) is not None:
            draw(results, f"{title} on CIFAR-10", root / "docs" / "pictures")
    readme = root / "README.md"
    readme.write_text(re.sub(r"^\| MobileNetV2-1\.0, CIFAR-10 \|.*$", readme_row(), readme.read_text(), flags=re.M))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1])
