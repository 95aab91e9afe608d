"""Blocks that are cut out of random small CNNs, and segments that are replaced, compute the same as the student."""

import copy
from random import Random

import torch
import torch.nn.functional as F
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

import depthfold as df
from depthfold.core import as_pad_argument
from depthfold.importance import importance_student
from depthfold.importance.fit import _Target
from depthfold.importance.pieces import ValueRecorder, cut_out, end_of, input_of, start_of
from depthfold.merging import replace_segment
from depthfold.merging.kernels import as_module, segment_kernel
from depthfold.testing.strategies import network_specs
from depthfold.tracing import student_parts
from properties.test_fold import build, close


@settings(max_examples=max(settings().max_examples // 4, 6))
@given(spec=network_specs(), seed=st.integers(0, 2**16))
@torch.no_grad()
def test_pieces_and_replaced_segments_compute_the_same(spec, seed):
    model, x = build(spec, seed)
    traced = df.trace(model, x)
    blocks = [b for b in traced.flagged_spans("full") if traced.network.merged_shape(b.span).parameters < 50_000]
    assume(blocks)
    block = Random(seed).choice(blocks)
    event(f"layers: {len(block.span)}")
    student = importance_student(traced, block, 0, reinit=False).eval()
    original = df.rewrite(traced, traced.vanilla).eval()
    wanted = student(x)

    # The layers of the block, fed with the values of the original, give the student's value at its end.
    graph, origin, _ = student_parts(student)
    end = end_of(graph, origin.blueprint, origin.plan, block.j)
    piece = cut_out(graph, start_of(traced, block.i), end)
    front = cut_out(graph, start_of(traced, block.i), input_of(graph, origin.blueprint, block))
    target = _Target(traced, student_parts(original)[0], block)
    recorder = ValueRecorder(student_parts(original)[0], (*piece.inputs, *front.inputs, *target.names))
    original(x)
    values = recorder.take()
    recorded = copy.deepcopy(student)
    own = ValueRecorder(student_parts(recorded)[0], [end.name])
    recorded(x)
    close(piece(values), own.take()[end.name])

    # The exact convolution of the segment replaces it.
    nodes = {node.name: node for node in graph.graph.nodes}
    merged = as_module(segment_kernel(graph, nodes, origin.blueprint, block.span), x)
    shape = traced.network.merged_shape(block.span)
    given_to = front(values)
    if len(block.span) == 1:  # nothing is removed, so the layer itself computes the target
        padded = given_to if shape.symmetric else F.pad(given_to, as_pad_argument(shape.padding))
        inserted = block.a and block.i > 0 and block.i not in traced.network.activations
        if not inserted:
            close(merged(padded), target.of(values))
    replace_segment(student, block.span, merged)
    close(student(x), wanted)
