"""verify(): does the shallow network compute what the rewritten one computes, at the borders and in the interior?"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from depthfold.backends.cuda import cuda_settings
from depthfold.core import ConvShape
from depthfold.errors import InvalidValue, VerificationError
from depthfold.merging.verification import TOLERANCE, Seam, SegmentErrors, Shallow, Verification, shallow_parts
from depthfold.tracing import Student, student_parts
from depthfold.tracing.checking import fixed_random_numbers, working_graph
from depthfold.tracing.inputs import ExampleInputs, inputs_at
from depthfold.tracing.tracer import describe_error

# In which precision two networks are compared, and what can be expected of it.

HALVES = (torch.float16, torch.bfloat16)
_CASTS = ("half", "bfloat16", "double")


def coarsest(module: nn.Module) -> torch.dtype:
    """The coarsest precision of the parameters: where a network has several, no output is more precise than this."""
    found = {parameter.dtype for parameter in module.parameters()} & TOLERANCE.keys()
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def in_single(graph: fx.GraphModule) -> fx.GraphModule:
    """A network with weights in half precision as one that computes in float32, so that only the weights are rounded.
    Casts of its own would bring the coarse precision back, or one that does not fit the weights: they follow."""
    single = copy.deepcopy(graph).float()
    for node in single.graph.nodes:
        if node.op == "call_method" and node.target in _CASTS:
            node.target = "float"
        node.args, node.kwargs = map_aggregate(node.args, _single), map_aggregate(node.kwargs, _single)
    return single


def _single(argument: Any) -> Any:
    return torch.float32 if isinstance(argument, torch.dtype) and argument in TOLERANCE else argument


def check_weights(which: str, graph: fx.GraphModule) -> None:
    """Refuse a network that is only shapes."""
    for name, tensor in itertools.chain(graph.named_parameters(), graph.named_buffers()):
        if tensor.is_meta:
            raise VerificationError(
                f'The {which} network has no weights: {name} is on the device "meta", which keeps shapes alone, so '
                "there is nothing to compare. Load the model's weights (load_state_dict(..., assign=True)), then trace "
                "it again."
            )


# How far apart two outputs are, and how far a change in the last digit of the input takes them.


def output_error(wanted: Any, found: Any) -> float:
    """The largest error of all the tensors in two outputs of the same structure; infinite where they do not match."""
    one, two = _tensors(wanted), _tensors(found)
    if len(one) != len(two):
        return float("inf")
    return max((tensor_error(a, b) for a, b in zip(one, two, strict=True)), default=0.0)


def tensor_error(wanted: Tensor, found: Tensor, scale: Tensor | None = None) -> float:
    """The largest difference, as a share of the largest wanted value."""
    if wanted.shape != found.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    check_finite(wanted)
    return share((wanted - found).abs(), wanted.abs().max() if scale is None else scale)


def check_finite(wanted: Tensor) -> None:
    if not torch.isfinite(wanted).all():
        raise VerificationError(
            "The network yields values that are not finite, so nothing can be verified. Check its weights and "
            "statistics, or verify with inputs of your own."
        )


def share(differences: Tensor, scale: Tensor) -> float:
    """The largest of the differences, as a share of the scale."""
    difference, largest = float(differences.max()) if differences.numel() else 0.0, float(scale)
    if difference == 0:
        return 0.0
    return difference / largest if largest and difference == difference else float("inf")


def last_digit(tensor: Tensor) -> Tensor:
    """The same tensor, every number changed in its last digit."""
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device, tensor.dtype)
    return tensor * (1 + torch.finfo(tensor.dtype).eps * noise)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


OUTPUT = "the outputs"


def verify(student: nn.Module, shallow: nn.Module, inputs: Any = None) -> Verification:
    """Run both networks on the same inputs and compare them, segment by segment and at the outputs.

    `inputs` are those of the whole model, as for trace(); without them, random ones of the traced sizes are used.
    """
    deep, remembered, path = student_parts(student)
    made, merged, _ = shallow_parts(shallow, path)
    seams = _seams(merged, remembered)
    check_weights("rewritten", deep)
    check_weights("merged", made)
    precision = coarsest(deep)
    given = remembered.blueprint.inputs.random(seed=0)
    # TF32 rounds every product to three digits: that would be the error, whatever the networks compute.
    with cuda_settings(tf32=False, benchmark=False), _evaluating(student), _evaluating(shallow), torch.no_grad():
        if inputs is not None:
            given = ExampleInputs.of(inputs).like(student)
            given = inputs_at(student, path, given) if path else given
        if precision in HALVES and _runs(single := in_single(deep), given.like(single)):
            deep, made = single, in_single(made)
        given = given.like(deep)
        found = _record("merged", made, given, {name for s in seams for name in (s.shallow, s.shallow_source)})
        # The student's segments get the inputs of the merged ones, so that an error is the segment's own and not an
        # earlier one's. The merged network runs once only: its convolutions may be many times the student's work.
        sources = {seam.student_source: found[seam.shallow_source] for seam in seams}
        wanted = _record("rewritten", deep, given, {seam.student for seam in seams}, sources)
        wanted[OUTPUT] = _record("rewritten", deep, given, set())[OUTPUT]
        tolerance = TOLERANCE[precision]
        output = output_error(wanted[OUTPUT], found[OUTPUT])
        sensitivity = 0.0
        if output > tolerance:
            other = _record("rewritten", deep, given.map(last_digit), set())
            sensitivity = output_error(wanted[OUTPUT], other[OUTPUT])
    network = remembered.blueprint.network
    segments = tuple(_segment_errors(seam, network.merged_shape(seam.span), wanted, found) for seam in seams)
    return Verification(segments, output, tolerance, sensitivity)


def _segment_errors(seam: Seam, shape: ConvShape, wanted: dict[str, Any], found: dict[str, Any]) -> SegmentErrors:
    a, b = wanted[seam.student], found[seam.shallow]
    if not a.numel():
        raise InvalidValue(
            f"The inputs are an empty batch: {seam.span} makes a map of the shape {tuple(a.shape)} of them, and "
            "nothing can be compared. Give one image at least, or no inputs, and random ones are taken."
        )
    if a.shape != b.shape:
        return SegmentErrors(seam.span, border=float("inf"), interior=float("inf"))
    interior = torch.ones(a.shape[2:], dtype=torch.bool, device=a.device)
    sizes = found[seam.shallow_source].shape[2:]
    for n, size in enumerate(sizes):
        start = torch.arange(a.shape[2 + n], device=a.device) * shape.stride[n] - shape.padding[n][0]
        inside = (start >= 0) & (start + shape.extent[n] <= size)
        interior &= inside.reshape([-1 if m == n else 1 for m in range(len(sizes))])
    scale = a.abs().max()
    check_finite(scale)
    apart = (a - b).abs().amax((0, 1))
    border, inner = (share(apart[part], scale) for part in (~interior, interior))
    return SegmentErrors(seam.span, border, inner)


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps the values of the nodes that are asked for. Values that are given replace its own where
    they can: those of a merged network that is wrong may be of another size, or not finite."""

    def __init__(self, graph: fx.GraphModule, names: set[str], given: Mapping[str, Tensor]) -> None:
        super().__init__(working_graph(graph), graph=graph.graph)
        self.names, self.given = names, given
        self.kept: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        given = self.given.get(n.name)
        if given is not None and given.shape == value.shape and given.isfinite().all():
            value = given.clone()
        if n.op == "output":
            self.kept[OUTPUT] = value
        elif n.name in self.names:
            self.kept[n.name] = value.clone()  # an activation may overwrite it in place
        return value


def _record(
    which: str, graph: fx.GraphModule, inputs: ExampleInputs, names: set[str], given: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    recorder = _Recorder(graph, names, given or {})
    try:
        with fixed_random_numbers(inputs):  # a forward may draw some, and write to its input
            recorder.run(*inputs.map(Tensor.clone).for_graph(graph))
    except Exception as error:
        raise VerificationError(
            f"The {which} network does not run on the inputs: {describe_error(error)}. Give inputs that the model "
            "takes, as for trace(), and leave the networks that rewrite() and merge() return as they are."
        ) from error
    return recorder.kept


def _runs(graph: fx.GraphModule, inputs: ExampleInputs) -> bool:
    """Whether a graph whose precision was changed still runs: a module that we do not look into may have casts."""
    try:
        _record("rewritten", graph, inputs, set())
    except VerificationError:
        return False
    return True


def _seams(merged: Shallow, student: Student) -> tuple[Seam, ...]:
    # A and S alone: a solved plan also knows what it costs, which a loaded network has forgotten.
    plans = {(made.plan.activations, made.plan.cuts) for made in (merged, student)}
    same = merged.blueprint.network == student.blueprint.network
    if not same or len(plans) > 1:
        what = "plan" if same else "network"
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
