"""Many independent jobs, and who runs them. Nothing here knows of networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

# What a job can fail of:
#   "not finite"     its numbers left the finite ones; running it again would do the same: no retry
#   "out of memory"  perhaps only beside its neighbours: once more, alone, after the others
#   "worker lost"    its process or node died; perhaps not its fault: again, elsewhere, a few times
#   "error"          anything else that it raised: no retry
Kind = Literal["not finite", "out of memory", "worker lost", "error"]

# Work is built once per worker and then called for every job: the costly things (model, data) live in it.
Work = Callable[[Any], Any]
Setup = Callable[[], Work]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A key that names the job, and what the work is called with. The result may depend on this alone, never on the
    worker, the order or the time."""

    key: str
    payload: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a job has no result."""

    kind: Kind
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a job: its result, or the failure of its last attempt. `seconds` is what that attempt took."""

    key: str
    result: Any = None
    failure: Failure | None = None
    seconds: float = 0.0
    attempts: int = 1


class Executor(Protocol):
    """Runs jobs and yields an outcome for each, in the order in which they finish."""

    def run(self, setup: Setup, jobs: Sequence[Job]) -> Iterator[Outcome]: ...
