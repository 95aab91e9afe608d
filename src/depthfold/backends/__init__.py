"""Runtimes behind one protocol: compile a module, run it, time it, and state the environment."""

from depthfold.backends.base import Backend, Compiled, Inputs, SupportsInside, backend_errors
from depthfold.backends.registry import available, describe_target, get

__all__ = ["Backend", "Compiled", "Inputs", "SupportsInside", "available", "backend_errors", "describe_target", "get"]
