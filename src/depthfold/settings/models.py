"""Models by name (torchvision:NAME, timm:NAME, file.py:function), and their weights from a file."""

from __future__ import annotations

import ast
import pickle
import warnings
from collections.abc import Iterator, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from depthfold.errors import InvalidValue
from depthfold.settings.user_file import call, find_in_file, names_file
from depthfold.support.text import did_you_mean, one_line

TRAINED = frozenset({"weights", "pretrained", "checkpoint_path"})  # arguments with which a library loads weights
WEIGHTS_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
INSIDE = ("state_dict", "model_state_dict", "model")  # keys under which training scripts save the state dict
STATE_DICT = (
    "Only state dicts of tensors are read, because anything else in such a file could run code. Save one with "
    "torch.save(model.state_dict(), path), or with safetensors"
)
SHOWN = 3  # differences listed in a message
USUAL_SIZE = (224,)  # of the images of a torchvision model whose weights state no size, for example of a detector


def make_model(text: str, weights: str | None = None) -> nn.Module:
    """Make the model, with weights from a file or with the library's weights of that name.

    Arguments follow the name: torchvision:resnet18,num_classes=10. Without weights a model is initialised in the same
    way each time, so that a run can be resumed.
    """
    where, _, rest = text.partition(":")
    file = weights if weights is not None and is_weights_file(weights) else None
    named = weights if file is None else None
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        if names_file(text):
            model = _from_file(text, named)
        elif where in ("torchvision", "timm") and rest:
            model = _from_library(where, rest, named)
        else:
            raise InvalidValue(
                f"The model {text!r} is not valid. {_hint(text)}Write torchvision:NAME, timm:NAME or file.py:function."
            )
    if file is not None:
        _load_weights(model, Path(file).expanduser(), text)
    if other := {tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()} - {torch.float32}:
        raise InvalidValue(
            f"The model {text!r} has weights in {', '.join(sorted(map(str, other)))}, and commands work in float32. "
            "Call model.float() in its file; a target has a precision of its own (pytorch:precision=float16)."
        )
    return model.eval()


class UntrainedModel(UserWarning):
    """The model has random weights."""


def warn_if_untrained(text: str, weights: str | None) -> None:
    """Warn if a library's model was made without weights. The user's own function may load them itself."""
    if weights is not None or names_file(text):
        return
    _, options = _options(text.partition(":")[2])
    if not any(options.get(option) for option in TRAINED):
        warnings.warn(
            f"The model {text!r} has random weights, because none were given. Give a file of trained weights, or the "
            "library's: --weights DEFAULT for torchvision, --weights pretrained for timm.",
            UntrainedModel,
            stacklevel=2,
        )


def _from_file(text: str, named: str | None) -> nn.Module:
    if named is not None:
        raise InvalidValue(
            f"There is no weights file {named!r}. For your own model give a .safetensors, .pt or .pth file, or "
            "load the weights in its function."
        )
    found = find_in_file(text, "The model")
    model = found if isinstance(found, nn.Module) else call(found, text, "The model")
    if not isinstance(model, nn.Module):
        raise InvalidValue(
            f"The model {text!r} must be a function that returns an nn.Module; it returned {model!r:.80}."
        )
    return model


def _from_library(where: str, rest: str, weights: str | None) -> nn.Module:
    name, options = _options(rest)
    from depthfold.vision import import_timm, import_torchvision  # torchvision takes a second to import

    if where == "timm":
        library = import_timm()
        known, make = library.list_models(), library.create_model
        if weights not in (None, "pretrained"):
            raise InvalidValue(f"timm's weights are called 'pretrained', and there is no weights file {weights!r}.")
        options |= {} if weights is None else {"pretrained": True}
    else:
        library = import_torchvision().models
        known, make = library.list_models(), library.get_model
        options |= {} if weights is None else {"weights": weights}
        if name in known and weights is not None:
            members = tuple(library.get_model_weights(name).__members__)
            if weights.rpartition(".")[2] not in members:  # both DEFAULT and ResNet18_Weights.DEFAULT are names
                raise InvalidValue(
                    f"torchvision has no weights {weights!r} for {name!r}, and there is no file of that name. "
                    f"{did_you_mean(weights, members)}It has {', '.join(members)}."
                )
    base = name.partition(".")[0] if where == "timm" else name  # timm: resnet18.a1_in1k
    if base not in known:
        hint = did_you_mean(name, known, lambda close: f"{where}:{close}", most=3, cutoff=0.5)
        raise InvalidValue(f"{where} has no model {name!r}. {hint}It has {len(known)} models.")
    defaults = {}
    if where == "torchvision" and "weights_backbone" in signature(library.get_model_builder(name)).parameters:
        defaults = {"weights_backbone": None}  # otherwise detectors and segmenters download a backbone
    try:
        return make(name, **defaults | options)  # type: ignore[no-any-return]
    except Exception as error:  # an unknown argument, or weights that cannot be downloaded
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        what = f"{name!r} with {given}" if given else repr(name)
        raise InvalidValue(f"{where} cannot make {what}: {one_line(error)}") from error


