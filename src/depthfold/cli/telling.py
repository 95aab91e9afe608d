"""From the options of a command to its settings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from depthfold.pipeline.settings import Settings

APART = frozenset({"config", "debug", "retry", "json"})  # of one command only, and not kept


@contextlib.contextmanager
def settings_of(ctx: typer.Context, *needs: str, looks: bool = False) -> Iterator[Settings]:
    """The settings of a command, which the run keeps when it has succeeded with them. A command that only looks leaves
    the run as it is: the next one must not measure on a target that was named for a glance."""
    from depthfold.pipeline.config_file import gather, keep  # these import torch, which --help must not wait for

    uses = set(ctx.params) - APART
    if "data" not in {*needs, *told(ctx)}:
        uses -= {"data"}  # a run outlives its data: only a stage that asks for them finds out that they are gone
    settings = gather(told(ctx), ctx.params.get("config"), needs=needs, uses=uses)
    yield settings
    if settings.run is not None and not looks:
        keep(settings)


def told(ctx: typer.Context) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in ctx.params.items() if name not in APART and value not in (None, [], ())}
