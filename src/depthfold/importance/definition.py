"""What the importance of a block is, by the paper's definition (eq. imp and eq. ext-imp): which network is trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from depthfold.core import FlaggedSpan, Network, Plan
from depthfold.errors import PlanError
from depthfold.rewriting import rewrite
from depthfold.tracing import TracedNetwork, student_parts
from depthfold.tracing.functional import use_plain_convolutions
from depthfold.training import fork_rng


def importance_plan(network: Network, block: FlaggedSpan) -> Plan:
    """The original network but for one block: no activation strictly inside it, one at i if a and at j if b, none
    there otherwise. The block is one segment, so that its padding moves; every other layer is a segment of its own."""
    inside = range(block.i + 1, block.j)
    forced = {position for position, flag in ((block.i, block.a), (block.j, block.b)) if flag and position > 0}
    stands = (network.activations - {block.i, block.j, *inside}) | forced
    if network.depth in network.activations and network.depth not in stands:
        raise PlanError(
            f"The block {block} asks for no activation after the last layer, {network.depth}, where the network has "
            "one; that one always stands. Leave this block out of the table."
        )
    return Plan(activations=stands, cuts=[cut for cut in range(1, network.depth) if cut not in inside])


def importance_student(traced: TracedNetwork, block: FlaggedSpan, seed: int, *, reinit: bool = True) -> nn.Module:
    """The network that is trained for the block's entry.

    With `reinit`, the convolution and the batch norm of a block of one layer are reinitialised as PyTorch does it,
    drawn by the seed: as for longer blocks, its importance is what training can recover.
    """
    student = rewrite(traced, importance_plan(traced.network, block)).cpu()  # where draws are the same on every machine
    if reinit and len(block.span) == 1:
        _reset(student, traced, block.j, seed)
    return student


def _reset(student: nn.Module, traced: TracedNetwork, l: int, seed: int) -> None:
    part = student_parts(student)[0]
    site = traced.blueprint.sites[l - 1]
    nodes = {node.name: node for node in part.graph.nodes}
    use_plain_convolutions(part, {site.conv})
    with fork_rng(torch.device("cpu")) as reseed:
        reseed(seed)
        for name in (site.conv, site.norm):
            module: Any = None if name is None else part.get_submodule(str(nodes[name].target))
            # A batch norm of the frozen kind has no such method: it holds constants.
            if hasattr(module, "reset_parameters"):
                _reinitialise(module, trained=module.training or not student.training)


def _reinitialise(module: nn.Module, *, trained: bool) -> None:
    """Put what training will change back to its beginning. What it will not, it could not put there either, so that
    stays: frozen parameters and, unless the statistics are `trained`, buffers."""
    before = {}
    for name, parameter in list(module.named_parameters(recurse=False)):
        if not parameter.requires_grad:
            before[name] = parameter.detach().clone()
        # A parameter of its own: another layer may share the old one, and must keep it.
        setattr(module, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
    if not trained:
        before |= {name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)}
    module.reset_parameters()  # type: ignore[operator]
    with torch.no_grad():
        for name, tensor in before.items():
            getattr(module, name).copy_(tensor)