def usual_input(text: str, weights: str | None, model: nn.Module) -> tuple[int, int, int] | None:
    """Return channels, height and width of the images that a library's model was made for; None for other models.

    timm states them. torchvision states the size to which images are cropped for the weights; without any, those of the
    default weights count.
    """
    if names_file(text):
        return None
    where, _, rest = text.partition(":")
    name, options = _options(rest)
    if where == "timm":
        found: Any = getattr(model, "pretrained_cfg", {})
        channels, *size = found.get("input_size", (3, *USUAL_SIZE, *USUAL_SIZE))
        return options.get("in_chans", channels), size[0], size[-1]
    from depthfold.vision import import_torchvision

    named = options.get("weights") or (None if weights is None or is_weights_file(weights) else weights)
    known = import_torchvision().models.get_model_weights(name)
    chosen = known.__members__.get("DEFAULT" if named is None else str(named).rpartition(".")[2])
    crop = getattr(chosen.transforms(), "crop_size", USUAL_SIZE) if chosen else USUAL_SIZE
    return (3, crop[0], crop[-1])


def _options(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name, and the arguments after it as Python literals or text."""
    name, *items = (part.strip() for part in text.split(","))
    options: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.isidentifier():
            raise InvalidValue(f"The model's argument {item!r} is not valid. Write NAME,num_classes=10.")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return name, options


def _hint(text: str) -> str:
    """Return what the user may have meant. A bare name is most often a model of torchvision."""
    if ":" in text or not text:
        where, _, name = text.partition(":")
        if where in ("torchvision", "timm"):
            return f"The name of the {where} model is missing. "
        return did_you_mean(where, ("torchvision", "timm"), lambda close: f"{close}:{name}")
    from depthfold.vision import import_torchvision

    return did_you_mean(text, import_torchvision().models.list_models(), lambda close: f"torchvision:{close}")


def is_weights_file(text: str) -> bool:
    """Return True if the text is the path of a weights file, and not the name of a library's weights."""
    return Path(text).suffix in WEIGHTS_SUFFIXES or Path(text).expanduser().is_file()


def _load_weights(model: nn.Module, path: Path, name: str) -> None:
    """Load all weights of the model from the file, or raise InvalidValue and load none."""
    found = _read(path)
    if found and all(key.startswith("module.") for key in found):  # saved from a DataParallel
        found = {key.removeprefix("module."): value for key, value in found.items()}
    problems = tuple(_differences(model.state_dict(), found))
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise InvalidValue(
            f"The weights in {path} do not fit the model {name}: {'; '.join(problems[:SHOWN])}{more}. Give weights of "
            "the same architecture, with the same number of classes."
        )
    model.load_state_dict(found)


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise InvalidValue(f"There is no weights file {path}. Check the path given with --weights.")
    data: Any
    try:
        if path.suffix == ".safetensors":
            data = load_file(path)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # advice for callers of torch.load
                data = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        why = one_line(error).rstrip(".")
        if path.suffix != ".safetensors" and not isinstance(error, OSError):
            # PyTorch's own message advises weights_only=False, which would run any code in the file.
            why = "the file is damaged, or contains more than tensors, for example a whole model"
        raise InvalidValue(f"The weights in {path} cannot be read: {why}. {STATE_DICT}.") from error
    for key in INSIDE:
        if isinstance(data, Mapping) and isinstance(data.get(key), Mapping):
            data = data[key]
    if not isinstance(data, Mapping) or not all(isinstance(value, Tensor) for value in data.values()):
        raise InvalidValue(f"{path} does not contain a state dict, but {type(data).__name__}. {STATE_DICT}.")
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
