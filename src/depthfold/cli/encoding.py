"""Characters that stdout lacks (PYTHONIOENCODING=ascii) are spelled out. Python would raise in the middle of a table,
at the end of hours; on stderr it spells them out by itself."""

from __future__ import annotations

import codecs
import io
import sys

NAME = "depthfold.spelled"
_SPELLED = {"±": "+-", "…": "..."}  # Rich ends with the latter what does not fit into a column


def spell_out() -> None:
    """From now on."""
    codecs.register_error(NAME, _spelled)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=NAME)


def _spelled(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_SPELLED.get(one) or one.encode("ascii", "backslashreplace").decode() for one in missing), error.end
