"""export(): write a merged network to a file of a runtime, and compare it with PyTorch."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from depthfold.backends import Exporter, Inputs, Layout, backend_errors, disable_autocast, full_precision, get
from depthfold.backends.base import batched, flatten, on_cpu, private_copy, quiet, with_batch
from depthfold.core import Environment
from depthfold.errors import BackendError, InvalidValue, OutOfMemory, VerificationError
from depthfold.exporting.int8 import FileModule, Int8, Quantised, calibration_inputs, compare_with_float32, quantise
from depthfold.exporting.raw import AsInTask, Images, images_of
from depthfold.exporting.save import write_errors
from depthfold.merging import SENSITIVITY_FACTOR, TOLERANCE, Shallow, output_error, sensitivity, shallow_parts
from depthfold.store import put_all_in_place
from depthfold.support.document import encode
from depthfold.support.optional import load
from depthfold.support.text import did_you_mean
from depthfold.tracing import Blueprint, ExampleInputs, device_of, dtype_of
from depthfold.training import Task, check_task
from depthfold.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A file that runs without depthfold.

    `error` is the largest difference between the file and the network as a share of the largest output, in
    `environment`; both are None if they were not compared. `batch` is the batch size that the file accepts. `why_fixed`
    is the reason why it is not "dynamic", if that was requested. `int8` compares an INT8 file with float32; `error` is
    then that of the float32 file that it was made from. `images` are those that the file takes, if the task is known.
    """

    path: Path
    format: str
    batch: int | Literal["dynamic"]
    error: float | None = None
    environment: Environment | None = None
    why_fixed: str | None = None
    int8: Quantised | None = None
    images: Images | None = None

    def __str__(self) -> str:
        batch = "batches of any size" if self.batch == "dynamic" else f"a batch of {self.batch}"
        text = f"{self.path}: {self.format}, for {batch}"
        text += f" of raw images ({self.images.layout})" if self.images and self.images.raw else ""
        text += f" ({self.why_fixed})" if self.why_fixed else ""
        if self.error is None or self.environment is None:
            return f"{text}; not compared with PyTorch"
        runtime = f"{self.environment.runtime} {self.environment.runtime_version}"
        if self.int8 is not None:
            return f"{text}; {runtime}: {self.int8}"
        return f"{text}; {runtime} is within {self.error:.1e} of PyTorch"


def finish_onnx(path: Path, origin: Shallow, images: Images | None) -> None:
    """Write name, plan, version and preprocessing to the metadata of an ONNX file, and run ONNX's checker."""
    onnx = load("onnx", "onnx")
    with backend_errors("The ONNX file is not valid"):
        model = onnx.load(path)
        graph = model.graph
        # PyTorch's exporter stores source lines with their paths in the metadata of every operation.
        for item in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer, *model.functions):
            del item.metadata_props[:]
        plan = json.dumps(encode(origin.plan))
        metadata = {"name": origin.blueprint.network.name, "plan": plan, "depthfold": __version__}
        metadata |= images.metadata() if images else {}
        onnx.helper.set_model_props(model, metadata)
        onnx.checker.check_model(model, full_check=True)
    path.write_bytes(model.SerializeToString())


def compare(backend: Exporter, module: nn.Module, inputs: Inputs, path: Path, *, dynamic: bool) -> float:
    """Return the largest error on two random inputs, with two batch sizes if the file is `dynamic`.

    Raise VerificationError if the error exceeds both the tolerance of verify() and the effect of rounding the inputs.
    """
    module, inputs = private_copy(module, inputs)
    size = len(inputs[0])
    errors = []
    # Different sizes from the one that the file was written with, to detect a batch size that became a constant.
    for seed, batch in enumerate((1, size + 2) if dynamic else (size, size)):
        given = ExampleInputs(with_batch(inputs, batch)).random(seed).args
        wanted = run_in_pytorch(module, given)
        compiled = backend.open(path, given)
        try:
            found = compiled()
        finally:
            compiled.close()
        errors.append(output_error(wanted, found))
        tolerance = TOLERANCE.get(dtype_of(module), 1e-4)
        if errors[-1] > tolerance:
            amplified = sensitivity(wanted, _changed_runs(module, given))
            tolerance = max(tolerance, SENSITIVITY_FACTOR * amplified)
        if not errors[-1] <= tolerance:
            raise VerificationError(
                f"The exported {path.name} differs from the network by {errors[-1]:.1e} of the largest output with a "
                f"batch of {batch}; {tolerance:.1e} is allowed. Export to another format, and please report the model."
            )
    return max(errors)


