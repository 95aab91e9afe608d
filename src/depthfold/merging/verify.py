"""verify(): compare a merged network with the rewritten one, segment by segment and at the outputs."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from depthfold.backends import full_precision
from depthfold.core import ConvShape, Span
from depthfold.errors import InvalidValue, OutOfMemory, VerificationError, lacks_memory
from depthfold.merging.output_errors import (
    SENSITIVITY_FACTOR,
    TOLERANCE,
    check_finite,
    largest_share,
    output_error,
    sensitivity,
)
from depthfold.merging.shallow import SegmentNodes, Shallow, shallow_parts
from depthfold.tracing import Blueprint, ExampleInputs, Student, describe_error, device_of, inputs_at, student_parts
from depthfold.tracing.checking import fixed_random_numbers, working_graph
from depthfold.tracing.interpreter import Interpreter

HALF_DTYPES = (torch.float16, torch.bfloat16)
OUTPUT = "the outputs"
IMAGES = 2  # of a larger batch that are compared, unless inputs are given
_CASTS = ("half", "bfloat16", "double")


@dataclass(frozen=True, slots=True)
class SegmentErrors:
    """The largest errors of a segment's output for equal inputs, as shares of its largest value.

    Outputs at the border depend on padding; those in the interior do not.
    """

    span: Span
    border: float
    interior: float


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of verify(): errors as shares of the largest value, and the tolerance.

    Segments are compared on equal inputs and must meet the tolerance. The network may amplify the rounding errors of
    its segments. So if the outputs exceed the tolerance, `sensitivity` is the error of the rewritten network itself
    after its inputs are changed in the last digit. No merged network can be more accurate than that.
    """

    segments: tuple[SegmentErrors, ...]
    output: float
    tolerance: float
    sensitivity: float = 0.0

    @property
    def border(self) -> float:
        return max((segment.border for segment in self.segments), default=0.0)

    @property
    def interior(self) -> float:
        return max((segment.interior for segment in self.segments), default=0.0)

    @property
    def ok(self) -> bool:
        segments = max(self.border, self.interior) <= self.tolerance
        return segments and self.output <= max(self.tolerance, SENSITIVITY_FACTOR * self.sensitivity)

    def __str__(self) -> str:
        text = (
            f"largest error at the borders {self.border:.1e}, in the interior {self.interior:.1e}, at the outputs "
            f"{self.output:.1e}; tolerance {self.tolerance:.0e}"
        )
        if self.sensitivity:
            text += f" (a change in the last digit of its input changes the outputs by {self.sensitivity:.1e})"
        wrong = [s for s in self.segments if not max(s.border, s.interior) <= self.tolerance]
        return text if not wrong else text + f"; first wrong segment {wrong[0].span}"

    def __repr__(self) -> str:
        """Return one line: the errors of all segments would fill pages."""
        return f"<Verification {'ok' if self.ok else 'failed'}: {self}>"


