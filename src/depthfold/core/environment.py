"""The environment of a measurement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar

from depthfold.errors import InvalidValue
from depthfold.support.coerce import as_tuple, as_whole
from depthfold.support.document import Document


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment(Document):
    """The machine, the runtime and the input of a measurement.

    A field is None if it is unknown (the published CSV files have no environment) or if the measurement does not depend
    on it. For example, measure_importance() states none, because importances hardly depend on the machine.
    """

    FORMAT: ClassVar[str] = "depthfold.environment"

    machine: str | None = None
    device: str | None = None
    runtime: str | None = None
    runtime_version: str | None = None
    precision: str | None = None
    batch: int | None = None
    input_size: tuple[int, ...] | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.stated.items():
            what = f"The {name.replace('_', ' ')} of an environment"
            if name in ("batch", "threads"):
                object.__setattr__(self, name, as_whole(what, value, InvalidValue))
            elif name == "input_size":
                object.__setattr__(self, name, _sizes(what, value))
            elif not value:
                raise InvalidValue(f"{what} is empty. Use None if it is unknown.")

    @property
    def stated(self) -> dict[str, object]:
        """The fields that are not None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def differences(self, other: Environment) -> tuple[str, ...]:
        """Describe each field that is set in both environments and differs."""
        return tuple(self._differences(other.stated))

    def _differences(self, others: dict[str, object]) -> Iterator[str]:
        for name, value in self.stated.items():
            if name in others and others[name] != value:
                yield f"{name.replace('_', ' ')}: {_show(value)} against {_show(others[name])}"

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {_show(value)}" for name, value in self.stated.items()) or (
            "not stated"
        )


def _sizes(what: str, value: object) -> tuple[int, ...]:
    sizes = as_tuple(what, value, InvalidValue)
    if not sizes:
        raise InvalidValue(f"{what} is empty. Use channels and sizes such as (3, 224, 224), or None if it is unknown.")
    return tuple(as_whole(f"Each number in {what[0].lower()}{what[1:]}", size, InvalidValue) for size in sizes)


def _show(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
