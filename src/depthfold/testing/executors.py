"""The conformance suite of executors: what any implementation of the protocol must do. Call it from your own tests.

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
from depthfold.jobs.base import Executor, Job, Outcome

# Jobs of every kind for the conformance suite of executors: plain ones, and ones that go wrong in each known way.
#
# They leave files in a folder that the workers share with the caller, which is how the suite knows what was really run,
# where, how often and beside what.

What = Literal[
    "plain",
    "large",
    "raises",
    "not finite",
    "too large at first",
    "too large",
    "dies at first",
    "dies",
    "lambda",
    "long",
]
PAUSE = 0.02  # seconds: long enough for two jobs to meet that should not, and no more


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """A payload: what to do, and with which number or bytes."""

    key: str
    what: What = "plain"
    data: Any = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A setup. `fails` makes it raise; `dies` makes it end its process."""

    folder: str
    fails: bool = False
    dies: bool = False

    def __call__(self) -> Worker:
        if self.fails:
            raise ValueError("this setup fails on purpose")
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return Worker(Path(self.folder))


class Worker:
    """The work. It knows by itself, and by nothing else, how often it was called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name, self.calls = folder, uuid.uuid4().hex, 0
        where = f"{platform.node()}-{os.getpid()}-{threading.get_ident()}"
        _leave(folder / "setups" / self.name, where)

    def __call__(self, errand: Errand) -> Any:
        self.calls += 1
        attempt = len(list(self.folder.glob(f"starts/{errand.key}.*"))) + 1
        _leave(self.folder / "starts" / f"{errand.key}.{attempt}", f"{platform.node()} {os.getpid()}")
        try:
            result = self._do(errand, attempt)
        finally:
            _leave(self.folder / "ends" / f"{errand.key}.{attempt}", "")
        return result

    def _do(self, errand: Errand, attempt: int) -> Any:
        match errand.what:
            case "raises":
                raise ValueError(f"{errand.key} fails on purpose")
            case "not finite":
                raise NotFinite("the loss is nan at step 7", step=7, lr=0.1)
            case "too large" | "too large at first" if attempt == 1:
                raise MemoryError("this needs more than there is")
            case "too large":
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            case "too large at first":
                time.sleep(PAUSE)
                return self._others(errand)
            case "dies at first" if attempt == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            case "dies":
                os._exit(3)
            case "lambda":
                return lambda: errand
            case "long":
                self._wait()
        time.sleep(PAUSE)
        return expected(errand) | {"worker": self.name, "call": self.calls}

    def _others(self, errand: Errand) -> dict[str, Any]:
        """Which other jobs run at this moment, and how many were done before."""
        starts, ends = ({file.name for file in (self.folder / kind).glob("*")} for kind in ("starts", "ends"))
        running = sorted(name for name in starts - ends if name.partition(".")[0] != errand.key)
        return {"beside": running, "after": len({name.partition(".")[0] for name in ends} - {errand.key})}

    def _wait(self) -> None:
        while not (self.folder / "enough").exists():
            time.sleep(PAUSE)


def expected(errand: Errand) -> dict[str, Any]:
    """What the work gives for an errand that nothing keeps it from doing."""
    if errand.what == "large":
        return {"value": hashlib.sha256(errand.data).hexdigest(), "echo": errand.data[::-1]}
    return {"value": 3 * errand.data + 1}


def _leave(path: Path, text: str) -> None:
    """Whole or not at all: the suite may look at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.parent.parent / f"draft-{uuid.uuid4().hex}"
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


# What the conformance suite of executors has to say of outcomes: each finding is a sentence.


def run(executor: Executor, folder: Path, errands: Sequence[Errand]) -> tuple[dict[str, Outcome], list[str]]:
    """The outcomes by key, and what is wrong with them whatever the jobs are."""
    outcomes = list(executor.run(Place(folder=str(folder)), [Job(key=e.key, payload=e) for e in errands]))
    times, problems = Counter(outcome.key for outcome in outcomes), []
    problems += [f"there is no outcome for {errand.key!r}" for errand in errands if not times[errand.key]]
    problems += [f"there are {number} outcomes for {key!r}" for key, number in times.items() if number > 1]
    if unknown := set(times) - {errand.key for errand in errands}:
        problems.append(f"there are outcomes of jobs that were not asked for: {sorted(unknown)}")
    for outcome in outcomes:
        if not (math.isfinite(outcome.seconds) and outcome.seconds >= 0):
            problems.append(f"{outcome.key!r} took {outcome.seconds} seconds")
        attempts = len(list(folder.glob(f"starts/{outcome.key}.*")))
        if attempts != outcome.attempts:
            problems.append(f"{outcome.key!r} was run {attempts} times, and is said to have been {outcome.attempts}")
    return {outcome.key: outcome for outcome in outcomes}, problems


