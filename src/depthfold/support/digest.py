"""The digest that identifies contents: weights, networks, tables, datasets."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def digest(*parts: Any) -> str:
    """Return 16 hex digits that change with any of the parts.

    A part is a bytes-like object, which is hashed unchanged, or plain data, which is hashed as JSON with sorted keys,
    on a new line.
    """
    found = hashlib.sha256()
    for number, part in enumerate(parts):
        if isinstance(part, bytes | bytearray | memoryview):
            found.update(part)
        else:
            found.update(b"\n" * (number > 0) + json.dumps(part, sort_keys=True).encode())
    return found.hexdigest()[:16]
