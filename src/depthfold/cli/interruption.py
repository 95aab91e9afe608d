"""Ctrl-C, at any moment: one line and the exit code 130.

Raised inside an import, a KeyboardInterrupt does harm: libraries catch it where they try what they can do without, and
go on half imported. So nothing is raised there, nor where nobody would catch it: the process ends. Runs survive that.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

CODE = 130
WORDS = "run the same command again, and it goes on where it stopped."

_IMPORTING = "<frozen importlib._bootstrap>"
_CATCHING = "depthfold.cli.group"


def expect_interruption() -> None:
    """From now on, unless SIGINT is not ours to hear: a shell has its background jobs ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)


def _interrupted(number: int, frame: FrameType | None) -> None:
    caught = False
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            _leave()
        caught = caught or frame.f_globals.get("__name__") == _CATCHING
        frame = frame.f_back
    if not caught:
        _leave()
    raise KeyboardInterrupt


def _leave() -> None:
    shown = "\x1b[?25h\n" if os.isatty(2) else ""  # a bar that was under way has hidden the cursor
    os.write(2, f"{shown}Interrupted: {WORDS}\n".encode())
    os._exit(CODE)
