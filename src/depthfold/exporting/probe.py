"""A probe: a few numbers that a network computes, by which it is known again.

The fingerprint of a network covers what can be merged. An activation in the head, a pool or the epsilon of a batch norm
that was left alone is not in it, and leaves no trace in the tensors either. So a result keeps some of the outputs for
inputs that can be made again, number by number, on any machine and with any version of PyTorch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from depthfold.backends.cuda import cuda_settings
from depthfold.errors import InvalidValue
from depthfold.merging.verification import CHAOS, TOLERANCE
from depthfold.merging.verify import last_digit, output_error, tensor_error
from depthfold.tracing import ExampleInputs
from depthfold.tracing.tracer import describe_error

_KEPT = 64  # numbers of each output, spread evenly over it


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Some numbers of every output, its sizes, and how far they may be off elsewhere, as a share of the largest.

    There are none where the network takes inputs that are no tensors, or yields numbers that are not finite.
    """

    batch: int = 0
    sizes: tuple[tuple[int, ...], ...] = ()
    largest: tuple[float, ...] = ()
    numbers: tuple[tuple[float, ...], ...] = ()
    tolerance: float = 0.0


def take_probe(graph: fx.GraphModule, inputs: ExampleInputs) -> Probe:
    """What the graph computes now. `inputs` are an example of what it takes; their values do not matter."""
    given = _probe_inputs(inputs)
    if given is None:
        return Probe()
    outputs = _outputs(graph, given)
    if not outputs or not all(tensor.isfinite().all() for tensor in outputs):
        return Probe()
    sensitivity = output_error(outputs, _outputs(graph, given.map(last_digit)))
    return Probe(
        batch=_batch(inputs),
        sizes=tuple(tuple(tensor.shape) for tensor in outputs),
        largest=tuple(float(tensor.abs().max()) if tensor.numel() else 0.0 for tensor in outputs),
        numbers=tuple(tuple(_some(tensor).tolist()) for tensor in outputs),
        tolerance=max(TOLERANCE.get(outputs[0].dtype, 1e-4), CHAOS * sensitivity),
    )


def probe_error(probe: Probe, graph: fx.GraphModule, inputs: ExampleInputs) -> float:
    """How far the graph is from the one that was probed, as a share of the largest number."""
    given = _probe_inputs(inputs, probe.batch)
    if not probe.numbers or given is None:
        return 0.0
    outputs = _outputs(graph, given)
    if tuple(tuple(tensor.shape) for tensor in outputs) != probe.sizes:
        return float("inf")
    kept = zip(probe.numbers, outputs, probe.largest, strict=True)
    return max(tensor_error(_numbers(numbers), _some(tensor), _numbers(largest)) for numbers, tensor, largest in kept)


def _probe_inputs(inputs: ExampleInputs, batch: int = 0) -> ExampleInputs | None:
    """Numbers spread evenly over (-2, 2): the fractions of the multiples of the golden ratio, in whole numbers.

    Not random ones: what a seed gives is not the same on every machine and in every version of PyTorch.
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
    """All floating-point outputs. Half precisions are computed in float32, as every machine can."""
    graph = copy.deepcopy(graph).eval()
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in graph.parameters()):
        graph = graph.float()
    given = given.like(graph)
    try:
        with cuda_settings(tf32=False, benchmark=False), torch.no_grad():
            value: Any = graph(*given.map(Tensor.clone).for_graph(graph))
    except Exception as error:
        raise InvalidValue(
            f"The merged network does not run on inputs of the sizes that it was traced with: {describe_error(error)}. "
            "Leave what merge() returned as it is."
        ) from error
    return tuple(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point())


def _some(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    places = torch.linspace(0, len(flat) - 1, min(_KEPT, len(flat)), dtype=torch.float64, device=flat.device)
    return flat[places.round().long()].double().cpu()


def _numbers(kept: Sequence[float] | float) -> Tensor:
    return torch.tensor(kept, dtype=torch.float64, device="cpu")
