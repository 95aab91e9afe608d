"""The conformance suite of executors. Call it from the tests of your own executor:

def test_my_executor():
    check_executor(MyExecutor())
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import signal
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from depthfold.errors import DepthfoldError, InvalidValue, NotFinite
from depthfold.jobs import Executor, Job, Outcome

# The jobs write files to a folder that the workers share with the caller. From these files the suite knows which jobs
# were run, on which worker, how often, and at the same time as which others.

Behaviour = Literal[
    "plain", "large", "raises", "not finite", "too large at first", "too large", "dies at first", "dies",
    "lambda", "long",
]  # fmt: skip
PAUSE = 0.02  # seconds; long enough for two jobs to overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleJob:
    """The payload of a job: how it behaves, and the number or bytes that it processes."""

    key: str
    behaviour: Behaviour = "plain"
    data: Any = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSetup:
    """A setup. With `fails` it raises; with `dies` it kills its process."""

    folder: str
    fails: bool = False
    dies: bool = False

    def __call__(self) -> SampleWork:
        if self.fails:
            raise ValueError("this setup fails on purpose")
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return SampleWork(Path(self.folder))


class SampleWork:
    """The work. It counts its own calls."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name, self.calls = folder, uuid.uuid4().hex, 0
        where = f"{platform.node()}-{os.getpid()}-{threading.get_ident()}"
        _write(folder / "setups" / self.name, where)

    def __call__(self, job: SampleJob) -> Any:
        self.calls += 1
        attempt = len(list(self.folder.glob(f"starts/{job.key}.*"))) + 1
        _write(self.folder / "starts" / f"{job.key}.{attempt}", f"{platform.node()} {os.getpid()}")
        try:
            result = self._do(job, attempt)
        finally:
            _write(self.folder / "ends" / f"{job.key}.{attempt}", "")
        return result

    def _do(self, job: SampleJob, attempt: int) -> Any:
        match job.behaviour:
            case "raises":
                raise ValueError(f"{job.key} fails on purpose")
            case "not finite":
                raise NotFinite("the loss is nan at step 7", step=7, lr=0.1)
            case "too large" | "too large at first" if attempt == 1:
                raise MemoryError("this needs more than there is")
            case "too large":
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            case "too large at first":
                time.sleep(PAUSE)
                return self._others(job)
            case "dies at first" if attempt == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            case "dies":
                os._exit(3)
            case "lambda":
                return lambda: job
            case "long":
                self._wait()
        time.sleep(PAUSE)
        return expected(job) | {"worker": self.name, "call": self.calls}

    def _others(self, job: SampleJob) -> dict[str, Any]:
        """Return the other jobs that are running now, and the number of jobs that have finished."""
        starts, ends = ({file.name for file in (self.folder / kind).glob("*")} for kind in ("starts", "ends"))
        running = sorted(name for name in starts - ends if name.partition(".")[0] != job.key)
        return {"beside": running, "after": len({name.partition(".")[0] for name in ends} - {job.key})}

    def _wait(self) -> None:
        while not (self.folder / "enough").exists():
            time.sleep(PAUSE)


def expected(job: SampleJob) -> dict[str, Any]:
    """Return the result of a job that succeeds."""
    if job.behaviour == "large":
        return {"value": hashlib.sha256(job.data).hexdigest(), "echo": job.data[::-1]}
    return {"value": 3 * job.data + 1}


