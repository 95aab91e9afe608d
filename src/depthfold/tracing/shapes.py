"""The shapes of the convolutions and average pools in the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any

import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from depthfold.core import ConvShape, Padding, Refusal
from depthfold.tracing.functional import per_dimension
from depthfold.tracing.roles import zero_padding


def conv_shape(conv: fx.Node, pad: fx.Node | None, modules: Mapping[str, Any]) -> ConvShape:
    """Return the shape of a convolution, including the zero padding `pad` before it."""
    module = modules[str(conv.target)]
    padding = module_padding(module)
    if pad is not None:
        extra = pad_widths(pad, modules, len(padding))
        padding = tuple((a + c, b + d) for (a, b), (c, d) in zip(padding, extra, strict=True))
    return module_shape(module, padding)


def module_shape(conv: _ConvNd, padding: Padding) -> ConvShape:
    """Return the shape of a convolution module with this padding."""
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
    """Return the padding of a convolution as numbers. For "same", an odd pixel goes to the end, as in PyTorch."""
    if conv.padding == "valid":
        return ((0, 0),) * len(conv.kernel_size)
    if conv.padding == "same":
        totals = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((int(p), int(p)) for p in conv.padding)


def pad_widths(node: fx.Node, modules: Mapping[str, Any], dims: int) -> Padding:
    """Return the widths of a zero padding per dimension. PyTorch lists the last dimension first."""
    flat = modules[str(node.target)].padding if node.op == "call_module" else zero_padding(node) or ()
    pairs = list(zip(flat[::2], flat[1::2], strict=True))
    pairs += [(0, 0)] * (dims - len(pairs))
    return tuple(reversed(pairs))


def skip_fits(branch: list[ConvShape], projection: ConvShape | None) -> bool:
    """Return True if the taps of a skip lie within the merged kernel of its branch."""
    merged = reduce(ConvShape.then, branch)
    if projection is None and merged.in_channels != merged.out_channels:
        return False
    return merged.offset(projection or ConvShape.identity(merged.in_channels, merged.dims)) is not None


# Average pools: depth-wise convolutions with fixed weights, if they are equivalent to one at every size.

_MODULES: dict[Any, int] = {nn.AvgPool1d: 1, nn.AvgPool2d: 2, nn.AvgPool3d: 3}
_FUNCTIONS: dict[Any, int] = {F.avg_pool1d: 1, F.avg_pool2d: 2, F.avg_pool3d: 3}
_ARGUMENTS = ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragePool:
    """The settings of an average pool."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    ceil_mode: bool
    count_include_pad: bool
    divisor_override: int | None

    @property
    def divisor(self) -> int:
        """The number that the pool divides by where its window lies within the map."""
        return self.divisor_override or prod(self.kernel)

    @property
    def deviation(self) -> str | None:
        """The reason why the pool is not a convolution at every size, or None if it is one."""
        if self.ceil_mode and max(self.stride) > 1:
            return "it rounds the output size up (ceil_mode=True), but a convolution rounds it down"
        if max(self.padding) and not self.count_include_pad and self.divisor_override is None:
            return "it divides by a different number at the borders (count_include_pad=False)"
        return None

    def shape(self, channels: int) -> ConvShape:
        """Return the shape of the equivalent convolution."""
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
    """Return the average pool that the node computes, or None if it computes something else."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        dims = next((n for base, n in _MODULES.items() if isinstance(module, base)), None)
        if dims is None or not any(type(module).forward is base.forward for base in _MODULES):
            return None
        settings = {name: getattr(module, name, None) for name in _ARGUMENTS[1:]}
    else:
        dims = _FUNCTIONS.get(node.target)
        settings = function_arguments(node)
        if dims is None or any(isinstance(value, fx.Node) for value in settings.values()):
            return None
    kernel = per_dimension(settings["kernel_size"], dims)
    stride = settings.get("stride")
    return AveragePool(
        kernel=kernel,
        stride=per_dimension(stride, dims) if stride else kernel,
        padding=per_dimension(settings.get("padding") or 0, dims),
        ceil_mode=bool(settings.get("ceil_mode")),
        count_include_pad=settings.get("count_include_pad", True) is not False,
        divisor_override=settings.get("divisor_override"),
    )


def function_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a functional average pool by name, without the input."""
    settings = dict(zip(_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
    return {name: value for name, value in settings.items() if name != "input"}


def explain_pool(refusal: Refusal, node: fx.Node, modules: Mapping[str, Any]) -> Refusal:
    """Return the refusal, with the exact reason if the node is an average pool that is not a convolution."""
    pool = average_pool(node, modules) if refusal.code == "pooling" else None
    if pool is None or pool.deviation is None:
        return refusal
    return replace(refusal, why=f"this average pool is not a convolution at every size: {pool.deviation}")
