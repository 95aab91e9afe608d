"""Backends by name: the built-in ones, and those that other packages register as entry points."""

from __future__ import annotations

import dataclasses
import importlib
import types
import typing
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from depthfold.backends.base import Backend
from depthfold.errors import BackendError, InvalidValue, MissingDependency
from depthfold.support.document import decode
from depthfold.support.text import did_you_mean, one_line

GROUP = "depthfold.backends"

_BUILT_IN = {
    "cost_model": "depthfold.backends.cost_model:CostModel",
    "inductor": "depthfold.backends.inductor:Inductor",
    "onnxruntime": "depthfold.backends.onnxruntime:OnnxRuntime",
    "openvino": "depthfold.backends.openvino:OpenVino",
    "pytorch": "depthfold.backends.pytorch:PyTorch",
    "tensorrt": "depthfold.backends.tensorrt:TensorRT",
}
_METHODS = ("environment", "compile", "export")
_FLAGS = {"true": True, "false": False}


def available() -> tuple[str, ...]:
    """Return the names that get() accepts. A runtime may still not be installed."""
    return tuple(sorted({*_BUILT_IN, *_registered()}))


def get(target: str | Backend) -> Backend:
    """Return a backend by name, optionally with options ("pytorch:device=cuda,precision=tf32").

    Return objects unchanged.
    """
    if not isinstance(target, str):
        if problem := _missing_members(target):
            raise InvalidValue(f"Expected a backend or the name of one, found {target!r:.80}. {problem} {_known()}")
        return target
    name, _, text = target.partition(":")
    cls = _find(name.strip())
    backend = cls(**_options(cls, name.strip(), text))
    if problem := _missing_members(backend):
        raise InvalidValue(f"{_describe_entry_point(_registered()[name.strip()])} is not a backend. {problem}")
    return typing.cast(Backend, backend)


def _missing_members(target: object) -> str:
    """Return a sentence about the members of a backend that an object does not have, or an empty string."""
    if isinstance(target, type):
        return f"It is a class: pass an instance, {target.__name__}()."
    missing = [f"{method}()" for method in _METHODS if not callable(getattr(target, method, None))]
    if not isinstance(getattr(target, "name", None), str):
        missing.append("name")
    return f"It does not have {', '.join(missing)}." if missing else ""


def describe_target(backend: Any, *, without: tuple[str, ...] = ()) -> str:
    """Return the text that get() accepts: the name and all options except defaults and those in `without`."""
    fields = dataclasses.fields(backend)
    values = {field.name: getattr(backend, field.name) for field in fields if field.name not in without}
    changed = {
        field.name: values[field.name] for field in fields if values.get(field.name, field.default) != field.default
    }
    options = ",".join(f"{name}={_format_value(value)}" for name, value in changed.items())
    return f"{backend.name}:{options}" if options else str(backend.name)


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _find(name: str) -> type:
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        return typing.cast(type, getattr(importlib.import_module(module), attribute))
    registered = _registered()
    if name not in registered:
        raise InvalidValue(f"There is no backend {name!r}. {did_you_mean(name, available())}{_known()}")
    where = _describe_entry_point(registered[name])
    try:
        found = registered[name].load()
    except ImportError as error:
        raise MissingDependency(
            f"{where} cannot be imported: {one_line(error)}. Install its dependencies, or another version."
        ) from error
    except Exception as error:  # importing another package may raise anything
        raise BackendError(
            f"{where} cannot be loaded: {type(error).__name__}: {one_line(error)}. Update or uninstall the package."
        ) from error
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise InvalidValue(
            f"{where} must be a dataclass whose fields are the options of a backend, found {found!r:.80}."
        )
    return found


def _describe_entry_point(point: EntryPoint) -> str:
    package = f", package {point.dist.name}" if point.dist else ""
    return f"The entry point {point.name!r} of the group {GROUP!r} ({point.value}{package})"


def _known() -> str:
    return f"Known backends: {', '.join(available())}."


def _options(cls: type, name: str, text: str) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    known = {field.name for field in dataclasses.fields(cls)}
    options: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key not in known or key in options:
            found = f"has no option {key!r}" if equals and key not in known else f"cannot read {item!r}"
            hint = did_you_mean(key, known) if equals and key not in known else ""
            raise InvalidValue(f"The backend {name!r} {found}. {hint}{_describe_options(cls, name)}")
        try:
            options[key] = _read(hints[key], value)
        except (InvalidValue, ValueError):
            raise InvalidValue(
                f"The option {key!r} of the backend {name!r} cannot be {value!r}. {_describe_options(cls, name)}"
            ) from None
    return options


def _describe_options(cls: type, name: str) -> str:
    hints = typing.get_type_hints(cls)
    options = [f"{f.name}={_format_value(f.default)} ({_type(hints[f.name])})" for f in dataclasses.fields(cls)]
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


def _format_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _read(hint: Any, text: str) -> Any:
    """Convert text to the type `hint`."""
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
