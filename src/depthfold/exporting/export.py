"""export(): a merged network as one file of a runtime's, compared with PyTorch before it takes its place."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from depthfold.backends import get
from depthfold.backends.base import Exporter, Inputs, batched, flatten, on_cpu, private_copy, reasons, with_batch
from depthfold.backends.cuda import cuda_settings
from depthfold.core import Environment, Plan
from depthfold.errors import BackendError, InvalidValue, OutOfMemory, VerificationError
from depthfold.exporting.save import writing
from depthfold.merging.verification import CHAOS, TOLERANCE, Shallow, shallow_parts
from depthfold.merging.verify import last_digit, output_error
from depthfold.store.files import put_all_in_place
from depthfold.support.document import encode
from depthfold.support.optional import load
from depthfold.support.text import did_you_mean
from depthfold.tracing import Blueprint, ExampleInputs, device_of
from depthfold.version import __version__

# What export() wrote, and what it found when it compared the file with the network.


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A file that runs without depthfold.

    `error` is the largest difference between the file and the network, as a share of the largest output, and
    `environment` where it was found; both are None where nothing was compared. `batch` is the one size of the batch
    that the file takes, and `why_fixed` the reason where any size was asked for.
    """

    path: Path
    format: str
    batch: int | Literal["dynamic"]
    error: float | None = None
    environment: Environment | None = None
    why_fixed: str | None = None

    def __str__(self) -> str:
        batch = "batches of any size" if self.batch == "dynamic" else f"a batch of {self.batch}"
        text = f"{self.path}: {self.format}, for {batch}"
        text += f" ({self.why_fixed})" if self.why_fixed else ""
        if self.error is None or self.environment is None:
            return f"{text}; not compared with PyTorch"
        runtime = f"{self.environment.runtime} {self.environment.runtime_version}"
        return f"{text}; {runtime} is within {self.error:.1e} of PyTorch"


# What an ONNX file says of itself: which network it is and by which plan, and not where it was made.


def finish_onnx(path: Path, remembered: Shallow) -> None:
    """Put name, plan and version into the file's metadata, and let ONNX's own checker look at all of it."""
    onnx = load("onnx", "onnx")
    with reasons("The ONNX file is not valid"):
        model = onnx.load(path)
        graph = model.graph
        # PyTorch's exporter notes with every operation the lines of source that it came from, with their folders.
        for noted in (
            *graph.node,
            *graph.input,
            *graph.output,
            *graph.value_info,
            *graph.initializer,
            *model.functions,
        ):
            del noted.metadata_props[:]
        plan = Plan(remembered.plan.activations, remembered.plan.cuts)
        notes = {"name": remembered.blueprint.network.name, "plan": json.dumps(encode(plan)), "depthfold": __version__}
        onnx.helper.set_model_props(model, notes)
        onnx.checker.check_model(model, full_check=True)
        path.write_bytes(model.SerializeToString())


# Does an exported file compute what the network computes?


def compare(backend: Exporter, module: nn.Module, inputs: Inputs, path: Path, *, dynamic: bool) -> float:
    """The largest error on two random inputs, of two sizes of the batch where the file takes any. Raises if it is more
    than rounding: the tolerance of verify(), or what the network makes of a change in the last digit of its input."""
    module, inputs = private_copy(module, inputs)
    size = len(inputs[0])
    errors = []
    # Neither size is the one that the file was made with: what it takes for a constant would show.
    for seed, batch in enumerate((1, size + 2) if dynamic else (size, size)):
        given = ExampleInputs(with_batch(inputs, batch)).random(seed).args
        wanted = run_in_pytorch(module, given)
        compiled = backend.open(path, given)
        try:
            found = compiled()
        finally:
            compiled.close()
        errors.append(output_error(wanted, found))
        tolerance = TOLERANCE.get(inputs[0].dtype, 1e-4)
        if errors[-1] > tolerance:
            sensitivity = output_error(wanted, run_in_pytorch(module, tuple(map(last_digit, given))))
            tolerance = max(tolerance, CHAOS * sensitivity)
        if not errors[-1] <= tolerance:
            raise VerificationError(
                f"The exported {path.name} does not compute what the network computes: with a batch of {batch} it is "
                f"off by {errors[-1]:.1e} of the largest output, and {tolerance:.1e} is allowed. "
                "Export to another format, and please report the model."
            )
    return max(errors)


def run_in_pytorch(module: nn.Module, given: Inputs) -> Inputs:
    """The outputs in evaluation mode, on the CPU. A graph of torch.fx that fails also prints itself: not to the user,
    who gets the reason."""
    what = f"PyTorch cannot run this module with a batch of {len(given[0])}"
    quiet = contextlib.redirect_stderr(io.StringIO())
    with reasons(what), quiet, torch.inference_mode(), cuda_settings(tf32=False, benchmark=False):
        return tuple(map(on_cpu, flatten(module(*(tensor.clone() for tensor in given)))))


