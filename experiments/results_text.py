"""The words of docs/results.md: its sections, what is said about each network, and what was not shown."""

from __future__ import annotations

from dataclasses import dataclass

CIFAR10, IMAGENETTE = "CIFAR-10", "Imagenette at 224 px"


@dataclass(frozen=True)
class Section:
    """A section of the page: one network on one target, measured in the folder of that name."""

    network: str
    title: str
    data: str = CIFAR10
    origin: str = "trained here for 160 epochs"
    stopwatch: str = "cuda"
    weights: str = ""
    remark: str = ""

    @property
    def heading(self) -> str:
        return f"{self.title} on {self.data}" + _TARGETS.get(self.stopwatch, "")

    @property
    def command(self) -> str:
        stopwatch = "" if self.stopwatch == "cuda" else f" --stopwatch {self.stopwatch}"
        weights = f" --weights {self.weights}" if self.weights else ""
        return f"python experiments/equal_latency.py train DATA RUN --network {self.network}{weights}{stopwatch}"


_TARGETS = {"float16": ", in float16", "onnxruntime": ", for ONNX Runtime on a CPU"}
_LITE = "with its weights for ImageNet, fitted to ten classes in six epochs"

SECTIONS = {
    "mobilenet_v2": Section("mobilenet_v2", "MobileNetV2-1.0", remark="""\
More moves do not help this network: where the plans differ, all moves are mostly behind on the test set, and the
hold-out set does not agree on which method is best. The surrogate predicts that all moves are ahead, but it is fitted
to plans that were trained for five epochs; after 60 epochs of fine-tuning the choice of the plan counts less."""),
    "mobilenet_v2_1.4": Section("mobilenet_v2_1.4", "MobileNetV2-1.4"),
    "vgg19_bn": Section("vgg19_bn", "VGG19-BN"),
    "resnet56": Section(
        "resnet56", "ResNet-56", origin="with the weights of github.com/akamaster/pytorch_resnet_cifar10",
        weights="resnet56-4bfd9763.th", remark="""\
More moves help this network, most where it is compressed most. Merging the two 3x3 convolutions of a block into one
5x5 saves less than half of their time, merging three blocks saves nothing in most places, and so the paper's moves do
not reach 35 % at all; dropping a layer saves all of its time. The published weights were trained on all 50,000 images,
among them those of the hold-out set, whose scores are therefore too high."""),
    "efficientnet_lite0": Section("efficientnet_lite0", "EfficientNet-Lite0", IMAGENETTE, _LITE),
    "efficientnet_lite0-on-float16": Section("efficientnet_lite0", "EfficientNet-Lite0", IMAGENETTE, _LITE, "float16"),
    "efficientnet_lite0-on-onnxruntime": Section(
        "efficientnet_lite0", "EfficientNet-Lite0", IMAGENETTE, _LITE, "onnxruntime"
    ),
}  # fmt: skip

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
in its binary layout, RUN a folder for the results, OTHER one with the latency table of another target
(`python experiments/equal_latency.py latency none OTHER --network mobilenet_v2 --stopwatch onnxruntime`, there).

| table of the paper | command here |
| --- | --- |
| accuracy and latency, MobileNetV2-1.0 and -1.4, against DepthShrinker's patterns and its search | `python experiments/equal_latency.py train DATA RUN --network mobilenet_v2`, or `mobilenet_v2_1.4` |
| the same plans on other GPUs | `python experiments/transfer.py RUN OTHER --network mobilenet_v2 --stopwatch cuda`, on that GPU |
| knowledge distillation | the first command; the searches and channel pruning are also trained without it |
| channel pruning | the first command: Torch-Pruning by magnitude and by Taylor expansion, down to the same measured latency |
| VGG19-BN | `python experiments/equal_latency.py train DATA RUN --network vgg19_bn` |
| FLOPs and peak memory | columns of the tables above |
| latency on a CPU | `python experiments/transfer.py RUN OTHER --network mobilenet_v2 --stopwatch onnxruntime` |
| latency without activations, then merged (Section 5.3) | `python experiments/merging_steps.py RUN --network mobilenet_v2` |"""  # noqa: E501

LIMITS = """\
## What was not shown

- ImageNet and TensorRT were not available. This compresses a network with both:

      depthfold compress torchvision:mobilenet_v2 --weights DEFAULT --data imagefolder:IMAGENET \\
          --input 3x224x224 --target tensorrt --budget 60% --run out

- The fine-tuning is shorter than that of the paper, whose networks for ImageNet were trained for 180 epochs.
- The plans were chosen with importances of one seed."""
