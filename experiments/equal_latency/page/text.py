"""The words of docs/results.md: its sections, what is said about each network, and what was not shown."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.subjects import ON_GPU

CIFAR10, IMAGENETTE = "CIFAR-10", "Imagenette at 224 px"


@dataclass(frozen=True)
class Section:
    """A section of the page: one network on one target, measured in the folder of that name.

    `weights` and `trained_plans` are options of compare.py. `holdout` is False if the original was
    trained on the hold-out images. `latency` and `surrogate` say what these cost, if this run did not measure it.
    `variants` is another folder in which other recipes were tried. `seeds` are those of the searches, if they are not
    those of the network.
    """

    network: str
    title: str
    data: str = CIFAR10
    origin: str = "trained here for 160 epochs"
    stopwatch: str = "cuda"
    weights: str = ""
    trained_plans: str = ""
    holdout: bool = True
    latency: str = ""
    surrogate: str = ""
    variants: str = ""
    seeds: int | None = None
    remark: str = ""

    @property
    def heading(self) -> str:
        return f"{self.title} on {self.data}" + _TARGETS[self.stopwatch]

    @property
    def name(self) -> str:
        return self.title + _TARGETS[self.stopwatch]

    @property
    def measured_on(self) -> str:
        """The target in the words of the README's table."""
        return _SHORT_TARGETS[self.stopwatch]

    @property
    def options(self) -> tuple[str, ...]:
        """The options of compare.py beyond the network and the stopwatch."""
        given = {"--weights": self.weights, "--trained-plans": self.trained_plans, "--seeds": self.seeds}
        return tuple(text for option, value in given.items() if value for text in (option, str(value)))

    def command(self, folder: str) -> str:
        """The command that measures the section, which is in the folder of that name."""
        data = "--imagenette IMAGENETTE" if self.data == IMAGENETTE else "--cifar10 CIFAR10"
        turns = "" if self.stopwatch in ON_GPU else "  # alternating with the ARM machine: see --help"
        return f"python -m experiments.equal_latency RUNS {data} --only {folder}{turns}"


_TARGETS = {
    "cuda": ", in TF32 on the H200",
    "float16": ", in float16 on the H200",
    "onnxruntime": ", for ONNX Runtime on two ARM cores",
}
_SHORT_TARGETS = {
    "cuda": "H200, TF32",
    "float16": "H200, float16",
    "onnxruntime": "ARM, float32",
}
_LITE = "its weights for ImageNet, fine-tuned to ten classes in six epochs"
_METHODS = "experiments/importance_methods"

