"""Compare the recorded graph with the model, and find the smallest submodule at fault if they differ."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from depthfold.errors import TraceError
from depthfold.tracing.diagnosis import likely_reason, line_that_changes
from depthfold.tracing.inputs import ExampleInputs
from depthfold.tracing.modules import is_container, is_hooked, is_leaf
from depthfold.tracing.random_numbers import fork_rng
from depthfold.tracing.request import copy_model
from depthfold.tracing.rules import Reason
from depthfold.tracing.tracer import describe_error

# Relative to the largest value. The graph runs the same operations in the same order, so results on a CPU are the same.
# Libraries for other devices may select another algorithm in each run, and TF32 rounds products to three digits.
_TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_OTHER_DEVICES = 100


@dataclass(frozen=True, slots=True)
class Fault:
    """A module that does not compute what was recorded: its path ("" for the traced part itself) and the reason."""

    path: str
    reason: Reason

    @classmethod
    def of_state(cls, part: nn.Module, path: str, changed: str) -> Fault:
        """Return the fault of a module whose forward changes the tensor or attribute at the path `changed`."""
        name = changed.rpartition(".")[2]
        line = line_that_changes(part.get_submodule(path), name)
        return cls(path, ("state", f"its forward changes {name}, which the next call may read{line}"))


def working_copy(module: nn.Module) -> Any:
    """Return a copy to run, which shares what a run does not change: parameters and layers of PyTorch."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in module.parameters()}
    for part in module.modules():
        own = type(part).__module__.startswith("torch.nn.modules") and not any(part.children())
        if own and not (is_hooked(part) or part.training):
            shared[id(part)] = part
    return copy_model(module, shared)


def working_graph(graph: fx.GraphModule) -> fx.GraphModule:
    """Return the graph, or a working copy of it if it calls modules that may keep state between calls."""
    called = [graph.get_submodule(str(node.target)) for node in graph.graph.nodes if node.op == "call_module"]
    known = ("torch.nn.modules", "depthfold.tracing", "timm.layers")
    safe = all(type(module).__module__.startswith(known) and not module.training for module in called)
    return graph if safe else working_copy(graph)


Record = Callable[[nn.Module, ExampleInputs, Collection[str]], fx.GraphModule]


def find_fault(
    part: nn.Module, graph: fx.GraphModule, inputs: ExampleInputs, opaque: Collection[str], record: Record
) -> Fault | None:
    """Compare the graph with the model on the example inputs and on random ones. Return None if they agree.

    `opaque` are the submodules that the graph calls as a whole. `record` records a submodule like the whole model.
    """
    calls = _three_calls(inputs)
    model = working_copy(part)
    recorded = list(recorded_modules(model, opaque))
    states: list[Mapping[str, Any]] = []
    agree = _same_behaviour(model, working_graph(graph), calls, lambda: states.append(module_state(recorded)))
    # A value that is set once, such as a cache, is not a fault: it no longer changes in the third call.
    changed = _changes(*states[-2:]) if len(states) > 2 else set()
    if agree and not changed:
        return None
    if changed:
        return Fault.of_state(part, _where_changed(working_copy(part), calls, changed, opaque), min(changed))
    path = _smallest_fault(part, inputs, opaque, record)
    return Fault(path, likely_reason(part.get_submodule(path)))


def run_model(part: nn.Module, inputs: ExampleInputs) -> None:
    """Raise TraceError if the model does not run on its example inputs."""
    try:
        _call(working_copy(part), inputs.map(Tensor.clone))
    except Exception as error:
        raise TraceError(
            f"The model does not run on its example inputs: {describe_error(error)}. Pass inputs on its device and in "
            "its precision: a tuple of positional arguments, a dict of keyword arguments, or a single argument."
        ) from error


def check_in_model(model: nn.Module, at: str, graph: fx.GraphModule, inputs: ExampleInputs) -> None:
    """Raise TraceError if the model runs as a whole, but not with the graph in place of the submodule `at`."""
    try:
        expected = _call(working_copy(model), inputs.map(Tensor.clone))
    except Exception:  # noqa: BLE001 - any error of the user's code; the traced part runs
        return
    changed = working_copy(model)
    changed.set_submodule(at, working_copy(graph))
    try:
        if _same(expected, _call(changed, inputs.map(Tensor.clone))):
            return
        why = "its outputs change"
    except Exception as error:  # noqa: BLE001 - any error of the user's code
        why = describe_error(error)
    raise TraceError(
        f"The rest of {type(model).__name__} does not work with the recorded graph of at={at!r}: {why}. Let the "
        "forward of that part return everything that the rest reads from the module, or choose another at=."
    )


def _call(module: nn.Module, inputs: ExampleInputs) -> Any:
    """Call a module, with the same random numbers every time."""
    with fixed_random_numbers(inputs), torch.no_grad():
        if isinstance(module, fx.GraphModule):
            return module.forward(*inputs.for_graph(module))  # __call__ would print errors
        return inputs.call(module)


@contextmanager
def fixed_random_numbers(inputs: ExampleInputs) -> Iterator[None]:
    """Seed PyTorch within this context, and restore the state of its generators afterwards."""
    with fork_rng(*{tensor.device for tensor in inputs.tensors()}) as seed:
        seed(0)
        yield


