"""In which precision two networks are compared, and what can be expected of it."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from depthfold.errors import VerificationError
from depthfold.merging.verification import TOLERANCE

HALVES = (torch.float16, torch.bfloat16)
_CASTS = ("half", "bfloat16", "double")


def coarsest(module: nn.Module) -> torch.dtype:
    """The coarsest precision of the parameters: where a network has several, no output is more precise than this."""
    found = {parameter.dtype for parameter in module.parameters()} & TOLERANCE.keys()
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def in_single(graph: fx.GraphModule) -> fx.GraphModule:
    """A network with weights in half precision as one that computes in float32, so that only the weights are rounded.
    Casts of its own would bring the coarse precision back, or one that does not fit the weights: they follow."""
    single = copy.deepcopy(graph).float()
    for node in single.graph.nodes:
        if node.op == "call_method" and node.target in _CASTS:
            node.target = "float"
        node.args, node.kwargs = map_aggregate(node.args, _single), map_aggregate(node.kwargs, _single)
    return single


def _single(argument: Any) -> Any:
    return torch.float32 if isinstance(argument, torch.dtype) and argument in TOLERANCE else argument


def check_weights(which: str, graph: fx.GraphModule) -> None:
    """Refuse a network that is only shapes."""
    for name, tensor in itertools.chain(graph.named_parameters(), graph.named_buffers()):
        if tensor.is_meta:
            raise VerificationError(
                f'The {which} network has no weights: {name} is on the device "meta", which keeps shapes alone, so '
                "there is nothing to compare. Load the model's weights (load_state_dict(..., assign=True)), then trace "
                "it again."
            )