SECTIONS = {
    "mobilenet_v2": Section(
        "mobilenet_v2", "MobileNetV2-1.0", surrogate=f"see [importance-methods](../{_METHODS}/README.md)",
        weights=f"{_METHODS}/base.safetensors", trained_plans=f"{_METHODS}/surrogate-brief-divergence.json",
        remark="""\
Dropping does not help this network. LayerMerge's rule is 0.3 and 0.4 points ahead of all moves at 80 and 35 %, slightly
more than seeds explain, and level at 65 and 50 %. The paper's moves are level with all moves. The hold-out set does not
agree on which method is best. The surrogate predicts that all moves are ahead. It is fitted to plans that were trained
for five epochs and that drop nothing, so it was not tested where all moves differ. Without a surrogate, LayerMerge's
rule is 0.2 to 0.3 points ahead of all moves at 80, 65 and 50 %, about as much as seeds explain.

The search space of all moves was extended after the other methods had been trained: a dropped inverted residual no
longer comes with an inserted activation. The plans for 65 % and less changed, and were measured again; their accuracy
did not change beyond noise.

Merging makes depth-wise convolutions dense, so a network with half the latency can have more FLOPs and parameters than
the original. The stem and the second stage of this MobileNetV2 have no stride, because the images are small.

All moves are 0.7, 1.0 and 0.5 points ahead of DepthShrinker's patterns B, C and D, with one seed each, and level with
A. The patterns were found for ImageNet and other GPUs. DepthShrinker's search on this dataset is level with all moves
where it keeps 12 and 9 of 17 blocks, at 1.19 and 1.26 times the speed. Where it keeps 7, at 1.57 times, it is 0.4
points behind, slightly more than seeds explain.

Channel pruning with a uniform width and with AMC's channels is level with all moves, at 1.24 and 1.32 times the speed.

At 65 %, channel pruning by both criteria is 0.4 points behind, about as much as seeds explain; on the hold-out set,
Taylor expansion is 0.4 points ahead there. At 50 % they are 1.9 (magnitude) and 3.8 points (Taylor expansion) behind.
At 80 % they are 0.1 points behind and 0.3 ahead, which is within noise. At 35 % pruning by magnitude loses 4.8 points,
and all moves lose 1.4; by Taylor expansion, pruning does not reach 35 % in 60 steps. The control has one plan for 80
and 65 %, which is faster than both, and one for 50 and 35 %.""",
    ),
    "mobilenet_v2_1.4": Section(
        "mobilenet_v2_1.4", "MobileNetV2-1.4",
        remark="""\
All moves and the paper's moves are level. Channel pruning by magnitude is level with them at 80, 65 and 50 %, and 1.6
points behind at 35 %. By Taylor expansion it is level at 80 and 65 % and 1.3 points behind at 50 %, and it does not
reach 35 % in 60 steps. With a uniform width it is level at 80 %. On the hold-out set, no method is ahead at all
budgets, and pruning by magnitude is 0.4, 0.4, 0.9 and 0.9 points behind all moves. The network by Taylor expansion for
80 % has 74 % of the latency. So within 0.2 points of the fine-tuned original, pruning is 1.35 times as fast, and
depthfold, which has no network between 1.25 and 1.55 times, 1.25 times.

LayerMerge's rule is level with all moves at 80, 65 and 50 %, and 0.6 points behind at 35 %, where it is as accurate as
all moves on the hold-out set. The control has one plan for 80 and 65 %, which is faster than both and 0.8 points behind
all moves at that latency, and one for 50 %, 1.4 points behind. Its plan for 35 % takes 20 % of the latency, and is 0.9
points behind all moves there.

At 5 times the speed, DepthShrinker's pattern F is 1.8 points ahead of all moves. F merges each inverted residual into
one convolution, drops nothing and keeps 17 activations; the plan of all moves drops eight branches and keeps 8
activations. The surrogate predicts the opposite, 77 % for F and 87 % for all moves. Probably a block that merges costs
much in the few steps in which importances are measured, and less after 60 epochs. Of 11 pairs of plans that are about
equally fast and not equally accurate, it orders only this one wrongly ([which plan is better](#which-plan-is-better)
has what was tried). Of DepthShrinker's other patterns, A, C and D are level with all moves, and B and E are 0.6 and 0.5
points behind, with one seed each. DepthShrinker's search is level with all moves where it keeps 12, 9 and 7 of 17
blocks, at 1.09, 1.24 and 1.54 times the speed.

All of this was measured from a second training of the original, because the weights of the first were not kept
(mobilenet_v2_1.4-first-fit, 93.68 %); the importances and the surrogate are those of the first. From the first, five of
these plans were 0.1 to 0.5 points more accurate, and the largest speed-up within 0.2 points was 2.03 times, or 1.54
times against the fine-tuned original (93.96 %).""",
    ),
    "vgg19_bn": Section(
        "vgg19_bn", "VGG19-BN",
        remark="""\
Only plans that drop layers save more than a quarter of the latency. In the latency table, merging the first two
convolutions of a stage into a 5x5 saves 19 to 33 % of their time in the first four stages. Elsewhere it costs time:
between equal numbers of channels, a 5x5 convolution has 1.4 times the FLOPs of two 3x3 convolutions. All moves drop up
to three of the four convolutions of a stage. One has to stay in each of the five stages, so the fastest plan has 39 %
of the latency, and none meets 35 %.

Channel pruning by Taylor expansion is 1.2 and 2.4 points behind all moves at 65 and 50 %. By magnitude it does not
reach 50 % with 70 % of the channels removed. At 80 % both kinds are 0.4 points behind, and at 65 % magnitude is 0.1
points ahead, which is within noise. LayerMerge's rule chooses the same plan at 50 %, and is level at 80 and 65 %. The
control is 1.0 points behind the paper's moves at 80 %.

The original fine-tuned with the same recipe is 0.6 points better than the original on the test set, and 0.2 points
worse on the hold-out set.""",
    ),
    "resnet56": Section(
        "resnet56", "ResNet-56", origin="the weights of github.com/akamaster/pytorch_resnet_cifar10",
        weights="resnet56-4bfd9763.th", holdout=False,
        remark="""\
At 80 %, channel pruning is 0.2 and 0.3 points behind all moves, which is within noise; its networks for 80 % have 68
and 73 % of the latency. At 65 % it is 0.8 and 1.5 points behind, and it does not reach 50 % in 60 steps. The shortcuts
of this network add zero channels, so the channels between the blocks of all three stages can only be removed together,
8 of 16, 32 and 64 in one step, and no layer goes below 8. Pruning that handles such shortcuts may do better. At 80 and
65 % the searches are level.

All moves are ahead where the network is compressed most, by dropping residual branches: at 50 % both seeds are above
those of the paper's moves, and at 35 % both are more than 0.8 points above those of LayerMerge's rule. At 50 % and
below, their plans merge almost nothing. In the latency table, merging the two 3x3 convolutions of a block into a 5x5
saves 17 to 45 % of their time, but merging three blocks is slower than not merging them in most places, so merging
alone does not reach 35 %.

The control, with one seed, is as accurate as the original at 1.9 times the speed, and as all moves at that latency
within noise. At 2.1 times the speed it is 0.9 points behind. So measured importances do not help this network above
half of its latency, as far as one seed can tell.

The published weights were trained on all 50,000 training images, so there is no hold-out set: the importances and the
surrogate come from images of which the original classifies 99.98 % correctly. The plans are those of a surrogate fitted
by least squares (tau 0.96). To the same 24 trained plans, depthfold now fits by ranks (tau 0.99). The term per block is
a fifteenth of that there, and all moves have other plans for 50 and 35 %, which were not trained.""",
    ),
    "efficientnet_lite0": Section(
        "efficientnet_lite0", "EfficientNet-Lite0", IMAGENETTE, _LITE, latency="67, for the last 39 entries",
        remark="""\
Channel pruning by magnitude is 1.4 points behind all moves at 65 %. For 80 and 50 % it has 97.76 and 95.06 %, but those
networks were not timed. By Taylor expansion it is 6.1 points behind at 65 %. It removes 88 % of the parameters there,
but few channels of the first layers, which take most of the time: the peak memory falls by 16 % only. LayerMerge's rule
and the paper's moves are 0.3 points behind at 65 and 50 %, which is little for one seed. The control for 65 % takes
55 % of the latency, and is 1.8 points behind all moves there. The plan for 80 % only merges four layers, at the largest
resolution, into one. The network then has 1.5 times the FLOPs and less than half of the peak memory.

These plans were found with a surrogate fitted by least squares. Its term per block is seven times as large as in the
fit by ranks, which was used in float16 and for ARM.

The original was trained three times with the same recipe, because the weights of the earlier trainings were not kept;
the test accuracies are 98.62, 98.24 and 98.47 %. The networks with a dagger start from the third, the others from the
second, which is the original of the table. A difference between networks of two originals is not tested for noise, and
is not in the summary. The steps of pruning by Taylor expansion were picked with the second original; from the third
they take 82 and 69 % of the latency instead of 80 and 65 %, and the second of them is the last step.""",
    ),
    "efficientnet_lite0-on-float16": Section(
        "efficientnet_lite0", "EfficientNet-Lite0", IMAGENETTE, _LITE, "float16",
        remark="""\
The searches are level at 65 and 50 %. At 35 % the paper's moves, which cannot drop layers, are 2.1 points behind;
LayerMerge's rule is level. Only the latency is measured in float16: accuracies are those of the same network in TF32.
All networks start from the third training of the original (see the section for ARM). It is not the original of the TF32
section. From a fourth (efficientnet_lite0-on-float16-fourth-fit, 98.37 %), the plans of all moves for 65, 50 and 35 %
have 98.50, 98.27 and 97.58 %.""",
    ),
    "efficientnet_lite0-on-onnxruntime": Section(
        "efficientnet_lite0", "EfficientNet-Lite0", IMAGENETTE, _LITE, "onnxruntime",
        variants="efficientnet_lite0-on-onnxruntime-earlier", seeds=2,
        remark="""\
Channel pruning by magnitude is 0.7, 1.6, 3.1 and 1.2 points behind all moves at 80, 65, 50 and 35 %; on the hold-out
set it is 0.6 points ahead at 80 %. LayerMerge's rule is level with all moves on the test set; on the hold-out set it is
0.7 points ahead at 80 % and 0.5 behind at 50 %, where the seeds of all moves differ by 0.7. The paper's moves do not
reach 65 %, and at 80 % they are 4.1 points behind all moves; the control is 4.7 points behind. At 80 % all moves only
drop; at 65 and 50 % they also merge one convolution away, at 35 % four: see the table of steps below. Merging makes
depth-wise convolutions dense, which pays only in some places on this CPU, so merging everything possible is slower than
not merging. The original took 27.5 to 27.6 ms when it was timed with all moves at 35 %, the control and the fine-tuned
original, and 28.3 to 29.2 ms with the others, on another day.

Fine-tuned for 180 epochs, seed 0 of all moves at 65 % loses 0.1 points instead of 0.3, and 0.2 instead of 0.3 on the
hold-out set. Both gains are within noise. No other network was fine-tuned for that long, so the tables and the
differences above are without this one.

The surrogate is fitted by ranks. In a fit by least squares, the term per block is seven times as large, because the
plans that lost most of their accuracy decide that fit ([solver.md](solver.md#the-fitted-surrogate)). With that fit
(efficientnet_lite0-on-onnxruntime-least-squares, the same original), all moves are as accurate as with ranks, and have
the same plan at 35 %. LayerMerge's rule is as accurate at 80 %, and 1.7, 2.9 and 0.6 points less accurate than with
ranks at 65, 50 and 35 %.

The search was changed after a comparison on ARM in which all moves were behind LayerMerge's rule at all budgets, by
0.3, 0.1, 0.3 and 1.9 points at 80, 65, 50 and 35 % (efficientnet_lite0-on-onnxruntime-earlier: earlier importances, an
earlier surrogate, dropped blocks with an inserted activation, the second training of the original, one seed). At 35 %,
LayerMerge's rule had 92.64 % at 33 % of the latency there, which is 0.7 points ahead of all moves of this table.

In all sections of EfficientNet-Lite0, 134 of the 3,925 test images are from ImageNet's validation set and the others
from its training set. The original was trained on those, so long fine-tuning may lower the accuracy on them.

The learning rate and the weight of the distillation are the best of four pairs, by the hold-out accuracy of the earlier
network of all moves at 65 % after 20 epochs. Ten more recipes were then tried with this network for 60 epochs, five of
them with features. None had a higher hold-out accuracy; four of those with features had a higher accuracy on the test
set, which is how they were noticed. `features=2` was then tried for the nine networks that had been trained without it,
and is used for all because it raises the mean hold-out accuracy. Of these trainings, only the nine were kept.

The original was trained three times with the same recipe, because the weights of the earlier trainings were not kept;
the test accuracies are 98.62, 98.24 and 98.47 %. All networks of the table start from the third. The importances and
the surrogate, which was fitted to plans for the H200, come from the second.""",
    ),
}  # fmt: skip

