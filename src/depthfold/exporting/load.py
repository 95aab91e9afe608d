"""load(): rebuild a saved network by tracing, rewriting and merging the model again, and load its weights."""

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
from depthfold.exporting.save import CONFIG, TENSORS, Result, TensorSpec, assign_tensors, named_tensors
from depthfold.merging import build_shallow, empty_module, shallow_parts
from depthfold.rewriting import rewrite
from depthfold.support.text import one_line
from depthfold.tracing import TracedNetwork, device_of, trace

WRITERS = "save(shallow, folder) or `depthfold merge`"
RESTORE = "Restore the folder, or save the network again"


def read_config(folder: Path) -> Result:
    path = folder / CONFIG
    if not folder.is_dir():
        raise ResultError(f"There is no folder {folder}. Expected a folder written by {WRITERS}.")
    if not path.is_file():
        raise ResultError(f"{folder} has no {CONFIG}. Expected a folder written by {WRITERS}.")
    try:
        text = path.read_text(encoding="utf-8")
        _check_version(path, json.loads(text))
        return Result.loads(text)
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror}. Check its permissions.") from error
    except ResultError:
        raise
    except (DepthfoldError, ValueError) as error:  # not JSON, not text, or the wrong fields
        raise ResultError(f"{path} is damaged: {one_line(error).rstrip('.')}. {RESTORE}.") from error


def _check_version(path: Path, data: Any) -> None:
    found = (data.get("format"), data.get("version")) if isinstance(data, dict) else (None, None)
    if found[0] != Result.FORMAT:
        raise ResultError(
            f"{path} has the format {found[0]!r}, expected {Result.FORMAT!r}. Use a folder written by {WRITERS}."
        )
    if isinstance(found[1], int) and found[1] > Result.VERSION:
        raise ResultError(
            f"{path} was written by a newer depthfold ({data.get('depthfold')}) in version {found[1]} of the format; "
            f"this one reads version {Result.VERSION}. Upgrade with: pip install -U depthfold"
        )


def read_tensors(path: Path, result: Result) -> dict[str, Tensor]:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ResultError(f"{path} is missing. {RESTORE}.") from error
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror}. Check its permissions.") from error
    if hashlib.sha256(data).hexdigest() != result.sha256:
        raise ResultError(f"{path} or {CONFIG} was modified: the SHA-256 of the file does not match. {RESTORE}.")
    try:
        tensors = safetensors.torch.load(data)
    except Exception as error:  # its digest matches, so it was replaced on purpose
        raise ResultError(f"{path} is not a safetensors file: {one_line(error)}. {RESTORE}.") from error
    if differences({name: TensorSpec.of(tensor) for name, tensor in tensors.items()}, result.tensors):
        raise ResultError(f"{path} does not contain the tensors listed in {CONFIG}. {RESTORE}.")
    return tensors


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    return [
        f"{name!r} is {found.get(name, 'missing')} instead of {wanted.get(name, 'absent')}"
        for name in sorted({*found, *wanted})
        if found.get(name) != wanted.get(name)
    ]


def load(folder: str | Path, model: nn.Module, example_inputs: Any = None) -> nn.Module:
    """Return the merged network that save() wrote, in evaluation mode, on the device of the model.

    `model` is the architecture that was traced; its weights are not used, and it may be on the device "meta". It is not
    changed. `example_inputs` are as for trace(), and needed only if the original ones were not plain tensors. Nothing
    is unpickled. On the same machine, the outputs are bit for bit those of the saved network.
    """
    folder = Path(folder)
    result = read_config(folder)
    tensors = read_tensors(folder / TENSORS, result)
    traced = _trace_again(folder, result, model, example_inputs)
    shallow = _build_without_weights(folder, traced, result)
    _check_shapes(folder, result, shallow)
    device = device_of(model)
    device = torch.device("cpu") if device.type == "meta" else device
    assign_tensors(shallow, {name: tensor.to(device) for name, tensor in tensors.items()}, result.tied)
    graph, _, _ = shallow_parts(shallow)
    error = probe_error(result.probe, graph, traced.blueprint.inputs)
    if not error <= result.probe.tolerance:
        raise ResultError(
            f"The network from {folder} and this {type(model).__name__} differs from the saved one by {error:.1e} of "
            f"the largest output; {result.probe.tolerance:.1e} is allowed. Either {CONFIG} was modified, or the model "
            "differs in a part that is not merged, for example in an activation or an epsilon."
        )
    return shallow


def _trace_again(folder: Path, result: Result, model: nn.Module, example_inputs: Any) -> TracedNetwork:
    if not isinstance(model, nn.Module):
        raise InvalidValue(
            f"load() needs the model that was traced as an nn.Module, found {type(model).__name__}. Its weights are "
            "not used."
        )
    if example_inputs is None:
        if result.example is None:
            raise InvalidValue(
                f"{folder} does not contain example inputs, because they were not plain tensors. Use load(folder, "
                "model, example_inputs)."
            )
        example_inputs = result.example.zeros().like(model)
    try:
        traced = trace(model, example_inputs, ignore=result.ignore, at=result.at)
    except TraceError as error:
        raise ResultError(
            f"{folder} was made from {result.name}, and the given {type(model).__name__} cannot be traced in the same "
            f"way: {error}"
        ) from error
    if traced.network.fingerprint != result.fingerprint:
        sizes = f", with inputs of {result.example}" if result.example else ""
        raise ResultError(
            f"{folder} was made from {result.name} (fingerprint {result.fingerprint}), but this {traced.network.name} "
            f"is another network (fingerprint {traced.network.fingerprint}). Use the architecture that was "
            f"traced{sizes}."
        )
    return traced


def _build_without_weights(folder: Path, traced: TracedNetwork, result: Result) -> nn.Module:
    """Return the merged network with its convolutions on the device "meta"."""

    def empty(span: Span, like: Tensor) -> nn.Module:
        return empty_module(traced.network.merged_shape(span, result.plan.dropped), like.dtype)

    try:
        return build_shallow(rewrite(traced, result.plan), empty)
    except PlanError as error:
        raise ResultError(
            f"The plan in {folder / CONFIG} does not fit {traced.network.name}: {error} {RESTORE}."
        ) from error


def _check_shapes(folder: Path, result: Result, shallow: nn.Module) -> None:
    """Raise ResultError if the tensors of the rebuilt network have other names or shapes than the saved ones."""
    wanted = dict(result.tensors) | {name: result.tensors[source] for name, source in result.tied.items()}
    found = {name: TensorSpec.of(tensor) for name, tensor in named_tensors(shallow)}
    # The dtype may differ: a network may be traced in float32 and saved in float16.
    if problems := differences(_shapes(found), _shapes(wanted)):
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ResultError(
            f"The tensors in {folder} do not fit the rebuilt network: {'; '.join(problems[:3])}{more}. Either the "
            f"model is not the architecture that was traced, or the plan in {CONFIG} was modified."
        )


def _shapes(specs: Mapping[str, TensorSpec]) -> dict[str, str]:
    return {name: "x".join(map(str, spec.shape)) or "a number" for name, spec in specs.items()}
