"""save(): a merged network as two files, from which load() makes it again without unpickling anything."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from depthfold.core import Plan
from depthfold.core.wording import one_line
from depthfold.errors import InvalidValue, ResultError
from depthfold.exporting.probe import take_probe
from depthfold.exporting.result import CONFIG, TENSORS, Example, Result, TensorSpec
from depthfold.exporting.tensors import without_ties
from depthfold.merging.verification import Shallow, shallow_parts
from depthfold.store.files import put_all_in_place
from depthfold.version import __version__


def save(shallow: nn.Module, folder: str | Path) -> Path:
    """Write a merged network, as merge() returned it, to a folder: config.json and model.safetensors.

    Parent folders are made, and a result that is there already is written over: both files are complete before either
    takes its place. `load(folder, model)` makes the network again. Returns the folder.
    """
    graph, remembered, path = shallow_parts(shallow)
    blueprint, plan = remembered.blueprint, remembered.plan
    _refuse_wrappers(shallow, path, blueprint.at or "")
    _refuse_several(shallow)
    tensors, tied = without_ties(shallow)
    # Copies, each in memory of its own: safetensors refuses tensors that share theirs or are not contiguous.
    kept = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    try:
        data = safetensors.torch.save(kept, metadata={"format": "pt"})
    except Exception as error:  # a type of numbers that the format does not have
        raise ResultError(f"The tensors have no form in safetensors: {one_line(error)}.") from error
    result = Result(
        name=blueprint.network.name,
        fingerprint=blueprint.network.fingerprint,
        plan=Plan(plan.activations, plan.cuts),  # a solved plan also knows what it costs, which is no part of this
        at=blueprint.at,
        ignore=blueprint.ignore,
        example=Example.of(blueprint.example),
        tensors={name: TensorSpec.of(tensor) for name, tensor in kept.items()},
        tied=tied,
        sha256=hashlib.sha256(data).hexdigest(),
        probe=take_probe(graph, blueprint.inputs),
        depthfold=__version__,
        torch=str(torch.__version__),
    )
    folder = Path(folder)
    with writing(folder), put_all_in_place(folder / CONFIG) as config:
        config.with_name(TENSORS).write_bytes(data)
        config.write_text(result.dumps() + "\n", encoding="utf-8")
    return folder


def _refuse_wrappers(shallow: nn.Module, path: str, at: str) -> None:
    """load() makes what merge() returned, and knows nothing of a module that somebody put around it or took off."""
    if path == at:
        return
    expected = f"a model with the merged network at {at!r}" if at else "the merged network itself"
    found = f"it at {path!r}" if path else "the merged network alone"
    raise InvalidValue(
        f"save() takes what merge(student) returned, which is {expected}; found {found} in {type(shallow).__name__}."
    )


def _refuse_several(shallow: nn.Module) -> None:
    """load() replays one plan."""
    paths = [path for path, part in shallow.named_modules() if Shallow.KEY in getattr(part, "meta", ())]
    if len(paths) > 1:
        raise InvalidValue(
            f"save() keeps the plan of one merged network, found {len(paths)}: {', '.join(map(repr, paths))}. "
            "export() takes such a model as it is."
        )


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Whatever the disk says, as one error."""
    try:
        yield
    except OSError as error:
        raise ResultError(
            f"{path} cannot be written: {error.strerror or one_line(error)}. Check the folder and its free space, or "
            "name another; what was there before is still there."
        ) from error
