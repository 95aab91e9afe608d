"""Method "fit": the merged convolution of a block that is closest to the original, by least squares in closed form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from depthfold.algebra import Kernel
from depthfold.backends import disable_autocast
from depthfold.core import ConvShape, FlaggedSpan, as_pad_argument
from depthfold.errors import DepthfoldError
from depthfold.importance.pieces import ValueRecorder, cut_out, input_of, start_of
from depthfold.merging import replace_segment
from depthfold.merging.kernels import as_module
from depthfold.rewriting import rewrite
from depthfold.rewriting.activations import remove_activation
from depthfold.tracing import TracedNetwork, device_of, dtype_of, fork_rng, free_weights, student_parts
from depthfold.training import (
    Recipe,
    Step,
    Task,
    derive_seed,
    loss_without_gradients,
    total_steps,
)

LARGEST = 2**26  # entries of the normal equations: 512 MiB in float64, or 8,192 weights per output of a dense kernel
WINDOWS = 2**26  # numbers that are multiplied at once
RIDGE = 1e-3  # the first penalty on the weights, relative to the mean diagonal entry of the normal equations
GROWTH, ATTEMPTS = 10.0, 4  # of the penalty, if the equations cannot be solved


def too_large(shape: ConvShape) -> str | None:
    """Return the reason why a convolution of this shape cannot be fitted, or None."""
    unknowns = shape.in_channels // shape.groups * _size(shape.kernel)
    if shape.groups * unknowns**2 <= LARGEST:
        return None
    limit = int((LARGEST / shape.groups) ** 0.5)
    return f"its merged convolution has {unknowns} weights per output, and the method 'fit' solves for at most {limit}"


def fit_block(
    traced: TracedNetwork, student: nn.Module, block: FlaggedSpan, task: Task, recipe: Recipe, seed: int
) -> None:
    """Replace the block of a student with the convolution that is closest to the original's values at its end.

    If the student drops all layers of the block, there is nothing to fit.
    """
    if not student_parts(student)[1].plan.dropped.kept(block.span):
        return
    replace_segment(student, block.span, fitted_convolution(traced, student, block, task, recipe, seed))


def fitted_convolution(
    traced: TracedNetwork, student: nn.Module, block: FlaggedSpan, task: Task, recipe: Recipe, seed: int
) -> nn.Module:
    """Return the merged convolution of a student's block that is closest to the original's values at its end.

    The target is the value before the activation at j. If a residual that began before i ends at j, its addition stays
    in the network, and the target is the value without it. The images are those of the recipe's steps.
    """
    device = device_of(student)
    original = rewrite(traced, traced.vanilla).eval().to(device)
    graph, origin, _ = student_parts(student)
    front = cut_out(graph, start_of(traced, block.i), input_of(graph, origin.blueprint, block))
    front.module.eval()
    target = _Target(traced, student_parts(original)[0], block)
    recorder = ValueRecorder(student_parts(original)[0], (*front.inputs, *target.names))
    equations = NormalEquations(traced.network.merged_shape(block.span, origin.plan.dropped), device)
    with torch.no_grad(), disable_autocast(device), fork_rng(device) as reseed:
        for number in range(total_steps(recipe, task)):
            reseed(derive_seed(seed, "step", number, 0))
            loss_without_gradients(task, original, Step(number=number, seed=seed, recipe=recipe, device=device))
            values = recorder.take()
            equations.add(front(values), target.of(values))
    free_weights(original)
    like = torch.empty(0, device=device, dtype=dtype_of(student))
    return as_module(equations.solve(), like)


class _Target:
    """What the merged convolution of a block must compute, from the values of the original's nodes."""

    def __init__(self, traced: TracedNetwork, original: fx.GraphModule, block: FlaggedSpan) -> None:
        site = traced.blueprint.sites[block.j - 1]
        # The steps of the last layer: its convolution and batch norm, then one addition after another.
        self.names = (site.linear, *site.additions)
        inside = {skip.add for skip in traced.blueprint.skip_sites if block.span.contains(skip.skip.span)}
        self._merged = tuple(name in inside for name in site.additions)
        if site.activates_in_norm:  # otherwise the value has no name
            nodes = {node.name: node for node in original.graph.nodes}
            remove_activation(original, nodes, site)

    def of(self, values: dict[str, Tensor]) -> Tensor:
        steps = [values[name] for name in self.names]
        merged = [
            after - before for before, after, inside in zip(steps, steps[1:], self._merged, strict=False) if inside
        ]
        return sum(merged, start=steps[0])


