"""JSON documents of frozen dataclasses, encoded and decoded by their type hints.

A data class that is written to its own file has a format and a version; nested data classes do not. Reading is strict:
an unknown field, a missing field or a wrong type raises InvalidValue with the path of the field. Only the fields that a
class names in FORMER, which files of older versions have, are ignored.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from depthfold.errors import InvalidValue

# The metadata of a field that is written only if its value differs from the default. Documents without it stay as they
# were before the field existed.
SPARSE = {"sparse": True}


class Document:
    """Mix-in for frozen dataclasses that are written as JSON documents with a format and a version."""

    __slots__ = ()
    FORMAT: ClassVar[str]
    VERSION: ClassVar[int] = 1

    def to_json(self) -> dict[str, Any]:
        return {"format": self.FORMAT, "version": self.VERSION} | encode_fields(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        found = data.get("format"), data.get("version")
        if found != (cls.FORMAT, cls.VERSION):
            raise InvalidValue(
                f"This document has format {found[0]!r}, version {found[1]!r}; {cls.__name__} reads format "
                f"{cls.FORMAT!r}, version {cls.VERSION}. Read it with the command and the version of depthfold that "
                "wrote it."
            )
        fields = {key: value for key, value in data.items() if key not in ("format", "version")}
        return typing.cast(Self, decode_fields(cls, fields, cls.__name__))

    def dumps(self) -> str:
        return json.dumps(self.to_json(), indent=1, allow_nan=False)

    @classmethod
    def loads(cls, text: str) -> Self:
        try:
            data = json.loads(text)
        except ValueError as error:  # JSONDecodeError, or an integer with thousands of digits
            raise InvalidValue(f"This is not JSON: {error}. Expected a {cls.FORMAT!r} document.") from error
        if not isinstance(data, dict):
            raise InvalidValue(f"Expected a JSON object with a {cls.FORMAT!r} document, found {type(data).__name__}.")
        return cls.from_json(data)


def encode(value: Any) -> Any:
    """Return a data class, or a value inside one, as plain JSON data."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return encode_fields(value)
    if isinstance(value, frozenset):
        return sorted(encode(item) for item in value)
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InvalidValue(f"{type(value).__name__} has no JSON form. Use numbers, text, tuples and data classes.")


def encode_fields(value: Any) -> dict[str, Any]:
    fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value) if field.init)
    written = ((field, own) for field, own in fields if not (field.metadata.get("sparse") and own == field.default))
    return {field.name: encode(own) for field, own in written}


def decode_fields(cls: type, data: Any, where: str) -> Any:
    """Return the dataclass `cls` from its JSON object. `where` is the path in the document, for error messages."""
    if not isinstance(data, Mapping):
        raise InvalidValue(f"{where}: expected an object, found {type(data).__name__}.")
    hints, required = _fields(cls)
    data = {key: value for key, value in data.items() if key not in getattr(cls, "FORMER", ())}
    if unknown := sorted(data.keys() - hints.keys()):
        raise InvalidValue(f"{where}: unknown field {unknown[0]!r}; the fields are {', '.join(hints)}.")
    if missing := sorted(required - data.keys()):
        raise InvalidValue(f"{where}: the field {missing[0]!r} is missing.")
    return cls(**{name: decode(hints[name], value, f"{where}.{name}") for name, value in data.items()})


@functools.cache
def _fields(cls: type) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of the fields of a dataclass, and the names of those without a default."""
    types_of, fields = typing.get_type_hints(cls), [field for field in dataclasses.fields(cls) if field.init]
    required = (
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )
    return {field.name: types_of[field.name] for field in fields}, frozenset(required)


def decode(hint: Any, value: Any, where: str) -> Any:
    """Convert plain JSON data to the type `hint`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return decode(next(arg for arg in args if arg is not type(None)), value, where)
    if origin is tuple or origin is frozenset:
        if not isinstance(value, list | tuple):
            raise InvalidValue(f"{where}: expected a list, found {type(value).__name__}.")
        if origin is frozenset or (len(args) == 2 and args[1] is Ellipsis):
            return origin(decode(args[0], item, f"{where}[{n}]") for n, item in enumerate(value))
        if len(value) != len(args):
            raise InvalidValue(f"{where}: expected {len(args)} items, found {len(value)}.")
        return tuple(decode(arg, item, f"{where}[{n}]") for n, (arg, item) in enumerate(zip(args, value, strict=True)))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise InvalidValue(f"{where}: expected an object, found {type(value).__name__}.")
        return {key: decode(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is typing.Literal:
        if value not in args:
            raise InvalidValue(f"{where}: expected one of {', '.join(map(repr, args))}, found {value!r}.")
        return value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return decode_fields(hint, value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise InvalidValue(f"{where}: the number is too large for a float.") from None
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise InvalidValue(f"{where}: expected {hint.__name__}, found {value!r}.")
    return value
