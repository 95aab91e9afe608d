"""The journal of latencies: all measurements so far, in memory and in the run folder."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from depthfold.core import Drops, Environment, Plan
from depthfold.errors import InvalidValue
from depthfold.latency.timer import Rounds, Timer, milliseconds
from depthfold.store import Journal, journal_in
from depthfold.store.run_folder import LATENCY_JOURNAL
from depthfold.support.document import decode, encode
from depthfold.tracing import TracedNetwork


def latency_depends_on(traced: TracedNetwork, environment: Environment) -> dict[str, Any]:
    """Return what latencies depend on: the layers, the operations around them, the environment and other inputs."""
    found: dict[str, Any] = {
        "network": traced.network.fingerprint,
        "operations around the layers (stem, head, pooling)": traced.surroundings_digest,
        "environment": environment.to_json(),
    }
    inputs = traced.example_tensors()
    if len(inputs) > 1:  # the environment has the size of the first one
        found["sizes of the inputs"] = ", ".join("x".join(map(str, tensor.shape)) for tensor in inputs)
    return found


class LatencyJournal(Journal):
    """Samples by round, and reasons of failures. A key is that of a block or a plan."""

    def __init__(self, run: str | Path | None, traced: TracedNetwork, environment: Environment) -> None:
        self.rounds: dict[str, Rounds] = defaultdict(list)
        self.reasons: dict[str, str] = {}
        self.plans: dict[str, Plan] = {}
        self.shares: dict[str, list[float]] = defaultdict(list)
        self.doubt: str | None = None  # why the times are not comparable with each other
        super().__init__(journal_in(run, LATENCY_JOURNAL), latency_depends_on(traced, environment))

    def write_round(self, key: str, samples: tuple[float, ...]) -> None:
        """Write a round that the timer has already added to `rounds`."""
        self.append({"key": key, "samples": samples})

    def add_reason(self, key: str, reason: str) -> None:
        self.reasons[key] = reason
        self.append({"key": key, "reason": reason})

    def add_plan(self, plan: Plan) -> str:
        """Add a plan, so that later fits can use its latency, and return its key."""
        key = f"plan {sorted(plan.activations)} {list(plan.cuts)}"
        record: dict[str, Any] = {"activations": sorted(plan.activations), "cuts": list(plan.cuts)}
        if plan.dropped:
            key += f" without {plan.dropped}"
            record["dropped"] = encode(plan.dropped)
        if key not in self.plans:
            self.plans[key] = plan
            self.append({"key": key} | record)
        return key

    def add_share(self, plan: Plan, share: float) -> None:
        """Add a latency that choose() measured, as a share of the original's latency measured at the same time.

        Milliseconds would not be comparable: the machine may be faster or slower than when the table was made.
        """
        key = self.add_plan(plan)
        self.shares[key].append(share)
        self.append({"key": key, "share": share})

    def add_doubt(self, doubt: str) -> None:
        self.doubt = doubt
        self.append({"key": "doubt", "doubt": doubt})

    def is_timed(self, key: str) -> bool:
        """Return True if it has a time. A block that failed in its third round has samples, but also a reason."""
        return bool(self.rounds.get(key)) and key not in self.reasons

    def is_missing(self, key: str, timer: Timer) -> bool:
        """Return True if the timer would time it further, because it has neither all rounds nor a reason."""
        return key not in self.reasons and not timer.is_done(self.rounds.get(key, []))

    def samples(self, key: str) -> tuple[float, ...]:
        return tuple(sample for samples in self.rounds.get(key, []) for sample in samples)

    def time(self, key: str) -> float:
        return milliseconds(self.rounds[key])

    def take(self, record: dict[str, Any]) -> None:
        key = decode(str, record["key"], "key")
        if "samples" in record:
            samples = decode(tuple[float, ...], record["samples"], "samples")
            if not samples:
                raise InvalidValue("samples: expected at least one, found none.")
            self.rounds[key].append(samples)
            self.reasons.pop(key, None)  # it was retried and ran
        elif "share" in record:
            self.shares[key].append(decode(float, record["share"], "share"))
        elif "doubt" in record:
            self.doubt = decode(str, record["doubt"], "doubt")
        elif "reason" in record:
            self.reasons[key] = decode(str, record["reason"], "reason")
        else:
            activations, cuts = (decode(tuple[int, ...], record[name], name) for name in ("activations", "cuts"))
            self.plans[key] = Plan(activations, cuts, decode(Drops, record.get("dropped", {}), "dropped"))
