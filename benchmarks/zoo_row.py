"""Check one network of the zoo: trace it, rewrite and merge it with several plans, compare at two input sizes."""

from __future__ import annotations

import gc
import platform
import time
from collections import Counter
from random import Random
from typing import Any, Literal

import torch
from torch import Tensor, nn
from zoo_models import REFUSALS, build, inputs_for, of_other_sizes
from zoo_packages import TRAINED

import depthfold as df
from depthfold.merging import output_error
from depthfold.testing import random_plan, randomise_statistics
from depthfold.tracing import ExampleInputs, TracedNetwork, inputs_at
from depthfold.vision import import_timm

# The space of each random plan, and the share of layers that it drops.
PLANS: tuple[tuple[Literal["paper", "full"], float], ...] = (("paper", 0), ("full", 0), ("full", 0), ("full", 0.4))
SINGLE_PRECISION_FROM = 60_000_000  # parameters; three copies of a larger network in float64 do not fit into memory


def examine(name: str) -> dict[str, Any]:
    """Return the row of a network: its layers and spans, its refusals, and the errors of merging."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    started = time.perf_counter()
    model, at = build(name)
    parameters = sum(p.numel() for p in model.parameters())
    precision = torch.float32 if parameters > SINGLE_PRECISION_FROM else torch.float64
    model = model.to(precision).eval()
    if name not in TRAINED:
        randomise_statistics(model)
    row: dict[str, Any] = {"name": name, "parameters": parameters, "precision": str(precision).split(".")[1]}
    row["environment"] = f"PyTorch {torch.__version__}, timm {import_timm().__version__}, {platform.machine()}"
    inputs = inputs_for(name, model, precision)
    given = {"size": inputs}
    traced = df.trace(model, inputs, at=at)
    other, refusal = _other(model, df.rewrite(traced, traced.vanilla).eval(), at, inputs)
    if other is not None:
        given["other"] = other
    wanted = {which: _run(model, at, values) for which, values in given.items()}
    keys = set(model.state_dict())
    del model  # the network has a copy
    row |= {which: list(_size(values)) for which, values in given.items()}
    row |= {
        "refusal": refusal,
        "layers": traced.depth,
        "skips": len(traced.network.skips),
        "droppable layers": len(traced.network.droppable_layers),
        "droppable branches": len(traced.network.droppable_branches),
        "paper": len(traced.spans("paper")),
        "full": len(traced.spans("full")),
        "refusals": dict(Counter(refusal.code for refusal in traced.network.refusals).most_common()),
    }
    rng = Random(name)
    row["vanilla"] = vanilla(traced, at, given, wanted, keys)
    row["plans"] = [fold(traced, rng, space, drops, other) for space, drops in PLANS] if traced.depth else []
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def vanilla(
    traced: TracedNetwork, at: str | None, given: dict[str, Any], wanted: dict[str, Any], keys: set[str]
) -> dict[str, Any]:
    """Compare the model with the merged network of the vanilla plan: outputs and names of parameters."""
    student = df.rewrite(traced, traced.vanilla)
    merged = df.merge(student)
    found: dict[str, Any] = {"foreign": sorted(set(student.state_dict()) - keys), "ok": True}
    for which, values in given.items():
        found[which] = output_error(wanted[which], _run(merged, at, values))
        verification = df.verify(student, merged, values)
        # The model and the merged network may differ as much as the student and the merged network.
        allowed = max(verification.tolerance, verification.output)
        found["ok"] &= verification.ok and found[which] <= 2 * allowed
    found["ok"] &= not found["foreign"]
    return found


def fold(
    traced: TracedNetwork, rng: Random, space: Literal["paper", "full"], drops: float, other: Any
) -> dict[str, Any]:
    """Rewrite and merge according to one random plan, and return the errors."""
    gc.collect()  # graphs contain reference cycles, and memory holds only three copies of the largest networks
    plan = random_plan(traced.network, rng, space, drops=drops)
    student = df.rewrite(traced, plan)
    merged = df.merge(student)
    row: dict[str, Any] = {"space": space, "segments": len(traced.network.segments(plan))}
    row |= {"layers dropped": len(plan.dropped.layers), "branches dropped": len(plan.dropped.branches)}
    row |= _errors(df.verify(student, merged))
    return row if other is None else row | {"other": _errors(df.verify(student, merged, other))}


def passed(row: dict[str, Any]) -> bool:
    if "error" in row:
        return False
    plans = [found for plan in row["plans"] for found in (plan, plan.get("other", {"ok": True}))]
    return all(found["ok"] for found in (row["vanilla"], *plans))


def _errors(verification: Any) -> dict[str, Any]:
    return {name: getattr(verification, name) for name in ("border", "interior", "output", "ok")}


def _other(model: nn.Module, student: nn.Module, at: str | None, inputs: Any) -> tuple[Any, str | None]:
    """Return inputs of the first other size that the network accepts, or the first line of its error.

    The student of a network whose padding depends on the input size refuses sizes with different padding.
    """
    problem = ""
    for other in of_other_sizes(inputs):
        try:
            _run(model, at, other)
            _run(student, at, other)
        except REFUSALS as error:
            problem = str(error).strip().split("\n")[0]
            continue
        return other, None
    return None, problem


def _run(model: nn.Module, at: str | None, given: Any) -> Any:
    """Return the output of the traced part for inputs of the whole model."""
    inputs = ExampleInputs.of(given).map(Tensor.clone)  # a forward may write to its input
    with torch.no_grad():
        if at is None:
            return inputs.call(model)
        return inputs_at(model, at, inputs).call(model.get_submodule(at))


def _size(inputs: Any) -> tuple[int, ...]:
    return tuple((inputs[0] if isinstance(inputs, list) else inputs).shape)