TITLE = """\
# Results

Methods at equal latency budgets. Generated by `make results` from the measurements in
[experiments/equal_latency](../experiments/equal_latency/README.md), which says what the commands below need; do not
edit."""

SUMMARY = """\
## Summary

- On an H200, with PyTorch and large batches, networks become about 2 times as fast within 0.2 points of the original,
  but MobileNetV2-1.4 only 1.55 times. Within 0.2 points of the original fine-tuned with the same recipe, the fairer
  comparison, they become 1.25 to 2.01 times as fast. From an earlier training of its original, MobileNetV2-1.4 had 2.03
  and 1.54 times with the same plans, so such figures of one seed are uncertain.
- EfficientNet-Lite0 for ARM becomes 1.56 times as fast at a loss of 0.3 points, or of 0.1 points after 180 epochs
  instead of 60 (one seed, within noise). Against the fine-tuned original, it loses 0.5 and 0.3 points. No other network
  was fine-tuned for that long. Within 0.2 points of either original it is 1.27 times.
- The better kind of channel pruning is level with all moves on MobileNetV2-1.4 at 80, 65 and 50 % of the latency, on
  MobileNetV2-1.0 and VGG19-BN at 80 and 65 %, and on ResNet-56 at 80 %. Within 0.2 points of the fine-tuned original of
  MobileNetV2-1.4, pruning is 1.35 times as fast, and depthfold, which has no network between 1.25 and 1.55 times, 1.25
  times. Elsewhere, the better kind is up to 1.9 points behind, and where only one can be compared, up to 3.1 points (by
  magnitude, on ARM). On VGG19-BN, ResNet-56 and EfficientNet-Lite0, the conditions were unfavourable to pruning
  ([limitations](#limitations)).
- DepthShrinker's search on both MobileNetV2 networks is level with depthfold at 1.09 to 1.54 times the speed, and 0.4
  points behind at 1.57 times. Its published patterns are level or behind, except at 5 times the speed: there, pattern F
  of MobileNetV2-1.4 is 1.8 points ahead of depthfold.
- LayerMerge's rule is level with all moves in most places, 0.3 and 0.4 points ahead on MobileNetV2-1.0 at 80 and 35 %,
  and 0.6 and 1.2 points behind on MobileNetV2-1.4 and ResNet-56 at 35 %.
- On VGG19-BN, ResNet-56 and ARM, most of the speed-up comes from dropping layers and branches, which the paper does not
  do. On both MobileNetV2 networks, dropping gains nothing over the paper's moves beyond noise.
- On ResNet-56, a plan from constant importances (one seed, 1.9 times as fast) is as accurate as all moves are at that
  latency.
- Plans that mostly drop layers can carry over to other targets: those of VGG19-BN and ResNet-56 for the H200 at 50 %
  are 3.67 and 1.50 times as fast on two ARM cores, and that of EfficientNet-Lite0 for ARM at 65 % is 1.48 times as fast
  on two x86 cores. Those of MobileNetV2-1.0 and EfficientNet-Lite0 for the H200 are slower than the original on CPUs at
  some budgets.
- Not measured: ImageNet, TensorRT, torch.compile, plans fine-tuned for x86 CPUs, small batches on a GPU, and other GPUs
  ([limitations](#limitations)).

An empty cell was not measured, or is a method for other networks. "None": all measured networks of the method lost
more. "So far": not all networks of the method were trained and timed. "Other original": not comparable, because the
method was fine-tuned from another training of the original."""

