"""Backends by name: the built-in ones, and those that other packages register by entry point."""

from __future__ import annotations

import dataclasses
import importlib
import types
import typing
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from depthfold.backends.base import Backend
from depthfold.core.document import decode
from depthfold.core.wording import did_you_mean
from depthfold.errors import InvalidValue

GROUP = "depthfold.backends"

_BUILT_IN = {
    "cost_model": "depthfold.backends.cost_model:CostModel",
    "inductor": "depthfold.backends.inductor:Inductor",
    "onnxruntime": "depthfold.backends.onnxruntime:OnnxRuntime",
    "openvino": "depthfold.backends.openvino:OpenVino",
    "pytorch": "depthfold.backends.pytorch:PyTorch",
    "tensorrt": "depthfold.backends.tensorrt:TensorRT",
}
_FLAGS = {"true": True, "false": False}


def available() -> tuple[str, ...]:
    """The names that get() knows. Whether a runtime is installed shows when it is used."""
    return tuple(sorted({*_BUILT_IN, *_registered()}))


def get(target: str | Backend) -> Backend:
    """A backend by name, by name with options ("pytorch:device=cuda,precision=tf32"), or as it is."""
    if not isinstance(target, str):
        if isinstance(target, type) or not isinstance(target, Backend):
            raise InvalidValue(f"Expected a backend or the name of one, found {target!r:.80}. {_known()}")
        return target
    name, _, text = target.partition(":")
    cls = _find(name.strip())
    return typing.cast(Backend, cls(**_options(cls, name.strip(), text)))


def spelled(backend: Backend, *, without: tuple[str, ...] = ()) -> str:
    """The backend as get() reads it: its name and the options that differ from their defaults, but for `without`."""
    fields = dataclasses.fields(backend)  # type: ignore[arg-type]
    values = {field.name: getattr(backend, field.name) for field in fields if field.name not in without}
    changed = {
        field.name: values[field.name] for field in fields if values.get(field.name, field.default) != field.default
    }
    options = ",".join(f"{name}={_spell(value)}" for name, value in changed.items())
    return f"{backend.name}:{options}" if options else backend.name


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _find(name: str) -> type:
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        return typing.cast(type, getattr(importlib.import_module(module), attribute))
    registered = _registered()
    if name not in registered:
        raise InvalidValue(f"There is no backend {name!r}. {did_you_mean(name, available())}{_known()}")
    found = registered[name].load()
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise InvalidValue(
            f"The entry point {name!r} of the group {GROUP!r} ({registered[name].value}) must name a dataclass whose "
            f"fields are the options of a backend, found {found!r:.80}."
        )
    return found


def _known() -> str:
    return f"Known are {', '.join(available())}."


def _options(cls: type, name: str, text: str) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    known = {field.name for field in dataclasses.fields(cls)}
    options: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key not in known or key in options:
            found = f"has no option {key!r}" if equals and key not in known else f"cannot read {item!r}"
            hint = did_you_mean(key, known) if equals and key not in known else ""
            raise InvalidValue(f"The backend {name!r} {found}. {hint}{_described(cls, name)}")
        try:
            options[key] = _read(hints[key], value)
        except (InvalidValue, ValueError):
            raise InvalidValue(
                f"The option {key!r} of the backend {name!r} cannot be {value!r}. {_described(cls, name)}"
            ) from None
    return options


def _described(cls: type, name: str) -> str:
    hints = typing.get_type_hints(cls)
    options = [f"{f.name}={_spell(f.default)} ({_type(hints[f.name])})" for f in dataclasses.fields(cls)]
    return f"Its options and their defaults: {', '.join(options)}." if options else f"{name!r} has no options."


def _type(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " | ".join(map(str, args))
    if origin in (typing.Union, types.UnionType):
        return " | ".join("none" if arg is type(None) else _type(arg) for arg in args)
    if origin is tuple:
        return f"{_type(args[0])}+..."
    return str(getattr(hint, "__name__", hint))


def _spell(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _read(hint: Any, text: str) -> Any:
    """Text as the type that `hint` asks for: the strictness of the nouns' JSON, but for how numbers are written."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if text.lower() == "none" and type(None) in args:
            return None
        return _read(next(arg for arg in args if arg is not type(None)), text)
    if origin is tuple:
        return tuple(_read(args[0], part) for part in text.split("+"))
    value: Any = text
    if hint is bool:
        value = _FLAGS.get(text.lower(), text)
    elif hint in (int, float):
        value = hint(text)
    return decode(hint, value, "option")
