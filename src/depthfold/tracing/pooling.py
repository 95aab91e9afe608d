"""Average pools: each is a depth-wise convolution with fixed weights, where it computes the same at every size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from depthfold.core import ConvShape, Refusal

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
