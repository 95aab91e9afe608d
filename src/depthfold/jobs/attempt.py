"""One attempt at a job: the same code in every executor, so that a job fails in the same words wherever it runs."""

from __future__ import annotations

import pickle
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthfold.core.wording import one_line
from depthfold.errors import DepthfoldError, NotFinite, lacks_memory, spoils_device
from depthfold.jobs.base import Failure, Kind, Setup, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of an attempt: the result, pickled, or the failure. A `spoiled` worker must not get another job."""

    result: bytes = b""
    failure: Failure | None = None
    seconds: float = 0.0
    spoiled: bool = False


def attempt(work: Work, payload: Any) -> Answer:
    """Call the work. Whatever it raises is a failure of this job; SystemExit and KeyboardInterrupt are not its own."""
    start = time.perf_counter()
    spoiled = False
    try:
        result, failure = _pickled(work(payload))
    except Exception as error:  # noqa: BLE001 - the work may raise anything, and the other jobs go on
        result, failure, spoiled = b"", failure_of(error), spoils_device(error)
    return Answer(result=result, failure=failure, seconds=time.perf_counter() - start, spoiled=spoiled)


def begin(setup: Setup) -> Work:
    """Build the work, or raise what is fatal to all jobs."""
    try:
        return setup()
    except Exception as error:
        raise setup_failed(told(error)) from error


def setup_failed(why: str) -> DepthfoldError:
    return DepthfoldError(f"The setup of the jobs failed: {why}. It would fail for every job, so none was run.")


def failure_of(error: Exception) -> Failure:
    kind: Kind = "error"
    if isinstance(error, NotFinite):
        kind = "not finite"
    elif lacks_memory(error):
        kind = "out of memory"
    return Failure(kind=kind, message=told(error) if kind == "error" else one_line(error))


def told(error: BaseException) -> str:
    """An error in one line: its type, its message and where it was raised."""
    text, name = one_line(error), type(error).__name__
    if not text.startswith(name):
        text = f"{name}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    last = frames[-1]
    line = f": {last.line}" if last.line else ""
    return f"{text} ({Path(last.filename).name}, line {last.lineno}, in {last.name}{line})"


def _pickled(result: Any) -> tuple[bytes, Failure | None]:
    # In process, too: a result that could not come from a worker must not work here and fail on the cluster.
    try:
        return pickle.dumps(result), None
    except (pickle.PicklingError, TypeError, AttributeError) as error:  # what pickle raises for what it cannot do
        found = f"the result is a {type(result).__name__}, which cannot be pickled: {one_line(error)}"
        return b"", Failure(kind="error", message=f"{found}. Return plain values: numbers, text, tuples, dicts.")
