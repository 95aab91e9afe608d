"""Shapes of the convolutions in the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from depthfold.core import ConvShape, Refusal
from depthfold.core.shape import Padding
from depthfold.tracing.roles import zero_padding

if TYPE_CHECKING:
    from depthfold.tracing.drafts import Draft


def conv_shape(draft: Draft, modules: Mapping[str, Any]) -> ConvShape:
    """The shape of a draft's convolution, with the zero padding before it taken in."""
    conv = modules[str(draft.conv.target)]
    padding = module_padding(conv)
    if draft.pad is not None:
        extra = pad_widths(draft.pad, modules, len(padding))
        padding = tuple((a + c, b + d) for (a, b), (c, d) in zip(padding, extra, strict=True))
    return module_shape(conv, padding)


def module_shape(conv: _ConvNd, padding: Padding) -> ConvShape:
    return ConvShape(
        in_channels=conv.in_channels,
        out_channels=conv.out_channels,
        kernel=tuple(conv.kernel_size),
        stride=tuple(conv.stride),
        padding=padding,
        dilation=tuple(conv.dilation),
        groups=conv.groups,
    )


def module_padding(conv: _ConvNd) -> Padding:
    """The padding of a convolution in numbers; "same" puts the odd one behind, as PyTorch does."""
    if conv.padding == "valid":
        return ((0, 0),) * len(conv.kernel_size)
    if conv.padding == "same":
        totals = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((int(p), int(p)) for p in conv.padding)


def pad_widths(node: fx.Node, modules: Mapping[str, Any], dims: int) -> Padding:
    """The widths of a zero-pad, per dimension. PyTorch lists the last dimension first."""
    flat = modules[str(node.target)].padding if node.op == "call_module" else zero_padding(node) or ()
    pairs = list(zip(flat[::2], flat[1::2], strict=True))
    pairs += [(0, 0)] * (dims - len(pairs))
    return tuple(reversed(pairs))


def skip_fits(branch: list[ConvShape], projection: ConvShape | None) -> bool:
    """Whether the taps of a skip fall within the merged kernel of the branch that it spans."""
    merged = reduce(ConvShape.then, branch)
    if projection is None and merged.in_channels != merged.out_channels:
        return False
    return merged.offset(projection or ConvShape.identity(merged.in_channels, merged.dims)) is not None


# Average pools: each is a depth-wise convolution with fixed weights, where it computes the same at every size.

_MODULES: dict[Any, int] = {nn.AvgPool1d: 1, nn.AvgPool2d: 2, nn.AvgPool3d: 3}
_FUNCTIONS: dict[Any, int] = {F.avg_pool1d: 1, F.avg_pool2d: 2, F.avg_pool3d: 3}
_ARGUMENTS = ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragePool:
    """The settings of an average pool. `divisor` is what it divides by where its window lies within the map."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    ceil_mode: bool
    count_include_pad: bool
    divisor_override: int | None

    @property
    def divisor(self) -> int:
        return self.divisor_override or prod(self.kernel)

    @property
    def deviation(self) -> str | None:
        """Why the pool is not a convolution of its input at every size, or None if it is."""
        if self.ceil_mode and max(self.stride) > 1:
            return "it rounds the size up (ceil_mode=True), and a convolution rounds it down"
        if max(self.padding) and not self.count_include_pad and self.divisor_override is None:
            return "it divides by another number at the borders (count_include_pad=False)"
        return None

    def shape(self, channels: int) -> ConvShape:
        """The shape of the convolution that the pool is."""
        return ConvShape(
            in_channels=channels,
            out_channels=channels,
            kernel=self.kernel,
            stride=self.stride,
            padding=tuple((p, p) for p in self.padding),
            dilation=(1,) * len(self.kernel),
            groups=channels,
        )


def average_pool(node: fx.Node, modules: Mapping[str, Any]) -> AveragePool | None:
    """The average pool that the node computes, or None if it computes something else."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        dims = next((n for base, n in _MODULES.items() if isinstance(module, base)), None)
        if dims is None or not any(type(module).forward is base.forward for base in _MODULES):
            return None
        given = {name: getattr(module, name, None) for name in _ARGUMENTS[1:]}
    else:
        dims = _FUNCTIONS.get(node.target)
        given = function_arguments(node)
        if dims is None or any(isinstance(value, fx.Node) for value in given.values()):
            return None
    kernel = _per_dimension(given["kernel_size"], dims)
    stride = given.get("stride")
    return AveragePool(
        kernel=kernel,
        stride=_per_dimension(stride, dims) if stride else kernel,
        padding=_per_dimension(given.get("padding") or 0, dims),
        ceil_mode=bool(given.get("ceil_mode")),
        count_include_pad=given.get("count_include_pad", True) is not False,
        divisor_override=given.get("divisor_override"),
    )


def function_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of an average pool as a function by their names, without the input."""
    given = dict(zip(_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
    return {name: value for name, value in given.items() if name != "input"}


def explain_pool(refusal: Refusal, node: fx.Node, modules: Mapping[str, Any]) -> Refusal:
    """The refusal of a node, with the reason where the node is an average pool that no kernel can hold."""
    pool = average_pool(node, modules) if refusal.code == "pooling" else None
    if pool is None or pool.deviation is None:
        return refusal
    return replace(refusal, why=f"this average pool is not a convolution at every size: {pool.deviation}")


def _per_dimension(value: Any, dims: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    return values * dims if len(values) == 1 else values
