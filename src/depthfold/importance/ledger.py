"""What is known of the trainings so far: results and failures by key, in a journal where a run is given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from depthfold.core import FlaggedSpan, Network, Plan
from depthfold.errors import InvalidValue, TableError
from depthfold.importance.definition import importance_plan
from depthfold.importance.entry import Payload, Result
from depthfold.jobs import Job, Outcome
from depthfold.store import HeaderMismatch, Journal
from depthfold.support.coerce import as_path
from depthfold.support.document import decode
from depthfold.tracing import TracedNetwork
from depthfold.training import Recipe, Task, task_name

FILE = "importance.jsonl"  # inside the folder of a run
BASE = "base"


def key_of(block: FlaggedSpan, seed: int) -> str:
    return f"{block.i}-{block.j}-{int(block.a)}-{int(block.b)} seed {seed}"


def job_of(block: FlaggedSpan, seed: int) -> Job:
    payload: Payload = ((block.i, block.j, block.a, block.b), seed)
    return Job(key=key_of(block, seed), payload=payload)


def trained_for(network: Network, blocks: Iterable[FlaggedSpan], *, afresh: bool) -> dict[FlaggedSpan, FlaggedSpan]:
    """Every block, and the one whose training is its own. If layers do not begin afresh, a block of one layer is
    the network as it is but for its activations, and one training serves all that have the same."""
    first: dict[Plan, FlaggedSpan] = {}
    return {
        block: block if afresh or len(block.span) > 1 else first.setdefault(importance_plan(network, block), block)
        for block in blocks
    }


@dataclass(slots=True)
class Ledger:
    """Results and failures. A key that failed and then succeeded has only its result."""

    results: dict[str, Result] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    journal: Journal | None = None

    @classmethod
    def open(
        cls, run: str | Path | None, traced: TracedNetwork, task: Task, recipe: Recipe, *, afresh: bool = True
    ) -> Self:
        """Read what the run holds; it must be of this network with these weights, this task, this recipe, and of
        blocks of one layer that begin as these do."""
        ledger = cls()
        if run is None:
            return ledger
        folder = as_path("The folder of a run", run, InvalidValue)
        header = {
            "network": traced.network.fingerprint,
            "weights": traced.weights_digest,
            "task": task_name(task),
            "recipe": recipe.to_json(),
        } | ({} if afresh else {"blocks of one layer": "begin as they are"})
        try:
            ledger.journal = Journal.open(folder / FILE, header)
        except HeaderMismatch as mismatch:
            raise _foreign(mismatch) from mismatch
        ledger.journal.replay(ledger._take)
        return ledger

    def add(self, outcome: Outcome) -> None:
        record: dict[str, Any] = {"key": outcome.key, "attempts": outcome.attempts}
        record |= {"result": outcome.result} if outcome.failure is None else {"failure": str(outcome.failure)}
        if self.journal is not None:
            self.journal.append(record)
        self._take(record)

    def missing(self, key: str, *, retry: bool) -> bool:
        return key not in self.results and (retry or key not in self.failures)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.journal is not None:
            self.journal.close()

    def _take(self, record: dict[str, Any]) -> None:
        key = decode(str, record["key"], "key")
        if "result" in record:
            self.results[key] = _result(record["result"])
            self.failures.pop(key, None)
        else:
            self.failures[key] = decode(str, record["failure"], "failure")


def _result(found: Any) -> Result:
    found = decode(dict, found, "result")
    curve = decode(tuple[tuple[int, float, float], ...], found["curve"], "curve")
    score, seconds = (decode(float, found[name], name) for name in ("score", "seconds"))
    return Result(score=score, curve=list(curve), seconds=seconds)


def _foreign(mismatch: HeaderMismatch) -> TableError:
    both = "; ".join(_differences("", mismatch.found, mismatch.expected))
    return TableError(
        f"The journal {mismatch.path} belongs to other importances ({both}). Continue with what it was begun with, "
        "give this run a folder of its own, or delete the journal to start again."
    )


def _differences(of: str, there: dict[str, Any], here: dict[str, Any]) -> Iterator[str]:
    for name in {**there, **here}:
        one, two = there.get(name), here.get(name)
        if isinstance(one, dict) and isinstance(two, dict):  # the recipe: what differs in it, not all of it twice
            yield from _differences(f"{of}{name}: ", one, two)
        elif one != two:
            yield f"{of}{name}: {_or_nothing(one)} there, {_or_nothing(two)} here"


def _or_nothing(value: object) -> str:
    return "nothing about it" if value is None else f"{value}"
