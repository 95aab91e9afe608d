"""Measure the demo's networks in float32 and INT8: latencies in the same rounds, and accuracies on 5,000 test images.

ResNet-18 and MobileNetV2 follow, with random weights at 112x112, so only their latencies count.

    python benchmarks/int8.py [RUN]

The folded network is the result of the run folder RUN (default: build/int8-demo). If it has none, the demo runs there
first, which takes about five minutes on two cores. The last lines give the ratios of this one run.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import onnxruntime
import torch

import depthfold as df
from depthfold.backends import get
from depthfold.demo import demo_settings, run_demo
from depthfold.demo.demo import model
from depthfold.demo.network import task
from depthfold.exporting import Int8
from depthfold.latency.timer import Rounds, Timer, milliseconds
from depthfold.support.text import count, text_table
from depthfold.training import FunctionTask
from depthfold.vision import import_torchvision

THREADS = (1, 2)
LARGER = ("resnet18", "mobilenet_v2")


def networks(run: Path) -> dict[str, torch.nn.Module]:
    """Return the original with its batch norms folded, and the folded network of the demo."""
    network, data = model(), task()
    traced = df.trace(network, data.example())
    if not (run / "result").exists():
        run_demo(demo_settings(run), say=print)
    return {
        "original": df.merge(df.rewrite(traced, traced.vanilla)),
        "folded": df.load(run / "result", network),
    }


def larger_networks() -> None:
    """Print the latencies of networks with random weights."""
    images = torch.rand(32, 3, 112, 112)
    data = FunctionTask(loss=lambda network, step: network(images).mean(), score=lambda *_: 0.0)
    for name in LARGER:
        traced = df.trace(import_torchvision().models.get_model(name), images[:1])
        network = df.merge(df.rewrite(traced, traced.vanilla))
        for threads in THREADS:
            settings = Int8(images=32, target=f"onnxruntime:threads={threads}")
            with tempfile.TemporaryDirectory() as folder:
                done = df.export(network, Path(folder) / "int8.onnx", task=data, int8=settings)
            found = done.int8
            times = f"{found.float32_latency:.2f} ms in float32, {found.latency:.2f} ms in INT8"
            print(f"{name}, {count(threads, 'thread')}: {times}, {found.speedup:.2f}x")


def main() -> None:
    run = Path(sys.argv[1] if len(sys.argv) > 1 else "build/int8-demo")
    data, found = task(), networks(run)
    with tempfile.TemporaryDirectory() as folder:
        paths: dict[str, Path] = {}
        scores: dict[str, float] = {}
        for name, network in found.items():
            paths[f"{name}, float32"] = df.export(network, Path(folder) / f"{name}.onnx").path
            quantised = Path(folder) / f"{name}-int8.onnx"
            done = df.export(network, quantised, task=data, int8=Int8(tolerance=0.5))
            paths[f"{name}, INT8"] = done.path
            scores |= {f"{name}, float32": done.int8.float32_score, f"{name}, INT8": done.int8.score}
        print(f"ONNX Runtime {onnxruntime.__version__}, {os.cpu_count()} cores, batch 1, load {os.getloadavg()[0]:.2f}")
        for threads in THREADS:
            backend = get(f"onnxruntime:threads={threads}")
            opened = {name: backend.open(path, (data.example(),)) for name, path in paths.items()}
            rounds: dict[str, Rounds] = {}
            Timer(rounds=20, samples=20).measure(opened, rounds)
            times = {name: milliseconds(samples) for name, samples in rounds.items()}
            rows = [(name, f"{times[name]:.3f} ms", f"{scores[name]:.2f} %") for name in paths]
            print("\n".join(text_table((f"{threads} threads", "latency", "accuracy"), rows)))
            for name in found:
                ratio = times[f"{name}, float32"] / times[f"{name}, INT8"]
                lost = scores[f"{name}, float32"] - scores[f"{name}, INT8"]
                print(f"{name}: INT8 is {ratio:.2f}x as fast as float32, {lost:.2f} points lower")
            whole = times["original, float32"] / times["folded, INT8"]
            print(f"folded and INT8 together: {whole:.2f}x as fast as the original in float32")
    larger_networks()


if __name__ == "__main__":
    main()