def judge(errands: Sequence[Errand], outcomes: dict[str, Outcome]) -> Iterator[str]:
    """Jobs that nothing keeps from succeeding must give what the work gives, at once."""
    for errand in errands:
        outcome = outcomes.get(errand.key)
        if outcome is None or errand.what not in ("plain", "large"):
            continue
        right, found = expected(errand), outcome.result or {}
        if outcome.failure is not None:
            yield f"{errand.key!r} failed: {outcome.failure}"
        elif {name: found.get(name) for name in right} != right:
            yield f"{errand.key!r} has another result than the work gives when it is called directly"


def expect_failure(outcomes: dict[str, Outcome], key: str, kind: str, attempts: int, text: str) -> Iterator[str]:
    outcome = outcomes.get(key)
    failure = outcome.failure if outcome else None
    if outcome is None or failure is None or failure.kind != kind or outcome.attempts != attempts:
        yield f"{key!r} must fail as {kind!r} after {attempts} attempts, found {outcome}"
    elif text not in failure.message or not failure.message:
        yield f"the message of {key!r} must hold {text!r}, found {failure.message!r}"


def expect_refusal(
    executor: Executor, place: Place, errands: Sequence[Errand], error: type[DepthfoldError], text: str
) -> Iterator[str]:
    try:
        found = list(executor.run(place, [Job(key=errand.key, payload=errand) for errand in errands]))
        yield f"must raise {error.__name__}, and gave {found}"
    except error as raised:
        if text not in str(raised):
            yield f"the message must hold {text!r}, found {str(raised)!r}"


_MEGABYTES = 4 << 20


def check_executor(executor: Executor, *, isolated: bool = True, folder: str | Path | None = None) -> None:
    """Raise an AssertionError that lists everything that the executor does wrong.

    `isolated=False` is for executors that run jobs in the caller's own process: jobs that end their process are then
    left out, since they would end the tests. `folder` is one that workers on other machines share with this one.
    """
    checks: dict[str, Callable[[Executor, Path], Iterator[str]]] = {
        "jobs": _plain,
        "order": _order,
        "failures": _failures,
        "setup": _setup,
        "jobs that make no sense": _nonsense,
        "left early": _left_early,
    }
    if isolated:
        checks |= {"lost workers": _lost, "workers lost in the setup": _lost_in_setup}
    problems = []
    for name, check in checks.items():
        with tempfile.TemporaryDirectory(dir=folder) as place:
            try:
                problems += [f"{name}: {problem}" for problem in check(executor, Path(place))]
            except Exception as error:  # noqa: BLE001 - reported, with all the others
                problems.append(f"{name}: raised {type(error).__name__}: {error}")
    if problems:
        raise AssertionError(f"The executor {executor!r} does not conform:\n" + "\n".join(f"- {p}" for p in problems))


def _plains(number: int) -> list[Errand]:
    return [Errand(key=f"plain {n}", data=n) for n in range(number)]


def _plain(executor: Executor, folder: Path) -> Iterator[str]:
    large = [Errand(key=f"large {n}", what="large", data=os.urandom(_MEGABYTES)) for n in range(2)]
    errands = [*_plains(20), *large]
    outcomes, problems = run(executor, folder, errands)
    yield from problems
    yield from judge(errands, outcomes)
    setups = {file.name: file.read_text(encoding="utf-8") for file in folder.glob("setups/*")}
    if len(set(setups.values())) < len(setups):
        yield f"the setup must be run once per worker, and was run {len(setups)} times in {len(set(setups.values()))}"
    calls = Counter(outcome.result["worker"] for outcome in outcomes.values() if outcome.failure is None)
    if len(setups) >= len(errands) or not set(calls) <= set(setups):
        yield f"a worker must be used again: there were {len(setups)} setups for {len(errands)} jobs"


