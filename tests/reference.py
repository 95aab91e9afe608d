"""An independent computation of rewritten networks, without graphs and without moving padding.

A segment is linear, so it acts on an infinite plane that is zero outside its input. Every layer of the segment runs on
a canvas that is much larger than the feature map, without padding, and the output is cut out at the end. The canvas
keeps track of its coordinates.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from depthfold.testing.networks import BlockUnit, BranchUnit, ConvUnit, PoolUnit

CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass
class Chain:
    """Layers with their global numbers, and skips (source, target, projection) in the same numbers."""

    start: int
    units: list = field(default_factory=list)
    activations: dict = field(default_factory=dict)
    skips: list = field(default_factory=list)

    @property
    def end(self):
        return self.start + len(self.units)


def collect(unit, chain):
    if isinstance(unit, ConvUnit):
        chain.units.append(unit)
        chain.activations[chain.end] = unit.style is not None
        return
    source = chain.end
    for item in unit.items:
        collect(item, chain)
    if unit.skip is not None:
        chain.skips.append((source, chain.end, unit.projection))
    if unit.style is not None:
        chain.activations[chain.end] = True


def program(model):
    """Return the parts of the model in order, with consecutive blocks joined into one chain."""
    steps, position = [], 0
    for part in model.parts:
        if isinstance(part, BlockUnit):
            if not (steps and isinstance(steps[-1], Chain)):
                steps.append(Chain(position))
            collect(part, steps[-1])
            position = steps[-1].end
        elif isinstance(part, BranchUnit):
            left = Chain(position)
            collect(part.left, left)
            right = Chain(left.end)
            collect(part.right, right)
            steps.append((left, right))
            position = right.end
        else:
            steps.append(part)
    return steps, position


def chains_of(steps):
    for step in steps:
        if isinstance(step, Chain):
            yield step
        elif isinstance(step, tuple):
            yield from step


def evaluate(model, x, plan):
    """Return the output of the model after it is rewritten by the plan."""
    steps, depth = program(model)
    for step in steps:
        if isinstance(step, Chain):
            x = run_chain(step, x, plan, depth)
        elif isinstance(step, tuple):
            x = torch.cat([run_chain(branch, x, plan, depth) for branch in step], dim=1)
        else:
            assert isinstance(step, PoolUnit)
            x = step(x)
    return x


def run_chain(chain, x, plan, depth):
    values = {chain.start: x}
    bounds = sorted({chain.start, chain.end, *(c for c in plan.cuts if chain.start < c < chain.end)})
    for i, j in pairwise(bounds):
        y = run_segment(chain, i, j, values[i], plan.dropped)
        for source, target, projection in chain.skips:
            if target == j and source < i:  # the skip starts before the segment, so it is not in a dropped branch
                y = y + (values[source] if projection is None else projection(values[source]))
        if j in plan.activations or (j == depth and chain.activations[j]):
            y = y.relu()
        values[j] = y
    return values[chain.end]


@dataclass
class Canvas:
    """A feature map on the infinite plane, with coordinate 0 at index `origin`."""

    value: torch.Tensor
    origin: list

    def window(self, starts, sizes):
        index = [slice(o + s, o + s + n) for o, s, n in zip(self.origin, starts, sizes, strict=True)]
        assert all(each.start >= 0 for each in index), "the canvas is too small"
        cut = self.value[(..., *index)]
        assert list(cut.shape[2:]) == list(sizes), "the canvas is too small"
        return cut

    def convolve(self, conv, norm, lead):
        value, origin = self.aligned(conv.stride, lead)
        convolve = CONVOLVE[len(conv.stride)]
        value = convolve(value, conv.weight, conv.bias, conv.stride, 0, conv.dilation, conv.groups)
        result = Canvas(value, origin)
        return result if norm is None else result.normalise(norm)

    def aligned(self, stride, lead):
        """Drop values before the first window, so that there is an output at coordinate 0."""
        value, origin = self.value, list(self.origin)
        for n, (s, p) in enumerate(zip(stride, lead, strict=True)):
            drop = (origin[n] - p) % s
            value = value.narrow(2 + n, drop, value.shape[2 + n] - drop)
            origin[n] = (origin[n] - drop - p) // s
        return value, origin

    def normalise(self, norm):
        shape = (1, -1, *[1] * len(self.origin))
        scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
        value = self.value * scale.reshape(shape) + (norm.bias - norm.running_mean * scale).reshape(shape)
        return Canvas(value, self.origin)

    def average(self, pool, lead):
        """Average every window of the infinite plane."""
        value, origin = self.aligned(pool.stride, lead)
        for n, (k, s) in enumerate(zip(pool.kernel_size, pool.stride, strict=True)):
            value = value.unfold(2 + n, k, s).mean(-1)
        return Canvas(value, origin)

    def branch(self, layers):
        """Run a branch parallel to a convolution: an identity, or a sequence of layers."""
        result = self
        for layer in () if isinstance(layers, nn.Identity) else layers:
            if isinstance(layer, _BatchNorm):
                result = result.normalise(layer)
            elif isinstance(layer, _ConvNd):
                result = result.convolve(layer, None, layer.padding)
            else:
                as_tuple = layer.padding if isinstance(layer.padding, tuple) else (layer.padding,)
                result = result.average(layer, as_tuple)
        return result

    def plus(self, other):
        starts = [-min(a, b) for a, b in zip(self.origin, other.origin, strict=True)]
        ends = [
            min(n - a, m - b)
            for n, a, m, b in zip(self.value.shape[2:], self.origin, other.value.shape[2:], other.origin, strict=True)
        ]
        sizes = [e - s for s, e in zip(starts, ends, strict=True)]
        return Canvas(self.window(starts, sizes) + other.window(starts, sizes), [-s for s in starts])


def padding_of(unit):
    conv = unit.conv
    if conv.padding == "same":
        totals = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        return [(t // 2, t - t // 2) for t in totals]
    own = [(p, p) for p in conv.padding]
    if unit.pad is None:
        return own
    return list(reversed(list(zip(unit.pad[::2], unit.pad[1::2], strict=True))))


def run_segment(chain, i, j, x, dropped):
    size = list(x.shape[2:])
    margin, grown = [0] * len(size), [1] * len(size)
    for l in range(i + 1, j + 1):
        if l in dropped.layers or any(branch.i < l <= branch.j for branch in dropped.branches):
            continue
        unit = chain.units[l - chain.start - 1]
        for n, (a, b) in enumerate(padding_of(unit)):
            reach = (unit.conv.kernel_size[n] - 1) * unit.conv.dilation[n] + 1
            margin[n] += grown[n] * (a + b + reach)
            grown[n] *= unit.conv.stride[n]
            size[n] = (size[n] + a + b - reach) // unit.conv.stride[n] + 1
    margin = [m + g for m, g in zip(margin, grown, strict=True)]
    at = {i: Canvas(F.pad(x, [m for m in reversed(margin) for _ in (0, 1)]), margin)}
    for l in range(i + 1, j + 1):
        around = [branch for branch in dropped.branches if branch.i < l <= branch.j]
        if around:
            at[l] = at[min(branch.i for branch in around)]
            continue
        unit = chain.units[l - chain.start - 1]
        if l in dropped.layers:
            at[l] = at[l - 1]
        else:
            at[l] = at[l - 1].convolve(unit.conv, unit.norm, [a for a, _ in padding_of(unit)])
            at[l].value = at[l].value * unit.factor
        for beside in unit.beside:
            at[l] = at[l].plus(at[l - 1].branch(beside))
        for source, target, projection in chain.skips:
            if target == l and source >= i:
                skipped = at[source]
                if projection is not None:
                    skipped = skipped.convolve(projection[0], projection[1], [0] * len(size))
                at[l] = at[l].plus(skipped)
    return at[j].window([0] * len(size), size)
