"""The functions fuse() and fuse_eval(): modules that compute the same as a model, with the kernels of this package."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from depthfold.kernels.sites import find_sites, plain_module

Prepare = Callable[[fx.GraphModule], None]


def fuse(model: nn.Module, *, prepare: Prepare | None = None) -> Fused | None:
    """Return a module that computes the same as a model in training, faster. Return None if there is nothing to fuse.

    Call it in place of the model: under torch.autocast, or with an input in bfloat16. It reads the model's own
    parameters and buffers, so gradients arrive in float32 in the `grad` of the model's parameters, and its running
    statistics are updated. The model itself is not changed. It must stay in its mode and on its device.

    All weights are cast at the start of each forward. Put the model into the memory format channels_last before, since
    otherwise dense kernels are also laid out anew in each forward. Operations without a kernel stay as they are, for
    example other activations, other groups, batch norms in evaluation mode and modules with hooks. `prepare` may change
    the graph before, which is a copy with the modules of the model.
    """
    graph = _graph(model, prepare)
    sites = None if graph is None else find_sites(graph, training=True)
    if graph is None or not sites:
        return None
    from depthfold.kernels.builder import Builder

    fused = Fused(Builder(graph, sites).build(), _device(model))
    _release(graph)
    return fused


def fuse_eval(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, *, prepare: Prepare | None = None
) -> FusedEval | None:
    """Return a module that computes the same as a model in evaluation mode, without gradients, or None.

    It has copies of the weights in `dtype`, and scale and shift of each batch norm. If those of the model change, call
    `refresh()`. All other modules are the model's own. `prepare` is that of `fuse`.
    """
    graph = _graph(model, prepare)
    sites = None if graph is None else find_sites(graph, training=False)
    if graph is None or not sites:
        return None
    from depthfold.kernels.builder import EvalBuilder

    builder = EvalBuilder(graph, sites, dtype)
    fused = FusedEval(builder.build(), _device(model), builder.weights, builder.norms)
    _release(graph)
    return fused


class Fused(nn.Module):
    """A model with the kernels of this package."""

    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        super().__init__()
        self.module, self._device = module, device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Triton launches on the current device, not on that of the tensors.
        cuda = self._device.type == "cuda"
        with torch.cuda.device(self._device) if cuda else contextlib.nullcontext():
            return self.module(*args, **kwargs)

    def close(self) -> None:
        """Drop all tensors and modules."""
        _release(self.module)


class FusedEval(Fused):
    """A model in evaluation mode with the kernels of this package."""

    def __init__(
        self,
        module: fx.GraphModule,
        device: torch.device,
        weights: list[tuple[Tensor, Tensor]],
        norms: list[tuple[Tensor, Any]],
    ) -> None:
        super().__init__(module, device)
        self._weights, self._norms = weights, norms
        self.refresh()

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the model's weights and running statistics again, into the same tensors."""
        from depthfold.kernels.norm import fold

        if self._weights:
            torch._foreach_copy_([own for own, _ in self._weights], [weight for _, weight in self._weights])
        for statistics, norm in self._norms:
            statistics.copy_(fold(norm))

    def close(self) -> None:
        super().close()
        self._weights, self._norms = [], []


def _release(graph: fx.GraphModule) -> None:
    """Drop all tensors and modules, which would stay until the garbage collector runs: a graph refers to itself."""
    for attributes in (graph._parameters, graph._buffers, graph._modules):
        attributes.clear()


def _graph(model: nn.Module, prepare: Prepare | None) -> fx.GraphModule | None:
    """Return a graph of a model that the kernels can run, with its tensors and modules, or None."""
    if next(model.parameters(), None) is None or not _can_run(_device(model)):
        return None
    if model._forward_hooks or model._forward_pre_hooks:
        return None
    if isinstance(model, fx.GraphModule):
        graph = fx.GraphModule(model, copy.deepcopy(model.graph))
    else:
        try:
            graph = fx.symbolic_trace(model)
        except Exception:  # noqa: BLE001 - any error of the user's code, which runs with proxies
            return None
    if prepare is not None:
        prepare(graph)
    return _without_identities(graph)


def _without_identities(graph: fx.GraphModule) -> fx.GraphModule:
    """Remove the calls of modules that return their input. A removed activation leaves one before a convolution."""
    for node in list(graph.graph.nodes):
        module = plain_module(graph, node)
        if module is not None and _returns_input(module):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.graph.erase_node(node)
    return graph


def _returns_input(module: nn.Module) -> bool:
    """Return True for nn.Identity, and for other classes with the same forward."""
    own, code = nn.Identity.forward.__code__, getattr(type(module).forward, "__code__", None)
    same = code is not None and (code.co_code, code.co_argcount, code.co_flags) == (own.co_code, 2, own.co_flags)
    return same and type(module).__call__ is nn.Module.__call__


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _can_run(device: torch.device) -> bool:
    """Return True if Triton is installed and compiles for the device, or is in its interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8  # bfloat16
    return os.environ.get("TRITON_INTERPRET") == "1"
