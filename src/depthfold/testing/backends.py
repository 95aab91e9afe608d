"""The conformance suite of backends. Call it from the tests of your own backend:

def test_my_backend():
    check_backend(MyBackend())
"""

from __future__ import annotations

import copy
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn

from depthfold.backends import Backend, Compiled, Exporter, Inputs
from depthfold.core import Environment
from depthfold.errors import BackendError, DepthfoldError
from depthfold.merging import merge
from depthfold.rewriting import rewrite
from depthfold.testing.networks import Block, Conv, NetworkSpec, SmallCNN, random_plan, randomise_statistics
from depthfold.tracing import trace

Case = tuple[nn.Module, Inputs]


def backend_cases() -> dict[str, Case]:
    """Return small networks like the blocks of a table and merged networks, in training mode, with their inputs."""
    with torch.random.fork_rng(devices=()):  # the random state of the caller is not changed
        torch.manual_seed(0)
        cases = _networks()
    generator = torch.Generator().manual_seed(1)
    sample = torch.randn(2, 4, 15, 14, generator=generator)
    return {name: (randomise_statistics(module).train(), (sample.clone(),)) for name, module in cases.items()}


def _networks() -> dict[str, nn.Module]:
    return {
        "convolution": nn.Conv2d(4, 6, 3, padding=1),
        "convolution and ReLU6": nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.ReLU6()),
        "depth-wise": nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        "dilated, not square": nn.Conv2d(4, 2, (3, 5), padding=(2, 4), dilation=2),
        "padding not symmetric": SmallCNN(_spec(_conv(6, padding=((0, 2), (1, 0))))),
        "residual": SmallCNN(_spec(Block(items=(_conv(8), _conv(4)), skip="identity", activation="function"))),
        "merged": _merged(),
    }


def _conv(out: int, padding: tuple[tuple[int, int], ...] = ((1, 1), (1, 1))) -> Conv:
    return Conv(out=out, kernel=(3, 3), stride=(1, 1), padding=padding, dilation=(1, 1))


def _spec(*items: Conv | Block) -> NetworkSpec:
    return NetworkSpec(channels=4, size=(15, 14), parts=(Block(items=items),))


def _merged() -> nn.Module:
    deep = randomise_statistics(
        SmallCNN(_spec(_conv(8), _conv(8), Block(items=(_conv(8),), skip="identity"), _conv(4)))
    )
    traced = trace(deep, (torch.randn(2, 4, 15, 14),))
    return merge(rewrite(traced, random_plan(traced.network, Random(3))))


# The largest difference from eager PyTorch in float32, relative to the largest output.
TOLERANCES = {"float32": 1e-4, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 5e-2}

# The allowed range of a sample as a share of the duration of the call. It may be slightly above 1, because a device has
# its own clock, and far below 1, because a backend may return the mean of many runs.
LARGEST_SHARE, SMALLEST_SHARE = 1.05, 1e-5


def check_backend(
    backend: Backend,
    *,
    cases: Mapping[str, Case] | None = None,
    tolerance: float | None = None,
    clock: bool = True,
    suffix: str | None = None,
) -> None:
    """Raise an AssertionError that lists all violations of the protocol.

    `cases` are the networks to run (default: `backend_cases()`). `tolerance` is for precisions that are not in
    `TOLERANCES`. Use `clock=False` for a backend that computes its seconds instead of measuring them, like the cost
    model: they are then not compared with the clock. With a `suffix` such as ".onnx", the backend must export a file
    and, if it can open the file, the file must give the same results.
    """
    cases = backend_cases() if cases is None else cases
    problems = [f"environment: {problem}" for problem in _environment(backend, next(iter(cases.values()))[1])]
    for name, (module, inputs) in cases.items():
        allowed = _allowed(backend, inputs, tolerance)
        problems += [f"{name}: {problem}" for problem in _network(backend, module, inputs, allowed, clock)]
    problems += [f"errors: {problem}" for problem in _errors(backend)]
    problems += [f"export: {problem}" for problem in _export(backend, suffix, tolerance)]
    if problems:
        raise AssertionError(
            f"The backend {backend.name!r} does not conform:\n" + "\n".join(f"- {p}" for p in problems)
        )


def _environment(backend: Backend, inputs: Inputs) -> Iterator[str]:
    found = backend.environment(inputs)
    if missing := [field.name for field in fields(found) if getattr(found, field.name) is None]:
        yield f"has no {', '.join(missing)}"
    if (found.batch, found.input_size) != (inputs[0].shape[0], tuple(inputs[0].shape[1:])):
        yield f"batch {found.batch} and input size {found.input_size} are not those of {tuple(inputs[0].shape)}"
    if backend.environment(inputs) != found:
        yield "changes between two calls"
    if Environment.loads(found.dumps()) != found:
        yield "changes when it is read back from JSON"


