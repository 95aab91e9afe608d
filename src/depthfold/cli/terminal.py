"""Ctrl-C, and terminals that are not UTF-8."""

from __future__ import annotations

import io
import os
import signal
import sys

INTERRUPTED = "Interrupted: run the same command again to resume."
EXIT_CODE = 130


def exit_on_interrupt() -> None:
    """Make Ctrl-C end the process at once, while libraries are imported.

    A KeyboardInterrupt inside an import does harm: some libraries catch it and continue half imported. An ignored
    SIGINT stays ignored: a shell does that for its background jobs.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(*_: object) -> None:
    os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(EXIT_CODE)


def replace_unknown_characters() -> None:
    """Print "?" for characters that stdout cannot encode, instead of failing at the end of a run."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
