"""Compress your own model with your own data, loss and score: here, a network that segments discs in noisy images.

    python examples/own_model.py --run out/own_model

It takes half a minute. Replace `Segmenter`, `images_and_masks`, `loss` and `score` by your own.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import depthfold as df
from depthfold.training import FunctionTask, Step, train

SIZE = 20
SPLITS = {"train": (0, 512), "holdout": (1, 64), "test": (2, 100)}  # seed and number of images


def layer(before: int, after: int, kernel: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    convolution = nn.Conv2d(before, after, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after), activation())


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.body = nn.Sequential(
            layer(channels, wide, 1), layer(wide, wide, 3), layer(wide, channels, 1, activation=nn.Identity)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Segmenter(nn.Sequential):
    """One number per pixel, above 0 inside a disc."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__(layer(1, channels, 3), Residual(channels), Residual(channels), nn.Conv2d(channels, 1, 1))


def images_and_masks(split: str) -> tuple[Tensor, Tensor]:
    """Return made-up images, and masks that are 1 inside the disc of each image."""
    seed, number = SPLITS[split]
    random = torch.Generator().manual_seed(seed)
    centre = 6 + (SIZE - 12) * torch.rand(number, 2, 1, 1, generator=random)
    radius = 2 + 4 * torch.rand(number, 1, 1, generator=random)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    masks = ((rows - centre[:, 0]) ** 2 + (columns - centre[:, 1]) ** 2 < radius**2).float().unsqueeze(1)
    return masks + torch.randn(masks.shape, generator=random), masks


DATA = {split: images_and_masks(split) for split in SPLITS}


def loss(model: nn.Module, step: Step) -> Tensor:
    """Return the loss of one step. All random numbers come from the step, so that a run can be resumed."""
    images, masks = DATA["train"]
    chosen = torch.randint(len(images), (step.recipe.batch,), generator=step.generator("batch"), device=step.device)
    images, masks = (part[chosen.cpu()].to(step.device) for part in (images, masks))
    outputs, targets = model(images), masks
    if step.teacher is not None:  # the original network, in fine-tuning
        targets = (1 - step.recipe.distillation) * masks + step.recipe.distillation * step.teacher(images).sigmoid()
    return F.binary_cross_entropy_with_logits(outputs, targets)


def score(model: nn.Module, split: str) -> float:
    """Return the intersection over union of the found and the true discs, in per cent. A higher score is better."""
    images, masks = DATA[split]
    device = next(model.parameters()).device
    found, wanted = model(images.to(device)).cpu() > 0, masks > 0
    return 100 * ((found & wanted).sum() / (found | wanted).sum()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", default="out/own_model", help="the folder for tables, checkpoints and the report")
    parser.add_argument("--target", default="onnxruntime", help="the runtime to make the network fast on")
    parser.add_argument("--budget", default="80%", help="the latency that the result may have")
    given = parser.parse_args()

    torch.manual_seed(0)
    task = FunctionTask(loss=loss, score=score, identity="discs, version 1")
    model = Segmenter()
    train(model, task, df.Recipe(steps=40, batch=16, lr=0.1, warmup=5))  # your model is already trained

    options = df.Options(
        importance_method="recalibrated",  # the fastest method; the default is more accurate
        importance_recipe=df.Recipe(steps=2, batch=16),
        recipe=df.Recipe(steps=20, batch=16, lr=0.05, warmup=5),
        exports=(),
    )
    example = DATA["train"][0][:1]
    print(df.trace(model, example))
    done = df.compress(model, task, given.target, given.budget, run=given.run, example_inputs=example, options=options)
    print(done)
    print(done.plan)
    print("Report:", done.folder / "report.html")


if __name__ == "__main__":
    main()
