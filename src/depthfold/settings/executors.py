"""Executors by name: inline, processes:2,threads=1, ray:address=auto,gpus=0.25."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from typing import Any

from depthfold.errors import InvalidValue
from depthfold.jobs import Executor, InProcess, Processes, RayCluster
from depthfold.support.text import did_you_mean

KINDS: dict[str, type] = {"inline": InProcess, "processes": Processes, "ray": RayCluster}
HIDDEN = frozenset({"runtime_env"})  # cannot be written on one line
TYPES = {"address": str, "cpus": float, "gpus": float}  # all others are integers


def make_executor(text: str) -> Executor:
    """Make the executor that the text names. A bare number after the name is the number of workers."""
    name, _, rest = text.partition(":")
    if name not in KINDS:
        raise InvalidValue(
            f"There is no executor {name!r}. {did_you_mean(name, KINDS)}The executors are {', '.join(KINDS)}."
        )
    known = [field.name for field in dataclasses.fields(KINDS[name]) if field.name not in HIDDEN]
    options: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = item.partition("=")
        if not equals and item.isdecimal() and "workers" in known:
            key, value = "workers", item
        if key not in known or not value:
            raise InvalidValue(
                f"The executor {name!r} cannot read {item!r}. Its options are {', '.join(known)}; for example "
                "processes:2,threads=1 or ray:address=auto,gpus=0.25."
            )
        options[key] = _parse(name, key, value)
    if name == "ray":
        # user_file.py registers a module with Ray only if Ray was imported before it.
        with contextlib.suppress(ImportError):
            importlib.import_module("ray.cloudpickle")
    return KINDS[name](**options)  # type: ignore[no-any-return]


def _parse(name: str, key: str, value: str) -> Any:
    if key == "devices":
        return tuple(value.split("+"))
    kind = TYPES.get(key, int)
    try:
        return kind(value)
    except ValueError:
        wanted = "a number" if kind is float else "a whole number"
        raise InvalidValue(f"The option {key!r} of the executor {name!r} must be {wanted}, found {value!r}.") from None
