"""A made-up run, as a report is given it: a structure, plausible tables, their frontier, and measurements of it."""

from __future__ import annotations

import dataclasses
import random
from typing import get_args

from depthfold.core import (
    Environment,
    Frontier,
    ImportanceTable,
    LatencyTable,
    Network,
    Point,
    Profile,
    Score,
    Segment,
    Span,
    Timing,
)
from depthfold.core.options import Move
from depthfold.reporting import Evaluation, Findings, TrainingPoint, Verified
from depthfold.solver import solve
from structures import mobilenet_v2
from tables import plausible_tables, tables_with_moves, with_two_times

# The time of spans without an activation, as a multiple: less for three layers and more for four.
WITHOUT = {3: 0.75, 4: 9.0}
CPU = Environment(machine="a laptop", runtime="onnxruntime", batch=1, input_size=(3, 32, 32))


def made_up_run(network: Network | None = None, *, seed: int = 0, **given: object) -> Findings:
    """What every report has, and nothing else unless it is given. The chosen plan is the middle one."""
    network = network or mobilenet_v2()
    latency, importance = plausible_tables(network.spans(), network.flagged_spans(), seed)
    latency = with_two_times(
        latency,
        lambda span, time: WITHOUT.get(len(span), 1.0) * time,
        lambda span, time: 1.1 * time if span == Span(2, 3) else time,
    )
    if any(span.b for span in network.flagged_spans()) and network.depth > 6:
        latency, importance = _with_blanks(latency), _with_a_blank(importance)
    frontier = solve(latency, importance, network=network)
    return Findings(**{"title": "A run", "network": network, "latency": latency, "importance": importance,
                       "frontier": frontier, "plan": frontier[len(frontier) // 2]} | given)  # fmt: skip


def measured_run(network: Network | None = None, **given: object) -> Findings:
    """With everything that a report can tell."""
    findings = made_up_run(network)
    return dataclasses.replace(
        findings,
        **{
            "before": profile(20.0, flops=600_000_000, parameters=3_500_000, depth=52, memory=31_000_000),
            "after": profile(12.5, flops=450_000_000, parameters=4_200_000, depth=30, memory=None),
            "score_before": Evaluation(score=0.72, metric="top-1 accuracy", images=10_000),
            "score_after": Evaluation(score=0.705, metric="top-1 accuracy", images=10_000),
            "verification": Verified(ok=True, text="largest error 2e-06"),
            "environment": CPU,
            "versions": (("torch", "2.13.0"),),
            "command": "depthfold compress --budget 60%",
            "notes": ("The stem was left out.",),
            "training": tuple(
                TrainingPoint(step=step, loss=2.0 / step**0.3, score=60.0 + step / 100 if step % 100 == 0 else None)
                for step in range(25, 501, 25)
            ),
        }
        | given,
    )


def profile(median: float, *, flops: int, parameters: int, depth: int, memory: int | None) -> Profile:
    rng = random.Random(median)
    return Profile(
        environment=CPU,
        quartiles=(median - rng.uniform(0.0, 1.0), median, median + rng.uniform(0.0, 1.0)),
        count=41,
        flops=flops,
        parameters=parameters,
        depth=depth,
        memory=memory,
        memory_reason=None if memory else "the process was killed",
    )


def loaded_run() -> Findings:
    """A run whose original was timed while something else ran."""
    findings = measured_run()
    before = dataclasses.replace(findings.before, quartiles=(12.0, 20.0, 31.0))
    return dataclasses.replace(findings, before=before)


def brute_force_states(network: Network, plan: object) -> dict[int, str]:
    """Return the state of the activation after each layer that has one before or after, position by position."""
    states = {}
    for l, layer in enumerate(network.layers, start=1):
        had, has = layer.activation is not None, l in plan.plan.activations
        if had or has:
            states[l] = "kept" if had and has else "removed" if had else "inserted"
    return states


def _with_blanks(latency: LatencyTable) -> LatencyTable:
    """The longest span of all has no time."""
    longest = max(latency.entries, key=lambda entry: len(entry.span)).span
    entries = (Timing(span=longest, reason="out of memory") if e.span == longest else e for e in latency.entries)
    return LatencyTable(entries=tuple(entries), network=latency.network)


def _with_a_blank(importance: ImportanceTable) -> ImportanceTable:
    """The longest block has no score; the others are raw scores around that of the original, 0.75."""
    longest = max(importance.entries, key=lambda entry: len(entry.span.span)).span
    entries = (
        Score(span=longest, reason="the loss is NaN")
        if entry.span == longest
        else Score(span=entry.span, samples=(0.75 + entry.mean,))
        for entry in importance.entries
    )
    return ImportanceTable(entries=tuple(entries), base=0.75)


def every_subset(network: Network) -> Frontier:
    """A frontier of 2^(L-1) plans: every set of cuts once. Its numbers rise, and mean nothing else."""
    depth = network.depth
    points = tuple(
        Point(
            latency=1.0 + n**0.5,
            importance=float(n),
            latency_by_activations=1.0 + n,
            activations=(),
            cuts=tuple(p for p in range(1, depth) if n >> (p - 1) & 1),
            boundaries=(),
        )
        for n in range(2 ** (depth - 1))
    )
    segments = tuple(Segment(span=Span(i, j), times=(1.0, 1.0)) for i in range(depth) for j in range(i + 1, depth + 1))
    return Frontier(
        network="chain", depth=depth, environment=Environment(), original=50.0, alpha=None,
        segments=segments, points=points,
    )  # fmt: skip


def dropping_run(network: Network | None = None, *, seed: int = 1, **given: object) -> Findings:
    """A run with all moves. The chosen plan drops layers and branches, and one of its segments is empty."""
    network = network or mobilenet_v2()
    latency, importance = tables_with_moves(network, "paper", get_args(Move), seed)
    frontier = solve(latency, importance, network=network)
    chosen = next(
        plan
        for plan in frontier[len(frontier) // 3 :]
        if plan.plan.dropped.layers and plan.plan.dropped.branches and plan.convolutions < len(plan.segments)
    )
    return Findings(**{"title": "A run with dropped layers", "network": network, "latency": latency,
                       "importance": importance, "frontier": frontier, "plan": chosen} | given)  # fmt: skip
