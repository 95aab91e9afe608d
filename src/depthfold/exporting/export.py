"""export(): a merged network as one file of a runtime's, compared with PyTorch before it takes its place."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from depthfold.backends import get
from depthfold.backends.base import Exporter, Inputs, batched, private_copy, with_batch
from depthfold.core.wording import did_you_mean
from depthfold.errors import BackendError, InvalidValue, OutOfMemory, VerificationError
from depthfold.exporting.comparing import compare, run_in_pytorch
from depthfold.exporting.exported import Exported
from depthfold.exporting.onnx_file import finish_onnx
from depthfold.exporting.save import writing
from depthfold.merging.verification import Shallow, shallow_parts
from depthfold.store.files import put_all_in_place
from depthfold.tracing import Blueprint, ExampleInputs, device_of

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
