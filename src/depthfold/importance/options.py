"""The entries of an importance table: the blocks with all their options, and which of them are not measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from depthfold.core import (
    BlockOption,
    LatencyTable,
    Move,
    Network,
    Plan,
    Space,
    Span,
    block_options,
    require_moves,
)
from depthfold.core.options import MERGE
from depthfold.importance.definition import importance_plan
from depthfold.importance.fit import too_large
from depthfold.importance.methods import Method
from depthfold.merging.kernels import segment_kernel
from depthfold.stage_one import DROPS_SAVE_NO_TIME, SAVES_NO_TIME, Shapes, check_shapes, useless_options
from depthfold.tracing import TracedNetwork

DIGITS = 6  # of a layer's weight, so that it does not depend on the machine


def importance_options(
    traced: TracedNetwork, space: Space = "paper", moves: Iterable[Move] = MERGE
) -> tuple[BlockOption, ...]:
    """Return the keys of an importance table: every flagged span with each set of layers and branches that it can drop.

    Many sets of dropped layers give a merged convolution of the same shape, and so the same latency. Only one of them
    is in the table: the one whose kept layers have the largest sum of `layer_weights`.
    """
    moves = require_moves(moves)
    weights = layer_weights(traced) if "drop-layers" in moves else None
    return block_options(traced.network, space, moves, weights)


def layer_weights(traced: TracedNetwork) -> dict[int, float]:
    """Return the mean absolute value of the kernel of each droppable layer, with its batch norm folded into it.

    It is the mean and not the sum, so that a layer does not count more because it is wide. The layers that are kept of
    several with the same shape are those with the largest weights.
    """
    nodes = {node.name: node for node in traced.graph.graph.nodes}
    found = {}
    for l in sorted(traced.network.droppable_layers):
        kernel = segment_kernel(traced.graph, nodes, traced.blueprint, Span(l - 1, l))
        found[l] = float(f"{kernel.weight.abs().mean().item():.{DIGITS}g}")
    return found


def left_out_options(
    network: Network, options: Sequence[BlockOption], method: Method, latency: LatencyTable | None
) -> dict[BlockOption, str]:
    """Return the options that are not measured because they cannot help or are too large, with the reasons.

    With `reinit`, a block of one layer costs importance, so splitting a block at an activation may lower the sum. Then
    only options that save no time compared with dropping less are left out. Raise TableError for a latency table of
    another network, or one that lacks the shapes of the options.
    """
    found = {} if latency is None else _useless(network, options, latency, reinit=method.reinit)
    if method.name == "fit":
        for option in options:
            if option in found or is_unchanged(network, option) or not option.dropped.kept(option.block.span):
                continue
            if why := too_large(network.merged_shape(option.block.span, option.dropped)):
                found[option] = f"not measured: {why}"
    return found


def _useless(
    network: Network, options: Sequence[BlockOption], latency: LatencyTable, *, reinit: bool
) -> dict[BlockOption, str]:
    check_shapes(latency, Shapes(network), options)
    useless = useless_options(network, latency, options, splits=not reinit)
    return {option: DROPS_SAVE_NO_TIME if option.dropped else SAVES_NO_TIME for option in options if option in useless}


def is_unchanged(network: Network, option: BlockOption) -> bool:
    """Return True for a block of one layer with the network's own activations, which changes nothing."""
    return len(option.block.span) == 1 and importance_plan(network, *option) == network.vanilla


def shared_measurements(
    network: Network, options: Iterable[BlockOption], method: Method
) -> dict[BlockOption, BlockOption]:
    """Map every option to the one whose measurement it uses.

    Without `reinit`, blocks of one layer differ from the original network only in their activations. If the whole
    network is treated alike, all blocks with the same activations share one measurement.
    """
    first: dict[Plan, BlockOption] = {}

    def measured_as(option: BlockOption) -> BlockOption:
        plan = importance_plan(network, *option)
        shared = len(option.block.span) == 1 and not method.reinit and method.name not in ("local", "fit")
        return first.setdefault(plan, option) if shared else option

    return {option: measured_as(option) for option in options}
