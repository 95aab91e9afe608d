"""Compress a model of timm on a folder of images.

    python examples/timm_image_folder.py --data imagenet --model mobilenetv2_100 --pretrained --size 224

The folder has the folders train and val, each with a folder per class. Without --data, the example writes a folder of
small made-up images, and trains and compresses a small network. This takes half a minute, and warns that the hold-out
set is small.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import depthfold as df
from depthfold.training import train
from depthfold.vision import import_timm

COLOURS = {"blue": 2, "green": 1, "red": 0}  # the classes of the made-up images, and their channels


def write_images(folder: Path, size: int, per_class: int = 40) -> Path:
    """Write images of noise, in which one channel is brighter than the others, and return their folder."""
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        for name, channel in COLOURS.items():
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            for n in range(per_class):
                pixels = random.integers(0, 192, (size, size, 3), dtype=np.uint8)
                pixels[..., channel] += 40
                Image.fromarray(pixels).save(folder / split / name / f"{n}.png")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="the folder of images")
    parser.add_argument("--model", default="test_efficientnet", help="the name of a model of timm")
    parser.add_argument("--pretrained", action="store_true", help="download the pretrained weights")
    parser.add_argument("--size", type=int, default=32, help="the height and width of an image")
    parser.add_argument("--run", type=Path, default=Path("out/timm"), help="the folder for the results")
    parser.add_argument("--target", default="onnxruntime", help="the runtime to make the network fast on")
    parser.add_argument("--budget", default="90%", help="the latency that the result may have")
    given = parser.parse_args()

    torch.manual_seed(0)
    folder = given.data or write_images(given.run / "images", given.size)
    classes = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
    # With pretrained weights, num_classes must stay that of the weights, in the order of their classes.
    heads = {} if given.pretrained else {"num_classes": len(classes)}
    model = import_timm().create_model(given.model, pretrained=given.pretrained, **heads).eval()
    config = model.pretrained_cfg
    task = df.ClassificationTask.image_folder(
        folder, size=given.size, normalise=(config["mean"], config["std"]), holdout=0.05 if given.data else 0.5
    )
    if given.data is None:  # seconds instead of hours
        train(model, task, df.Recipe(steps=20, batch=16, lr=0.02, warmup=2))
        few = df.Recipe(steps=2, batch=16)
        options = df.Options(
            importance_method="recalibrated",
            importance_recipe=few,
            exports=(),
            recipe=df.Recipe(steps=10, batch=16, lr=0.01, warmup=2),
            allow_doubtful=True,
        )  # fmt: skip - an example also runs on a busy machine
    else:
        options = df.Options(recipe="imagenet-100")
    done = df.compress(model, task, given.target, given.budget, run=given.run, options=options)
    print(done)
    print("Report:", done.folder / "report.html")


if __name__ == "__main__":
    main()
