"""verify(): does the shallow network compute what the rewritten one computes, at the borders and in the interior?"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from depthfold.backends.torch_run import cuda_settings
from depthfold.core import ConvShape, Plan, Span
from depthfold.errors import InvalidValue, VerificationError
from depthfold.tracing import Blueprint, Student, student_parts
from depthfold.tracing.inputs import Inputs, inputs_at
from depthfold.tracing.tracer import explain

# Of the largest value, by the precision of the weights. Half precisions are compared in float32: what is left is the
# rounding of the merged weights themselves.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-2}


OUTPUT = "the outputs"


@dataclass(frozen=True, slots=True)
class Seam:
    """Where a segment of the two networks can be compared: names of nodes in both. The sources are its input."""

    span: Span
    student: str
    student_source: str
    shallow: str
    shallow_source: str


@dataclass(frozen=True, slots=True, eq=False)
class Shallow:
    """What a merged network remembers of its making."""

    network: Blueprint
    plan: Plan
    seams: tuple[Seam, ...]

    KEY: ClassVar[str] = "depthfold.shallow"


@dataclass(frozen=True, slots=True)
class SegmentErrors:
    """The largest error of a segment's output, as a share of its largest value, when both networks give the segment
    the same input. Border outputs saw padding."""

    span: Span
    border: float
    interior: float


@dataclass(frozen=True, slots=True)
class Verification:
    """What verify() found: errors as shares of the largest value, and the tolerance that was used."""

    segments: tuple[SegmentErrors, ...]
    output: float
    tolerance: float

    @property
    def border(self) -> float:
        return max((segment.border for segment in self.segments), default=0.0)

    @property
    def interior(self) -> float:
        return max((segment.interior for segment in self.segments), default=0.0)

    @property
    def ok(self) -> bool:
        return max(self.border, self.interior, self.output) <= self.tolerance

    def __str__(self) -> str:
        text = (
            f"largest error at the borders {self.border:.1e}, in the interior {self.interior:.1e}, at the outputs "
            f"{self.output:.1e}; tolerance {self.tolerance:.0e}"
        )
        wrong = [s for s in self.segments if not max(s.border, s.interior) <= self.tolerance]
        return text if not wrong else text + f"; first wrong segment {wrong[0].span}"


def verify(student: nn.Module, shallow: nn.Module, inputs: Any = None) -> Verification:
    """Run both networks on the same inputs and compare them, segment by segment and at the outputs.

    `inputs` are those of the whole model, as for trace(); without them, random ones of the traced sizes are used.
    """
    deep, remembered, path = student_parts(student)
    made = _shallow_part(shallow, path)
    seams = _seams(made, remembered)
    dtype = next((p.dtype for p in deep.parameters() if p.is_floating_point()), torch.float32)
    given = remembered.network.inputs.random(seed=0)
    # TF32 rounds every product to three digits: that would be the error, whatever the networks compute.
    with cuda_settings(tf32=False, benchmark=False), _evaluating(student), _evaluating(shallow), torch.no_grad():
        if inputs is not None:
            given = Inputs.of(inputs).like(student)
            given = inputs_at(student, path, given) if path else given
        if dtype in (torch.float16, torch.bfloat16):
            deep, made = copy.deepcopy(deep).float(), copy.deepcopy(made).float()
        given = given.like(deep)
        wanted = _record("rewritten", deep, given, {name for s in seams for name in (s.student, s.student_source)})
        # Every segment gets the input that the student's has, so that its error is its own and not an earlier one's.
        sources = {seam.shallow_source: wanted[seam.student_source] for seam in seams}
        found = _record("merged", made, given, {seam.shallow for seam in seams}, sources)
        found[OUTPUT] = _record("merged", made, given, set())[OUTPUT]
    segments = tuple(_segment_errors(seam, remembered.network.merged_shape(seam.span), wanted, found) for seam in seams)
    one, two = _tensors(wanted[OUTPUT]), _tensors(found[OUTPUT])
    output = max((_error(a, b) for a, b in zip(one, two, strict=False)), default=0.0)
    return Verification(segments, output if len(one) == len(two) else float("inf"), TOLERANCE.get(dtype, 1e-4))


def _segment_errors(seam: Seam, shape: ConvShape, wanted: dict[str, Any], found: dict[str, Any]) -> SegmentErrors:
    a, b = wanted[seam.student], found[seam.shallow]
    if a.shape != b.shape:
        return SegmentErrors(seam.span, border=float("inf"), interior=float("inf"))
    interior = torch.ones(a.shape[2:], dtype=torch.bool, device=a.device)
    sizes = wanted[seam.student_source].shape[2:]
    for n, size in enumerate(sizes):
        start = torch.arange(a.shape[2 + n], device=a.device) * shape.stride[n] - shape.padding[n][0]
        inside = (start >= 0) & (start + shape.extent[n] <= size)
        interior &= inside.reshape([-1 if m == n else 1 for m in range(len(sizes))])
    scale = a.abs().max()
    border, inner = (_error(a[..., part], b[..., part], scale) for part in (~interior, interior))
    return SegmentErrors(seam.span, border, inner)


def _error(wanted: Tensor, found: Tensor, scale: Tensor | None = None) -> float:
    """The largest difference, as a share of the largest wanted value."""
    if wanted.shape != found.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    if not torch.isfinite(wanted).all():
        raise VerificationError(
            "The rewritten network yields values that are not finite, so nothing can be verified. Check its weights "
            "and statistics, or verify() with inputs of your own."
        )
    difference = float((wanted - found).abs().max())
    largest = float(wanted.abs().max() if scale is None else scale)
    if difference == 0:
        return 0.0
    return difference / largest if largest and difference == difference else float("inf")


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps the values of the nodes that are asked for. Values that are given replace its own."""

    def __init__(self, graph: fx.GraphModule, names: set[str], given: Mapping[str, Tensor]) -> None:
        super().__init__(graph)
        self.names, self.given = names, given
        self.kept: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name in self.given and value.shape == self.given[n.name].shape:
            value = self.given[n.name].clone()
        if n.op == "output":
            self.kept[OUTPUT] = value
        elif n.name in self.names:
            self.kept[n.name] = value.clone()  # an activation may overwrite it in place
        return value


def _record(
    which: str, graph: fx.GraphModule, inputs: Inputs, names: set[str], given: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    recorder = _Recorder(graph, names, given or {})
    try:
        recorder.run(*inputs.map(Tensor.clone).for_graph(graph))  # a forward may write to its input
    except Exception as error:
        raise VerificationError(
            f"The {which} network does not run on the inputs: {explain(error)}. Give inputs that the model takes, as "
            "for trace(), and leave the networks that rewrite() and merge() return as they are."
        ) from error
    return recorder.kept


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _shallow_part(module: nn.Module, path: str) -> fx.GraphModule:
    """The merged graph: where the student has its rewritten one."""
    part = dict(module.named_modules()).get(path)
    if isinstance(part, fx.GraphModule) and Shallow.KEY in part.meta:
        return part
    raise InvalidValue(f"{type(module).__name__} is no merged network: expected what merge(student) returned.")


def _seams(made: fx.GraphModule, student: Student) -> tuple[Seam, ...]:
    merged: Shallow = made.meta[Shallow.KEY]
    if merged.network != student.network or merged.plan != student.plan:
        what = "plan" if merged.network == student.network else "network"
        raise InvalidValue(
            f"The merged network was made of another {what} than the rewritten one, so they cannot be compared. "
            "Merge this student again."
        )
    return merged.seams


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; every module then gets back the mode that it had."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