def _network(backend: Backend, module: nn.Module, inputs: Inputs, tolerance: float, clock: bool) -> Iterator[str]:
    given, expected = copy.deepcopy(module), _eager(module, inputs)
    own = tuple(tensor.clone() for tensor in inputs)
    try:
        compiled = backend.compile(module, own)
    except BackendError as error:
        yield f"rejected: {error}"
        return
    if difference := _changed(given, module):
        yield f"compile() changed the module: {difference}"
    if not all(map(torch.equal, own, inputs)):
        yield "compile() changed the inputs"
    for tensor in own:
        tensor.zero_()  # a compiled module must have its own copy of the inputs
    first, samples, second = compiled(), [_sample(compiled) for _ in range(3)], compiled()
    if (distance := _distance(first, expected)) > tolerance:
        yield f"differs from eager PyTorch by {distance:.1e} of the largest output; {tolerance:.0e} is allowed"
    if (distance := _distance(second, first)) > tolerance / 100:
        yield f"two runs differ by {distance:.1e} of the largest output"
    if any(tensor.device.type != "cpu" for tensor in first):
        yield "outputs are not on the CPU"
    if not all(isinstance(t, float) and math.isfinite(t) and t > 0 for t, _ in samples):
        yield f"seconds() must return finite seconds above 0, found {[t for t, _ in samples]}"
    elif clock:
        yield from _check_clock(samples)
    compiled.close()


def _sample(compiled: Compiled) -> tuple[float, float]:
    """Return the result of seconds(), and the duration of the call."""
    start = time.perf_counter()
    seconds = compiled.seconds()
    return seconds, time.perf_counter() - start


def _check_clock(samples: Sequence[tuple[float, float]]) -> Iterator[str]:
    """Yield a problem if a sample is longer than its call, or if all are much shorter.

    A single short sample is allowed, because the process may be interrupted between the run and the end of the call.
    """
    ratios = [seconds / passed for seconds, passed in samples]
    for (seconds, passed), ratio in zip(samples, ratios, strict=True):
        if ratio > LARGEST_SHARE or max(ratios) < SMALLEST_SHARE:
            yield (
                f"seconds() returned {seconds:.1e}, but the call took {passed:.1e} s; expected the duration of one run "
                "in seconds. If it is computed and not measured, use clock=False"
            )
            return


def _errors(backend: Backend) -> Iterator[str]:
    """Yield a problem for each failing module that does not raise a BackendError of one line."""
    cases: dict[str, nn.Module] = {"wrong channels": nn.Conv2d(5, 6, 3), "a forward that raises": _Raises()}
    inputs = (torch.zeros(1, 4, 8, 8),)
    for name, module in cases.items():
        try:
            backend.compile(module, inputs)
            yield f"{name}: compile() must raise BackendError, but raised nothing"
        except BackendError as error:
            if "\n" in str(error) or not str(error):
                yield f"{name}: the message must be one line, found {str(error)!r}"
        except Exception as error:  # noqa: BLE001 - reported together with the other problems
            yield f"{name}: compile() must raise BackendError, but raised {type(error).__name__}: {error}"


def _export(backend: Backend, suffix: str | None, tolerance: float | None) -> Iterator[str]:
    """Yield the problems of exported files. Without a suffix, the backend may also raise a DepthfoldError."""
    module, inputs = nn.Conv2d(4, 6, 3), (torch.randn(2, 4, 8, 8),)
    with tempfile.TemporaryDirectory() as folder:
        try:
            written = backend.export(module, inputs, Path(folder) / f"model{suffix or '.onnx'}")
            if not written.exists():
                yield f"export() returned {written.name}, which does not exist"
            elif suffix and isinstance(backend, Exporter):
                opened, allowed = backend.open(written, inputs), _allowed(backend, inputs, tolerance)
                if (distance := _distance(opened(), _eager(module, inputs))) > allowed:
                    yield f"the opened file differs from eager PyTorch by {distance:.1e}; {allowed:.0e} is allowed"
                opened.close()
        except DepthfoldError as error:
            if suffix:
                yield f"it must write a {suffix} file, but raised: {error}"
        except Exception as error:  # noqa: BLE001
            yield f"export() must write a file or raise a DepthfoldError, but raised {type(error).__name__}: {error}"


def _allowed(backend: Backend, inputs: Inputs, tolerance: float | None) -> float:
    return tolerance or TOLERANCES.get(backend.environment(inputs).precision or "", 1e-2)


class _Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("this module\ndoes not run")


def _eager(module: nn.Module, inputs: Inputs) -> Inputs:
    with torch.no_grad():
        output = copy.deepcopy(module).eval()(*inputs)
    return (output,) if isinstance(output, Tensor) else tuple(output)


def _changed(before: nn.Module, after: nn.Module) -> str | None:
    if [m.training for m in before.modules()] != [m.training for m in after.modules()]:
        return "training or evaluation mode"
    old, new = before.state_dict(), after.state_dict()
    if old.keys() != new.keys():
        return "its parameters or buffers"
    for name, tensor in old.items():
        if (tensor.dtype, tensor.device) != (new[name].dtype, new[name].device) or not torch.equal(tensor, new[name]):
            return name
    flags = [[p.requires_grad for p in module.parameters()] for module in (before, after)]
    return "requires_grad" if flags[0] != flags[1] else None


def _distance(found: Inputs, expected: Inputs) -> float:
    """Return the largest difference relative to the largest expected value, or infinity if the shapes differ."""
    if [tensor.shape for tensor in found] != [tensor.shape for tensor in expected]:
        return math.inf
    largest = 0.0
    for one, two in zip(found, expected, strict=True):
        distance = (one.double() - two.double()).abs().max() / two.double().abs().max().clamp_min(1e-12)
        largest = max(largest, math.inf if distance.isnan() else float(distance))
    return largest
