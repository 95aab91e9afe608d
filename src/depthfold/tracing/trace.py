"""trace(): a model that we have never seen, as a Network."""

from __future__ import annotations

import keyword
from typing import Any

import torch
import torch.fx.graph
from torch import Tensor, fx, nn

from depthfold.core import Network
from depthfold.tracing.chains import link_chains
from depthfold.tracing.drafts import Values, draft_layers
from depthfold.tracing.inputs import ExampleInputs, inputs_at
from depthfold.tracing.numbering import number
from depthfold.tracing.outputs import is_output, part_is_output
from depthfold.tracing.proof import check_in_model
from depthfold.tracing.recording import record_faithfully
from depthfold.tracing.request import check_ignore, check_model, copy_model, modules_outside, refuse_hooks
from depthfold.tracing.roles import assign_roles, home, refuse_gates
from depthfold.tracing.rules import Ignore
from depthfold.tracing.traced import Blueprint, TracedNetwork

# Modules and parameters whose names are Python keywords, such as nn.ModuleDict({"in": ..., "class": ...}).
#
# torch.fx writes `self.in(x)` for them, which is not Python. It writes `getattr(self, "0")` for names that are not
# identifiers; this makes it do so for keywords too, here and wherever a graph is unpickled.


def _format_target(base: str, target: str) -> str:
    text = base
    for name in target.split("."):
        plain = name.isidentifier() and not keyword.iskeyword(name)
        text = f"{text}.{name}" if plain else f'getattr({text}, "{name}")'
    return text


def allow_keywords() -> None:
    graph: Any = torch.fx.graph
    graph._format_target = _format_target


@torch.inference_mode(False)  # there, tensors do not know when they are written to
def trace(model: nn.Module, example_inputs: Any, ignore: Ignore = (), at: str | None = None) -> TracedNetwork:
    """Find what can be merged in a model, and why the rest cannot.

    `example_inputs` is what the model takes: a tuple of positional arguments, a dict of named ones, or the single
    argument. `ignore` lists modules that are to be no layers, by name ("features.0"), glob ("features.0.*") or type:
    they keep their convolutions and activations, only their batch norms are folded when merging. `at` names a submodule
    to trace instead of the whole model. The model itself is not changed: a copy is traced, in evaluation mode. What its
    forward does only in training (auxiliary outputs, for example) is no part of the network.
    """
    check_model(model, at)
    snapshot = copy_model(model)
    modes = {path: module.training for path, module in snapshot.named_modules(remove_duplicate=False)}
    snapshot.eval()
    inputs = ExampleInputs.of(example_inputs).map(Tensor.clone)  # a forward may write to its input
    example, given = inputs.map(lambda tensor: tensor.to("meta")), inputs
    if at:
        inputs = inputs_at(snapshot, at, given)
    part = snapshot.get_submodule(at) if at else snapshot
    name = type(part).__name__
    refuse_hooks(part, name)
    left_alone = check_ignore(part, ignore, at)
    recording = record_faithfully(part, inputs, f"{name} (at={at!r})" if at else name)
    graph, sizes = recording.graph, recording.sizes
    if at:
        check_in_model(snapshot, at, graph, given)
    roles = refuse_gates(assign_roles(graph, sizes, recording.opaque, left_alone, modules_outside(snapshot, at)), sizes)
    values = Values(roles, dict(graph.named_modules(remove_duplicate=False)), recording.changing)
    numbered = number(link_chains(draft_layers(values), values), values, sizes)
    ends_in_output = bool(numbered.sites) and is_output(graph, numbered.sites[-1].out)
    if at and ends_in_output:
        ends_in_output = part_is_output(snapshot, at, given)
    _restore_modes(snapshot, graph, modes, at)
    network = Network(
        name=name,
        layers=numbered.layers,
        skips=tuple(site.skip for site in numbered.skip_sites),
        barriers=numbered.barriers,
        refusals=numbered.refusals,
        fixed_padding=recording.fixed,
        ends_in_output=ends_in_output,
    )
    blueprint = Blueprint(
        network=network,
        sites=numbered.sites,
        skip_sites=numbered.skip_sites,
        inputs=inputs,
        at=at or None,
        ignore=tuple(f"{at}.{name}" if at else name for name in left_alone),
        example=example,
    )
    return TracedNetwork(blueprint=blueprint, graph=graph, model=snapshot if at else None)


def _restore_modes(snapshot: nn.Module, graph: fx.GraphModule, modes: dict[str, bool], at: str | None) -> None:
    """Every module back to the mode in which the user had it."""
    for path, module in snapshot.named_modules():
        module.training = modes[path]
    homes = {str(node.target): home(node) for node in graph.graph.nodes if node.op == "call_module"}
    for path, module in graph.named_modules():
        # A dropout that was a function is no module of the user's: it has the mode of the one that called it.
        found = (".".join(name for name in (at, place) if name) for place in (path, homes.get(path), None))
        module.training = next(modes[whole] for whole in found if whole in modes)
