"""What is compiled to be timed: made, and freed in the end, so that it fails in the words of a runtime."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from torch import nn

from depthfold.backends import Backend, Compiled
from depthfold.backends.base import Inputs, reasons

Key = TypeVar("Key")


def build(backend: Backend, make: Callable[[], tuple[nn.Module, Inputs]]) -> Compiled:
    """Compile what `make` returns. What cannot even be made, for want of memory, fails as if the runtime refused it."""
    with reasons("It cannot be built"):
        return backend.compile(*make())


@contextlib.contextmanager
def held(compiled: Mapping[Key, Compiled]) -> Iterator[Mapping[Key, Compiled]]:
    """Close all of them in the end. That fails, too, on a device that is spoiled."""
    try:
        yield compiled
    finally:
        with reasons("What was compiled cannot be freed"):
            for one in compiled.values():
                one.close()
