"""Everything that a command can be told, checked together: all problems are reported at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

from depthfold.core.network import Space
from depthfold.errors import InvalidValue
from depthfold.pipeline.checks import MISSING, image_of, problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run is told, in the words of the command line and of config.toml. Paths are absolute."""

    run: str | None = None
    model: str | None = None
    weights: str | None = None
    data: str | None = None
    input: str | None = None
    batch: int = 1
    ignore: tuple[str, ...] = ()
    at: str | None = None
    space: Space = "paper"
    target: str | None = None
    budget: str | None = None
    trainings: str | Mapping[str, Any] = "importance"
    importance: str | None = None
    executor: str = "inline"
    afresh: bool = True
    alpha: float | None = None
    recipe: str | Mapping[str, Any] = "quick"
    distil: bool = True
    export: tuple[str, ...] = ("model.onnx",)

    @classmethod
    def checked(cls, table: Mapping[str, Any], *, needs: Collection[str], uses: Collection[str]) -> Self:
        """The settings of a table. Those that are needed must be there, and those that are used must make sense; the
        others belong to other commands, which will look at them."""
        known = [field.name for field in dataclasses.fields(cls)]
        found = tuple(problems(table, known, needs, {*uses, *needs}))
        if len(found) == 1:
            raise InvalidValue(found[0])
        if found:
            listed = "\n".join(f"  - {problem}" for problem in found)
            raise InvalidValue(f"{len(found)} settings cannot be used:\n{listed}")
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
        }
        return cls(**fields)

    @property
    def image(self) -> tuple[int, int, int] | None:
        """Channels, height and width of `input`."""
        return None if self.input is None else image_of(self.input)

    @property
    def folder(self) -> str:
        """The run folder of a command that needs one."""
        return given(self.run, "run")


def given(value: str | None, name: str) -> str:
    """The setting, or an error that says how to give it."""
    if value is None:
        raise InvalidValue(f"{MISSING[name]}.")
    return value
