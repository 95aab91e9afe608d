"""Controls for the methods of importance: tables that need no training and hardly look at the network."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

import depthfold as df
from depthfold.baselines import constant_importance
from depthfold.core import FlaggedSpan, ImportanceTable, Score
from depthfold.importance.pieces import ValueRecorder
from depthfold.tracing import TracedNetwork


def controls(traced: TracedNetwork, task: df.ClassificationTask, device: str) -> dict[str, ImportanceTable]:
    """Return three tables: the same number for every block of two or more layers, minus the activations it removes, and
    minus the entropy of their states."""
    own, entropies = traced.network.activations, entropy_of_states(traced, task, device)

    def removed(block: FlaggedSpan) -> list[int]:
        return [l for l in range(block.i + 1, block.j) if l in own]

    rules: dict[str, Callable[[FlaggedSpan], float]] = {
        "removed": lambda block: -float(len(removed(block))),
        "entropy": lambda block: -sum(entropies[l] for l in removed(block)),
    }
    measured = {name: _table(traced, rule) for name, rule in rules.items()}
    return {"constant": constant_importance(traced.network), **measured}


def _table(traced: TracedNetwork, rule: Callable[[FlaggedSpan], float]) -> ImportanceTable:
    entries = tuple(Score(span=block, samples=(rule(block),)) for block in traced.flagged_spans())
    return ImportanceTable(network=traced.network.name, fingerprint=traced.network.fingerprint, entries=entries)


@torch.no_grad()
def entropy_of_states(traced: TracedNetwork, task: df.ClassificationTask, device: str) -> dict[int, float]:
    """Return the entropy of each activation's state (0, linear or 6) in bits, averaged over its channels.

    It is measured on the hold-out images of one batch; EASIER ranks layers by it.
    """
    graph = df.rewrite(traced, traced.vanilla).eval()
    part = df.tracing.student_parts(graph)[0]  # type: ignore[attr-defined]
    places = {l: traced.blueprint.sites[l - 1].out for l in sorted(traced.network.activations)}
    recorder = ValueRecorder(part, places.values())
    graph.to(device)
    found: dict[int, float] = {}

    class Once(Exception):
        pass

    def forward(x: Tensor) -> Tensor:
        graph(x[:1000])
        values = recorder.take()
        for l, name in places.items():
            found[l] = _entropy(values[name].float())
        raise Once

    probe = _Probe(graph, forward)
    with contextlib.suppress(Once):
        task.score(probe, "holdout")
    return found


class _Probe(torch.nn.Module):
    """A model that hands its input to a function. It has the parameters of the graph, which tell its device."""

    def __init__(self, graph: torch.nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.graph, self._function = graph, function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)


def _entropy(value: Tensor) -> float:
    channels = value.transpose(0, 1).flatten(1)
    shares = torch.stack([(channels <= 0).float().mean(1), (channels >= 6).float().mean(1)])
    shares = torch.cat([shares, 1 - shares.sum(0, keepdim=True)]).clamp_min(0)
    return float(-(shares * shares.clamp_min(1e-12).log2()).sum(0).mean())
