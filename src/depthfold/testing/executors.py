"""The conformance suite of executors: what any implementation of the protocol must do. Call it from your own tests.

def test_my_executor():
    check_executor(MyExecutor())
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from depthfold.errors import DepthfoldError, InvalidValue
from depthfold.jobs.base import Executor, Job
from depthfold.testing.errands import Errand, Place, What
from depthfold.testing.outcomes import expect_failure, expect_refusal, judge, run

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
