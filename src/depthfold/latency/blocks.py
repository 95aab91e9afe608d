"""Blocks: the convolution that a span becomes, as a module that can be timed."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from depthfold.core import ConvShape, Network, Span, as_pad_argument, free_positions
from depthfold.core.options import Move, span_options
from depthfold.errors import BackendError
from depthfold.merging import random_module, use_plain_layers
from depthfold.rewriting import activation_module, activation_names
from depthfold.support.digest import digest
from depthfold.support.document import encode
from depthfold.tracing import TracedNetwork


@dataclass(frozen=True, slots=True)
class Branch:
    """A skip that ends inside the block but starts before it: its addition stays, after a projection if it has one."""

    channels: int
    size: tuple[int, ...]
    projection: ConvShape | None


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Everything that the time of a block depends on. Spans with equal shapes are timed once."""

    shape: ConvShape
    in_size: tuple[int, ...]
    branches: tuple[Branch, ...]
    activation: str | None
    batch: int

    @property
    def key(self) -> str:
        """The key of the block in journals: the same in every run."""
        return digest(encode(self))

    @property
    def elements(self) -> tuple[int, int]:
        """The number of elements that the block reads, and that it writes."""
        size = torch.Size(self.in_size).numel()
        out = torch.Size(self.shape.out_size(self.in_size)).numel()
        return self.batch * self.shape.in_channels * size, self.batch * self.shape.out_channels * out

    def extra_activations(self, b: bool) -> int:
        """Return how many more elements pass an activation with flag b than in the block that is timed."""
        return (b - (self.activation is not None)) * self.elements[1]

    @property
    def parameters(self) -> int:
        return self.shape.parameters + sum(b.projection.parameters for b in self.branches if b.projection)

    @property
    def moved(self) -> int:
        """The number of elements that it moves: those of its weights, its input and its output."""
        return self.parameters + sum(self.elements)

    @property
    def multiply_adds(self) -> int:
        """The multiplications with additions of its convolutions."""
        convolutions = [(self.shape, self.in_size), *((b.projection, b.size) for b in self.branches if b.projection)]
        return self.batch * sum(
            (shape.parameters - shape.out_channels) * torch.Size(shape.out_size(size)).numel()
            for shape, size in convolutions
        )

    def inputs(self) -> tuple[Tensor, ...]:
        """Return one random example, repeated to fill the batch: drawing a large batch takes longer than timing it."""
        generator = torch.Generator().manual_seed(0)
        sizes = [(self.shape.in_channels, self.in_size), *((b.channels, b.size) for b in self.branches)]
        return tuple(
            torch.randn(1, c, *size, generator=generator).repeat(self.batch, 1, *(1 for _ in size)) for c, size in sizes
        )


def block_module(traced: TracedNetwork, shape: BlockShape) -> nn.Module:
    """Return the convolution of a block with its additions and its activation, with random weights."""
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


def block_shapes(traced: TracedNetwork, spans: Iterable[Span], batch: int | None = None) -> dict[Span, BlockShape]:
    """Return the blocks of spans, for the batch that reached their layers while tracing, or for the given batch.

    A block is timed once, with or without an activation at j, whichever is more likely: see `timed_with_activation`.
    """
    names = activation_names(traced)

    def shape(span: Span) -> BlockShape:
        kind = names[span.j - 1] if timed_with_activation(traced.network, span) else None
        size = traced.network.layers[span.i].in_size
        examples = traced.blueprint.sites[span.i].batch if batch is None else batch
        return BlockShape(traced.network.merged_shape(span), size, _branches(traced.network, span), kind, examples)

    return {span: shape(span) for span in spans}


def dropped_shapes(
    network: Network, blocks: Mapping[Span, BlockShape], moves: Iterable[Move]
) -> dict[tuple[Span, ConvShape], BlockShape]:
    """Return the blocks of the spans with dropped layers, by span and shape. Completely dropped blocks are not
    timed."""
    found = {}
    for span, block in blocks.items():
        for shape, dropped in span_options(network, span, moves).items():
            if dropped and not dropped.missing.issuperset(span.layers):
                found[span, shape] = replace(block, shape=shape)
    return found


def empty_shapes(network: Network, spans: Iterable[Span], moves: Iterable[Move]) -> list[tuple[Span, ConvShape]]:
    """Return the spans whose layers can all be in dropped branches, each with the shape that it then has."""
    if "drop-branches" not in moves:
        return []
    options = ((span, span_options(network, span, ("drop-branches",))) for span in spans)
    return [(span, shape) for span, found in options for shape, dropped in found.items() if dropped]


def _branches(network: Network, span: Span) -> tuple[Branch, ...]:
    """Return the skips that end at j and start before i."""
    firsts = [(skip, network.layers[skip.source]) for skip in network.skips_into(span.j) if skip.source < span.i]
    return tuple(Branch(first.shape.in_channels, first.in_size, skip.projection) for skip, first in firsts)


def timed_with_activation(network: Network, span: Span) -> bool:
    """Return True if the block of a span is timed with an activation at j.

    A single layer has one if the network has one there. Several layers also have one if it may be inserted there.
    """
    return span.j in network.activations or (len(span) > 1 and span.j in free_positions(network))
