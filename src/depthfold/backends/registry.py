"""Backends by name: the built-in ones, and those that other packages register by entry point."""

from __future__ import annotations

import dataclasses
import importlib
import types
import typing
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Protocol

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


class Named(Protocol):
    """What has a name; its options are the fields of its dataclass."""

    name: ClassVar[str]


def available() -> tuple[str, ...]:
    """The names that get() knows. Whether a runtime is installed shows when it is used."""
    return tuple(sorted({*_BUILT_IN, *_registered()}))


def get(target: str | Backend) -> Backend:
    """A backend by name, by name with options ("pytorch:device=cuda,precision=tf32"), or as it is."""
    if not isinstance(target, str):
        if lacking := _lacking(target):
            raise InvalidValue(f"Expected a backend or the name of one, found {target!r:.80}. {lacking} {_known()}")
        return target
    name, _, text = target.partition(":")
    cls = _find(name.strip())
    backend = cls(**_options(cls, name.strip(), text))
    if lacking := _lacking(backend):
        raise InvalidValue(f"{_described_point(_registered()[name.strip()])} names no backend. {lacking}")
    return typing.cast(Backend, backend)


def _lacking(target: object) -> str:
    """What an object has not that a backend has, as a sentence; nothing if it has everything."""
    if isinstance(target, type):
        return f"It is a class: make one of it, {target.__name__}()."
    missing = [f"{method}()" for method in _METHODS if not callable(getattr(target, method, None))]
    if not isinstance(getattr(target, "name", None), str):
        missing.append("a name")
    return f"It lacks {', '.join(missing)}." if missing else ""


def spelled(backend: Named, *, without: tuple[str, ...] = ()) -> str:
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
    where = _described_point(registered[name])
    try:
        found = registered[name].load()
    except ImportError as error:
        raise MissingDependency(
            f"{where} does not import: {one_line(error)}. Install what it needs, or a version of it that fits."
        ) from error
    except Exception as error:  # a module of somebody else's may raise anything when it is imported
        raise BackendError(
            f"{where} does not load: {type(error).__name__}: {one_line(error)}. Tell its authors, or uninstall it."
        ) from error
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise InvalidValue(
            f"{where} must name a dataclass whose fields are the options of a backend, found {found!r:.80}."
        )
    return found


def _described_point(point: EntryPoint) -> str:
    package = f", of the package {point.dist.name}" if point.dist else ""
    return f"The entry point {point.name!r} of the group {GROUP!r} ({point.value}{package})"


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
