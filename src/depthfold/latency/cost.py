"""What measuring a latency table costs, known from the shapes alone, and the blocks that are not worth measuring."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from depthfold.backends import Backend, get
from depthfold.core import ConvShape, Environment, Move, Space, Span, require_moves
from depthfold.core.options import MERGE
from depthfold.latency.blocks import BlockShape, block_shapes, dropped_shapes
from depthfold.latency.candidates import MAX_ELEMENTS, elements_outside
from depthfold.latency.timer import Timer
from depthfold.support.cores import usable_cores
from depthfold.support.text import amount, count
from depthfold.tracing import TracedNetwork

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

# Bytes per element of a module that is compiled, and of one that is being compiled, measured with blocks of 13 and 21
# million weights on ONNX Runtime (12 and 26), OpenVINO (10 and 30) and PyTorch (6 and 14).
BYTES_KEPT, BYTES_COMPILING = 12, 30

# For the estimate of the time: windows of runs in which a candidate warms up, seconds to build one, and multiply-adds
# and elements per second of one thread of a CPU and of a GPU.
WARM_UP_WINDOWS, SECONDS_EACH = 3, 0.4
SPEED_OF_A_THREAD, SPEED_OF_A_GPU = (8e9, 6e8), (5e12, 2e11)
# The networks that a calibration times, unless the caller of measure_latency() says otherwise.
NETWORKS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringCost:
    """The cost of a latency table: blocks to time, blocks that are left out, bytes of memory at most, and seconds.

    The seconds are a rough estimate, within a factor of three.
    """

    blocks: int
    left_out: int
    networks: int
    memory: int
    seconds: float

    def __str__(self) -> str:
        without = f" ({count(self.left_out, 'more block')} cannot pay and are left out)" if self.left_out else ""
        networks = f" and {count(self.networks, 'network')}" if self.networks else ""
        return (
            f"{count(self.blocks, 'distinct block')}{without}{networks} to time: up to "
            f"{amount(self.memory, digits=2)}B of memory, about {duration(self.seconds)}"
        )


def measuring_cost(
    traced: TracedNetwork, target: str | Backend, *, space: Space = "paper", moves: Iterable[Move] = MERGE
) -> MeasuringCost:
    """Estimate what measure_latency() will cost by default. Nothing is built or timed."""
    environment = get(target).environment(traced.example_tensors())
    blocks = block_shapes(traced, traced.spans(space))
    dropped = dropped_shapes(traced.network, blocks, require_moves(moves))
    return cost_of(traced, blocks, dropped, environment, NETWORKS, Timer())


def cost_of(
    traced: TracedNetwork,
    blocks: Mapping[Span, BlockShape],
    dropped: DroppedBlocks,
    environment: Environment,
    networks: int,
    timer: Timer,
) -> MeasuringCost:
    """Estimate the cost of measuring these blocks and this number of whole networks."""

    def seconds(multiply_adds: int, elements: int) -> float:
        return _seconds(multiply_adds, elements, environment, timer)

    left_out = blocks_that_cannot_pay(blocks, dropped, environment)
    every = _all_blocks(blocks, dropped)
    timed = {block for key, block in every.items() if key not in left_out and not block.shape.too_large}
    sizes = [block.parameters + sum(block.elements) for block in timed]
    network = elements_outside(traced, traced.example_tensors()) + _largest_plan(traced.depth, blocks, left_out)
    layers = [block for span, block in blocks.items() if len(span) == 1]
    original = seconds(sum(block.multiply_adds for block in layers), network)
    return MeasuringCost(
        blocks=len(timed),
        left_out=len({every[key] for key in left_out}),
        networks=networks,
        memory=max(_memory(sizes), _memory([network] * networks)),
        seconds=sum(seconds(block.multiply_adds, size) for block, size in zip(timed, sizes, strict=True))
        + networks * original,
    )


def blocks_that_cannot_pay(
    blocks: Mapping[Span, BlockShape], dropped: DroppedBlocks, environment: Environment
) -> dict[BlockKey, str]:
    """Return the blocks with far more work than the layers that they replace, with the reason of their entries.

    Blocks that are too large to be built are not among them: their entries say that.
    """
    launch = LAUNCH_ON_CPU if environment.device == "cpu" else LAUNCH_ELSEWHERE
    found: dict[BlockKey, str] = {}
    for (span, shape), block in _all_blocks(blocks, dropped).items():
        layers = [blocks[Span(l - 1, l)] for l in span.layers]
        computed, moved = sum(layer.multiply_adds for layer in layers), sum(map(_moved, layers))
        work, elements = block.multiply_adds / max(computed, 1), _moved(block)
        if block.shape.too_large or len(layers) == 1:
            continue
        if work > FACTOR and elements > FACTOR * (moved + launch * len(layers)):
            found[span, shape] = (
                f"not measured: as one convolution it has {work:.3g} times the multiply-adds of its layers and moves "
                f"{elements / moved:.3g} times as much memory, so it cannot be faster"
            )
    return found


def available_memory() -> int | None:
    """Return the bytes of memory that are free on this machine, None if they are not known."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):  # another system
        return None


def duration(seconds: float) -> str:
    """Return a rough time as text."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{max(seconds, 1):.0f} s"


def _all_blocks(blocks: Mapping[Span, BlockShape], dropped: DroppedBlocks) -> dict[BlockKey, BlockShape]:
    found: dict[BlockKey, BlockShape] = {(span, None): block for span, block in blocks.items()}
    found.update((key, block) for key, block in dropped.items())
    return found


def _moved(block: BlockShape) -> int:
    return block.parameters + sum(block.elements)


def _largest_plan(depth: int, blocks: Mapping[Span, BlockShape], left_out: Mapping[BlockKey, str]) -> int:
    """Return the most weights that a plan can have."""
    most = {0: 0}
    for span in sorted(blocks, key=lambda span: span.j):
        if span.i in most and (span, None) not in left_out and not blocks[span].shape.too_large:
            most[span.j] = max(most.get(span.j, 0), most[span.i] + blocks[span].parameters)
    return most.get(depth, 0)


def _memory(sizes: list[int]) -> int:
    """Return the most bytes that candidates of these sizes take, in whichever order CandidateTimer compiles them."""
    largest = max(sizes, default=0)
    together = max(min(sum(sizes), MAX_ELEMENTS), largest)
    return BYTES_KEPT * together + (BYTES_COMPILING - BYTES_KEPT) * largest


def _seconds(multiply_adds: int, elements: int, environment: Environment, timer: Timer) -> float:
    """Return a rough time to build and time one candidate."""
    threads = environment.threads or usable_cores()
    on_cpu = environment.device == "cpu"
    compute, move = [threads * speed for speed in SPEED_OF_A_THREAD] if on_cpu else SPEED_OF_A_GPU
    once = max(multiply_adds / compute, elements / move)
    runs = WARM_UP_WINDOWS * timer.window + timer.rounds * timer.samples
    return SECONDS_EACH + max(runs * once, timer.rounds * timer.round_seconds)
