"""One network of the zoo: traced, rewritten by several plans and merged, at the traced size and at another one."""

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
from depthfold.merging.verify import output_error
from depthfold.testing import random_plan, randomise_statistics
from depthfold.tracing import TracedNetwork
from depthfold.tracing.inputs import ExampleInputs, inputs_at
from depthfold.vision import import_timm

SPACES: tuple[Literal["paper", "full"], ...] = ("paper", "full", "full")
SINGLE_PRECISION_FROM = 60_000_000  # parameters: larger networks do not fit into memory three times in float64


def examine(name: str) -> dict[str, Any]:
    """What the network has, what is refused, and how exactly it merges."""
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
    del model  # the network has its own copy
    row |= {which: list(_size(values)) for which, values in given.items()}
    row |= {
        "refusal": refusal,
        "layers": traced.depth,
        "skips": len(traced.network.skips),
        "paper": len(traced.spans("paper")),
        "full": len(traced.spans("full")),
        "refusals": dict(Counter(refusal.code for refusal in traced.network.refusals).most_common()),
    }
    rng = Random(name)
    row["vanilla"] = vanilla(traced, at, given, wanted, keys)
    row["plans"] = [fold(traced, rng, space, other) for space in SPACES] if traced.depth else []
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def vanilla(
    traced: TracedNetwork, at: str | None, given: dict[str, Any], wanted: dict[str, Any], keys: set[str]
) -> dict[str, Any]:
    """The plan that changes nothing, merged, against the user's model itself: its outputs and the names of its
    parameters."""
    student = df.rewrite(traced, traced.vanilla)
    merged = df.merge(student)
    found: dict[str, Any] = {"foreign": sorted(set(student.state_dict()) - keys), "ok": True}
    for which, values in given.items():
        found[which] = output_error(wanted[which], _run(merged, at, values))
        verification = df.verify(student, merged, values)
        # What the student and the merged network may differ by is what this one and the model may differ by.
        allowed = max(verification.tolerance, verification.output)
        found["ok"] &= verification.ok and found[which] <= 2 * allowed
    found["ok"] &= not found["foreign"]
    return found


def fold(traced: TracedNetwork, rng: Random, space: Literal["paper", "full"], other: Any) -> dict[str, Any]:
    """Rewrite and merge by one random plan."""
    gc.collect()  # graphs hold themselves in cycles, and the largest networks fit into memory only three times
    plan = random_plan(traced.network, rng, space)
    student = df.rewrite(traced, plan)
    merged = df.merge(student)
    row: dict[str, Any] = {"space": space, "segments": len(traced.network.segments(plan))}
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
    """Inputs of the first other size that the network takes, or the first words of its refusal. The student of a
    network that pads by the size of its maps refuses sizes at which it would have to pad differently."""
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
    """What the part that is traced makes of inputs of the whole model."""
    inputs = ExampleInputs.of(given).map(Tensor.clone)  # a forward may write to its input
    with torch.no_grad():
        if at is None:
            return inputs.call(model)
        return inputs_at(model, at, inputs).call(model.get_submodule(at))


def _size(inputs: Any) -> tuple[int, ...]:
    return tuple((inputs[0] if isinstance(inputs, list) else inputs).shape)