METHOD = """\
## How it was measured

- Every method starts from the same trained network (but see EfficientNet-Lite0 in TF32, where there are two).
  All compressed networks are fine-tuned with the same recipe, with the original as their teacher, then merged. One
  network for ARM was also fine-tuned for longer. The recipe for CIFAR-10 is that of
  [importance-methods](../experiments/importance_methods/README.md) with 60 epochs instead of 12.
- A budget is a share of the original's latency: 80, 65, 50 or 35 %, so the speed-ups are near 1.25, 1.5, 2 and 2.9.
  Each method uses its best plan whose predicted latency meets the budget. Channel pruning takes up to 60 steps, 40 on
  VGG19-BN and EfficientNet-Lite0, and the first step whose measured latency meets the budget is used. The tables show the measured latency, a median. The
  original is timed again in turn with every network, with its batch norms folded, too; "times as fast" compares those
  two. The row of the original has its median latency.
- The standard deviation between seeds of one plan is 0.16 points on MobileNetV2-1.0 and on ResNet-56 (21 and 11 plans
  with two seeds), and is assumed to be the same for the other networks. A difference in bold is larger than 1.96 times
  its standard deviation due to seeds: 0.44 points between one seed each, 0.31 between means of two. Of equally good
  networks, about one pair in twenty would be in bold, too. The sampling error of the test set is not in this: about
  0.25 points for an accuracy on CIFAR-10 and 0.2 on Imagenette, less for a difference.
- FLOPs count multiplications and additions, so they are twice the multiply-adds of the paper's tables.
- Accuracies are means over seeds on the test set, in per cent, with individual seeds in parentheses. A slash separates
  two trainings with the same seed, which need not be equal on a GPU. The hold-out set is a tenth of the training
  images, on which no network was trained (but see ResNet-56). Importances were measured and the surrogate was fitted on
  it, so it is not a second test set.
- The searches maximise the score that a surrogate predicts, which is fitted to 24 briefly trained plans
  ([solver.md](solver.md#the-fitted-surrogate)), or without a surrogate the sum of importances. The importances are
  those of the method "brief", the default. `depthfold compress --surrogate` has the same objective, fitted to 12 plans;
  without `--surrogate`, it is the sum of importances. ResNet-56 and EfficientNet-Lite0 in TF32 were measured before the
  surrogate could be fitted by ranks.

| method | what it may do |
| --- | --- |
| depthfold, the paper's moves | remove activations, merge: the default of `--moves` |
| depthfold, all moves | also drop layers and residual branches: `--moves drop-layers --moves drop-branches` |
| LayerMerge's rule | LayerMerge's search space: drop layers, merge every block into one convolution (S = B). Tables, objective and training are depthfold's, not those of LayerMerge as published ([baselines.md](baselines.md)) |
| control | the paper's moves, with the same importance for every block ([baselines.md](baselines.md)) |
| DepthShrinker, channel pruning | see [baselines.md](baselines.md). DepthShrinker's search trains its gates for 10 epochs, with costs from the measured latency table and the original as its teacher |"""  # noqa: E501

