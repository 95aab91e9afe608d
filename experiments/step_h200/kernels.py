"""Check the kernels of depthfold.kernels on a GPU against float64, and time training steps with and without them.

    python -m experiments.step_h200.kernels [--no-checks]

Units of MobileNetV2 (32x32 images, batch 512) and VGG19-BN are compared in bfloat16 and, some of them, in float32. In
bfloat16 an error counts against the error that PyTorch's own operations have under autocast. The checks run in several
processes and leave the compiled kernels in Triton's cache. A step is forward, loss, backward and SGD on fixed random
images. The table comes last; with OUT set, everything is also in $OUT/kernels.json. TRITON_INTERPRET=1 is a dry run on
the CPU, with small shapes.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import depthfold as df
from depthfold.kernels import fuse, fuse_eval
from depthfold.vision import import_torchvision
from experiments.cifar_networks import mobilenet_v2, trace_for_cifar, vgg19_bn

BATCH = 512
DRY = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if DRY else "cuda"
# Channels, size and stride; inputs, outputs and size; channels and size. The last of each are the uses per step.
DEPTHWISE = [
    (32, 32, 1, 1), (96, 32, 1, 1), (144, 32, 1, 1), (144, 32, 2, 1), (192, 16, 1, 2), (192, 16, 2, 1), (384, 8, 1, 4),
    (576, 8, 1, 2), (576, 8, 2, 1), (960, 4, 1, 3),
]  # fmt: skip
POINTWISE = [
    (32, 16, 32, 1), (96, 24, 32, 1), (144, 24, 32, 1), (144, 32, 16, 1), (192, 32, 16, 2), (192, 64, 8, 1),
    (384, 64, 8, 3), (384, 96, 8, 1), (576, 96, 8, 2),
]  # fmt: skip
NORM = [(16, 32), (24, 32), (32, 16), (64, 8), (96, 8), (160, 4), (320, 4), (1280, 4), (64, 32), (128, 16), (256, 8)]
POOL = [(64, 32), (128, 16), (256, 8), (512, 4), (512, 2)]
IN_FLOAT32 = {("depthwise", 96, 32, 1), ("depthwise", 192, 16, 2), ("pointwise", 96, 24, 32), ("pool", 128, 16)}


# --- Checks ---


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.act = nn.BatchNorm2d(channels), nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x) + x)


def unit(kind: str, *shape: int) -> nn.Module:
    """Return a small network of which one kernel computes the most."""
    c = shape[0]
    if kind == "depthwise":
        conv = nn.Conv2d(c, c, 3, shape[2], 1, groups=c, bias=False)
        model: nn.Module = nn.Sequential(nn.BatchNorm2d(c), nn.ReLU6(), conv, nn.BatchNorm2d(c), nn.ReLU6())
    elif kind == "pointwise":
        conv = nn.Conv2d(c, shape[1], 1, bias=False)
        model = nn.Sequential(nn.BatchNorm2d(c), nn.ReLU6(), conv, nn.BatchNorm2d(shape[1]))
    elif kind == "norm":
        model = nn.Sequential(nn.BatchNorm2d(c), nn.ReLU6(), Residual(c))
    else:
        model = nn.Sequential(nn.BatchNorm2d(c), nn.ReLU(), nn.MaxPool2d(2))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return model


def gradients(model: nn.Module, module: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> list[Tensor]:
    """Run forward and backward. Return the output and all gradients and running variances."""
    x = x.detach().requires_grad_()
    output = module(x)
    output.backward(gradient.to(output.dtype))
    found = [output, x.grad, *(p.grad for p in model.parameters())]
    return [*found, *(buffer for name, buffer in model.named_buffers() if "var" in name)]


def errors(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)]


def check(job: tuple[str, tuple[int, ...], int, str]) -> dict[str, Any]:
    """Compare a unit with float64, and in bfloat16 also PyTorch with float64."""
    kind, shape, batch, precision = job
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    dtype = getattr(torch, precision)
    model = unit(kind, *shape).to(DEVICE)
    size = shape[2] if kind == "pointwise" else shape[1]
    x = torch.randn(batch, shape[0], size, size, device=DEVICE) * 2 + 0.5
    x = x.to(dtype).contiguous(memory_format=torch.channels_last)
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    for part in (plain, exact):  # with the weights that the kernels compute with
        for module in part.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.data = module.weight.data.to(dtype).to(module.weight.dtype)
    fused = fuse(model)
    assert fused is not None
    gradient = torch.randn_like(exact(x.double()))
    for norm in exact.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.reset_running_stats()
    wanted = gradients(exact, exact, x.double(), gradient)
    ours = errors(gradients(model, fused, x, gradient), wanted)
    with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
        theirs = errors(gradients(plain, plain, x, gradient), wanted)
    good = all(a <= (1.5 * b + 2e-3 if dtype == torch.bfloat16 else 1e-4) for a, b in zip(ours, theirs, strict=True))
    return {
        "unit": kind, "shape": shape, "batch": batch, "precision": precision, "good": good, "ours": max(ours),
        "PyTorch": max(theirs), "all": list(zip(ours, theirs, strict=True)),
    }  # fmt: skip


def checks() -> list[tuple[str, tuple[int, ...], int, str]]:
    shapes = [("depthwise", shape[:-1]) for shape in DEPTHWISE] + [("pointwise", shape[:-1]) for shape in POINTWISE]
    shapes += [("norm", shape) for shape in NORM] + [("pool", shape) for shape in POOL]
    if DRY:
        return [(kind, (8, 8, 4) if kind == "pointwise" else (8, 4, 1), 2, "float32") for kind in dict(shapes)]
    jobs = [(kind, shape, BATCH, "bfloat16") for kind, shape in shapes]
    return jobs + [(kind, shape, 64, "float32") for kind, shape in shapes if (kind, *shape) in IN_FLOAT32]


# --- Steps ---


def student() -> nn.Module:
    """MobileNetV2 after rewrite(), with two merged blocks."""
    traced = trace_for_cifar(mobilenet_v2())
    cuts = [p for p in range(1, traced.depth) if p not in (3, 4, 6, 7)]
    return df.rewrite(traced, df.Plan({p for p in traced.network.activations if p in cuts}, cuts))


def tiny() -> nn.Module:
    """A network for a dry run."""
    stem = (nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU6())
    block = import_torchvision().models.mobilenetv2.InvertedResidual(8, 8, 1, 2)
    return nn.Sequential(*stem, block, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 10))


class Step:
    """A training step on fixed images. `how` is "eager", "captured" or "fused"."""

    def __init__(self, make: Callable[[], nn.Module], how: str, teacher: bool = False) -> None:
        torch.manual_seed(0)
        batch = 2 if DRY else BATCH
        self.model = make().to(DEVICE, memory_format=torch.channels_last).train()
        self.images = torch.randn(batch, 3, *((8, 8) if DRY else (32, 32)), device=DEVICE)
        self.labels = torch.randint(0, 10, (batch,), device=DEVICE)
        self.teacher: Any = copy.deepcopy(self.model).eval().requires_grad_(False) if teacher else None
        self.module: Any = self.model
        if how == "fused":
            self.module = fuse(self.model)
            self.teacher = self.teacher and fuse_eval(self.teacher, torch.float32 if DRY else torch.bfloat16)
            assert self.module is not None
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), 0.05, momentum=0.9, nesterov=True, fused=how != "eager" and not DRY
        )
        self.loss = torch.zeros((), device=DEVICE)
        self.run = self.step if how == "eager" or DRY else self.capture()

    def step(self) -> None:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=not DRY):
            output = self.module(self.images)
            loss = F.cross_entropy(output.float(), self.labels)
            if self.teacher is not None:
                with torch.no_grad():
                    targets = self.teacher(self.images).float().softmax(dim=1)
                loss = loss + F.cross_entropy(output.float(), targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss.copy_(loss.detach())

    def capture(self) -> Callable[[], None]:
        before = copy.deepcopy(self.model.state_dict())
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self.model.load_state_dict(before)
        for state in self.optimizer.state.values():
            state["momentum_buffer"].zero_()
        return graph.replay


def milliseconds(run: Callable[[], Any], repeat: int = 12, group: int = 3) -> float:
    """Return the median time of a call."""
    if DRY:
        started = time.perf_counter()
        run()
        return 1000 * (time.perf_counter() - started)
    for _ in range(4):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]
    for start, end in events:
        start.record()
        for _ in range(group):
            run()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in events) / group


def profile(run: Callable[[], None], steps: int = 3) -> list[dict[str, Any]]:
    """Return the milliseconds of each kernel per step, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    rows = [
        {"kernel": event.key[:120], "ms": event.self_device_time_total / 1000 / steps, "calls": event.count / steps}
        for event in found.key_averages()
        if event.self_device_time_total > 0
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def time_step(make: Callable[[], nn.Module], how: str, teacher: bool) -> dict[str, Any]:
    started = time.perf_counter()
    gc.collect()
    if not DRY:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = Step(make, how, teacher)
    row: dict[str, Any] = {"network": make.__name__, "step": how, "teacher": teacher}
    row["ready, s"] = time.perf_counter() - started
    row["losses"] = [(step.run(), step.loss.item())[1] for _ in range(1 if DRY else 10)]
    row["ms"] = milliseconds(step.run)
    if not DRY:
        row["peak, GB"] = torch.cuda.max_memory_allocated() / 1e9
        if how == "fused" and not teacher:
            row["kernels"] = profile(step.run)
    return row


# --- Output ---


def save(found: dict[str, Any]) -> None:
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "kernels.json").write_text(json.dumps(found, indent=1, default=str))


