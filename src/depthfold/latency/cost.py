"""What measuring a latency table costs in memory and time, known from the shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from depthfold.backends import Backend, get
from depthfold.core import Environment, Move, Space, Span, require_moves
from depthfold.core.options import MERGE
from depthfold.latency.blocks import BlockShape, block_shapes, dropped_shapes
from depthfold.latency.candidates import MAX_ELEMENTS, elements_outside
from depthfold.latency.cannot_pay import BlockKey, DroppedBlocks, all_blocks, blocks_that_cannot_pay
from depthfold.latency.timer import Timer
from depthfold.support.machine import usable_cores
from depthfold.support.text import amount, count, duration
from depthfold.tracing import TracedNetwork

# Bytes per element of a module that is compiled, and of one that is being compiled, measured with blocks of 13 and 21
# million weights on ONNX Runtime (12 and 26), OpenVINO (10 and 30) and PyTorch (6 and 14).
BYTES_KEPT, BYTES_COMPILING = 12, 30

# For the estimate of the time: windows of runs in which a candidate warms up, seconds to build one, and multiply-adds
# and elements per second of one thread of a CPU and of a GPU.
WARM_UP_WINDOWS, SECONDS_EACH = 3, 0.4
SPEED_OF_A_THREAD, SPEED_OF_A_GPU = (8e9, 6e8), (5e12, 2e11)
# The networks that measure_latency() times by default.
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
    every = all_blocks(blocks, dropped)
    timed = {block for key, block in every.items() if key not in left_out and not block.shape.too_large}
    sizes = [block.moved for block in timed]
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