class NormalEquations:
    """The normal equations of a convolution with bias, one system per group, collected from batches."""

    def __init__(self, shape: ConvShape, device: torch.device) -> None:
        self.shape = shape
        width = shape.in_channels // shape.groups * _size(shape.kernel)
        outputs = shape.out_channels // shape.groups
        # On the CPU if the device does not support float64.
        at = {"device": "cpu" if device.type == "mps" else device, "dtype": torch.float64}
        self.rows = 0
        self.gram = torch.zeros(shape.groups, width, width, **at)  # type: ignore[call-overload]
        self.cross = torch.zeros(shape.groups, width, outputs, **at)  # type: ignore[call-overload]
        self.window_sum = torch.zeros(shape.groups, width, 1, **at)  # type: ignore[call-overload]
        self.target_sum = torch.zeros(shape.groups, outputs, 1, **at)  # type: ignore[call-overload]

    def add(self, x: Tensor, target: Tensor) -> None:
        """Add a batch: the inputs of the convolution, and what it must return."""
        x = F.pad(x, as_pad_argument(self.shape.padding))
        per_image = target[0, 0].numel() * self.gram.shape[1] * self.shape.groups
        together = max(1, WINDOWS // per_image)
        for images, targets in zip(torch.split(x, together), torch.split(target, together), strict=True):
            self._add(_windows(images, self.shape), _by_group(targets, self.shape.groups))

    def _add(self, windows: Tensor, targets: Tensor) -> None:
        """Add matrices of the shape (groups, rows, columns)."""
        self.rows += windows.shape[1]
        for total, part in (
            (self.gram, windows.mT @ windows),
            (self.cross, windows.mT @ targets),
            (self.window_sum, windows.sum(1).unsqueeze(2)),
            (self.target_sum, targets.sum(1).unsqueeze(2)),
        ):
            total += part.to(total)

    def solve(self) -> Kernel:
        """Return the best kernel. The bias is not penalised."""
        shape = self.shape
        gram = self.gram - self.window_sum @ self.window_sum.mT / self.rows
        cross = self.cross - self.window_sum @ self.target_sum.mT / self.rows
        weight = _solve_with_ridge(gram, cross)  # (groups, width, outputs)
        bias = (self.target_sum - weight.mT @ self.window_sum) / self.rows
        kernel = weight.mT.reshape(shape.out_channels, shape.in_channels // shape.groups, *shape.kernel)
        return Kernel.of(shape, kernel, bias.flatten())


def _solve_with_ridge(gram: Tensor, cross: Tensor) -> Tensor:
    """Solve with a penalty on the weights, which grows until the equations can be solved."""
    scale = gram.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(gram.dtype).tiny)
    identity = torch.eye(gram.shape[1], device=gram.device, dtype=gram.dtype)
    for attempt in range(ATTEMPTS):
        penalty = RIDGE * GROWTH**attempt * scale
        factor, failed = torch.linalg.cholesky_ex(gram + penalty[:, None, None] * identity)
        if not failed.any():
            return torch.cholesky_solve(cross, factor)
    raise DepthfoldError("The least squares of the block cannot be solved: its values are not finite.")


def _windows(x: Tensor, shape: ConvShape) -> Tensor:
    """Return what each output of a convolution sees, as matrices of the shape (groups, rows, columns)."""
    dims = shape.dims
    for dim, (extent, stride, dilation) in enumerate(zip(shape.extent, shape.stride, shape.dilation, strict=True)):
        x = x.unfold(2 + dim, extent, stride)[..., ::dilation]
    images, channels, *rest = x.shape
    x = x.reshape(images, shape.groups, channels // shape.groups, *rest)
    # From images, groups, channels, places, taps to groups, images, places, channels, taps.
    places, taps = range(3, 3 + dims), range(3 + dims, 3 + 2 * dims)
    x = x.permute(1, 0, *places, 2, *taps)
    return x.reshape(shape.groups, images * _size(rest[:dims]), -1)


def _by_group(targets: Tensor, groups: int) -> Tensor:
    """Return the targets as matrices of the shape (groups, rows, outputs)."""
    rows = targets.flatten(2).transpose(1, 2).flatten(0, 1)
    return rows.reshape(len(rows), groups, -1).transpose(0, 1)


def _size(sizes: tuple[int, ...] | list[int]) -> int:
    return int(torch.Size(sizes).numel())
