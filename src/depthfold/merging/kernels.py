"""The kernel of a segment, and convolution modules with a given shape or kernel."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import fx, nn

from depthfold.algebra import Kernel, fold_norm
from depthfold.core import NOTHING, ConvShape, Drops, Span
from depthfold.tracing import Blueprint
from depthfold.tracing.functional import conv_tensors, norm_statistics_at
from depthfold.tracing.traced import SkipSite, StepSite

_LAYERS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def segment_kernel(
    student: fx.GraphModule, nodes: Mapping[str, fx.Node], blueprint: Blueprint, span: Span, dropped: Drops = NOTHING
) -> Kernel:
    """Compose the layers of the span that are left, and the skips inside it, into one kernel from position i to j."""
    inside = [*blueprint.skips_inside(span, dropped)]
    sources, kept = {site.skip.source for site in inside}, dropped.kept(span)

    def of(step: StepSite, like: torch.Tensor | None = None) -> Kernel:
        if step.conv is not None:
            kernel = Kernel.of(step.shape, *conv_tensors(student, nodes[step.conv]))
        else:
            assert like is not None
            kernel = Kernel.constant(step.shape, 1 / step.divisor, like)
        for name in step.affine:
            kernel = fold_norm(kernel, norm_statistics_at(student, nodes[name]))
        return kernel

    def branch(skip: SkipSite, like: torch.Tensor) -> Kernel:
        steps = skip.steps or (StepSite(shape=blueprint.network.skip_shape(skip.skip)),)
        return reduce(Kernel.then, (of(step, like) for step in steps))

    def layer(l: int) -> Kernel:
        site, shape = blueprint.sites[l - 1], blueprint.network.layers[l - 1].shape
        return of(StepSite(shape=shape, conv=site.conv, affine=site.affine))

    at: dict[int, Kernel] = {}  # from the start of the span to each position where a skip starts
    merged: Kernel | None = None  # None for the identity
    for l in span.layers:
        if l - 1 in sources and merged is not None:
            at[l - 1] = merged
        if l in kept:
            merged = layer(l) if merged is None else merged.then(layer(l))
        for skip in (each for each in inside if each.skip.target == l):
            if merged is None:  # all layers before are dropped
                like, shape = layer(kept[0]).weight, blueprint.network.identity_shape(span.i)
                merged = Kernel.constant(shape, 1.0, like)
            projected = branch(skip, merged.weight)
            source = at.get(skip.skip.source)
            # If the layers since then are dropped, the kernel at an earlier position is the same one.
            alone = all(merged is not kernel for kernel in at.values())
            merged = merged.plus(projected if source is None else source.then(projected), reuse=alone)
    assert merged is not None
    return merged


def empty_module(shape: ConvShape, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a convolution of this shape on the device "meta", which needs no memory and draws no random numbers.

    It does not pad if the padding is asymmetric: the caller pads its input.
    """
    module: nn.Module = _LAYERS[shape.dims](
        shape.in_channels,
        shape.out_channels,
        shape.kernel,
        stride=shape.stride,
        padding=tuple(p[0] for p in shape.padding) if shape.symmetric else 0,
        dilation=shape.dilation,
        groups=shape.groups,
        device="meta",
        dtype=dtype,
    )
    return module


def random_module(
    shape: ConvShape, *, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """Return a convolution of this shape with random weights, distributed like PyTorch's defaults.

    They come from a separate generator, so that the user's random state is not changed.
    """
    module = empty_module(shape, dtype).to_empty(device=device or torch.get_default_device())
    weight, bias = module.weight, module.bias
    assert isinstance(weight, torch.Tensor) and isinstance(bias, torch.Tensor)
    if weight.is_meta:  # the network has no weights
        return module
    generator = torch.Generator(weight.device).manual_seed(0)
    bound = weight[0].numel() ** -0.5
    with torch.no_grad():
        for tensor in (weight, bias):
            tensor.uniform_(-bound, bound, generator=generator)
    return module


def as_module(kernel: Kernel, like: torch.Tensor) -> nn.Module:
    """Return a convolution with this kernel, on the device and in the dtype of `like`."""
    module = empty_module(kernel.shape)
    # A contiguous 1x1 kernel may still have channels-last strides, which would change the layout of the output.
    weight = kernel.weight.to(like.device, like.dtype).clone(memory_format=torch.contiguous_format)
    module.weight = nn.Parameter(weight)
    module.bias = nn.Parameter(kernel.bias.to(like.device, like.dtype))
    return module