PAPER = """\
## The paper's tables

The paper measured on ImageNet and on 100 of its classes: MobileNetV2 with TensorRT in float32 at batch 128 on four older
GPUs, with PyTorch on one of them and on a CPU; VGG19-BN with PyTorch at batch 64. Its MobileNetV2-1.0 for ImageNet goes
from 72.89 to 72.83 % at 1.41 times the speed with TensorRT and 1.62 times with PyTorch (RTX 2080 Ti). That is not
comparable with the figures here, because this was changed:

- CIFAR-10, because ImageNet was not available: images of 32x32, so the stem and the second stage of MobileNetV2 have no
  stride. PyTorch with CUDA graphs in TF32 on an H200, at batch 512.
- Importances by the method "brief" and a fitted surrogate, instead of one epoch per block and a normalisation by alpha.
- Every network of the tables is distilled, for 60 epochs. In the paper, networks for ImageNet are trained for 180
  epochs, and only those of one table are distilled.

CIFAR10 is this dataset in its binary layout, and RUNS a folder for the results. OTHER is a folder with the latency table
of another target, measured there with `python -m experiments.equal_latency.compare latency none OTHER --network mobilenet_v2
--stopwatch TARGET`, where TARGET is `cuda`, `onnxruntime` or `openvino`. [Not measured yet](#not-measured-yet) has
details.

| table of the paper | measured here | command here |
| --- | --- | --- |
| MobileNetV2-1.0 and -1.4 against DepthShrinker's patterns | yes | `python -m experiments.equal_latency RUNS --cifar10 CIFAR10 --only mobilenet_v2 mobilenet_v2_1.4` |
| against DepthShrinker's search | yes: 12, 9 and 7 blocks of both | the same |
| against channel pruning | uniform width, AMC for 1.0, and Torch-Pruning | the same; not MetaPruning, whose channel counts were not published |
| knowledge distillation | with and without, all moves on MobileNetV2-1.0 | the same, of MobileNetV2-1.0 with all moves and channel pruning by Taylor expansion |
| VGG19-BN | yes | `python -m experiments.equal_latency RUNS --cifar10 CIFAR10 --only vgg19_bn` |
| FLOPs and peak memory | yes | columns of the tables above |
| the same plans on other GPUs, latency on a CPU | on CPUs, no other GPU | `python -m experiments.equal_latency.transfer RUNS/mobilenet_v2 OTHER --network mobilenet_v2 --stopwatch TARGET` |
| latency without activations, then merged (Section 5.3) | yes | the first command, or `python -m experiments.equal_latency.merging_steps RUNS/mobilenet_v2 --network mobilenet_v2 --stopwatch onnxruntime` on a CPU |"""  # noqa: E501

