"""From the options of a command to its settings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from depthfold.pipeline.settings import Settings

APART = frozenset({"config", "debug", "retry", "json"})  # of one command only, and not kept


@contextlib.contextmanager
def settings_of(ctx: typer.Context, *needs: str) -> Iterator[Settings]:
    """The settings of a command, which the run keeps when it has succeeded with them."""
    from depthfold.pipeline.config_file import gather, keep  # these import torch, which --help must not wait for

    told = {name: value for name, value in ctx.params.items() if name not in APART and value not in (None, [], ())}
    settings = gather(told, ctx.params.get("config"), needs=needs, uses=set(ctx.params) - APART)
    yield settings
    if settings.run is not None:
        keep(settings)
