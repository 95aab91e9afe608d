"""The network that is trained for the importance of a block: Eq. 3, and Eq. 14 with flags.

    I[i, j, a, b] = score(importance_student, trained briefly) - score(original)

The trained network starts from the weights of the original, so one short training stands for the maximum over theta.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from depthfold.core import NOTHING, Drops, FlaggedSpan, Network, Plan
from depthfold.errors import PlanError
from depthfold.rewriting import rewrite
from depthfold.tracing import TracedNetwork, fork_rng, student_parts
from depthfold.tracing.functional import use_plain_convolutions
from depthfold.tracing.modules import called_module


def importance_plan(network: Network, block: FlaggedSpan, dropped: Drops = NOTHING) -> Plan:
    """Return the plan of the original network in which only one block is changed (Eq. 14).

    It has no activation inside the block, one at i if a, and one at j if b, and it drops the layers and branches of the
    block that are given. The block is one segment, so that its padding moves; every other layer is a segment by itself.
    """
    inside = range(block.i + 1, block.j)
    at_ends = {position for position, flag in ((block.i, block.a), (block.j, block.b)) if flag and position > 0}
    activations = (network.activations - {block.i, block.j, *inside}) | at_ends
    if network.depth in network.activations and network.depth not in activations:
        raise PlanError(
            f"The block {block} has no activation after the last layer, {network.depth}, but the network always keeps "
            "the one it has there. Leave this block out of the table."
        )
    return Plan(activations, [cut for cut in range(1, network.depth) if cut not in inside], dropped)


def importance_student(
    traced: TracedNetwork, block: FlaggedSpan, seed: int, *, dropped: Drops = NOTHING, reinit: bool = True
) -> nn.Module:
    """Return the network that is trained for the entry of a block.

    With `reinit`, a block of one layer is reinitialised, unless the layer is dropped: its convolution and batch norm
    get PyTorch's initial values, drawn with the seed. So its importance measures what training can recover, as for
    longer blocks.
    """
    # On the CPU, where random numbers are the same on every machine.
    student = rewrite(traced, importance_plan(traced.network, block, dropped)).cpu()
    if reinit and len(block.span) == 1 and not dropped:
        _reset(student, traced, block.j, seed)
    return student


def _reset(student: nn.Module, traced: TracedNetwork, l: int, seed: int) -> None:
    part = student_parts(student)[0]
    site = traced.blueprint.sites[l - 1]
    nodes = {node.name: node for node in part.graph.nodes}
    use_plain_convolutions(part, {site.conv})
    with fork_rng(torch.device("cpu")) as reseed:
        reseed(seed)
        for name in (site.conv, *site.affine):
            module: Any = called_module(part, nodes[name])
            # torchvision's FrozenBatchNorm2d has no such method: it has only constants.
            if hasattr(module, "reset_parameters"):
                _reinitialise(module, trained=module.training or not student.training)


def _reinitialise(module: nn.Module, *, trained: bool) -> None:
    """Reset everything that training changes. Keep frozen parameters and, if not `trained`, the statistics."""
    before = {}
    for name, parameter in list(module.named_parameters(recurse=False)):
        if not parameter.requires_grad:
            before[name] = parameter.detach().clone()
        # Another layer may share the old parameter, and must keep it.
        setattr(module, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
    if not trained:
        before |= {name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)}
    module.reset_parameters()  # type: ignore[operator]
    with torch.no_grad():
        for name, tensor in before.items():
            getattr(module, name).copy_(tensor)