def lowest_precision(module: nn.Module) -> torch.dtype:
    """Return the dtype of the parameters with the lowest precision, which limits the precision of the outputs."""
    found = {parameter.dtype for parameter in module.parameters()} & TOLERANCE.keys()
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def to_float32(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a half-precision network that computes in float32, including the casts in its graph."""
    single = copy.deepcopy(graph).float()
    for node in single.graph.nodes:
        if node.op == "call_method" and node.target in _CASTS:
            node.target = "float"
        node.args, node.kwargs = map_aggregate(node.args, _to_float32), map_aggregate(node.kwargs, _to_float32)
    return single


def _to_float32(argument: Any) -> Any:
    return torch.float32 if isinstance(argument, torch.dtype) and argument in TOLERANCE else argument


def check_weights(which: str, graph: fx.GraphModule) -> None:
    """Raise VerificationError if the network is on the device "meta"."""
    for name, tensor in itertools.chain(graph.named_parameters(), graph.named_buffers()):
        if tensor.is_meta:
            raise VerificationError(
                f'The {which} network has no weights: {name} is on the device "meta". Load the weights of the model '
                "with load_state_dict(..., assign=True), and trace it again."
            )


def verify(student: nn.Module, shallow: nn.Module, inputs: Any = None) -> Verification:
    """Run both networks on the same inputs and compare them, segment by segment and at the outputs.

    `inputs` are those of the whole model, as for trace(). They default to random inputs of the traced sizes, with fewer
    images if the model also runs with those: all feature maps are kept.
    """
    deep, origin, path = student_parts(student)
    made, merged, _ = shallow_parts(shallow, path)
    segments = _common_segments(merged, origin)
    check_weights("rewritten", deep)
    check_weights("merged", made)
    precision = lowest_precision(deep)
    given = origin.blueprint.inputs.random(seed=0)
    with full_precision(device_of(deep)), _eval_mode(student), _eval_mode(shallow), torch.no_grad():
        if inputs is not None:
            given = ExampleInputs.of(inputs).like(student)
            given = inputs_at(student, path, given) if path else given
        elif (few := _few_images(given, origin.blueprint)) is not None and _runs(deep, few.like(deep)):
            given = few
        if precision in HALF_DTYPES and _runs(single := to_float32(deep), given.like(single)):
            deep, made = single, to_float32(made)
        given = given.like(deep)
        found = _record("merged", made, given, {name for s in segments for name in (s.shallow, s.shallow_source)})
        # The student's segments get the inputs of the merged ones, so that an error is not passed on to later segments.
        # The merged network runs only once, because its convolutions may be much slower than the student's.
        sources = {segment.student_source: found[segment.shallow_source] for segment in segments}
        wanted = _record("rewritten", deep, given, {segment.student for segment in segments}, sources)
        wanted[OUTPUT] = _record("rewritten", deep, given, set())[OUTPUT]
        tolerance = TOLERANCE[precision]
        output = output_error(wanted[OUTPUT], found[OUTPUT])
        amplified = 0.0
        if output > tolerance:
            run = partial(_record, "rewritten", deep, names=set())
            amplified = sensitivity(wanted[OUTPUT], lambda change: run(given.map(change))[OUTPUT])
    network = origin.blueprint.network
    shapes = [network.merged_shape(nodes.span, origin.plan.dropped) for nodes in segments]
    errors = tuple(_segment_errors(nodes, shape, wanted, found) for nodes, shape in zip(segments, shapes, strict=True))
    return Verification(errors, output, tolerance, amplified)


def _few_images(inputs: ExampleInputs, blueprint: Blueprint) -> ExampleInputs | None:
    """Return the inputs with the first images of a batch, or None if they are not a large batch."""
    batches = {site.batch for site in blueprint.sites} | {len(leaf) for leaf in inputs.tensors() if leaf.dim()}
    if len(batches) != 1 or batches.pop() <= IMAGES:
        return None
    return inputs.map(lambda tensor: tensor[:IMAGES])


def _segment_errors(
    nodes: SegmentNodes, shape: ConvShape, wanted: dict[str, Any], found: dict[str, Any]
) -> SegmentErrors:
    a, b = wanted[nodes.student], found[nodes.shallow]
    if not a.numel():
        raise InvalidValue(
            f"The inputs are an empty batch: {nodes.span} returns a feature map of shape {tuple(a.shape)}. Pass at "
            "least one image, or omit the inputs."
        )
    if a.shape != b.shape:
        return SegmentErrors(nodes.span, border=float("inf"), interior=float("inf"))
    interior = torch.ones(a.shape[2:], dtype=torch.bool, device=a.device)
    sizes = found[nodes.shallow_source].shape[2:]
    for n, size in enumerate(sizes):
        start = torch.arange(a.shape[2 + n], device=a.device) * shape.stride[n] - shape.padding[n][0]
        inside = (start >= 0) & (start + shape.extent[n] <= size)
        interior &= inside.reshape([-1 if m == n else 1 for m in range(len(sizes))])
    scale = a.abs().max()
    check_finite(scale)
    difference = (a - b).abs().amax((0, 1))
    border, inner = (largest_share(difference[part], scale) for part in (~interior, interior))
    return SegmentErrors(nodes.span, border, inner)


class _Recorder(Interpreter):
    """Runs a graph and keeps the values that it computes at the named nodes.

    Later nodes read the values in `given` instead of those of the graph if they have the same shape and are finite,
    which they may not be if the merged network is wrong.
    """

    def __init__(self, graph: fx.GraphModule, names: set[str], given: Mapping[str, Tensor]) -> None:
        super().__init__(working_graph(graph), graph=graph.graph)
        self.names, self.given = names, given
        self.kept: dict[str, Any] = {}
        tensors = (*graph.parameters(), *graph.buffers())
        self.stored = {tensor.untyped_storage()._cdata for tensor in tensors}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "output":
            self.kept[OUTPUT] = value
        elif n.name in self.names:
            self.kept[n.name] = value.clone()  # an in-place activation may overwrite it
        given = self.given.get(n.name)
        if given is not None and given.shape == value.shape and given.isfinite().all():
            expanded = any(step == 0 for step, size in zip(value.stride(), value.shape, strict=True) if size > 1)
            if expanded or value.untyped_storage()._cdata in self.stored:
                return given.clone()  # it cannot be written to, or is a weight
            value.copy_(given)  # into the same memory, which may have other names
        return value


def _record(
    which: str, graph: fx.GraphModule, inputs: ExampleInputs, names: set[str], given: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    recorder = _Recorder(graph, names, given or {})
    try:
        with fixed_random_numbers(inputs):  # a forward may use random numbers and modify its input
            recorder.run(*inputs.map(Tensor.clone).for_graph(graph))
    except Exception as error:
        if lacks_memory(error):
            raise OutOfMemory(
                f"The {which} network cannot be verified: {describe_error(error)}. Free memory, or trace with a "
                "smaller batch."
            ) from error
        raise VerificationError(
            f"The {which} network does not run on the inputs: {describe_error(error)}. Pass inputs as for trace(), and "
            "do not modify the results of rewrite() and merge()."
        ) from error
    return recorder.kept


def _runs(graph: fx.GraphModule, inputs: ExampleInputs) -> bool:
    """Return True if a graph still runs after its precision was changed. An opaque module may contain casts."""
    try:
        _record("rewritten", graph, inputs, set())
    except VerificationError:
        return False
    return True


def _common_segments(merged: Shallow, student: Student) -> tuple[SegmentNodes, ...]:
    same = merged.blueprint.network == student.blueprint.network
    if not same or merged.plan != student.plan:
        what = "plan" if same else "network"
        raise InvalidValue(
            f"The merged network was made from another {what} than the rewritten one. Merge this student again."
        )
    return merged.segments


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode, and restore the mode of every submodule afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
