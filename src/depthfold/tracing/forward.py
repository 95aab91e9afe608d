"""One forward as a graph: what it is called with, what is recorded, and what the graph keeps of the module."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from depthfold.errors import TraceError
from depthfold.tracing.inputs import ExampleInputs
from depthfold.tracing.tracer import Failure, ForgivingTracer, explain


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """The graph of a forward, what it calls and reads by name, and the submodules that could not be traced."""

    graph: fx.Graph
    kept: Mapping[str, Any]
    guards: Collection[str]
    failures: Mapping[str, Failure]

    def with_modules(self, module: nn.Module) -> fx.GraphModule:
        """Return the graph on the modules of `module`. Guards and constants of the forward are not there."""
        kept = dict(self.kept)
        for target in kept:
            with contextlib.suppress(AttributeError):
                kept[target] = attrgetter(target)(module)
        graph = fx.GraphModule(_holder(kept), self.graph, class_name=type(module).__name__)
        for path in {target.rpartition(".")[0] for target in kept if isinstance(kept[target], Tensor)}:
            _keep_all(graph.get_submodule(path), module.get_submodule(path))
        saved = module.state_dict()
        graph.meta[NOT_SAVED] = tuple(
            target for target in kept if isinstance(kept[target], Tensor) and target not in saved
        )
        return graph


# In a graph's meta: the tensors that are not part of the model's state dict.
NOT_SAVED = "depthfold.not_saved"


def leave_out_of_state(graph: fx.GraphModule) -> None:
    """Keep constants of the forward and buffers that the user does not save out of the state dict. torch.fx makes
    saved buffers of all of them, again in every copy."""
    for target in graph.meta.get(NOT_SAVED, ()):
        path, _, name = target.rpartition(".")
        with contextlib.suppress(AttributeError):  # merging has dropped it
            graph.get_submodule(path)._non_persistent_buffers_set.add(name)


def _holder(kept: Mapping[str, Any]) -> nn.Module:
    """Return a module that has these attributes, in this order: it is the order of the state dict."""
    root = nn.Module()
    for target, value in kept.items():
        *path, name = target.split(".")
        place = root
        for step in path:
            if not hasattr(place, step):
                place.add_module(step, nn.Module())
            place = getattr(place, step)
        # A tensor of a module that is called, too, comes with the module.
        if not hasattr(place, name) or (isinstance(value, nn.Module) and type(getattr(place, name)) is nn.Module):
            setattr(place, name, value)
    return root


def _keep_all(holder: nn.Module, original: nn.Module) -> None:
    """Let the holder of some tensors of a module hold all of them: a state dict is loaded as a whole."""
    for name, parameter in original.named_parameters(recurse=False):
        if not hasattr(holder, name):
            holder.register_parameter(name, parameter)
    for name, buffer in original.named_buffers(recurse=False):
        if not hasattr(holder, name):
            holder.register_buffer(name, buffer, persistent=name not in original._non_persistent_buffers_set)


def record(
    module: nn.Module,
    inputs: ExampleInputs,
    where: str,
    opaque: Collection[str] = (),
    fixed: Mapping[str, nn.Module] | None = None,
) -> Recorded:
    """Record the forward of a module. What the forward does to the module happens: give a copy."""
    call = _Call.of(module, inputs.map(Tensor.clone), where)  # a forward may write to its input
    tracer = ForgivingTracer(call.given, opaque, fixed)
    try:
        with _with_arguments(module, call):
            try:
                graph = tracer.trace(module)
            except torch.fx.proxy.TraceError:  # perhaps it only asks for sizes
                tracer = ForgivingTracer(call.given, opaque, fixed, answers=True)
                graph = tracer.trace(module)
    except Exception as error:
        raise TraceError(
            f"The forward of {where} cannot be traced: {explain(error)}. torch.fx records a forward that runs the same "
            'way whatever the values are. Trace a submodule instead, with at="..." (the part that holds the '
            f'convolutions, such as at="backbone"); {where} has the children {_children(module)}.'
        ) from error
    targets = dict.fromkeys(str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr"))
    kept = {name: tracer.guards[name] if name in tracer.guards else attrgetter(name)(module) for name in targets}
    return Recorded(graph, kept, tuple(tracer.guards), tracer.failures)


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of a forward that the example gives, by name, and how to pass them on. What it does not give keeps
    its default: `if mask is None` is then decided while tracing."""

    given: dict[str, Any]
    defaults: dict[str, Any]
    passed: tuple[str, ...]  # as Python code

    @classmethod
    def of(cls, module: nn.Module, inputs: ExampleInputs, where: str) -> _Call:
        signature = inspect.signature(module.forward)
        try:
            bound = signature.bind(*inputs.args, **inputs.named).arguments
        except TypeError as error:
            raise TraceError(
                f"The example inputs do not fit forward{signature} of {where}: {error}. Give a tuple of positional "
                "arguments, a dict of named ones, or the single argument."
            ) from error
        given: dict[str, Any] = {}
        defaults: dict[str, Any] = {}
        passed: list[str] = []
        kinds = {parameter.name: parameter.kind for parameter in signature.parameters.values()}
        starred = any(kinds[name] is inspect.Parameter.VAR_POSITIONAL and bound[name] for name in bound)
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                values = {f"{name}_{n}": value for n, value in enumerate(bound.get(name, ()))}
                given |= values
                passed += values
            elif parameter.kind is parameter.VAR_KEYWORD:
                given |= bound.get(name, {})
                passed += [f"{key}={key}" for key in bound.get(name, {})]
            elif name in bound:
                given[name] = bound[name]
                by_position = parameter.kind is parameter.POSITIONAL_ONLY or starred
                passed.append(
                    name if by_position and parameter.kind is not parameter.KEYWORD_ONLY else f"{name}={name}"
                )
            elif parameter.default is not parameter.empty:
                defaults[name] = parameter.default
        return cls(given, defaults, tuple(passed))


@contextlib.contextmanager
def _with_arguments(module: nn.Module, call: _Call) -> Iterator[None]:
    """For a while, a forward that takes the arguments that the example gives, and no others.

    torch.fx can fix arguments itself, but only numbers and None: a default may also be a tuple, a list or a tensor. It
    cannot hand on *args and **kwargs at all. It reads the names of the arguments off the code of the forward, so the
    forward must have code of its own.
    """
    own = type(module)
    kinds = {p.kind for p in inspect.signature(own.forward).parameters.values()}
    if not call.defaults and kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}:
        yield
        return
    names, passed = ", ".join(call.given), ", ".join(call.passed)
    scope: dict[str, Any] = {"forward_of_the_model": own.forward, "defaults": call.defaults}
    exec(f"def forward(self, {names}): return forward_of_the_model(self, {passed}, **defaults)", scope)
    module.__class__ = type(own.__name__, (own,), {"forward": scope["forward"], "__module__": own.__module__})
    try:
        yield
    finally:
        module.__class__ = own


def _children(module: nn.Module) -> str:
    names = [name for name, _ in module.named_children()]
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "none"