def _order(executor: Executor, folder: Path) -> Iterator[str]:
    errands = _plains(6)[::-1]
    outcomes, problems = run(executor, folder, errands)
    yield from problems
    yield from judge(errands, outcomes)


def _failures(executor: Executor, folder: Path) -> Iterator[str]:
    kinds: dict[str, What] = {
        "too large 0": "too large at first",
        "too large 1": "too large at first",
        "too large 2": "too large",
        "raises": "raises",
        "nan": "not finite",
        "lambda": "lambda",
    }
    errands = [*(Errand(key=key, what=what) for key, what in kinds.items()), *_plains(6)]
    outcomes, problems = run(executor, folder, errands)
    yield from problems
    yield from judge(errands, outcomes)
    yield from expect_failure(outcomes, "raises", "error", 1, "ValueError: raises fails on purpose")
    yield from expect_failure(outcomes, "nan", "not finite", 1, "the loss is nan at step 7")
    yield from expect_failure(outcomes, "lambda", "error", 1, "pickle")
    yield from expect_failure(outcomes, "too large 2", "out of memory", 2, "CUDA out of memory")
    for key in ("too large 0", "too large 1"):
        outcome = outcomes.get(key)
        if outcome is None or outcome.failure is not None or outcome.attempts != 2:
            yield f"{key!r} lacked memory once and must succeed at its second attempt, found {outcome}"
        elif outcome.result["beside"] or outcome.result["after"] < len(errands) - 1:
            yield f"{key!r} lacked memory and must run alone after all others, found {outcome.result}"


def _lost(executor: Executor, folder: Path) -> Iterator[str]:
    errands = [Errand(key="dies once", what="dies at first"), Errand(key="dies", what="dies"), *_plains(6)]
    outcomes, problems = run(executor, folder, errands)
    yield from problems
    yield from judge(errands, outcomes)
    yield from expect_failure(outcomes, "dies", "worker lost", 3, "")
    once = outcomes.get("dies once")
    if once is None or once.failure is not None or once.attempts != 2:
        yield f"a job whose worker is lost once must succeed at its second attempt, found {once}"


def _setup(executor: Executor, folder: Path) -> Iterator[str]:
    place = Place(folder=str(folder), fails=True)
    yield from expect_refusal(executor, place, _plains(2), DepthfoldError, "fails on purpose")


def _lost_in_setup(executor: Executor, folder: Path) -> Iterator[str]:
    yield from expect_refusal(executor, Place(folder=str(folder), dies=True), _plains(1), DepthfoldError, "")


def _nonsense(executor: Executor, folder: Path) -> Iterator[str]:
    place = Place(folder=str(folder))
    if found := list(executor.run(place, [])):
        yield f"no jobs must give no outcomes, found {found}"
    yield from expect_refusal(executor, place, [*_plains(2), *_plains(1)], InvalidValue, "plain 0")


def _left_early(executor: Executor, folder: Path) -> Iterator[str]:
    errands = [*_plains(1), *(Errand(key=f"long {n}", what="long") for n in range(8))]
    outcomes = executor.run(Place(folder=str(folder)), [Job(key=errand.key, payload=errand) for errand in errands])
    first = next(outcomes)
    if first.key != "plain 0":
        yield f"the first outcome must be that of the only job that ends, found {first}"
    outcomes.close()
    starts = [file.read_text(encoding="utf-8").split() for file in folder.glob("starts/*")]
    mine = {int(pid) for host, pid in starts if host == platform.node()} - {os.getpid()}
    for _ in range(500):  # a process ends some time after it was told to
        if not any(map(alive, mine)):
            break
        time.sleep(0.02)
    if left := sorted(filter(alive, mine)):
        yield f"processes {left} still run after the generator was closed"
    (folder / "enough").touch()  # whatever runs all the same may end


def alive(pid: int) -> bool:
    """Whether such a process runs on this machine. One that has ended, and of whose end nobody took note, does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # ended just now, or a system that has no such folder
        return not Path("/proc/self").exists()
