"""The version, where every layer may read it: the files that we write say which depthfold wrote them."""

from __future__ import annotations

__version__ = "0.1.0.dev0"
