"""One file per runtime behind one small protocol: compile a module, run it, time it, say where it ran."""

from depthfold.backends.base import Backend, Compiled
from depthfold.backends.registry import available, get

__all__ = ["Backend", "Compiled", "available", "get"]
