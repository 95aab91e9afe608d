"""Probes: a few output values of a network, which detect differences that the fingerprint does not cover.

The fingerprint covers what can be merged. An activation in the head, a pool, or the epsilon of an ignored batch norm is
neither in the fingerprint nor in the tensors. So a result stores some outputs for inputs that can be regenerated
exactly on any machine and with any version of PyTorch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from depthfold.backends import full_precision
from depthfold.errors import InvalidValue
from depthfold.merging import SENSITIVITY_FACTOR, TOLERANCE, sensitivity, tensor_error
from depthfold.tracing import ExampleInputs, describe_error, device_of

_KEPT = 64  # values of each output, evenly spaced


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Some values of every output, its shape, and the tolerance as a share of the largest value.

    It is empty if the inputs are not tensors, or if an output is not finite.
    """

    batch: int = 0
    sizes: tuple[tuple[int, ...], ...] = ()
    largest: tuple[float, ...] = ()
    numbers: tuple[tuple[float, ...], ...] = ()
    tolerance: float = 0.0


def record_probe(graph: fx.GraphModule, inputs: ExampleInputs) -> Probe:
    """Record the outputs of the graph. Only the shapes and dtypes of `inputs` are used."""
    given = _probe_inputs(inputs)
    if given is None:
        return Probe()
    outputs = _outputs(graph, given)
    if not outputs or not all(tensor.isfinite().all() for tensor in outputs):
        return Probe()
    amplified = sensitivity(outputs, lambda change: _outputs(graph, given.map(change)))
    return Probe(
        batch=_batch(inputs),
        sizes=tuple(tuple(tensor.shape) for tensor in outputs),
        largest=tuple(float(tensor.abs().max()) if tensor.numel() else 0.0 for tensor in outputs),
        numbers=tuple(tuple(_samples(tensor).tolist()) for tensor in outputs),
        tolerance=max(TOLERANCE.get(outputs[0].dtype, 1e-4), SENSITIVITY_FACTOR * amplified),
    )


def probe_error(probe: Probe, graph: fx.GraphModule, inputs: ExampleInputs) -> float:
    """Return the largest difference from the probed graph, as a share of the largest value."""
    given = _probe_inputs(inputs, probe.batch)
    if not probe.numbers or given is None:
        return 0.0
    outputs = _outputs(graph, given)
    if tuple(tuple(tensor.shape) for tensor in outputs) != probe.sizes:
        return float("inf")
    kept = zip(probe.numbers, outputs, probe.largest, strict=True)
    return max(
        tensor_error(_as_tensor(numbers), _samples(tensor), _as_tensor(largest)) for numbers, tensor, largest in kept
    )


def _probe_inputs(inputs: ExampleInputs, batch: int = 0) -> ExampleInputs | None:
    """Return inputs with values spread evenly over (-2, 2): the fractional parts of multiples of the golden ratio.

    Random numbers are not used, because a seed does not give the same ones in every version of PyTorch.
    """
    values = (*inputs.args, *inputs.named.values())
    if not all(isinstance(value, Tensor) for value in values):
        return None
    first = _batch(inputs)

    def numbers(tensor: Tensor) -> Tensor:
        shape = tuple(tensor.shape)
        if batch and shape[:1] == (first,):
            shape = (batch, *shape[1:])
        if not tensor.is_floating_point():
            return torch.zeros(shape, dtype=tensor.dtype, device="cpu")
        count = torch.Size(shape).numel()
        fractions = (torch.arange(count, device="cpu") * 2654435769 % 2**32).double() / 2**32
        return (4 * fractions - 2).reshape(shape).to(tensor.dtype)

    return inputs.map(numbers)


def _batch(inputs: ExampleInputs) -> int:
    first = next(iter((*inputs.args, *inputs.named.values())), None)
    return first.shape[0] if isinstance(first, Tensor) and first.dim() else 0


def _outputs(graph: fx.GraphModule, given: ExampleInputs) -> tuple[Tensor, ...]:
    """Return all floating-point outputs. Half precision is computed in float32, which every machine supports."""
    graph = copy.deepcopy(graph).eval()
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in graph.parameters()):
        graph = graph.float()
    given = given.like(graph)
    try:
        with full_precision(device_of(graph)), torch.no_grad():
            value: Any = graph(*given.map(Tensor.clone).for_graph(graph))
    except Exception as error:
        raise InvalidValue(
            f"The merged network does not run on inputs of the traced sizes: {describe_error(error)}. Do not "
            "modify the result of merge()."
        ) from error
    return tuple(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point())


def _samples(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    indices = torch.linspace(0, len(flat) - 1, min(_KEPT, len(flat)), dtype=torch.float64, device=flat.device)
    return flat[indices.round().long()].double().cpu()


def _as_tensor(kept: Sequence[float] | float) -> Tensor:
    return torch.tensor(kept, dtype=torch.float64, device="cpu")
