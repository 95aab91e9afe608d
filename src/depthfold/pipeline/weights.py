"""Weights from a file: a state dict in safetensors, or in PyTorch's own form without anything that could run."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthfold.errors import InvalidValue
from depthfold.support.optional import load
from depthfold.support.text import one_line

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
SHOWN = 3
# Under these names training scripts keep the state dict beside other things.
INSIDE = ("state_dict", "model_state_dict", "model")
STATE_DICT = (
    "Only state dicts of tensors are read, because anything else in such a file could run code. Save one with "
    "torch.save(model.state_dict(), path), or with safetensors"
)


def is_weights_file(text: str) -> bool:
    return Path(text).suffix in SUFFIXES or Path(text).expanduser().is_file()


def load_weights_file(model: nn.Module, path: Path, name: str) -> None:
    """Give the model the weights of the file, all of them or none."""
    path = path.expanduser()
    found = _read(path)
    if found and all(key.startswith("module.") for key in found):  # saved from a DataParallel
        found = {key.removeprefix("module."): value for key, value in found.items()}
    problems = tuple(_differences(model.state_dict(), found))
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise InvalidValue(
            f"The weights in {path} do not fit the model {name}: {'; '.join(problems[:SHOWN])}{more}. Give the "
            "weights of this very architecture, with the same number of classes."
        )
    model.load_state_dict(found)


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise InvalidValue(f"There is no file of weights {path}. Check the path of --weights.")
    data: Any
    try:
        if path.suffix == ".safetensors":
            data = load("safetensors.torch", "train").load_file(path)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of other ways to load it: for whoever calls torch.load, not for us
                data = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError, _damaged()) as error:
        why = one_line(error).rstrip(".")
        if path.suffix != ".safetensors" and not isinstance(error, OSError):
            # PyTorch advises to load it with weights_only=False, which would run whatever somebody put there.
            why = "the file is damaged, or holds more than tensors, such as a whole model"
        raise InvalidValue(f"The weights in {path} cannot be read: {why}. {STATE_DICT}.") from error
    for key in INSIDE:
        if isinstance(data, Mapping) and isinstance(data.get(key), Mapping):
            data = data[key]
    if not isinstance(data, Mapping) or not all(isinstance(value, Tensor) for value in data.values()):
        raise InvalidValue(f"{path} holds no state dict, but {type(data).__name__}. {STATE_DICT}.")
    return {str(key): value for key, value in data.items()}


def _differences(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Iterator[str]:
    for name in sorted({*wanted, *found}):
        if name not in found:
            yield f"{name} is missing"
        elif name not in wanted:
            yield f"{name} is not part of the model"
        elif wanted[name].shape != found[name].shape:
            one, two = ("x".join(map(str, tensors[name].shape)) or "a number" for tensors in (found, wanted))
            yield f"{name} is {one} in the file and {two} in the model"


def _damaged() -> type[Exception]:
    return load("safetensors", "train").SafetensorError  # type: ignore[no-any-return]
