"""What was measured so far: in memory, and in a journal where one is given, so that a killed run goes on."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from depthfold.core import Environment, Plan
from depthfold.errors import InvalidValue, TableError
from depthfold.latency.timer import Turns, milliseconds
from depthfold.store import HeaderMismatch, Journal
from depthfold.support.document import decode
from depthfold.tracing import TracedNetwork


@dataclass(slots=True)
class Notebook:
    """Turns by key, and reasons of what could not be measured. A key names a block or a plan."""

    turns: dict[str, Turns] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[str, str] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    shares: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    journal: Journal | None = None

    @classmethod
    def open(cls, path: str | Path | None, traced: TracedNetwork, environment: Environment) -> Self:
        """Read what the journal at `path` holds; it must be of this network, what stands around its layers included,
        and this environment."""
        notebook = cls()
        if path is None:
            return notebook
        header = {
            "fingerprint": traced.network.fingerprint,
            "surroundings": traced.surroundings_digest,
            "environment": environment.to_json(),
        }
        try:
            notebook.journal = Journal.open(path, header)
        except HeaderMismatch as mismatch:
            raise _foreign(path, header, mismatch.found) from mismatch
        notebook.journal.replay(notebook._take)
        return notebook

    def keep_turn(self, key: str, samples: tuple[float, ...]) -> None:
        """Only into the journal: the timer has added the turn already."""
        self._write({"key": key, "samples": samples})

    def keep_reason(self, key: str, reason: str) -> None:
        self.reasons[key] = reason
        self._write({"key": key, "reason": reason})

    def name_plan(self, plan: Plan) -> str:
        """The key of a plan; remembered, so that later fits can use its latency."""
        key = f"plan {sorted(plan.activations)} {list(plan.cuts)}"
        if key not in self.plans:
            self.plans[key] = plan
            self._write({"key": key, "activations": sorted(plan.activations), "cuts": list(plan.cuts)})
        return key

    def keep_share(self, plan: Plan, share: float) -> None:
        """What choose() found of a plan, as a share of the original timed beside it: milliseconds of another hour
        would not compare with those of the table."""
        key = self.name_plan(plan)
        self.shares[key].append(share)
        self._write({"key": key, "share": share})

    def timed(self, key: str) -> bool:
        """Whether it has a time: what failed in its third turn has samples, and a reason."""
        return bool(self.turns.get(key)) and key not in self.reasons

    def samples(self, key: str) -> tuple[float, ...]:
        return tuple(sample for turn in self.turns.get(key, []) for sample in turn)

    def time(self, key: str) -> float:
        return milliseconds(self.turns[key])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.journal is not None:
            self.journal.close()

    def _take(self, record: dict[str, Any]) -> None:
        key = decode(str, record["key"], "key")
        if "samples" in record:
            samples = decode(tuple[float, ...], record["samples"], "samples")
            if not samples:
                raise InvalidValue("samples: expected one at least, found none.")
            self.turns[key].append(samples)
            self.reasons.pop(key, None)  # it was tried again after that, and ran
        elif "share" in record:
            self.shares[key].append(decode(float, record["share"], "share"))
        elif "reason" in record:
            self.reasons[key] = decode(str, record["reason"], "reason")
        else:
            activations, cuts = (decode(tuple[int, ...], record[name], name) for name in ("activations", "cuts"))
            self.plans[key] = Plan(activations, cuts)

    def _write(self, record: dict[str, Any]) -> None:
        if self.journal is not None:
            self.journal.append(record)


def _foreign(path: str | Path, expected: dict[str, Any], found: dict[str, Any]) -> TableError:
    if not isinstance(found.get("environment"), dict):
        return TableError(f"The journal {path} is not one of latencies. Name another file.")
    here, there = (Environment.from_json(header["environment"]) for header in (expected, found))
    if here != there:
        what = f"It was measured with: {there}; this run has: {here}."
    elif found.get("fingerprint") != expected["fingerprint"]:
        what = (
            f"It is of another network (fingerprint {found.get('fingerprint')}; this one is {expected['fingerprint']})."
        )
    else:
        what = (
            "It is of a network with the same layers and something else around them (stem, head, pooling), or an older "
            "depthfold began it."
        )
    return TableError(f"The journal {path} belongs to something else. {what} Use another journal, or delete this one.")
