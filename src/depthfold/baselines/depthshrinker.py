"""DepthShrinker's published patterns for MobileNetV2, as plans."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Protocol

from depthfold.core import Network, Plan, Span
from depthfold.errors import InvalidValue, PlanError
from depthfold.support.text import did_you_mean

PATTERNS = MappingProxyType(
    {
        "DS-A-1.0": (0, 1, 3, 7, 8),
        "DS-B-1.0": (1, 2, 3, 7, 8),
        "DS-C-1.0": (1, 2, 5, 7, 8, 9, 11, 12),
        "DS-D-1.0": (1, 2, 4, 5, 6, 7, 8, 9, 12, 14),
        "DS-A-1.4": (1, 2, 5, 7, 9, 12),
        "DS-B-1.4": (0, 1, 2, 5, 6, 7, 8, 9, 12),
        "DS-C-1.4": (1, 2, 4, 5, 6, 7, 8, 9, 12),
        "DS-D-1.4": (0, 1, 2, 5, 6, 7, 8, 9, 10, 11, 12),
        "DS-E-1.4": (1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12),
        "DS-F-1.4": tuple(range(17)),
    }
)
"""The inverted residual blocks that each pattern removes, numbered 0..16. The number after A..F is the width."""

COSTS = MappingProxyType(
    {
        "1.0": (18.15, 85.52, 57.97, 35.78, 20.93, 20.93, 12.51, 11.45, 11.45, 11.45, 11.64, 17.85, 17.85, 9.49, 7.35,
                7.35, 8.48),
        "1.4": (15.19, 133.34, 75.77, 43.8, 30.39, 30.39, 18.81, 15.19, 15.19, 15.19, 17.0, 26.23, 26.23, 13.23, 11.41,
                11.41, 14.39),
    }
)  # fmt: skip
"""The milliseconds that each removed block saves, by width: the weights of the published search."""

RESIDUALS = (2, 4, 5, 7, 8, 9, 11, 12, 14, 15)  # the blocks of MobileNetV2 with a skip around them


class HasNetwork(Protocol):
    """A TracedNetwork, whose class would import torch."""

    @property
    def network(self) -> Network: ...


def depthshrinker_plan(network: Network | HasNetwork, name: str) -> Plan:
    """Return the plan of a published pattern, for example "DS-A-1.0", for any MobileNetV2.

    Each removed block becomes one dense convolution with an activation after it; nothing else changes. This is how the
    paper compares, also for the first block, which DepthShrinker's own code neither merges nor follows by an
    activation. A pattern fits every width: whether it is the one that was published for this width is not checked.
    """
    if name not in PATTERNS:
        hint = did_you_mean(name, PATTERNS)
        raise InvalidValue(f"There is no pattern {name!r}. {hint}The patterns are {', '.join(PATTERNS)}.")
    network = network if isinstance(network, Network) else network.network
    blocks = inverted_residuals(network)
    _check_mobilenet_v2(network, blocks)
    return plan_without(network, [blocks[number] for number in PATTERNS[name]])


def inverted_residuals(network: Network) -> tuple[Span, ...]:
    """Return the inverted residual blocks of a network, in order.

    A block is a 1x1 layer with an activation, a depth-wise layer with an activation, and a 1x1 layer without. The first
    layer is missing if the block does not expand its channels.
    """
    found = []
    for l in range(2, network.depth + 1):
        if not (_is_pointwise(network, l, False) and _is_active_depthwise(network, l - 1)):
            continue
        expands = l > 2 and _is_pointwise(network, l - 2, True)
        block = Span(l - 3 if expands else l - 2, l)
        if network.why_not(block) is None:
            found.append(block)
    return tuple(found)


def _is_pointwise(network: Network, l: int, active: bool) -> bool:
    """Return True if layer l is a dense 1x1 convolution with, or without, an activation."""
    shape = network.layers[l - 1].shape
    plain = max(shape.kernel) == max(shape.stride) == shape.groups == 1
    return plain and (l in network.activations) == active


def _is_active_depthwise(network: Network, l: int) -> bool:
    return network.layers[l - 1].shape.depthwise and l in network.activations


def _check_mobilenet_v2(network: Network, blocks: tuple[Span, ...]) -> None:
    """Raise InvalidValue if these are not the inverted residual blocks of MobileNetV2."""
    skips = {skip.span for skip in network.skips}
    with_skip = tuple(number for number, block in enumerate(blocks) if block in skips)
    if [len(block) for block in blocks] != [2, *[3] * 16] or with_skip != RESIDUALS:
        raise InvalidValue(
            f"DepthShrinker's patterns are for the 17 inverted residual blocks of MobileNetV2, but {network.name} has "
            f"{len(blocks)}, of which {with_skip} have a skip. Use search_depthshrinker() for other networks."
        )


def plan_without(network: Network, removed: Iterable[Span]) -> Plan:
    """Return the plan that merges each of these spans, and keeps everything else as it is.

    The activations inside a span are removed. One is inserted at its end if there is none, except at the output of the
    network.
    """
    spans = sorted(removed)
    check_blocks(network, spans)
    inner = {position for span in spans for position in span.inner}
    ends = {span.j for span in spans if not (span.j == network.depth and network.ends_in_output)}
    return Plan(
        activations=(network.activations - inner) | ends,
        cuts=[position for position in range(1, network.depth) if position not in inner],
    )


def check_blocks(network: Network, blocks: Iterable[Span]) -> None:
    """Raise PlanError if a block cannot be merged, or overlaps with the one before it."""
    end = 0
    for block in blocks:
        if refusal := network.why_not(block):
            raise PlanError(f"The block {block} cannot be merged: {refusal.why}.")
        if block.i < end:
            raise PlanError(f"The block {block} overlaps with the one before it, which ends at {end}.")
        end = block.j
