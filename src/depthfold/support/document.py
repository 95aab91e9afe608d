"""JSON for the nouns: one codec, driven by the type hints of the frozen dataclasses.

A noun that is written to a file of its own carries its format and version; a noun that lives inside another one
does not repeat them. Reading is strict: an unknown field, a missing field or a wrong type is an error that names it.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from depthfold.errors import InvalidValue


class Document:
    """Mix-in for a frozen dataclass that can be written as a JSON document with a format and a version."""

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
                f"This document has format {found[0]!r}, version {found[1]!r}; "
                f"{cls.__name__} reads format {cls.FORMAT!r}, version {cls.VERSION}. "
                "Was it written by another command, or by an older or newer depthfold?"
            )
        fields = {key: value for key, value in data.items() if key not in ("format", "version")}
        return typing.cast(Self, decode_fields(cls, fields, cls.__name__))

    def dumps(self) -> str:
        return json.dumps(self.to_json(), indent=1, allow_nan=False)

    @classmethod
    def loads(cls, text: str) -> Self:
        try:
            data = json.loads(text)
        except ValueError as error:  # JSONDecodeError is one, a whole number of thousands of digits is another
            raise InvalidValue(f"This is not JSON: {error}. Expected a {cls.FORMAT!r} document.") from error
        if not isinstance(data, dict):
            raise InvalidValue(f"Expected a JSON object with a {cls.FORMAT!r} document, found {type(data).__name__}.")
        return cls.from_json(data)


def encode(value: Any) -> Any:
    """A noun, or anything inside one, as plain JSON data."""
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
    raise InvalidValue(f"{type(value).__name__} has no JSON form; nouns hold numbers, text, tuples and other nouns.")


def encode_fields(noun: Any) -> dict[str, Any]:
    return {field.name: encode(getattr(noun, field.name)) for field in dataclasses.fields(noun) if field.init}


def decode_fields(cls: type, data: Any, where: str) -> Any:
    """Build the dataclass `cls` from its JSON object; `where` names the place in the document for messages."""
    if not isinstance(data, Mapping):
        raise InvalidValue(f"{where}: expected an object, found {type(data).__name__}.")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    required = {
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    if unknown := sorted(set(data) - set(fields)):
        raise InvalidValue(f"{where}: unknown field {unknown[0]!r}; known are {', '.join(fields)}.")
    if missing := sorted(required - set(data)):
        raise InvalidValue(f"{where}: the field {missing[0]!r} is missing.")
    return cls(**{name: decode(hints[name], value, f"{where}.{name}") for name, value in data.items()})


def decode(hint: Any, value: Any, where: str) -> Any:
    """Plain JSON data as the type that `hint` asks for."""
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
            raise InvalidValue(f"{where}: expected a number that fits a float, found a larger one.") from None
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise InvalidValue(f"{where}: expected {hint.__name__}, found {value!r}.")
    return value
