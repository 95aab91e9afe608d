"""A checkpoint: one safetensors file with tensors and a JSON document, complete or not there at all.

The document is in the file's own metadata, so tensors and document can never belong to two different steps. The file
is written beside its place and renamed into it: a kill at any byte leaves the one before. A digest over all of it
shows a file that somebody has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from depthfold.errors import CheckpointError
from depthfold.store.files import put_in_place
from depthfold.support.optional import load
from depthfold.tracing.weights import digest_of

_DOCUMENT, _DIGEST = "depthfold", "sha256"


def write(path: Path, document: str, tensors: Mapping[str, Tensor]) -> None:
    """Write the file, in place of the one that may be there."""
    save_file = load("safetensors.torch", "train").save_file
    # Copies, each in memory of its own: safetensors refuses tensors that share theirs or are not contiguous.
    kept = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    metadata = {_DOCUMENT: document, _DIGEST: digest_of(kept, document)}
    try:
        with put_in_place(path) as partial:
            save_file(kept, partial, metadata)
    except (OSError, _errors()) as error:
        raise CheckpointError(
            f"The checkpoint {path} cannot be written: {error}. Check the folder and its free space, or name another; "
            "the checkpoint before this one, if any, is still there."
        ) from error


def read(path: Path) -> tuple[str, dict[str, Tensor]]:
    """The document and the tensors, on the CPU."""
    safe_open = load("safetensors", "train").safe_open
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, _errors()) as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read: {error}. {_ADVICE}") from error
    document = metadata.get(_DOCUMENT)
    if document is None:
        raise CheckpointError(f"{path} is no checkpoint of depthfold's: it holds tensors only. {_ADVICE}")
    if metadata.get(_DIGEST) != digest_of(tensors, document):
        raise CheckpointError(f"The checkpoint {path} is damaged: its contents do not match their digest. {_ADVICE}")
    return document, tensors


_ADVICE = "Restore it, or delete it to start again."


def _errors() -> Any:
    return load("safetensors", "train").SafetensorError
