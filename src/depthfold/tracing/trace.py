"""The function trace(), which finds the layers of a model."""

from __future__ import annotations

import keyword
from dataclasses import replace
from typing import Any

import torch
import torch.fx.graph
from torch import Tensor, fx, nn

from depthfold.tracing.chains import link_chains
from depthfold.tracing.checking import check_in_model
from depthfold.tracing.drafts import DataFlow
from depthfold.tracing.inputs import ExampleInputs, inputs_at
from depthfold.tracing.layers import draft_layers
from depthfold.tracing.numbering import number
from depthfold.tracing.outputs import is_output, part_is_output
from depthfold.tracing.recording import record_and_check
from depthfold.tracing.request import check_model, copy_model, modules_outside, refuse_hooks, resolve_ignore
from depthfold.tracing.roles import assign_roles, enclosing_module, exclude_gates
from depthfold.tracing.rules import Ignore
from depthfold.tracing.traced import Blueprint, TracedNetwork


def _format_target(base: str, target: str) -> str:
    """Return the code that reads an attribute, with getattr for names that are not identifiers or are keywords."""
    text = base
    for name in target.split("."):
        plain = name.isidentifier() and not keyword.iskeyword(name)
        text = f"{text}.{name}" if plain else f'getattr({text}, "{name}")'
    return text


def allow_keywords() -> None:
    """Let torch.fx generate valid code for modules whose names are keywords, as in nn.ModuleDict({"in": ...})."""
    graph: Any = torch.fx.graph
    graph._format_target = _format_target


@torch.inference_mode(False)  # inference tensors do not record when they are written to
def trace(model: nn.Module, example_inputs: Any, ignore: Ignore = (), at: str | None = None) -> TracedNetwork:
    """Find what can be merged in a model, and why the rest cannot.

    `example_inputs` are the inputs of the model: a tuple of positional arguments, a dict of keyword arguments, or a
    single argument. `ignore` lists modules that do not become layers, by name ("features.0"), glob ("features.0.*") or
    type; merging only folds their batch norms. `at` is the path of a submodule to trace instead of the whole model.

    The model is not changed: a copy is traced in evaluation mode. Operations that run only in training, such as
    auxiliary outputs, are not part of the network.
    """
    check_model(model, at)
    snapshot = copy_model(model)
    modes = {path: module.training for path, module in snapshot.named_modules(remove_duplicate=False)}
    snapshot.eval()
    inputs = ExampleInputs.of(example_inputs).map(Tensor.clone)  # a forward may write to its input
    example, whole = inputs.map(lambda tensor: tensor.to("meta")), inputs
    if at:
        inputs = inputs_at(snapshot, at, whole)
    part = snapshot.get_submodule(at) if at else snapshot
    name = type(part).__name__
    refuse_hooks(part, name)
    ignored = resolve_ignore(part, ignore, at)
    recording = record_and_check(part, inputs, f"{name} (at={at!r})" if at else name)
    graph, sizes = recording.graph, recording.sizes
    if at:
        check_in_model(snapshot, at, graph, whole)
    roles = assign_roles(graph, sizes, recording.opaque, ignored, modules_outside(snapshot, at), at)
    roles = exclude_gates(roles, sizes)
    flow = DataFlow(roles, dict(graph.named_modules(remove_duplicate=False)), recording.overwritten)
    network, sites, skip_sites = number(name, link_chains(draft_layers(flow), flow), flow, sizes)
    ends_in_output = bool(sites) and is_output(graph, sites[-1].out)
    if at and ends_in_output:
        ends_in_output = part_is_output(snapshot, at, whole)
    _restore_modes(snapshot, graph, modes, at)
    blueprint = Blueprint(
        network=replace(network, fixed_padding=recording.fixed, ends_in_output=ends_in_output),
        sites=sites,
        skip_sites=skip_sites,
        inputs=inputs,
        at=at or None,
        ignore=tuple(f"{at}.{name}" if at else name for name in ignored),
        example=example,
    )
    return TracedNetwork(blueprint=blueprint, graph=graph, model=snapshot if at else None)


def _restore_modes(snapshot: nn.Module, graph: fx.GraphModule, modes: dict[str, bool], at: str | None) -> None:
    """Set every module to the mode that it has in the user's model."""
    for path, module in snapshot.named_modules():
        module.training = modes[path]
    callers = {str(node.target): enclosing_module(node) for node in graph.graph.nodes if node.op == "call_module"}
    for path, module in graph.named_modules():
        # A module that replaces a function is not in the user's model: it gets the mode of the module that called it.
        candidates = (".".join(filter(None, (at, name))) for name in (path, callers.get(path), None))
        module.training = next(modes[name] for name in candidates if name in modes)