def _same_behaviour(
    model: nn.Module, graph: nn.Module, calls: list[ExampleInputs], after: Callable[[], None] = lambda: None
) -> bool:
    """Return True if both return the same values and write the same values to their inputs, in every call.

    `after` runs after each call of the model.
    """
    agree = True
    for inputs in calls:
        one, two = inputs.map(Tensor.clone), inputs.map(Tensor.clone)
        try:
            expected = _call(model, one)
        except Exception:  # noqa: BLE001 - the model may not accept random inputs
            break
        after()
        try:
            found = _call(graph, two) if agree else expected
        except Exception:  # noqa: BLE001 - any error of the user's code
            agree = False
            continue
        agree = agree and _same((expected, one.args, one.named), (found, two.args, two.named))
    return agree


def _same(expected: Any, found: Any) -> bool:
    one, two = list(_leaves(expected)), list(_leaves(found))
    return len(one) == len(two) and all(map(_same_leaf, one, two))


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the elements of nested containers. A graph may return a plain dict where the model has a subclass."""
    if isinstance(value, Mapping):
        value = [value[key] for key in value]
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, entry.name) for entry in fields(value)]
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        for element in value:
            yield from _leaves(element)
    else:
        yield value


def _same_leaf(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor) != isinstance(two, Tensor):
        return False
    if not isinstance(one, Tensor):
        return bool(one == two)
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if one.is_meta or not one.numel() or torch.equal(one, two):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    finite = one.isfinite()
    if not torch.equal(finite, two.isfinite()):
        return False
    if not finite.any():
        return True
    difference = float((one[finite] - two[finite]).abs().max())
    tolerance = _TOLERANCE.get(one.dtype, 0.0) * (1 if one.device.type == "cpu" else _OTHER_DEVICES)
    return difference <= tolerance * float(one[finite].abs().max())


def _smallest_fault(part: nn.Module, inputs: ExampleInputs, opaque: Collection[str], record: Record) -> str:
    """Return the path of the smallest submodule whose recording differs from it: the first one to finish."""
    for path, received in _submodule_calls(working_copy(part), inputs, opaque):
        module = part.get_submodule(path)
        inside = [name.removeprefix(f"{path}.") for name in opaque if name.startswith(f"{path}.")]
        try:
            graph = record(module, received, inside)
        except TraceError:
            return path
        if not _same_behaviour(working_copy(module), graph, _three_calls(received)):
            return path
    return ""


def _three_calls(inputs: ExampleInputs) -> list[ExampleInputs]:
    """Return the inputs of three calls in a row. The first one checks the outputs, the others check for state."""
    return [inputs, inputs.random(seed=0), inputs.random(seed=1)]


def _submodule_calls(
    model: nn.Module, inputs: ExampleInputs, opaque: Collection[str]
) -> list[tuple[str, ExampleInputs]]:
    """Return the calls of all recorded submodules with their inputs, in the order in which they finish."""
    started: list[ExampleInputs] = []
    finished: list[tuple[str, ExampleInputs]] = []

    def begin(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        started.append(ExampleInputs(args, named).map(Tensor.clone))

    def end(path: str) -> Any:
        return lambda *_: finished.append((path, started.pop()))

    with _hooks(model, opaque, lambda _: begin, end):
        _call(model, inputs.map(Tensor.clone))
    return finished


@contextmanager
def _hooks(model: nn.Module, opaque: Collection[str], begin: Any, end: Any) -> Iterator[None]:
    """Register hooks on all recorded submodules within this context."""
    handles = []
    for path, module in list(recorded_modules(model, opaque)):
        if path and not is_container(module):  # a container does what its children do
            handles.append(module.register_forward_pre_hook(begin(path), with_kwargs=True))
            handles.append(module.register_forward_hook(end(path)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def recorded_modules(module: nn.Module, opaque: Collection[str], path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose forward was recorded, with their paths. The graph calls the others as a whole."""
    if path and (path in opaque or is_leaf(module)):
        return
    yield path, module
    for name, child in module.named_children():
        yield from recorded_modules(child, opaque, f"{path}.{name}" if path else name)


_PLAIN = (int, float, str, bool, type(None))


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    return {name for name in before.keys() | after.keys() if not _equal(before.get(name), after.get(name))}


def module_state(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, Any]:
    """Return the buffers, parameter versions and plain attributes of modules, by path."""
    state: dict[str, Any] = {}
    for path, module in modules:
        prefix = f"{path}." if path else ""
        for name, buffer in module.named_buffers(recurse=False):
            state[prefix + name] = buffer.detach().clone()
        for name, parameter in module.named_parameters(recurse=False):
            state[prefix + name] = parameter._version
        for name, value in vars(module).items():
            if _is_plain(value):
                state[prefix + name] = copy.deepcopy(value)
    return state


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, _PLAIN)


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        if one.is_meta or one.shape != two.shape or torch.equal(one, two):
            return one.shape == two.shape
        return one.is_floating_point() and torch.allclose(one, two, rtol=0, atol=0, equal_nan=True)
    return type(one) is type(two) and bool(one == two)


def _where_changed(model: nn.Module, calls: list[ExampleInputs], names: set[str], opaque: Collection[str]) -> str:
    """Return the path of the innermost module whose call changes one of these names."""
    found: list[str] = []
    before: list[dict[str, Any]] = []
    recorded = list(recorded_modules(model, opaque))  # before adding hooks, because a hooked module is not recorded

    def begin(_: str) -> Any:
        return lambda *_: before.append(module_state(recorded))

    def end(path: str) -> Any:
        return lambda *_: found.extend([path] if _changes(before.pop(), module_state(recorded)) & names else [])

    with _hooks(model, opaque, begin, end):
        for inputs in calls:
            _call(model, inputs.map(Tensor.clone))
    return found[0] if found else ""
