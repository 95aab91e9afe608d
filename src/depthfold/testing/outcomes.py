"""What the conformance suite of executors has to say of outcomes: each finding is a sentence."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from depthfold.errors import DepthfoldError
from depthfold.jobs.base import Executor, Job, Outcome
from depthfold.testing.errands import Errand, Place, expected


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
