"""The journal of importances: all results and failures so far, in memory and in the run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from depthfold.importance.entry import Result
from depthfold.importance.methods import Method
from depthfold.jobs import Outcome
from depthfold.store import Journal, journal_in
from depthfold.store.run_folder import IMPORTANCE_JOURNAL
from depthfold.support.document import decode
from depthfold.tracing import TracedNetwork
from depthfold.training import OutputTask, Task, task_name


def importance_depends_on(traced: TracedNetwork, task: Task, method: Method) -> dict[str, Any]:
    """Return what importances depend on: the network and its weights, the task, and the method with its settings."""
    found = {
        "network": traced.network.fingerprint,
        "weights": traced.weights_digest,
        "task": task_name(task),
        **method.depends_on(),
    }
    if method.name == "trained":
        return found
    return found | {"compares outputs": method.compares_outputs and isinstance(task, OutputTask)}


class ImportanceJournal(Journal):
    """Results and failures by key. A key that failed and then succeeded has only its result."""

    def __init__(self, run: str | Path | None, inputs: dict[str, Any], *, name: str = IMPORTANCE_JOURNAL) -> None:
        self.results: dict[str, Result] = {}
        self.failures: dict[str, str] = {}
        super().__init__(journal_in(run, name), inputs)

    def add(self, outcome: Outcome) -> None:
        record: dict[str, Any] = {"key": outcome.key, "attempts": outcome.attempts}
        record |= {"result": outcome.result} if outcome.failure is None else {"failure": str(outcome.failure)}
        self.append(record)
        self.take(record)

    def missing(self, key: str, *, retry: bool) -> bool:
        return key not in self.results and (retry or key not in self.failures)

    def take(self, record: dict[str, Any]) -> None:
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
    result = Result(score=score, curve=list(curve), seconds=seconds)
    if "inputs" not in found:
        return result
    return {**result, "error": decode(float, found["error"], "error"), "inputs": decode(int, found["inputs"], "inputs")}
