"""Shapes of the convolutions in the graph."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

from torch import fx
from torch.nn.modules.conv import _ConvNd

from depthfold.core import ConvShape
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
