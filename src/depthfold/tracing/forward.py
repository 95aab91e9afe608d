"""Record one forward as a graph, and build a graph module with the attributes that the graph uses."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn

from depthfold.errors import TraceError
from depthfold.tracing.inputs import ExampleInputs
from depthfold.tracing.tracer import Failure, FallbackTracer, describe_error


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """The graph of a forward, the attributes that it uses, and the submodules that could not be traced."""

    graph: fx.Graph
    attributes: Mapping[str, Any]
    guards: Collection[str]
    failures: Mapping[str, Failure]

    def with_modules(self, module: nn.Module) -> fx.GraphModule:
        """Return the graph with the modules and tensors of `module`; guards and constants come from the recording."""
        attributes = dict(self.attributes)
        for target in attributes:
            with contextlib.suppress(AttributeError):
                attributes[target] = attrgetter(target)(module)
        graph = fx.GraphModule(_holder(attributes), self.graph, class_name=type(module).__name__)
        for path in {target.rpartition(".")[0] for target in attributes if isinstance(attributes[target], Tensor)}:
            _copy_tensors(graph.get_submodule(path), module.get_submodule(path))
        saved = module.state_dict()
        graph.meta[NOT_SAVED] = tuple(
            target for target in attributes if isinstance(attributes[target], Tensor) and target not in saved
        )
        return graph


# Key in the meta of a graph: its tensors that are not part of the model's state dict.
NOT_SAVED = "depthfold.not_saved"


def exclude_unsaved_buffers(graph: fx.GraphModule) -> None:
    """Exclude constants and non-persistent buffers from the state dict, after torch.fx has made them persistent."""
    for target in graph.meta.get(NOT_SAVED, ()):
        path, _, name = target.rpartition(".")
        with contextlib.suppress(AttributeError):  # merging has removed it
            graph.get_submodule(path)._non_persistent_buffers_set.add(name)


def _holder(attributes: Mapping[str, Any]) -> nn.Module:
    """Return a module with these attributes. Their order is the order of the state dict."""
    root = nn.Module()
    for target, value in attributes.items():
        *path, name = target.split(".")
        parent = root
        for step in path:
            if not hasattr(parent, step):
                parent.add_module(step, nn.Module())
            parent = getattr(parent, step)
        # If the graph also calls the module of a tensor, the tensor comes with the module.
        if not hasattr(parent, name) or (isinstance(value, nn.Module) and type(getattr(parent, name)) is nn.Module):
            setattr(parent, name, value)
    return root


def _copy_tensors(holder: nn.Module, original: nn.Module) -> None:
    """Add the remaining tensors of a module to its holder, so that the state dict of the module can be loaded."""
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
    """Record the forward of a module. The forward may change the module, so pass a copy."""
    call = _Call.of(module, inputs.map(Tensor.clone), where)  # a forward may write to its input
    tracer = FallbackTracer(call.arguments, opaque, fixed)
    try:
        with _with_arguments(module, call):
            try:
                graph = tracer.trace(module)
            except torch.fx.proxy.TraceError:  # its control flow may depend only on sizes
                tracer = FallbackTracer(call.arguments, opaque, fixed, answer_sizes=True)
                graph = tracer.trace(module)
    except Exception as error:
        raise TraceError(
            f"The forward of {where} cannot be traced: {describe_error(error)}. Trace a submodule that contains the "
            f'convolutions, for example at="backbone"; {where} has the children {_children(module)}.'
        ) from error
    targets = dict.fromkeys(str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr"))
    attributes = {name: tracer.guards[name] if name in tracer.guards else attrgetter(name)(module) for name in targets}
    return Recorded(graph, attributes, tuple(tracer.guards), tracer.failures)


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments that the example inputs give to a forward, by name, and the code that passes them on.

    Other arguments keep their defaults, so that `if mask is None` is decided while tracing.
    """

    arguments: dict[str, Any]
    defaults: dict[str, Any]
    passed: tuple[str, ...]  # as Python code

    @classmethod
    def of(cls, module: nn.Module, inputs: ExampleInputs, where: str) -> _Call:
        signature = inspect.signature(module.forward)
        try:
            bound = signature.bind(*inputs.args, **inputs.named).arguments
        except TypeError as error:
            raise TraceError(
                f"The example inputs do not match forward{signature} of {where}: {error}. Pass a tuple of positional "
                "arguments, a dict of keyword arguments, or a single argument. The command line has only the last."
            ) from error
        arguments: dict[str, Any] = {}
        defaults: dict[str, Any] = {}
        passed: list[str] = []
        starred = any(p.kind is p.VAR_POSITIONAL and bound.get(p.name) for p in signature.parameters.values())
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                values = {f"{name}_{n}": value for n, value in enumerate(bound.get(name, ()))}
                arguments |= values
                passed += values
            elif parameter.kind is parameter.VAR_KEYWORD:
                arguments |= bound.get(name, {})
                passed += [f"{key}={key}" for key in bound.get(name, {})]
            elif name in bound:
                arguments[name] = bound[name]
                starred_before = starred and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
                by_position = parameter.kind is parameter.POSITIONAL_ONLY or starred_before
                passed.append(name if by_position else f"{name}={name}")
            elif parameter.default is not parameter.empty:
                defaults[name] = parameter.default
        return cls(arguments, defaults, tuple(passed))


@contextlib.contextmanager
def _with_arguments(module: nn.Module, call: _Call) -> Iterator[None]:
    """Give the module a forward that takes only the arguments of the example inputs, within this context.

    torch.fx can fix arguments itself, but only to numbers and None, and it cannot pass on *args and **kwargs. It also
    ignores a forward that was replaced on the object. It reads the names of the arguments from the code of the forward,
    so the replacement is compiled from source.
    """
    own, replaced = type(module), vars(module).get("forward")
    kinds = {p.kind for p in inspect.signature(own.forward).parameters.values()}
    # Other functions, such as torch.no_grad()(module.forward), still call the model of which this module is a copy.
    forward = replaced if isinstance(replaced, MethodType | functools.partial) else MethodType(own.forward, module)
    if forward is not replaced and not call.defaults and kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}:
        yield
        return
    names, passed = ", ".join(call.arguments), ", ".join(call.passed)
    scope: dict[str, Any] = {"forward_of_the_model": forward, "defaults": call.defaults}
    exec(f"def forward(self, {names}): return forward_of_the_model({passed}, **defaults)", scope)
    module.__class__ = type(own.__name__, (own,), {"forward": scope["forward"], "__module__": own.__module__})
    try:
        yield
    finally:
        module.__class__ = own


def _children(module: nn.Module) -> str:
    names = [name for name, _ in module.named_children()]
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "none"
