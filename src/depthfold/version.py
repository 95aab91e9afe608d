"""The version of depthfold, in a module that every package can import."""

from __future__ import annotations

__version__ = "0.1.0.dev0"
