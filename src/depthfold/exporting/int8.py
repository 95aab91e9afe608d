"""INT8 files: static quantisation by ONNX Runtime, calibrated on a task, and the comparison with float32."""

from __future__ import annotations

import inspect
import math
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from depthfold.backends import Backend, Compiled, Inputs, backend_errors, get
from depthfold.backends.base import quiet
from depthfold.backends.onnxruntime import OnnxRuntime
from depthfold.core import Environment
from depthfold.core.speedup import Quartiles, quartiles, why_unreliable
from depthfold.errors import InvalidValue, VerificationError
from depthfold.progress import progress_bars
from depthfold.support.coerce import as_float, as_whole
from depthfold.support.optional import load
from depthfold.support.text import count
from depthfold.tasks import ClassificationTask
from depthfold.tracing import device_of
from depthfold.training import Recipe, Split, Step, Task, preserve_modes, score_of

_BATCH = 32  # images in a batch of the calibration
_ROUNDS, _RUNS, _WARMUP = 40, 5, 10  # of the latencies: each round runs both files this often


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8:
    """How a file is quantised and checked.

    The ranges of the activations are those of `images` training images, without augmentation. Both files are scored on
    `split`. The score of the INT8 file may be lower by `tolerance`, in the unit of the task's score: by default one
    point of accuracy for a ClassificationTask, and for other tasks, whose unit is not known, 1 % of the float32 score.
    Both files are timed on `target`, an ONNX Runtime with its options.
    """

    images: int = 128
    tolerance: float | None = None
    split: Split = "test"
    target: str | Backend = "onnxruntime"

    def __post_init__(self) -> None:
        as_whole("The number of images of a calibration", self.images, InvalidValue)
        if (
            self.tolerance is not None
            and not as_float("The tolerance of an INT8 file", self.tolerance, InvalidValue) >= 0
        ):
            raise InvalidValue(f"The tolerance of an INT8 file must be at least 0, found {self.tolerance!r}.")
        if self.split not in (known := get_args(Split)):
            raise InvalidValue(
                f"The split of an INT8 file is {' or '.join(map(repr, known))}, found {self.split!r:.80}."
            )
        _ = self.backend  # raises the reason if the target cannot time it

    def allowed_loss(self, task: Task, float32_score: float) -> float:
        """Return by how much the score may be lower than that of the float32 file."""
        if self.tolerance is not None:
            return self.tolerance
        return 1.0 if isinstance(task, ClassificationTask) else 0.01 * abs(float32_score)

    @property
    def backend(self) -> OnnxRuntime:
        """The runtime that times the files. Raise InvalidValue if the target is not an ONNX Runtime."""
        found = get(self.target)
        if not isinstance(found, OnnxRuntime):
            raise InvalidValue(
                f"INT8 files are timed by ONNX Runtime, found the target {found.name!r}. Use onnxruntime, with options "
                "such as onnxruntime:threads=2."
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """An INT8 file compared with the same network in float32, both run by ONNX Runtime.

    The scores are those of the task on `split`. The latencies are medians in milliseconds, measured in alternating
    rounds in `environment`. Its precision is not stated, because the two files differ in it. `unreliable` says why the
    latencies are unreliable, if they are.
    """

    split: Split
    score: float
    float32_score: float
    latency: float
    float32_latency: float
    environment: Environment
    unreliable: str | None = None

    @property
    def speedup(self) -> float:
        return self.float32_latency / self.latency

    def __str__(self) -> str:
        scores = f"score {self.score:.4g} on the {self.split} set (float32: {self.float32_score:.4g})"
        faster = f"{self.speedup:.2f}x as fast" + (f", unreliable: {self.unreliable}" if self.unreliable else "")
        times = f"{self.latency:.4g} ms (float32: {self.float32_latency:.4g} ms, {faster})"
        threads = f" with {count(self.environment.threads, 'thread')}" if self.environment.threads else ""
        return f"{scores}, {times}{threads}"


def calibration_inputs(network: nn.Module, task: Task, images: int) -> list[Inputs]:
    """Return batches of the network's inputs, recorded while the task computes its loss. Any task can do that."""
    recorded: list[Inputs] = []
    signature = inspect.signature(network.forward)

    def record(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        recorded.append(tuple(tensor.detach().cpu() for tensor in _by_position(signature, args, named)))

    steps = math.ceil(images / _BATCH)
    recipe = Recipe(steps=steps, batch=math.ceil(images / steps))
    hook = network.register_forward_pre_hook(record, with_kwargs=True)
    try:
        with preserve_modes(network), torch.no_grad():
            network.eval()
            for number in range(recipe.steps or 0):
                task.loss(network, Step(number=number, seed=0, recipe=recipe, device=device_of(network)))
    finally:
        hook.remove()
    return recorded


def _by_position(signature: inspect.Signature, args: tuple[Any, ...], named: Mapping[str, Any]) -> Inputs:
    """Return the inputs of a call in the order of the forward, which is that of a file."""
    bound = signature.bind(*args, **named)
    values = (*bound.args, *bound.kwargs.values())
    if bound.kwargs or not all(isinstance(value, Tensor) for value in values):
        found = ", ".join(type(value).__name__ for value in values)
        raise InvalidValue(
            f"INT8 needs a network that the task calls with tensors only, found {found} for forward{signature}. Export "
            "a module that wraps it."
        )
    return bound.args


def quantise(source: Path, target: Path, batches: Iterable[Inputs]) -> None:
    """Write the INT8 form of an ONNX file: 8-bit activations, and weights with a scale for each output channel."""
    library = load("onnxruntime.quantization", "onnx")
    names = [info.name for info in _session(source).get_inputs()]
    feeds = iter([dict(zip(names, (t.numpy() for t in batch), strict=True)) for batch in batches])

    class Reader(library.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def get_next(self) -> Mapping[str, Any] | None:
            return next(feeds, None)

    with backend_errors("ONNX Runtime cannot quantise this network"), quiet():
        prepared = source.with_suffix(".prepared.onnx")
        load("onnxruntime.quantization.shape_inference", "onnx").quant_pre_process(
            str(source), str(prepared), skip_symbolic_shape=True
        )
        _use_global_pools(prepared)
        library.quantize_static(
            str(prepared), str(target), Reader(), quant_format=library.QuantFormat.QDQ, per_channel=True,
            activation_type=getattr(library.QuantType, _activation_type()), weight_type=library.QuantType.QInt8,
        )  # fmt: skip


def _activation_type() -> str:
    """Return the type for which ONNX Runtime has the fastest kernels on this machine.

    The dot products of x86 (VNNI) multiply unsigned by signed numbers; with signed activations, ONNX Runtime is about
    as slow there as in float32. Those of ARM (SDOT) multiply signed numbers.
    """
    return "QUInt8" if platform.machine().lower() in ("x86_64", "amd64") else "QInt8"


def _use_global_pools(path: Path) -> None:
    """Replace means over height and width by global average pools: ONNX Runtime has no ReduceMean in INT8."""
    onnx = load("onnx", "onnx")
    model = onnx.load(path)
    graph, helper = model.graph, onnx.helper
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in (*graph.value_info, *graph.input)}
    nodes: list[Any] = []
    for node in graph.node:
        axes = constants.get(node.input[1]) if node.op_type == "ReduceMean" and len(node.input) == 2 else None
        if axes is None or ranks.get(node.input[0]) != 4 or sorted(axis % 4 for axis in axes.tolist()) != [2, 3]:
            nodes.append(node)
            continue
        (result,) = node.output
        if any(attribute.name == "keepdims" and not attribute.i for attribute in node.attribute):
            nodes.append(helper.make_node("GlobalAveragePool", node.input[:1], [f"{result}_pooled"], node.name))
            nodes.append(helper.make_node("Flatten", [f"{result}_pooled"], [result], f"{node.name}_flatten", axis=1))
        else:
            nodes.append(helper.make_node("GlobalAveragePool", node.input[:1], [result], node.name))
    del graph.node[:]
    graph.node.extend(nodes)
    used = {name for node in nodes for name in node.input}
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in used]:
        graph.initializer.remove(tensor)  # ONNX Runtime would warn about the axes
    path.write_bytes(model.SerializeToString())


def compare_with_float32(files: tuple[FileModule, FileModule], inputs: Inputs, task: Task, int8: Int8) -> Quantised:
    """Score and time the INT8 file and the float32 file. Raise VerificationError if the score is too low."""
    score, float32_score = _scores(files, task, int8.split)
    if not score >= float32_score - (allowed := int8.allowed_loss(task, float32_score)):
        raise VerificationError(
            f"The INT8 file scores {score:.4g} on the {int8.split} set, and float32 {float32_score:.4g}; it may lose "
            f"{allowed:.4g}. Calibrate it with more images or allow more: int8=Int8(images=..., tolerance=...)."
        )
    backend = int8.backend
    times, float32_times = _times([backend.open(file.path, inputs) for file in files])
    return Quantised(
        split=int8.split, score=score, float32_score=float32_score, latency=times[1], float32_latency=float32_times[1],
        environment=replace(backend.environment(inputs), precision=None),
        unreliable=why_unreliable({"the INT8 file": times, "the float32 file": float32_times}),
    )  # fmt: skip


def _scores(files: Iterable[FileModule], task: Task, split: Split) -> list[float]:
    found = []
    with progress_bars("INT8 beside float32") as progress, torch.no_grad():
        tick = progress("scores", 2, 0)
        for file in files:
            found.append(score_of(task, file, split))
            tick()
    return found


def _times(files: list[Compiled]) -> list[Quartiles]:
    """Return the quartiles of each file in milliseconds. Alternating rounds share the drift of the machine."""
    samples: list[list[float]] = [[] for _ in files]
    try:
        for compiled in files:
            for _ in range(_WARMUP):
                compiled.seconds()
        for _ in range(_ROUNDS):
            for compiled, found in zip(files, samples, strict=True):
                found += [1000 * compiled.seconds() for _ in range(_RUNS)]
    finally:
        for compiled in files:
            compiled.close()
    return [quartiles(found) for found in samples]


class FileModule(nn.Module):
    """An ONNX file as a module on the CPU, so that a task can score it.

    It is called like the network, whose forward has the `signature`. `output` is an output of the network: the tensors
    of the file are returned in its tuples and dicts.
    """

    def __init__(self, path: Path, signature: inspect.Signature, output: Any) -> None:
        super().__init__()
        self.path, self.session, self.signature, self.output = path, _session(path), signature, output
        self.names = [info.name for info in self.session.get_inputs()]
        # Tasks take the device and the dtype of their images from the parameters.
        self.placeholder = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, *args: Any, **named: Any) -> Any:
        arrays = (tensor.cpu().numpy() for tensor in _by_position(self.signature, args, named))
        with backend_errors("ONNX Runtime cannot run this file"):
            found = self.session.run(None, dict(zip(self.names, arrays, strict=True)))
        return _filled(self.output, map(torch.from_numpy, found))

    def __deepcopy__(self, memo: object) -> FileModule:
        return FileModule(self.path, self.signature, self.output)  # a session cannot be copied


def _filled(output: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the output with other tensors, in the order of flatten()."""
    if isinstance(output, Tensor):
        return next(tensors)
    if isinstance(output, Mapping):
        return {key: _filled(item, tensors) for key, item in output.items()}
    if isinstance(output, tuple | list):
        items = [_filled(item, tensors) for item in output]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    return output


def _session(path: Path) -> Any:
    with backend_errors("ONNX Runtime cannot read this file"):
        return load("onnxruntime", "onnx").InferenceSession(str(path), providers=["CPUExecutionProvider"])
