"""Models by name: torchvision:NAME, timm:NAME, file.py:function."""

from __future__ import annotations

import ast
import warnings
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from depthfold.errors import InvalidValue
from depthfold.pipeline.user_file import call, find_in_file, names_file
from depthfold.pipeline.weights import is_weights_file, load_weights_file
from depthfold.support.text import did_you_mean, one_line

TRAINED = frozenset({"weights", "pretrained", "checkpoint_path"})  # options by which a library loads weights
FORMS = "A model is torchvision:NAME, timm:NAME or file.py:function"


def model_of(text: str, weights: str | None = None) -> nn.Module:
    """The model, with the weights of a file, or with those that torchvision or timm know by a name.

    Options follow the name: torchvision:resnet18,num_classes=10. Without weights a model is initialised in the same way
    each time, so that a run can go on tomorrow.
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
            raise InvalidValue(f"The model {text!r} cannot be read. {_guess(text)}{FORMS}.")
    if file is not None:
        load_weights_file(model, Path(file), text)
    return model.eval()


class UntrainedModel(UserWarning):
    """The model has the random weights that it began with."""


def warn_if_untrained(text: str, weights: str | None) -> None:
    """Tell that a model of a library was given no weights. One of the user's own may load them itself."""
    if weights is not None or names_file(text):
        return
    _, options = _options(text.partition(":")[2])
    if not any(options.get(option) for option in TRAINED):
        warnings.warn(
            f"The model {text!r} has random weights: no others were given, so what comes out is as good as untrained. "
            "Give a file of trained weights, or those that the library knows: --weights DEFAULT for torchvision's, "
            "--weights pretrained for timm's.",
            UntrainedModel,
            stacklevel=2,
        )


def _from_file(text: str, named: str | None) -> nn.Module:
    if named is not None:
        raise InvalidValue(
            f"There is no file of weights {named!r}. A model of your own takes a .safetensors, .pt or .pth file, or no "
            "weights where its function loads them."
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
        options |= {} if weights is None else {"pretrained": _pretrained(weights)}
    else:
        library = import_torchvision().models
        known, make = library.list_models(), library.get_model
        options |= {} if weights is None else {"weights": weights}
        if name in known and weights is not None:
            _expect_known(weights, name, tuple(library.get_model_weights(name).__members__))
    base = name.partition(".")[0] if where == "timm" else name  # timm: resnet18.a1_in1k
    if base not in known:
        hint = did_you_mean(name, known, lambda close: f"{where}:{close}", most=3, cutoff=0.5)
        raise InvalidValue(f"{where} has no model {name!r}. {hint}It has {len(known)} of them.")
    unasked = {}
    if where == "torchvision" and "weights_backbone" in signature(library.get_model_builder(name)).parameters:
        unasked = {"weights_backbone": None}  # detectors and segmenters would download some
    try:
        return make(name, **unasked | options)  # type: ignore[no-any-return]
    except Exception as error:  # an option that it does not take, or weights that cannot be downloaded
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        asked = f"{name!r} with {given}" if given else repr(name)
        raise InvalidValue(f"{where} cannot make {asked}: {one_line(error)}") from error


def _expect_known(weights: str, name: str, known: tuple[str, ...]) -> None:
    """torchvision takes them as DEFAULT, or in full, as ResNet18_Weights.DEFAULT."""
    if weights.rpartition(".")[2] not in known:
        raise InvalidValue(
            f"torchvision has no weights {weights!r} for {name!r}, and there is no file of that name. "
            f"{did_you_mean(weights, known)}It has {', '.join(known)}."
        )


def _pretrained(weights: str) -> bool:
    if weights != "pretrained":
        raise InvalidValue(f"timm knows its weights as 'pretrained'; {weights!r} is neither that nor a file.")
    return True


def _options(text: str) -> tuple[str, dict[str, Any]]:
    """The name, and the options after it as Python numbers, flags or text."""
    name, *items = (part.strip() for part in text.split(","))
    options: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.isidentifier():
            raise InvalidValue(f"The model's option {item!r} cannot be read. Write NAME,num_classes=10.")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return name, options


def _guess(text: str) -> str:
    """A bare name is most often one of torchvision's."""
    if ":" in text or not text:
        where, _, name = text.partition(":")
        if where in ("torchvision", "timm"):
            return f"The name of a model of {where}'s is missing. "
        return did_you_mean(where, ("torchvision", "timm"), lambda close: f"{close}:{name}")
    from depthfold.vision import import_torchvision

    return did_you_mean(text, import_torchvision().models.list_models(), lambda close: f"torchvision:{close}")
