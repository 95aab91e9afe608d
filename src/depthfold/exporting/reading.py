"""The two files of a saved result, read and checked: whatever is wrong with them is found before anything is built."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from depthfold.core.wording import one_line
from depthfold.errors import DepthfoldError, ResultError
from depthfold.exporting.result import CONFIG, Result, TensorSpec

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
