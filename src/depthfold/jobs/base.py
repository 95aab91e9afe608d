"""The executor protocol, and the data classes of jobs. Nothing here depends on networks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from depthfold.errors import InvalidValue

# The kinds of failures, and when a job is retried:
#   "not finite"     a loss or score is NaN or infinite; a second attempt would give the same result: no retry
#   "out of memory"  other jobs may have used the memory: one retry, alone, after all other jobs
#   "worker lost"    its process or node died, perhaps for an unrelated reason: a few retries on other workers
#   "error"          the job raised anything else: no retry
FailureKind = Literal["not finite", "out of memory", "worker lost", "error"]

# A setup runs once per worker and returns the work, which is then called for each job. Expensive objects (the model,
# the data) belong to the work.
Work = Callable[[Any], Any]
Setup = Callable[[], Work]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A key that identifies the job, and the argument for the work.

    The result may depend only on the payload, never on the worker, the order or the time.
    """

    key: str
    payload: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The reason why a job has no result."""

    kind: FailureKind
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a job, or the failure of its last attempt. `seconds` is the duration of that attempt."""

    key: str
    result: Any = None
    failure: Failure | None = None
    seconds: float = 0.0
    attempts: int = 1


class Executor(Protocol):
    """Runs jobs and yields one outcome per job, in the order in which they finish.

    Closing the generator stops all running jobs: use `contextlib.closing` if the loop may end early. A failing setup
    would fail for every job, so its error is raised as a DepthfoldError. Results must be picklable. The work must not
    modify its payload.
    """

    def run(self, setup: Setup, jobs: Sequence[Job]) -> Generator[Outcome, None, None]: ...


def check_is_executor(executor: object) -> None:
    if isinstance(executor, type) or not callable(getattr(executor, "run", None)):
        raise InvalidValue(
            f"An executor is an object with the method run, found {executor!r:.80}. Use one from depthfold.jobs, for "
            'example InProcess(), Processes(workers=2) or RayCluster(address="auto").'
        )