def _write(path: Path, text: str) -> None:
    """Write a file atomically, because the suite may read it at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.parent.parent / f"draft-{uuid.uuid4().hex}"
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def run(executor: Executor, folder: Path, jobs: Sequence[SampleJob]) -> tuple[dict[str, Outcome], list[str]]:
    """Return the outcomes by key, and the problems that are independent of the kinds of jobs."""
    outcomes = list(executor.run(SampleSetup(folder=str(folder)), [Job(key=job.key, payload=job) for job in jobs]))
    times, problems = Counter(outcome.key for outcome in outcomes), []
    problems += [f"there is no outcome for {job.key!r}" for job in jobs if not times[job.key]]
    problems += [f"there are {number} outcomes for {key!r}" for key, number in times.items() if number > 1]
    if unknown := set(times) - {job.key for job in jobs}:
        problems.append(f"there are outcomes of unknown jobs: {sorted(unknown)}")
    for outcome in outcomes:
        if not (math.isfinite(outcome.seconds) and outcome.seconds >= 0):
            problems.append(f"{outcome.key!r} took {outcome.seconds} seconds")
        attempts = len(list(folder.glob(f"starts/{outcome.key}.*")))
        if attempts != outcome.attempts:
            problems.append(f"{outcome.key!r} was run {attempts} times, but reports {outcome.attempts} attempts")
    return {outcome.key: outcome for outcome in outcomes}, problems


def check_results(jobs: Sequence[SampleJob], outcomes: dict[str, Outcome]) -> Iterator[str]:
    """Yield a problem for each plain job that failed or has the wrong result."""
    for job in jobs:
        outcome = outcomes.get(job.key)
        if outcome is None or job.behaviour not in ("plain", "large"):
            continue
        right, found = expected(job), outcome.result or {}
        if outcome.failure is not None:
            yield f"{job.key!r} failed: {outcome.failure}"
        elif {name: found.get(name) for name in right} != right:
            yield f"{job.key!r} has a different result than the work returns when it is called directly"


def check_failure(outcomes: dict[str, Outcome], key: str, kind: str, attempts: int, text: str) -> Iterator[str]:
    outcome = outcomes.get(key)
    failure = outcome.failure if outcome else None
    if outcome is None or failure is None or failure.kind != kind or outcome.attempts != attempts:
        yield f"{key!r} must fail as {kind!r} after {attempts} attempts, found {outcome}"
    elif text not in failure.message or not failure.message:
        yield f"the message of {key!r} must contain {text!r}, found {failure.message!r}"


def check_refused(
    executor: Executor, setup: SampleSetup, jobs: Sequence[SampleJob], error: type[DepthfoldError], text: str
) -> Iterator[str]:
    try:
        found = list(executor.run(setup, [Job(key=job.key, payload=job) for job in jobs]))
        yield f"must raise {error.__name__}, but returned {found}"
    except error as raised:
        if text not in str(raised):
            yield f"the message must contain {text!r}, found {str(raised)!r}"


_MEGABYTES = 4 << 20


def check_executor(executor: Executor, *, isolated: bool = True, folder: str | Path | None = None) -> None:
    """Raise an AssertionError that lists all violations of the protocol.

    Use `isolated=False` for executors that run jobs in the caller's process: jobs that end their process are then left
    out, because they would end the tests. `folder` must be shared with the workers if they run on other machines.
    """
    checks: dict[str, Callable[[Executor, Path], Iterator[str]]] = {
        "jobs": _plain,
        "order": _order,
        "failures": _failures,
        "setup": _setup,
        "invalid jobs": _invalid_jobs,
        "closed early": _closed_early,
    }
    if isolated:
        checks |= {"lost workers": _lost, "workers lost in the setup": _lost_in_setup}
    problems = []
    for name, check in checks.items():
        # An executor may stop its workers asynchronously: one may still write while the folder is removed.
        with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as path:
            try:
                problems += [f"{name}: {problem}" for problem in check(executor, Path(path))]
            except Exception as error:  # noqa: BLE001 - reported together with the other problems
                problems.append(f"{name}: raised {type(error).__name__}: {error}")
    if problems:
        raise AssertionError(f"The executor {executor!r} does not conform:\n" + "\n".join(f"- {p}" for p in problems))


def _plains(number: int) -> list[SampleJob]:
    return [SampleJob(key=f"plain {n}", data=n) for n in range(number)]


def _plain(executor: Executor, folder: Path) -> Iterator[str]:
    large = [SampleJob(key=f"large {n}", behaviour="large", data=os.urandom(_MEGABYTES)) for n in range(2)]
    jobs = [*_plains(20), *large]
    outcomes, problems = run(executor, folder, jobs)
    yield from problems
    yield from check_results(jobs, outcomes)
    setups = {file.name: file.read_text(encoding="utf-8") for file in folder.glob("setups/*")}
    if len(set(setups.values())) < len(setups):
        yield f"the setup must run once per worker, but ran {len(setups)} times in {len(set(setups.values()))}"
    calls = Counter(outcome.result["worker"] for outcome in outcomes.values() if outcome.failure is None)
    if len(setups) >= len(jobs) or not set(calls) <= set(setups):
        yield f"workers must be reused: there were {len(setups)} setups for {len(jobs)} jobs"


def _order(executor: Executor, folder: Path) -> Iterator[str]:
    jobs = _plains(6)[::-1]
    outcomes, problems = run(executor, folder, jobs)
    yield from problems
    yield from check_results(jobs, outcomes)


def _failures(executor: Executor, folder: Path) -> Iterator[str]:
    behaviours: dict[str, Behaviour] = {
        "too large 0": "too large at first",
        "too large 1": "too large at first",
        "too large 2": "too large",
        "raises": "raises",
        "nan": "not finite",
        "lambda": "lambda",
    }
    jobs = [*(SampleJob(key=key, behaviour=behaviour) for key, behaviour in behaviours.items()), *_plains(6)]
    outcomes, problems = run(executor, folder, jobs)
    yield from problems
    yield from check_results(jobs, outcomes)
    yield from check_failure(outcomes, "raises", "error", 1, "ValueError: raises fails on purpose")
    yield from check_failure(outcomes, "nan", "not finite", 1, "the loss is nan at step 7")
    yield from check_failure(outcomes, "lambda", "error", 1, "pickle")
    yield from check_failure(outcomes, "too large 2", "out of memory", 2, "CUDA out of memory")
    for key in ("too large 0", "too large 1"):
        outcome = outcomes.get(key)
        if outcome is None or outcome.failure is not None or outcome.attempts != 2:
            yield f"{key!r} ran out of memory once and must succeed in its second attempt, found {outcome}"
        elif outcome.result["beside"] or outcome.result["after"] < len(jobs) - 1:
            yield f"{key!r} ran out of memory and must run alone after all others, found {outcome.result}"


def _lost(executor: Executor, folder: Path) -> Iterator[str]:
    jobs = [SampleJob(key="dies once", behaviour="dies at first"), SampleJob(key="dies", behaviour="dies"), *_plains(6)]
    outcomes, problems = run(executor, folder, jobs)
    yield from problems
    yield from check_results(jobs, outcomes)
    yield from check_failure(outcomes, "dies", "worker lost", 3, "")
    once = outcomes.get("dies once")
    if once is None or once.failure is not None or once.attempts != 2:
        yield f"a job whose worker is lost once must succeed in its second attempt, found {once}"


def _setup(executor: Executor, folder: Path) -> Iterator[str]:
    setup = SampleSetup(folder=str(folder), fails=True)
    yield from check_refused(executor, setup, _plains(2), DepthfoldError, "fails on purpose")


def _lost_in_setup(executor: Executor, folder: Path) -> Iterator[str]:
    yield from check_refused(executor, SampleSetup(folder=str(folder), dies=True), _plains(1), DepthfoldError, "")


def _invalid_jobs(executor: Executor, folder: Path) -> Iterator[str]:
    setup = SampleSetup(folder=str(folder))
    if found := list(executor.run(setup, [])):
        yield f"without jobs there must be no outcomes, found {found}"
    yield from check_refused(executor, setup, [*_plains(2), *_plains(1)], InvalidValue, "plain 0")


def _closed_early(executor: Executor, folder: Path) -> Iterator[str]:
    jobs = [*_plains(1), *(SampleJob(key=f"long {n}", behaviour="long") for n in range(8))]
    outcomes = executor.run(SampleSetup(folder=str(folder)), [Job(key=job.key, payload=job) for job in jobs])
    first = next(outcomes)
    if first.key != "plain 0":
        yield f"the first outcome must be that of the only job that finishes, found {first}"
    outcomes.close()
    starts = [file.read_text(encoding="utf-8").split() for file in folder.glob("starts/*")]
    mine = {int(pid) for host, pid in starts if host == platform.node()} - {os.getpid()}
    for _ in range(500):  # a process takes some time to end
        if not any(map(alive, mine)):
            break
        time.sleep(0.02)
    if left := sorted(filter(alive, mine)):
        yield f"processes {left} are still running after the generator was closed"
    (folder / "enough").touch()  # let remaining jobs end


def alive(pid: int) -> bool:
    """Return True if the process is running on this machine. A zombie is not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # it ended just now, or the system has no /proc
        return not Path("/proc/self").exists()