# By suffix: what the format is called, and the backend that writes and reads it.
FORMATS = {
    ".onnx": ("ONNX", "onnxruntime"),
    ".pt2": ("PyTorch program", "pytorch"),
    ".xml": ("OpenVINO IR", "openvino"),
    ".engine": ("TensorRT engine", "tensorrt"),
}


def export(
    shallow: nn.Module, path: str | Path, example_inputs: Any = None, *, dynamic_batch: bool = True, check: bool = True
) -> Exported:
    """Write a merged network to a file that runs without depthfold. The suffix says which: .onnx, .pt2, .xml, .engine.

    The file takes batches of any size or, where the network or the runtime does not allow that, the batch of the
    example inputs; `why_fixed` then says why. It is run on random inputs and compared with PyTorch: where it computes
    something else this raises VerificationError, and no file is left. `example_inputs` are as for trace(), and those
    of the trace unless given. `shallow` may be a module around the merged network: with a softmax, say.
    """
    _, remembered, at = shallow_parts(shallow)
    path = Path(path)
    form, backend = _format(path, device_of(shallow))
    inputs = _tensors(shallow, _arguments(shallow, remembered.blueprint, at, example_inputs))
    why_fixed = None
    with writing(path), put_all_in_place(path) as partial:
        attempt = _Attempt(backend, shallow, remembered, partial, check)
        try:
            batch: Any = "dynamic" if dynamic_batch else len(inputs[0])
            error = attempt.write(inputs, dynamic_batch)
        except OutOfMemory:
            raise
        except (BackendError, VerificationError) as reason:
            if not dynamic_batch:
                raise
            batch, why_fixed = len(inputs[0]), str(reason)
            error = attempt.write(inputs, dynamic_batch=False)
    precision = str(inputs[0].dtype).removeprefix("torch.")
    environment = dataclasses.replace(backend.environment(inputs), precision=precision) if check else None
    return Exported(path=path, format=form, batch=batch, error=error, environment=environment, why_fixed=why_fixed)


@dataclasses.dataclass(frozen=True, slots=True)
class _Attempt:
    """One file, written and compared, in a folder from which it has not gone anywhere yet."""

    backend: Exporter
    module: nn.Module
    remembered: Shallow
    path: Path
    check: bool

    def write(self, inputs: Inputs, dynamic_batch: bool) -> float | None:
        if dynamic_batch:
            inputs = with_batch(inputs, max(2, len(inputs[0])))  # PyTorch takes a size of 1 for a constant
            run_in_pytorch(*private_copy(self.module, with_batch(inputs, len(inputs[0]) + 1)))  # or this says why not
        self.backend.export(self.module, inputs, self.path, dynamic_batch=dynamic_batch)
        if self.path.suffix == ".onnx":
            finish_onnx(self.path, self.remembered)
        return compare(self.backend, self.module, inputs, self.path, dynamic=dynamic_batch) if self.check else None


def _format(path: Path, device: torch.device) -> tuple[str, Exporter]:
    if path.suffix not in FORMATS:
        hint = did_you_mean(path.suffix, FORMATS, lambda close: repr(path.with_suffix(close).name), cutoff=0.5)
        known = ", ".join(f"{suffix} ({form})" for suffix, (form, _) in FORMATS.items())
        raise InvalidValue(f"export() cannot tell the format of {path.name!r} by its suffix. {hint}Known are {known}.")
    form, target = FORMATS[path.suffix]
    if target == "pytorch" and device.type == "cuda":
        target = "pytorch:device=cuda"  # where its tensors are, the program runs
    return form, cast(Exporter, get(target))


def _arguments(shallow: nn.Module, blueprint: Blueprint, at: str, example_inputs: Any) -> ExampleInputs:
    """What the module takes: what is given, or noise of the sizes that were traced."""
    if example_inputs is not None:
        return ExampleInputs.of(example_inputs).like(shallow)
    if at and at != blueprint.at:
        raise InvalidValue(
            f"{type(shallow).__name__} is a module around the merged network, so what it takes is not known. Give "
            "export(module, path, example_inputs)."
        )
    example = blueprint.example if at else blueprint.inputs
    real = example.map(lambda tensor: torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor)
    return real.like(shallow).random(seed=0)


def _tensors(shallow: nn.Module, given: ExampleInputs) -> Inputs:
    """The arguments in order: a file of a runtime's takes tensors, and a batch in front."""
    signature = inspect.signature(shallow.forward)
    try:
        bound = signature.bind(*given.args, **given.named)
    except TypeError as error:
        raise InvalidValue(
            f"The example inputs do not fit forward{signature}: {error}. Give them as for trace()."
        ) from error
    found = (*bound.args, *bound.kwargs.values())
    if bound.kwargs or not found or not all(isinstance(value, Tensor) for value in found) or not batched(found)[0]:
        raise InvalidValue(
            "An exported file takes tensors by their position, with a batch in front, found "
            f"{', '.join(type(value).__name__ for value in found) or 'nothing'} for forward{signature}. Export the "
            "part of the network that takes tensors, or a module around it that does."
        )
    return tuple(found)
