"""Runtimes behind one protocol: compile a module, run it, time it, and state the environment."""

from depthfold.backends.base import (
    Backend,
    Compiled,
    Exporter,
    Inputs,
    SupportsInside,
    backend_errors,
    float32_copy,
)
from depthfold.backends.memory_format import set_channels_last
from depthfold.backends.precision import disable_autocast, full_precision
from depthfold.backends.raw_images import Layout, RawImages
from depthfold.backends.registry import available, describe_target, get

__all__ = [
    "Backend", "Compiled", "Exporter", "Inputs", "Layout", "RawImages", "SupportsInside", "available", "backend_errors",
    "describe_target", "disable_autocast", "float32_copy", "full_precision", "get", "set_channels_last",
]  # fmt: skip