def _changed_runs(module: nn.Module, given: Inputs) -> Callable[[Callable[[Tensor], Tensor]], Inputs]:
    return lambda change: run_in_pytorch(module, tuple(map(change, given)))


def run_in_pytorch(module: nn.Module, given: Inputs) -> Inputs:
    """Return the outputs in evaluation mode, on the CPU."""
    what = f"PyTorch cannot run this module with a batch of {len(given[0])}"
    with backend_errors(what), quiet(), torch.inference_mode(), full_precision(device_of(module)):
        return tuple(map(on_cpu, flatten(module(*(tensor.clone() for tensor in given)))))


# By suffix: the name of the format, and the backend that writes and reads it.
FORMATS = {
    ".onnx": ("ONNX", "onnxruntime"),
    ".pt2": ("PyTorch program", "pytorch"),
    ".xml": ("OpenVINO IR", "openvino"),
    ".engine": ("TensorRT engine", "tensorrt"),
}

# Why a format does not work in a precision. The file can be written without the comparison, except ONNX in bfloat16.
_WRONG_PRECISIONS = {
    (".onnx", torch.bfloat16): "ONNX has no convolutions in bfloat16 before opset 22",
    (".onnx", torch.float64): "ONNX Runtime has no convolutions in float64",
    (".xml", torch.bfloat16): "OpenVINO takes NumPy arrays, which have no bfloat16",
    (".xml", torch.float64): "OpenVINO computes in float32",
}


