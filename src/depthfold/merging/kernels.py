"""The kernel of a segment, from the weights of the rewritten network."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import fx, nn

from depthfold.algebra import Kernel, fold_norm
from depthfold.core import ConvShape, Span
from depthfold.tracing import Blueprint
from depthfold.tracing.functional import conv_tensors, norm_statistics_at
from depthfold.tracing.traced import SkipSite, StepSite

_LAYERS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def segment_kernel(student: fx.GraphModule, nodes: Mapping[str, fx.Node], blueprint: Blueprint, span: Span) -> Kernel:
    """All layers of the span and the skips that it holds, as one kernel from the value at i to the value at j."""
    held = [site for site in blueprint.skip_sites if span.contains(site.skip.span)]
    sources = {site.skip.source for site in held}

    def of(step: StepSite, like: torch.Tensor | None = None) -> Kernel:
        if step.conv is not None:
            kernel = Kernel.of(step.shape, *conv_tensors(student, nodes[step.conv]))
        else:
            assert like is not None
            kernel = Kernel.constant(step.shape, 1 / step.divisor, like)
        return fold_norm(kernel, norm_statistics_at(student, nodes[step.norm])) if step.norm else kernel

    def branch(skip: SkipSite, like: torch.Tensor) -> Kernel:
        steps = skip.steps or (StepSite(shape=blueprint.network.skip_shape(skip.skip)),)
        return reduce(Kernel.then, (of(step, like) for step in steps))

    at: dict[int, Kernel] = {}  # from the front of the span to each position where a skip starts
    merged: Kernel | None = None
    for l in span.layers:
        if l - 1 in sources and merged is not None:
            at[l - 1] = merged
        site, shape = blueprint.sites[l - 1], blueprint.network.layers[l - 1].shape
        layer = of(StepSite(shape=shape, conv=site.conv, norm=site.norm))
        merged = layer if merged is None else merged.then(layer)
        for skip in (each for each in held if each.skip.target == l):
            projected = branch(skip, merged.weight)
            source = at.get(skip.skip.source)
            merged = merged.plus(projected if source is None else source.then(projected), reuse=True)
    assert merged is not None
    return merged


def empty_module(shape: ConvShape, dtype: torch.dtype | None = None) -> nn.Module:
    """A plain convolution layer of this shape, without memory and without having drawn random numbers: on "meta".
    Padding that it cannot hold is left to a padding before it."""
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
    """Such a layer with random weights, drawn as PyTorch's layers draw theirs, but from a generator of their own: a
    user's random numbers are the same whether or not a table is measured in between."""
    module = empty_module(shape, dtype).to_empty(device=device or torch.get_default_device())
    weight, bias = module.weight, module.bias
    assert isinstance(weight, torch.Tensor) and isinstance(bias, torch.Tensor)
    if weight.is_meta:  # of a network that is only shapes
        return module
    generator = torch.Generator(weight.device).manual_seed(0)
    bound = weight[0].numel() ** -0.5
    with torch.no_grad():
        for tensor in (weight, bias):
            tensor.uniform_(-bound, bound, generator=generator)
    return module


def as_module(kernel: Kernel, like: torch.Tensor) -> nn.Module:
    """A plain convolution layer with this kernel."""
    module = empty_module(kernel.shape)
    # A 1x1 kernel may have the strides of channels-last and pass for contiguous: its convolution would change layout.
    weight = kernel.weight.to(like.device, like.dtype).clone(memory_format=torch.contiguous_format)
    module.weight = nn.Parameter(weight)
    module.bias = nn.Parameter(kernel.bias.to(like.device, like.dtype))
    return module
