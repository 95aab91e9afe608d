"""Small CNNs built from a specification, random plans, and random statistics for batch norms."""

from __future__ import annotations

import contextlib
import operator
from dataclasses import dataclass
from functools import reduce
from random import Random
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthfold.core import Drops, Network, Padding, Plan, Space, as_pad_argument
from depthfold.errors import PlanError


def random_plan(
    network: Network, rng: Random, space: Space = "full", largest: int = 4_000_000, drops: float = 0.0
) -> Plan:
    """Return a random plan: cuts from a random walk over the spans of the space, and activations at some of them.

    `largest` limits the parameters of a merged convolution, because the full space of a deep network contains kernels
    that do not fit into memory. Spans of a single layer are always allowed. `drops` is the share of the droppable
    layers that are dropped, and half of it the share of the branches.
    """
    following: dict[int, list[int]] = {}
    for span in network.spans(space):
        if len(span) == 1 or network.merged_shape(span).parameters <= largest:
            following.setdefault(span.i, []).append(span.j)
    position, cuts = 0, []  # every single layer is a span, so the walk always reaches the end
    while position < network.depth:
        position = rng.choice(following[position])
        cuts.append(position)
    cuts = cuts[:-1]
    kept = [cut for cut in cuts if rng.random() < 0.6]
    if network.depth and rng.random() < 0.5:
        kept.append(network.depth)
    plan = Plan(activations=kept if network.activations else (), cuts=cuts)
    return _with_drops(network, plan, rng, drops) if drops else plan


def _with_drops(network: Network, plan: Plan, rng: Random, share: float) -> Plan:
    """Return the plan with random layers and branches dropped, and without the cuts inside dropped branches."""
    drops = [Drops(layers=[l]) for l in sorted(network.droppable_layers) if rng.random() < share]
    drops += [Drops(branches=[b]) for b in sorted(network.droppable_branches) if rng.random() < share / 2]
    rng.shuffle(drops)
    for each in drops:
        dropped = plan.dropped | each
        inside = {position for branch in dropped.branches for position in branch.inner}
        candidate = Plan(plan.activations - inside, set(plan.cuts) - inside, dropped)
        with contextlib.suppress(PlanError):  # only the addition of a residual is left, or a skip exceeds its branch
            network.segments(candidate)
            plan = candidate
    return plan


