"""Make the files that the demo ships: its trained network and its part of Fashion-MNIST.

    python -m experiments.demo.network FASHION_MNIST RUN [--device cuda:0]

The network is trained on the training set without a tenth of each class, and scored on the whole test set. RUN holds
the checkpoints: if you run the script again after an interruption, training resumes. It takes about 40 minutes on two
ARM cores.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import struct
import time
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

import depthfold as df
from depthfold.demo.network import SHIPPED, SmallMobileNet
from depthfold.tasks.datasets import FashionMnist

RECIPE = df.Recipe(
    epochs=6, batch=128, lr=0.1, weight_decay=3e-4, warmup=200, flip=True, evaluate=420, checkpoint=105
)  # fmt: skip
DROP = 0.4  # of the last residual
IMAGES = {"train": 1000, "test": 500}  # of each class
LEAST = 91.0  # required accuracy on the whole test set, in per cent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--device", help="for example cuda:0; by default, the device that accelerate selects")
    options = parser.parse_args()
    torch.manual_seed(0)
    task = df.ClassificationTask.fashion_mnist(options.data)
    started = time.perf_counter()
    model = df.finetune(SmallMobileNet(DROP), task, RECIPE, run=options.run, device=options.device).eval().cpu()
    score = task.score(model, "test")
    print(f"{score:.2f} % of the 10,000 test images, after {time.perf_counter() - started:.0f} s")
    if score < LEAST:
        raise SystemExit(f"That is less than {LEAST} %: nothing is shipped.")
    SHIPPED.mkdir(exist_ok=True)
    safetensors.torch.save_file(model.state_dict(), SHIPPED / "weights.safetensors")
    for part, number in IMAGES.items():
        ship(options.data, part, number)
    record = {
        "accuracy on the 10,000 test images": score,
        "recipe": RECIPE.to_json(),
        "stochastic depth": DROP,
        "images of each class": IMAGES,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "script": "experiments/demo/network.py",
    }
    (SHIPPED / "network.json").write_text(json.dumps(record, indent=1) + "\n")


def ship(data: Path, part: str, number: int) -> None:
    """Write the first `number` images of each class in the layout of the dataset."""
    found = FashionMnist(path=data).read(part)
    labels = found.labels.numpy()
    chosen = np.sort(np.concatenate([np.flatnonzero(labels == label)[:number] for label in range(10)]))
    pixels = found.images.pixels[torch.from_numpy(chosen), 0].numpy()
    prefix = {"train": "train", "test": "t10k"}[part]
    for name, array in (("images-idx3", pixels), ("labels-idx1", labels[chosen].astype(np.uint8))):
        header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
        packed = gzip.compress(header + array.tobytes(), mtime=0)  # no time stamp: the same bytes every time
        (SHIPPED / f"{prefix}-{name}-ubyte.gz").write_bytes(packed)


if __name__ == "__main__":
    main()