def environment() -> dict[str, Any]:
    import triton

    name = "CPU" if DRY else torch.cuda.get_device_name()
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}


def in_processes(work: Callable[[Any], Any], jobs: list[Any]) -> Iterator[Any]:
    if DRY:
        yield from map(work, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(10) as pool:
        yield from pool.imap_unordered(work, jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-checks", action="store_true")
    options = parser.parse_args()
    started = time.perf_counter()
    found: dict[str, Any] = {"environment": environment(), "checks": [], "steps": []}
    if not options.no_checks:
        for row in in_processes(check, checks()):
            found["checks"].append(row)
        save(found)
    print(f"checked after {time.perf_counter() - started:.0f} s", flush=True)
    networks: list[Any] = [tiny] if DRY else [mobilenet_v2, vgg19_bn, student]
    for make, how in itertools.product(networks, ("eager", "captured", "fused")):
        for teacher in (False, True) if make is networks[0] and how != "captured" else (False,):
            found["steps"].append(time_step(make, how, teacher))
            save(found)
    report(found, time.perf_counter() - started)


def report(found: dict[str, Any], seconds: float) -> None:
    for row in found["steps"]:
        for kernel in row.get("kernels", ())[:12]:
            print(f"  {row['network']:12} {kernel['ms']:.3f} ms {kernel['calls']:5.0f}  {kernel['kernel'][:80]}")
    print("\nerrors against float64, as a share of the norm: the worst of output, gradients and statistics")
    for row in sorted(found["checks"], key=lambda row: (row["unit"], row["precision"], row["shape"])):
        verdict = "good" if row["good"] else "BAD"
        shape = "x".join(map(str, row["shape"]))
        print(f"{row['unit']:10} {shape:12} {row['precision']:9}", end=" ")
        print(f"{row['ours']:.1e}  PyTorch {row['PyTorch']:.1e}  {verdict}")
    print(f"\n{found['environment']}, batch {BATCH}, {seconds:.0f} s in all")
    print(
        f"{'network':13} {'step':9} {'teacher':8} {'ms':>7} {'x eager':>8} {'peak GB':>8} {'ready s':>8}  loss after 10"
    )
    eager = {(row["network"], row["teacher"]): row["ms"] for row in found["steps"] if row["step"] == "eager"}
    for row in found["steps"]:
        times = eager[row["network"], row["teacher"]] / row["ms"]
        print(
            f"{row['network']:13} {row['step']:9} {'yes' if row['teacher'] else 'no':8} {row['ms']:7.2f} {times:8.2f} "
            f"{row.get('peak, GB', 0):8.2f} {row['ready, s']:8.1f}  {row['losses'][-1]:.4f}"
        )
    bad = [row for row in found["checks"] if not row["good"]]
    print(f"{len(found['checks'])} checks, {len(bad)} bad")


if __name__ == "__main__":
    main()
