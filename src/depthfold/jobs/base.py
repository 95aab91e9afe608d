"""Many independent jobs, and who runs them. Nothing here knows of networks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from depthfold.errors import InvalidValue
from depthfold.support.coerce import as_whole

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
    """Runs jobs and yields an outcome for each, in the order in which they finish.

    Closing the generator stops whatever still runs: use `contextlib.closing` where the loop may be left early. A setup
    that fails would fail for every job, so it is raised, as a DepthfoldError. Results are plain values that can be
    pickled; a payload is not changed by the work.
    """

    def run(self, setup: Setup, jobs: Sequence[Job]) -> Generator[Outcome, None, None]: ...


def expect_executor(executor: object) -> None:
    if isinstance(executor, type) or not callable(getattr(executor, "run", None)):
        raise InvalidValue(
            f"An executor is an object with the method run, found {executor!r:.80}. Give one of depthfold.jobs: "
            'InProcess(), Processes(workers=2) or RayCluster(address="auto"), say.'
        )


def expect_positive(what: str, number: int | None, *, optional: bool = False) -> None:
    if number is not None or not optional:
        as_whole(what, number, InvalidValue)
