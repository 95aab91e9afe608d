"""Runtimes behind one protocol: compile a module, run it, time it, and state the environment."""

from depthfold.backends.base import Backend, Compiled
from depthfold.backends.registry import available, get

__all__ = ["Backend", "Compiled", "available", "get"]
