"""The blocks that have so much more work than their layers that they are not worth measuring."""

from __future__ import annotations

from collections.abc import Mapping

from depthfold.core import ConvShape, Environment, Span
from depthfold.latency.blocks import BlockShape

BlockKey = tuple[Span, ConvShape | None]  # a span, and its shape if layers are dropped
DroppedBlocks = Mapping[tuple[Span, ConvShape], BlockShape]

# A block is left out if it has more than FACTOR times the multiply-adds of its layers and moves more than FACTOR times
# as many elements (weights, input, output). A layer takes the time of its multiply-adds, of its elements or of its
# launch, whichever is longest. A block with FACTOR times as many of all three is faster than its layers only if its
# kernel is FACTOR times as efficient as theirs. On two cores of a Neoverse-N1, the blocks of ResNet-18 at 48x48 that
# this leaves out take 5 to 21 times as long as their layers in ONNX Runtime, and 2.5 to 14 times in OpenVINO. The
# blocks of MobileNetV2 at 224x224 that are nearest to the limit take at least 12 and 8 times as long.
FACTOR = 3
# The elements that a device moves in the time of a launch: 10 microseconds at 200 GB/s on a large CPU, 6 microseconds
# at 5 TB/s on a GPU. It protects blocks of many small layers, whose launches take longer than their work.
LAUNCH_ON_CPU, LAUNCH_ELSEWHERE = 500_000, 8_000_000


def blocks_that_cannot_pay(
    blocks: Mapping[Span, BlockShape], dropped: DroppedBlocks, environment: Environment
) -> dict[BlockKey, str]:
    """Return the blocks with far more work than the layers that they replace, with the reason of their entries.

    Blocks that are too large to be built are not among them: their entries say that.
    """
    launch = LAUNCH_ON_CPU if environment.device == "cpu" else LAUNCH_ELSEWHERE
    found: dict[BlockKey, str] = {}
    for (span, shape), block in all_blocks(blocks, dropped).items():
        layers = [blocks[Span(l - 1, l)] for l in span.layers]
        computed, moved = sum(layer.multiply_adds for layer in layers), sum(layer.moved for layer in layers)
        work, elements = block.multiply_adds / max(computed, 1), block.moved
        if block.shape.too_large or len(layers) == 1:
            continue
        if work > FACTOR and elements > FACTOR * (moved + launch * len(layers)):
            found[span, shape] = (
                f"not measured: as one convolution it has {work:.3g} times the multiply-adds of its layers and moves "
                f"{elements / moved:.3g} times as much memory, so it cannot be faster"
            )
    return found


def all_blocks(blocks: Mapping[Span, BlockShape], dropped: DroppedBlocks) -> dict[BlockKey, BlockShape]:
    """Return the blocks of merged spans, and those of spans with dropped layers."""
    found: dict[BlockKey, BlockShape] = {(span, None): block for span, block in blocks.items()}
    found.update((key, block) for key, block in dropped.items())
    return found