def randomise_statistics(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every batch norm random statistics and affine parameters, because the default values hide errors."""
    generator = torch.Generator().manual_seed(seed)

    def fill(tensor: torch.Tensor | None, low: float, high: float) -> None:
        if tensor is not None:
            values = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * (high - low) + low
            tensor.data.copy_(values)

    for module in model.modules():
        if isinstance(getattr(module, "running_var", None), torch.Tensor):
            fill(module.running_mean, -0.5, 0.5)  # type: ignore[arg-type]
            fill(module.running_var, 0.5, 2.0)  # type: ignore[arg-type]
            fill(module.weight, 0.5, 1.5)  # type: ignore[arg-type]
            fill(module.bias, -0.5, 0.5)  # type: ignore[arg-type]
    return model


CONV: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORM: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
POOL: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE: dict[int, Any] = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}

# A branch parallel to a convolution: the identity, a batch norm, a 1x1 convolution, a convolution of the same shape, or
# an average pool of the same shape, with or without a 1x1 convolution after it.
Beside = Literal["identity", "norm", "point", "twin", "pool", "pool and point"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conv:
    """One convolution. Asymmetric padding becomes an F.pad before it; with `same`, it uses padding="same".

    `beside` are parallel branches whose outputs are added. If `nested`, they are summed before they are added.
    """

    out: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Padding
    dilation: tuple[int, ...]
    groups: int = 1
    bias: bool = True
    eps: float | None = 1e-3  # of the batch norm; None for no batch norm
    factor: float = 1.0  # multiplies the output of the batch norm
    activation: Literal["module", "function", "method"] | None = "module"
    same: bool = False
    beside: tuple[Beside, ...] = ()
    nested: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A sequence of items with an optional residual connection: the identity, or a 1x1 projection with this stride."""

    items: tuple[Conv | Block, ...]
    skip: Literal["identity", "projection"] | None = None
    stride: tuple[int, ...] = ()
    activation: Literal["module", "function", "method"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """Two parallel blocks whose outputs are concatenated."""

    left: Block
    right: Block


@dataclass(frozen=True, slots=True)
class Pool:
    """A max pool of size 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    channels: int
    size: tuple[int, ...]
    parts: tuple[Block | Branches | Pool, ...]

    @property
    def dims(self) -> int:
        return len(self.size)


def _activate(style: str | None, x: Tensor, module: nn.Module | None) -> Tensor:
    if module is not None:
        return module(x)  # type: ignore[no-any-return]
    if style == "function":
        return F.relu(x)
    return x.relu() if style == "method" else x


class ConvUnit(nn.Module):
    def __init__(self, spec: Conv, channels: int) -> None:
        super().__init__()
        dims = len(spec.kernel)
        symmetric = all(a == b for a, b in spec.padding)
        padding: Any = tuple(a for a, _ in spec.padding) if symmetric else 0
        self.pad = None if symmetric or spec.same else as_pad_argument(spec.padding)
        self.conv = CONV[dims](
            channels,
            spec.out,
            spec.kernel,
            stride=spec.stride,
            padding="same" if spec.same else padding,
            dilation=spec.dilation,
            groups=spec.groups,
            bias=spec.bias,
        )
        self.norm = None if spec.eps is None else NORM[dims](spec.out, eps=spec.eps)
        self.beside = nn.ModuleList(_branch(kind, spec, channels) for kind in spec.beside)
        self.factor, self.nested = spec.factor, spec.nested
        self.style = spec.activation
        self.act = nn.ReLU() if spec.activation == "module" else None
        self.out = spec.out

    def forward(self, x: Tensor) -> Tensor:
        terms = [branch(x) for branch in self.beside]
        x = self.conv(x if self.pad is None else F.pad(x, self.pad))
        if self.norm is not None:
            x = self.norm(x)
        if self.factor != 1:
            x = x * self.factor
        if terms and self.nested:
            terms = [reduce(operator.add, reversed(terms))]
        return _activate(self.style, reduce(operator.add, terms, x), self.act)


def _branch(kind: Beside, spec: Conv, channels: int) -> nn.Module:
    dims, layers = len(spec.kernel), []
    padding = tuple(before for before, _ in spec.padding)
    if kind == "norm":
        layers.append(NORM[dims](channels, eps=0.2))
    if kind.startswith("pool"):
        layers.append(AVERAGE[dims](spec.kernel, spec.stride, padding))
    if kind == "twin":
        conv = CONV[dims](
            channels, spec.out, spec.kernel, stride=spec.stride, padding=padding, dilation=spec.dilation, bias=False
        )
        layers += [conv, NORM[dims](spec.out)]
    if kind.endswith("point"):
        stride = spec.stride if kind == "point" else 1
        layers += [CONV[dims](channels, spec.out, 1, stride=stride), NORM[dims](spec.out, eps=0.1)]
    return nn.Sequential(*layers) if layers else nn.Identity()


class BlockUnit(nn.Module):
    def __init__(self, spec: Block, channels: int) -> None:
        super().__init__()
        self.items = nn.ModuleList()
        out = channels
        for item in spec.items:
            unit: Any = ConvUnit(item, out) if isinstance(item, Conv) else BlockUnit(item, out)
            self.items.append(unit)
            out = unit.out
        self.skip = spec.skip
        self.projection = None
        if spec.skip == "projection":
            dims = len(spec.stride)
            conv = CONV[dims](channels, out, 1, stride=spec.stride, bias=False)
            self.projection = nn.Sequential(conv, NORM[dims](out, eps=1e-2))
        self.style = spec.activation
        self.act = nn.ReLU() if spec.activation == "module" else None
        self.out = out

    def forward(self, x: Tensor) -> Tensor:
        source = x
        for item in self.items:
            x = item(x)
        if self.skip is not None:
            x = x + (source if self.projection is None else self.projection(source))
        return _activate(self.style, x, self.act)


class BranchUnit(nn.Module):
    def __init__(self, spec: Branches, channels: int) -> None:
        super().__init__()
        self.left = BlockUnit(spec.left, channels)
        self.right = BlockUnit(spec.right, channels)
        self.out = self.left.out + self.right.out

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.left(x), self.right(x)], dim=1)


class PoolUnit(nn.Module):
    def __init__(self, dims: int, channels: int) -> None:
        super().__init__()
        self.dims, self.out = dims, channels

    def forward(self, x: Tensor) -> Tensor:
        return POOL[self.dims](x, 2)  # type: ignore[no-any-return]


class SmallCNN(nn.Module):
    """The network of a specification. Its output is the feature map of the last part."""

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__()
        self.spec = spec
        self.parts = nn.ModuleList()
        channels = spec.channels
        for part in spec.parts:
            unit: Any
            if isinstance(part, Pool):
                unit = PoolUnit(spec.dims, channels)
            else:
                unit = BlockUnit(part, channels) if isinstance(part, Block) else BranchUnit(part, channels)
            self.parts.append(unit)
            channels = unit.out

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x
