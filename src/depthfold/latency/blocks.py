"""Blocks: what a span becomes, as a network of its own that can be timed."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from depthfold.core import ConvShape, Network, Span
from depthfold.core.network import free_positions
from depthfold.core.shape import as_pad_argument
from depthfold.errors import BackendError
from depthfold.merging import random_module, use_plain_layers
from depthfold.rewriting import activation_module, activation_names
from depthfold.support.digest import digest
from depthfold.support.document import encode
from depthfold.tracing import TracedNetwork


@dataclass(frozen=True, slots=True)
class Branch:
    """A skip that the span does not hold, so that its addition stays: the map it adds, or projects and adds."""

    channels: int
    size: tuple[int, ...]
    projection: ConvShape | None


@dataclass(frozen=True, slots=True)
class BlockShape:
    """All that the time of a block depends on. Spans with equal ones are timed once."""

    shape: ConvShape
    in_size: tuple[int, ...]
    branches: tuple[Branch, ...]
    activation: str | None
    batch: int

    @property
    def key(self) -> str:
        """A name for journals: the same in every run."""
        return digest(encode(self))

    @property
    def elements(self) -> tuple[int, int]:
        """How many numbers the block reads and writes."""
        size = torch.Size(self.in_size).numel()
        out = torch.Size(self.shape.out_size(self.in_size)).numel()
        return self.batch * self.shape.in_channels * size, self.batch * self.shape.out_channels * out

    def activated(self, b: bool) -> int:
        """Return how many more numbers are activated if the block has an activation (b) or not than as it is timed."""
        return (b - (self.activation is not None)) * self.elements[1]

    @property
    def parameters(self) -> int:
        return self.shape.parameters + sum(b.projection.parameters for b in self.branches if b.projection)

    def inputs(self) -> tuple[Tensor, ...]:
        """One random example, as often as the batch has: drawing every number of a large batch takes longer than
        timing the block."""
        generator = torch.Generator().manual_seed(0)
        sizes = [(self.shape.in_channels, self.in_size), *((b.channels, b.size) for b in self.branches)]
        return tuple(
            torch.randn(1, c, *size, generator=generator).repeat(self.batch, 1, *(1 for _ in size)) for c, size in sizes
        )


def block_module(traced: TracedNetwork, shape: BlockShape) -> nn.Module:
    """One convolution, the additions that stay, and the activation of the shape: random weights, for timing."""
    conv = shape.shape
    if why := conv.too_large:
        raise BackendError(f"It is too large: {why}.")
    parts = nn.ModuleDict({"conv": random_module(conv)})
    graph = fx.Graph()
    x = graph.placeholder("x")
    others = [graph.placeholder(f"skip{n}") for n in range(len(shape.branches))]
    if not conv.symmetric:
        x = graph.call_function(F.pad, (x, as_pad_argument(conv.padding)))
    x = graph.call_module("conv", (x,))
    for n, (other, branch) in enumerate(zip(others, shape.branches, strict=True)):
        if branch.projection is not None:
            parts[f"projection{n}"] = random_module(branch.projection)
            other = graph.call_module(f"projection{n}", (other,))
        x = graph.call_function(operator.add, (x, other))
    if shape.activation is not None:
        parts["activation"] = activation_module(traced, shape.activation, conv.out_channels)
        x = graph.call_module("activation", (x,))
    graph.output(x)
    block = fx.GraphModule(parts, graph).eval()
    use_plain_layers(block)  # as in a merged network
    return block


def block_shape(traced: TracedNetwork, span: Span, batch: int) -> BlockShape:
    """What the span becomes."""
    return block_shapes(traced, (span,), batch)[span]


def block_shapes(traced: TracedNetwork, spans: Iterable[Span], batch: int | None = None) -> dict[Span, BlockShape]:
    """What the spans become, for batches as they reached the layers while tracing, or of a given size.

    A block is timed once, so it has the likelier state of the activation at j: a layer that stays alone has what the
    network has there, and after several in one an activation stands, the network's own or, where one may be, inserted.
    """
    standing = activation_names(traced)

    def shape(span: Span) -> BlockShape:
        kind = standing[span.j - 1] if block_is_active(traced.network, span) else None
        size = traced.network.layers[span.i].in_size
        examples = traced.blueprint.sites[span.i].batch if batch is None else batch
        return BlockShape(traced.network.merged_shape(span), size, _branches(traced.network, span), kind, examples)

    return {span: shape(span) for span in spans}


def _branches(network: Network, span: Span) -> tuple[Branch, ...]:
    """An addition stays with the layer where its skip ends, unless the span holds the skip."""
    firsts = [(skip, network.layers[skip.source]) for skip in network.skips_into(span.j) if skip.source < span.i]
    return tuple(Branch(first.shape.in_channels, first.in_size, skip.projection) for skip, first in firsts)


def block_is_active(network: Network, span: Span) -> bool:
    """Return True if the block of a span is timed with an activation at its end."""
    return span.j in network.activations or (len(span) > 1 and span.j in free_positions(network))