LIMITS = """\
## Limitations

- The networks with the largest speed-up within 0.2 points were selected by their accuracy on the test set; the summary
  also has those that the hold-out set selects.
- Most networks have one seed, and the plans were chosen with importances of one seed.
- The search was changed after earlier comparisons had been scored on the test sets: the score of the method "brief"
  ([importance-methods](../experiments/importance_methods/README.md)), dropped branches without an inserted activation,
  the fit by ranks (see the remarks on MobileNetV2-1.0 and on EfficientNet-Lite0 for ARM).
- The recipe of EfficientNet-Lite0 was tuned with a network of all moves, and used for all other methods without a
  change. That may favour depthfold.
- Channel pruning takes up to 60 steps, removes at most 90 % of the channels of a layer, leaves at least 8, and is
  fine-tuned once, at the end. Pruning and fine-tuning in turns may reach higher accuracies.
- On VGG19-BN and EfficientNet-Lite0, channel pruning takes up to 40 steps, removes at most 70 % of the channels of a
  layer, and rounds what is kept down to a multiple of 8 in every step, as Torch-Pruning does. If layers are narrow, the
  first steps then remove much more than intended: on EfficientNet-Lite0, the first two by magnitude remove 22 % of the
  FLOPs, so its accuracies are probably too low. On VGG19-BN, whose layers are wider, the effect was not measured. On
  the other networks, what is kept is rounded to the nearest multiple, as `prune_channels` now does.
- On ResNet-56, one step of channel pruning removes half of the channels of the first stage, because the channels
  between all blocks are tied together. The accuracies of channel pruning there may be too low.
- On MobileNetV2-1.0 and -1.4, the first step by Taylor expansion removes 31 % of the FLOPs, because a fifth of their
  batch norm weights are close to zero.
- The weights of the originals of VGG19-BN and EfficientNet-Lite0 were not kept. The commands train a new original, and
  so give other accuracies than the tables.
- The speed-ups are those of PyTorch with CUDA graphs. torch.compile (TorchInductor) makes the original faster, too: on
  MobileNetV2-1.0 at 224 px in TF32 and batch 128, by a factor of 1.5, and the fastest of all plans is then 4.5 times as
  fast instead of 5.9 ([latency-h200](../experiments/latency_h200/README.md)). No network of these tables was compiled.
- No plan made for an x86 CPU was fine-tuned; plans for other targets were timed there. Small batches on a GPU and other
  GPUs were not measured.
- ImageNet and TensorRT were not available. This should compress a network with both; it was never run:

      depthfold compress torchvision:mobilenet_v2 --weights DEFAULT --data imagefolder:IMAGENET \\
          --target tensorrt --budget 60% --surrogate --recipe mobilenetv2-1.0 --run out

- Of the 3,925 test images of Imagenette, 3,791 are in the training set of ImageNet, on which EfficientNet-Lite0 was
  trained before. Its accuracies are not those on new images.
- The fine-tuning is shorter than that of the paper, whose networks for ImageNet were trained for 180 epochs.
- The largest speed-ups are relative to the original before any fine-tuning. Where fine-tuning improves the original as
  well, the second speed-up, or the one in parentheses, is the fairer one.
- EfficientNet-Lite0 for ARM at 80 % loses nothing on the test set, but 0.7 points on the hold-out set (one seed).
  Against the fine-tuned original it loses 0.2 and 1.1 points."""
