"""Compress the backbone of a detector with `at=`, and leave the rest of it as it is.

    python examples/detector_backbone.py

It takes half a minute. A detector cannot be traced as a whole if its forward depends on the values that it finds, but
its backbone can. For the detectors of torchvision, use at="backbone" (SSD, SSDLite) or at="backbone.body" (the others):

    traced = df.trace(torchvision.models.detection.fasterrcnn_mobilenet_v3_large_fpn(), images, at="backbone.body")
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import depthfold as df
from depthfold.training import FunctionTask, Step, train

SIZE, STRIDE = 32, 4
SPLITS = {"train": (0, 512), "holdout": (1, 64), "test": (2, 100)}  # seed and number of images


def layer(before: int, after: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU())


class Detector(nn.Module):
    """A detector of one kind of object: each cell of a grid has a score and the size of a box around it."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            layer(1, channels, 2), layer(channels, channels), layer(channels, channels, 2), layer(channels, channels),
            layer(channels, channels),
        )  # fmt: skip
        self.head = nn.Conv2d(channels, 3, 1)

    def maps(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images))

    def forward(self, images: list[Tensor]) -> list[Tensor]:
        """Return the boxes (left, top, right, bottom) of each image. Their number depends on the values."""
        found = []
        for maps in self.maps(torch.stack(images)):
            cells = torch.nonzero(maps[0] > 0) if maps[0].max() > 0 else torch.nonzero(maps[0] == maps[0].max())
            centres = STRIDE * (cells.flip(1) + 0.5)
            halves = STRIDE * maps[1:, cells[:, 0], cells[:, 1]].exp().T
            best = maps[0][cells[:, 0], cells[:, 1]].argsort(descending=True)
            found.append(torch.cat((centres - halves, centres + halves), 1)[best])
        return found


def images_and_boxes(split: str) -> tuple[Tensor, Tensor]:
    """Return made-up images of one bright box each, and the boxes."""
    seed, number = SPLITS[split]
    random = torch.Generator().manual_seed(seed)
    sizes = torch.randint(6, 17, (number, 2), generator=random)
    corners = (torch.rand(number, 2, generator=random) * (SIZE - sizes)).long()
    boxes = torch.cat((corners, corners + sizes), 1)
    images = 0.5 * torch.randn(number, 1, SIZE, SIZE, generator=random)
    for image, (left, top, right, bottom) in zip(images, boxes.tolist(), strict=True):
        image[0, top:bottom, left:right] += 1.5
    return images, boxes.float()


DATA = {split: images_and_boxes(split) for split in SPLITS}


def loss(model: nn.Module, step: Step) -> Tensor:
    """Return the loss of the scores, with 1 in the cell at the centre of a box, and of the sizes in that cell."""
    images, boxes = DATA["train"]
    chosen = torch.randint(len(images), (step.recipe.batch,), generator=step.generator("batch"), device=step.device)
    images, boxes = (part[chosen.cpu()].to(step.device) for part in (images, boxes))
    maps, each = model.maps(images), torch.arange(len(images), device=step.device)
    columns, rows = ((boxes[:, :2] + boxes[:, 2:]) / 2 / STRIDE).long().T
    wanted = torch.zeros_like(maps[:, 0])
    wanted[each, rows, columns] = 1
    halves = (boxes[:, 2:] - boxes[:, :2]) / 2 / STRIDE
    scores = F.binary_cross_entropy_with_logits(maps[:, 0], wanted, pos_weight=torch.tensor(8.0))
    return scores + F.l1_loss(maps[each, 1:, rows, columns], halves.log())


def score(model: nn.Module, split: str) -> float:
    """Return the mean intersection over union of the best box of each image and the true one, in per cent."""
    images, boxes = DATA[split]
    device = next(model.parameters()).device
    best = torch.stack([found[0] for found in model(list(images.to(device)))]).cpu()
    low, high = torch.maximum(best[:, :2], boxes[:, :2]), torch.minimum(best[:, 2:], boxes[:, 2:])
    shared = (high - low).clamp(min=0).prod(1)
    areas = sum((box[:, 2:] - box[:, :2]).prod(1) for box in (best, boxes))
    return 100 * (shared / (areas - shared)).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="onnxruntime", help="the runtime to make the backbone fast on")
    parser.add_argument("--budget", default="85%", help="the latency that the backbone may have")
    given = parser.parse_args()

    torch.manual_seed(0)
    task = FunctionTask(loss=loss, score=score, identity="boxes, version 1")
    detector = Detector()
    train(detector, task, df.Recipe(steps=100, batch=16, lr=0.05, warmup=5))  # your detector is already trained

    example = list(DATA["train"][0][:1])  # the inputs of the whole detector
    traced = df.trace(detector, (example,), at="backbone")
    print(traced)
    latency = df.measure_latency(traced, given.target, space="full")
    few = df.Recipe(steps=2, batch=16)
    importance = df.measure_importance(traced, task, few, method="recalibrated", space="full")
    frontier = df.solve(latency, importance, network=traced.network)
    plan = df.choose(traced, frontier, given.budget, given.target)
    student = df.finetune(df.rewrite(traced, plan), task, df.Recipe(steps=30, batch=16, lr=0.02, warmup=5))
    merged = df.merge(student)  # a Detector with a shallower backbone
    print(plan)
    print(f"IoU before {score(detector.eval(), 'test'):.1f} %, after {score(merged.eval(), 'test'):.1f} %")
    print(df.verify(student, merged))


if __name__ == "__main__":
    main()