def export(
    shallow: nn.Module,
    path: str | Path,
    example_inputs: Any = None,
    *,
    task: Task | None = None,
    raw_images: Layout | None = None,
    int8: bool | Int8 = False,
    dynamic_batch: bool = True,
    check: bool = True,
) -> Exported:
    """Write a merged network to a file that runs without depthfold. The suffix (.onnx, .pt2, .xml or .engine) selects
    the format.

    The file accepts batches of any size. If the network or the runtime does not support that, it accepts the batch of
    the example inputs, and `why_fixed` gives the reason. The file is run on random inputs and compared with PyTorch: if
    it computes something else, it is deleted and VerificationError is raised. `example_inputs` are as for trace(), and
    default to those of the trace. `shallow` may also be a module that wraps the merged network, for example with a
    softmax.

    - `task`: with a ClassificationTask, the metadata of an ONNX file state mean, deviation, size and classes.
    - `raw_images`: the file takes uint8 images of the size of the task, "NHWC" or "NCHW", and normalises them itself.
    - `int8`: an ONNX file is quantised to 8 bits. The task calibrates it and scores it beside the float32 file; if it
      loses more than Int8.tolerance, it is deleted and VerificationError is raised.
    """
    _, origin, at = shallow_parts(shallow)
    path = Path(path)
    form, backend = _format(path, device_of(shallow))
    settings = _int8_settings(int8, task, path, shallow)
    _check_precision(path, dtype_of(shallow), check)
    inputs = positional_tensors(shallow, _arguments(shallow, origin.blueprint, at, example_inputs))
    images = images_of(task, raw_images, inputs)
    quantised = None
    with disable_autocast(device_of(shallow)), write_errors(path), put_all_in_place(path) as partial:
        attempt = _Attempt(backend, shallow, origin, partial, check, images, settings is not None)
        error, why_fixed = (
            attempt.write_for_any_batch(inputs) if dynamic_batch else (attempt.write(inputs, False), None)
        )
        batch: Any = "dynamic" if dynamic_batch and why_fixed is None else len(inputs[0])
        if settings is not None and task is not None:
            if batch != "dynamic":
                raise BackendError(
                    f"INT8 needs a file for batches of any size. {why_fixed or 'Leave out dynamic_batch.'}"
                )
            form, quantised = f"{form} in INT8", attempt.quantise(inputs, task, settings)
    precision = str(dtype_of(shallow)).removeprefix("torch.") if settings is None else "int8"
    environment = dataclasses.replace(backend.environment(inputs), precision=precision) if check else None
    return Exported(
        path=path, format=form, batch=batch, error=error, environment=environment, why_fixed=why_fixed, int8=quantised,
        images=images,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class _Attempt:
    """A file that is written to a temporary folder and compared with the network.

    If it becomes an INT8 file, raw images are added after the quantisation, which works on the normalised ones.
    """

    backend: Exporter
    network: nn.Module
    origin: Shallow
    path: Path
    check: bool
    images: Images | None
    int8: bool

    @property
    def raw(self) -> Images | None:
        """The images, if the file takes raw ones."""
        return self.images if self.images is not None and self.images.raw else None

    def write_for_any_batch(self, inputs: Inputs) -> tuple[float | None, str | None]:
        """Return the error and, if the batch had to be fixed, the reason."""
        try:
            return self.write(inputs, dynamic_batch=True), None
        except OutOfMemory:
            raise
        except (BackendError, VerificationError) as reason:
            return self.write(inputs, dynamic_batch=False), _first_sentence(str(reason))

    def write(self, inputs: Inputs, dynamic_batch: bool) -> float | None:
        module = reference = self.network
        if (images := self.raw) is not None and not self.int8:
            module, reference = images.wrapped(self.network), AsInTask(self.network, images)
            inputs = images.noise(self.network, len(inputs[0]))
        if dynamic_batch:
            inputs = with_batch(inputs, max(2, len(inputs[0])))  # PyTorch treats a size of 1 as a constant
            run_in_pytorch(
                *private_copy(module, with_batch(inputs, len(inputs[0]) + 1))
            )  # raises the reason if it fails
        self.backend.export(module, inputs, self.path, dynamic_batch=dynamic_batch)
        if self.path.suffix == ".onnx":
            finish_onnx(self.path, self.origin, self.images)
        return compare(self.backend, reference, inputs, self.path, dynamic=dynamic_batch) if self.check else None

    def quantise(self, inputs: Inputs, task: Task, int8: Int8) -> Quantised | None:
        """Replace the float32 file by its INT8 form, and compare the two."""
        batches = calibration_inputs(self.network, task, int8.images)
        with tempfile.TemporaryDirectory(dir=self.path.parent) as folder:
            float32, normalised = Path(folder) / "float32.onnx", Path(folder) / "int8.onnx"
            self.path.replace(float32)
            quantise(float32, normalised, batches)
            self.path.write_bytes(normalised.read_bytes())
            if (images := self.raw) is not None:
                images.add_to(self.path, self.network)
            finish_onnx(self.path, self.origin, self.images)
            if not self.check:
                return None
            module, given = private_copy(self.network, inputs)
            with torch.no_grad():
                output = module(*given)
            signature = inspect.signature(self.network.forward)
            quantised, original = (FileModule(path, signature, output).eval() for path in (normalised, float32))
            if images is not None:
                noise = images.noise(self.network, len(inputs[0]))
                compare(self.backend, AsInTask(quantised, images), noise, self.path, dynamic=True)
            return compare_with_float32((quantised, original), inputs, task, int8)


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", text, maxsplit=1)[0]


def _format(path: Path, device: torch.device) -> tuple[str, Exporter]:
    if path.suffix not in FORMATS:
        hint = did_you_mean(path.suffix, FORMATS, lambda close: repr(path.with_suffix(close).name), cutoff=0.5)
        known = ", ".join(f"{suffix} ({form})" for suffix, (form, _) in FORMATS.items())
        raise InvalidValue(f"export() does not know the suffix of {path.name!r}. {hint}Known suffixes: {known}.")
    form, target = FORMATS[path.suffix]
    if target == "pytorch" and device.type == "cuda":
        target = "pytorch:device=cuda"  # the program runs on the device of its tensors
    return form, cast(Exporter, get(target))


def _check_precision(path: Path, dtype: torch.dtype, check: bool) -> None:
    """Raise InvalidValue if the file cannot be written in this precision, or not be compared with PyTorch."""
    reason = _WRONG_PRECISIONS.get((path.suffix, dtype))
    writable = (path.suffix, dtype) != (".onnx", torch.bfloat16)
    if reason is None or (writable and not check):
        return
    what = "compared with PyTorch" if writable else "written"
    raise InvalidValue(
        f"{path.name} cannot be {what} in {str(dtype).removeprefix('torch.')}: {reason}. Convert the network with "
        "shallow.float(), or export to .pt2."
    )


def _int8_settings(int8: object, task: Task | None, path: Path, shallow: nn.Module) -> Int8 | None:
    """Return how to quantise, or None. Raise InvalidValue if this network cannot be quantised into this file."""
    if int8 is False:
        return None
    if not isinstance(int8, Int8 | bool):
        raise InvalidValue(f"int8 is True, False or Int8(...), found {int8!r:.80}.")
    if path.suffix != ".onnx":
        raise InvalidValue(f"Only ONNX files can be in INT8, found {path.name!r}. Use {path.stem}.onnx.")
    if task is None:
        raise InvalidValue("INT8 is calibrated and scored on a task, and there is none. Pass task=...")
    check_task(task)
    if (dtype := dtype_of(shallow)) != torch.float32:
        raise InvalidValue(f"INT8 is made from a network in float32, found {dtype}. Convert it: shallow.float().")
    return Int8() if int8 is True else cast(Int8, int8)


def _arguments(shallow: nn.Module, blueprint: Blueprint, at: str, example_inputs: Any) -> ExampleInputs:
    """Return the given inputs, or random inputs of the traced sizes."""
    if example_inputs is not None:
        return ExampleInputs.of(example_inputs).like(shallow)
    if at and at != blueprint.at:
        raise InvalidValue(
            f"{type(shallow).__name__} wraps the merged network, so its inputs are not known. Use export(module, path, "
            "example_inputs)."
        )
    example = blueprint.example if at else blueprint.inputs
    real = example.map(lambda tensor: torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor)
    return real.like(shallow).random(seed=0)


def inputs_of_file(shallow: nn.Module) -> Inputs:
    """Return inputs of the sizes that an exported file takes by default, in order."""
    _, origin, at = shallow_parts(shallow)
    return positional_tensors(shallow, _arguments(shallow, origin.blueprint, at, None))


def positional_tensors(
    network: nn.Module,
    given: ExampleInputs,
    *,
    fix: str = "Export a part of the network that accepts tensors, or a module that wraps it.",
) -> Inputs:
    """Return the arguments in order. Raise InvalidValue if they are not tensors with a batch dimension."""
    signature = inspect.signature(network.forward)
    try:
        bound = signature.bind(*given.args, **given.named)
    except TypeError as error:
        raise InvalidValue(
            f"The example inputs do not fit forward{signature}: {error}. Pass them as for trace()."
        ) from error
    found = (*bound.args, *bound.kwargs.values())
    if bound.kwargs or not found or not all(isinstance(value, Tensor) for value in found) or not batched(found)[0]:
        raise InvalidValue(
            "An exported file accepts only positional tensors whose first dimension is the batch, found "
            f"{', '.join(type(value).__name__ for value in found) or 'nothing'} for forward{signature}. {fix}"
        )
    return tuple(found)
