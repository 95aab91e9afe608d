"""load(): a saved network made again. The model is traced, rewritten and merged as before, but for the weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from depthfold.core import Span
from depthfold.errors import DepthfoldError, InvalidValue, PlanError, ResultError, TraceError
from depthfold.exporting.probe import probe_error
from depthfold.exporting.save import CONFIG, TENSORS, Result, TensorSpec, named_tensors, put_tensors
from depthfold.merging.kernels import empty_module
from depthfold.merging.merge import build_shallow
from depthfold.merging.verification import shallow_parts
from depthfold.rewriting import rewrite
from depthfold.support.text import one_line
from depthfold.tracing import TracedNetwork, device_of, trace

# The two files of a saved result, read and checked: whatever is wrong with them is found before anything is built.

WRITERS = "save(shallow, folder) or `depthfold merge`"
RESTORE = "Restore the folder, or save the network again"


def read_config(folder: Path) -> Result:
    path = folder / CONFIG
    if not folder.is_dir():
        raise ResultError(f"There is no folder {folder}; expected one that {WRITERS} wrote.")
    if not path.is_file():
        raise ResultError(f"{folder} is no saved result: it has no {CONFIG}. Expected what {WRITERS} wrote.")
    try:
        text = path.read_text(encoding="utf-8")
        _check_version(path, json.loads(text))
        return Result.loads(text)
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror}.") from error
    except ResultError:
        raise
    except (DepthfoldError, ValueError) as error:  # no JSON, no text at all, or not the fields of a result
        raise ResultError(f"{path} is damaged: {one_line(error).rstrip('.')}. {RESTORE}.") from error


def _check_version(path: Path, data: Any) -> None:
    found = (data.get("format"), data.get("version")) if isinstance(data, dict) else (None, None)
    if found[0] != Result.FORMAT:
        raise ResultError(
            f"{path} is no result of depthfold's: its format is {found[0]!r}, expected {Result.FORMAT!r}. Name the "
            f"folder that {WRITERS} wrote."
        )
    if isinstance(found[1], int) and found[1] > Result.VERSION:
        raise ResultError(
            f"{path} was written by a newer depthfold ({data.get('depthfold')}): it has version {found[1]} of the "
            f"format, and this one reads version {Result.VERSION}. Upgrade with: pip install -U depthfold"
        )


def read_tensors(path: Path, result: Result) -> dict[str, Tensor]:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ResultError(f"{path} is missing: the result has no weights. {RESTORE}.") from error
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror}.") from error
    if hashlib.sha256(data).hexdigest() != result.sha256:
        raise ResultError(
            f"{path} is not the file that was saved: its SHA-256 is not the one in {CONFIG}. It was cut short or "
            f"changed, or {CONFIG} was. {RESTORE}."
        )
    try:
        tensors = safetensors.torch.load(data)
    except Exception as error:  # its digest is right, so somebody took trouble
        raise ResultError(f"{path} is no safetensors file: {one_line(error)}. {RESTORE}.") from error
    if differences({name: TensorSpec.of(tensor) for name, tensor in tensors.items()}, result.tensors):
        raise ResultError(f"{path} does not hold the tensors that {CONFIG} lists. {RESTORE}.")
    return tensors


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    return [
        f"{name!r} is {found.get(name, 'missing')} instead of {wanted.get(name, 'absent')}"
        for name in sorted({*found, *wanted})
        if found.get(name) != wanted.get(name)
    ]


def load(folder: str | Path, model: nn.Module, example_inputs: Any = None) -> nn.Module:
    """The merged network that save() wrote to the folder, in evaluation mode, on the device of the model.

    `model` is the architecture that was traced; its weights do not matter, and may be on the device "meta". It is not
    changed. `example_inputs` are as for trace(), and needed only where the original ones were no plain tensors.
    Nothing is unpickled. The network computes bit for bit what the saved one computed on the same machine.
    """
    folder = Path(folder)
    result = read_config(folder)
    tensors = read_tensors(folder / TENSORS, result)
    traced = _traced_again(folder, result, model, example_inputs)
    shallow = _announced(folder, traced, result)
    _check_names(folder, result, shallow)
    home = device_of(model)
    home = torch.device("cpu") if home.type == "meta" else home
    put_tensors(shallow, {name: tensor.to(home) for name, tensor in tensors.items()}, result.tied)
    graph, _, _ = shallow_parts(shallow)
    error = probe_error(result.probe, graph, traced.blueprint.inputs)
    if not error <= result.probe.tolerance:
        raise ResultError(
            f"The network made of {folder} and this {type(model).__name__} does not compute what the saved one "
            f"computed: it is off by {error:.1e} of the largest output, and {result.probe.tolerance:.1e} is allowed. "
            f"Either {CONFIG} was changed, or the model differs where nothing is merged: an activation, a pool, an "
            "epsilon. Give the architecture that was traced."
        )
    return shallow


def _traced_again(folder: Path, result: Result, model: nn.Module, example_inputs: Any) -> TracedNetwork:
    if not isinstance(model, nn.Module):
        raise InvalidValue(
            f"load() takes the model that was traced, as an nn.Module, found {type(model).__name__}. Build it as "
            "before; its weights do not matter."
        )
    if example_inputs is None:
        if result.example is None:
            raise InvalidValue(
                f"{folder} does not hold the example inputs, which were no plain tensors. Give them again: "
                "load(folder, model, example_inputs), as for trace()."
            )
        example_inputs = result.example.zeros().like(model)
    try:
        traced = trace(model, example_inputs, ignore=result.ignore, at=result.at)
    except TraceError as error:
        raise ResultError(
            f"{folder} was made of {result.name}, and the {type(model).__name__} that was given cannot be traced in "
            f"the same way: {error}"
        ) from error
    if traced.network.fingerprint != result.fingerprint:
        sizes = f", with inputs of {result.example}" if result.example else ""
        raise ResultError(
            f"{folder} was made of {result.name} (fingerprint {result.fingerprint}), and this {traced.network.name} is "
            f"another network (fingerprint {traced.network.fingerprint}): its layers, sizes, activations or skips "
            f"differ. Give the architecture that was traced{sizes}."
        )
    return traced


def _announced(folder: Path, traced: TracedNetwork, result: Result) -> nn.Module:
    """The merged network with its convolutions on the device "meta": only their shapes are needed."""

    def shaped(span: Span, like: Tensor) -> nn.Module:
        return empty_module(traced.network.merged_shape(span), like.dtype)

    try:
        return build_shallow(rewrite(traced, result.plan), shaped)
    except PlanError as error:
        raise ResultError(
            f"The plan in {folder / CONFIG} does not fit {traced.network.name}: {error} The file was changed. "
            f"{RESTORE}."
        ) from error


def _check_names(folder: Path, result: Result, shallow: nn.Module) -> None:
    """The tensors of the network that was made again are those of the saved one, size by size."""
    wanted = dict(result.tensors) | {name: result.tensors[source] for name, source in result.tied.items()}
    found = {name: TensorSpec.of(tensor) for name, tensor in named_tensors(shallow)}
    # The precision is the saved one's: a network may be traced in float32 and saved in float16.
    if problems := differences(_shapes(found), _shapes(wanted)):
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ResultError(
            f"The tensors in {folder} do not fit the network that was made again: {'; '.join(problems[:3])}{more}. "
            f"Either the model is not the architecture that was traced, or the plan in {CONFIG} was changed."
        )


def _shapes(specs: Mapping[str, TensorSpec]) -> dict[str, str]:
    return {name: "x".join(map(str, spec.shape)) or "a number" for name, spec in specs.items()}
