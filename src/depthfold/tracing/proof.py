"""Does the recorded graph compute what the model computes? If not: the smallest part of the model that is at fault."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from depthfold.errors import TraceError
from depthfold.tracing.inputs import ExampleInputs
from depthfold.tracing.modules import is_container, is_hooked, is_leaf
from depthfold.tracing.request import copy_model
from depthfold.tracing.rules import Reason
from depthfold.tracing.suspects import suspect, where_changed
from depthfold.tracing.tracer import explain

# Of the largest value. The graph runs the same operations in the same order, so on a CPU it gives the same digits;
# elsewhere libraries choose their algorithms anew, and products may be rounded to three digits (TF32).
_TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_ELSEWHERE = 100


@dataclass(frozen=True, slots=True)
class Fault:
    """A module that does not do what was recorded of it: its path ("" is the traced part itself), and why."""

    path: str
    reason: Reason

    @classmethod
    def of_state(cls, part: nn.Module, path: str, changed: str) -> Fault:
        """A module whose forward changes a tensor or an attribute, which has this path."""
        name = changed.rpartition(".")[2]
        place = where_changed(part.get_submodule(path), name)
        return cls(path, ("state", f"its forward changes {name}, and the next call may read it{place}"))


def spare(module: nn.Module) -> Any:
    """Return a copy to run, with its own buffers and attributes. It shares what no run changes: parameters, and layers
    of PyTorch in evaluation mode."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in module.parameters()}
    for part in module.modules():
        own = type(part).__module__.startswith("torch.nn.modules") and not any(part.children())
        if own and not (is_hooked(part) or part.training):
            shared[id(part)] = part
    return copy_model(module, shared)


def to_run(graph: fx.GraphModule) -> fx.GraphModule:
    """Return the graph, or a spare one if it calls modules that may keep something from one call to the next."""
    called = [graph.get_submodule(str(node.target)) for node in graph.graph.nodes if node.op == "call_module"]
    known = ("torch.nn.modules", "depthfold.tracing", "timm.layers")
    safe = all(type(module).__module__.startswith(known) and not module.training for module in called)
    return graph if safe else spare(graph)


Record = Callable[[nn.Module, ExampleInputs, Collection[str]], fx.GraphModule]


def find_fault(
    part: nn.Module, graph: fx.GraphModule, inputs: ExampleInputs, opaque: Collection[str], record: Record
) -> Fault | None:
    """Compare the graph with the model, on the example inputs and on random ones.

    Return None where both compute the same. `opaque` are the submodules that the graph calls as they are, `record`
    records a submodule in the same way as the whole.
    """
    calls = _several(inputs)
    model = spare(part)
    recorded = list(looked_into(model, opaque))
    states: list[Mapping[str, Any]] = []
    alike = _behave_alike(model, to_run(graph), calls, lambda: states.append(state_of(recorded)))
    # What is set once and kept, as a cache is, does not count: it is there after the second call.
    changed = _changes(*states[-2:]) if len(states) > 2 else set()
    if alike and not changed:
        return None
    if changed:
        return Fault.of_state(part, _where_changed(spare(part), calls, changed, opaque), min(changed))
    path = _smallest(part, inputs, opaque, record)
    return Fault(path, suspect(part.get_submodule(path)))


def run_model(part: nn.Module, inputs: ExampleInputs) -> None:
    """Raise TraceError if the model does not run on its example inputs."""
    try:
        _call(spare(part), inputs.map(Tensor.clone))
    except Exception as error:
        raise TraceError(
            f"The model does not run on its example inputs: {explain(error)}. Give the inputs that it takes, on its "
            "device and in its precision: a tuple of positional arguments, a dict of named ones, or a single argument."
        ) from error


def check_in_model(model: nn.Module, at: str, graph: fx.GraphModule, inputs: ExampleInputs) -> None:
    """Raise TraceError if the rest of the model does not work with the graph in the place of the submodule `at`: it may
    read what the submodule keeps on itself. Where the model itself does not run as a whole, nothing can be said."""
    try:
        wanted = _call(spare(model), inputs.map(Tensor.clone))
    except Exception:  # noqa: BLE001 - the part runs, and that is what is traced
        return
    changed = spare(model)
    changed.set_submodule(at, spare(graph))
    try:
        if _same(wanted, _call(changed, inputs.map(Tensor.clone))):
            return
        why = "its outputs change"
    except Exception as error:  # noqa: BLE001 - whatever it is, the model itself has run
        why = explain(error)
    raise TraceError(
        f"The rest of {type(model).__name__} does not work with what was recorded of at={at!r}: {why}. Let the forward "
        "of that part return all that the rest reads, instead of keeping it on the module, or trace with another at=."
    )


def _call(module: nn.Module, given: ExampleInputs) -> Any:
    """Call a module, with the same random numbers every time."""
    with same_random_numbers(given), torch.no_grad():
        if isinstance(module, fx.GraphModule):
            return module.forward(*given.for_graph(module))  # a call would print what fails
        return given.call(module)


@contextmanager
def same_random_numbers(inputs: ExampleInputs) -> Iterator[None]:
    """Draw the same random numbers each time, and leave the user's as they are."""
    devices = {leaf.device for leaf in tree_leaves((inputs.args, inputs.named)) if isinstance(leaf, Tensor)}
    with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
        torch.manual_seed(0)
        yield


def _behave_alike(
    model: nn.Module, graph: nn.Module, calls: list[ExampleInputs], after: Callable[[], None] = lambda: None
) -> bool:
    """Return whether both give the same outputs, call after call, and write the same to their inputs. `after` is called
    after each call of the model."""
    alike = True
    for given in calls:
        one, two = given.map(Tensor.clone), given.map(Tensor.clone)
        try:
            wanted = _call(model, one)
        except Exception:  # noqa: BLE001 - random inputs need not make sense to the model
            break
        after()
        try:
            found = _call(graph, two) if alike else wanted
        except Exception:  # noqa: BLE001 - whatever it is, the model itself has run
            alike = False
            continue
        alike = alike and _same((wanted, one.args, one.named), (found, two.args, two.named))
    return alike


def _same(wanted: Any, found: Any) -> bool:
    one, two = list(_leaves(wanted)), list(_leaves(found))
    return len(one) == len(two) and all(map(_same_leaf, one, two))


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what containers of any class hold: a graph may return a plain dict where the model has one of its own."""
    if isinstance(value, Mapping):
        value = [value[key] for key in value]
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, each.name) for each in fields(value)]
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        for each in value:
            yield from _leaves(each)
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
    apart = float((one[finite] - two[finite]).abs().max())
    tolerance = _TOLERANCE.get(one.dtype, 0.0) * (1 if one.device.type == "cpu" else _ELSEWHERE)
    return apart <= tolerance * float(one[finite].abs().max())


def _smallest(part: nn.Module, inputs: ExampleInputs, opaque: Collection[str], record: Record) -> str:
    """Return the path of the smallest submodule whose recording differs from what it does: the first one to end."""
    for path, given in _calls(spare(part), inputs, opaque):
        module = part.get_submodule(path)
        inside = [name.removeprefix(f"{path}.") for name in opaque if name.startswith(f"{path}.")]
        try:
            graph = record(module, given, inside)
        except TraceError:
            return path
        if not _behave_alike(spare(module), graph, _several(given)):
            return path
    return ""


def _several(inputs: ExampleInputs) -> list[ExampleInputs]:
    """Return the inputs of three calls in a row: the first shows what is computed, the others what is kept."""
    return [inputs, inputs.random(seed=0), inputs.random(seed=1)]


def _calls(model: nn.Module, inputs: ExampleInputs, opaque: Collection[str]) -> list[tuple[str, ExampleInputs]]:
    """Return every call of a submodule that was looked into, with what it received, in the order in which they end."""
    waiting: list[ExampleInputs] = []
    ended: list[tuple[str, ExampleInputs]] = []

    def begin(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        waiting.append(ExampleInputs(args, named).map(Tensor.clone))

    def end(path: str) -> Any:
        return lambda *_: ended.append((path, waiting.pop()))

    with _hooks(model, opaque, lambda _: begin, end):
        _call(model, inputs.map(Tensor.clone))
    return ended


@contextmanager
def _hooks(model: nn.Module, opaque: Collection[str], begin: Any, end: Any) -> Iterator[None]:
    handles = []
    for path, module in list(looked_into(model, opaque)):
        if path and not is_container(module):  # a container does what its children do
            handles.append(module.register_forward_pre_hook(begin(path), with_kwargs=True))
            handles.append(module.register_forward_hook(end(path)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def looked_into(module: nn.Module, opaque: Collection[str], path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose forward was recorded, by their paths. The others are called as they are."""
    if path and (path in opaque or is_leaf(module)):
        return
    yield path, module
    for name, child in module.named_children():
        yield from looked_into(child, opaque, f"{path}.{name}" if path else name)


_PLAIN = (int, float, str, bool, type(None))


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    return {name for name in before.keys() | after.keys() if not _equal(before.get(name), after.get(name))}


def state_of(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, Any]:
    """Return buffers, versions of parameters and plain attributes of modules, by their paths."""
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
        return one.shape == two.shape and (one.is_meta or torch.equal(one, two))
    return type(one) is type(two) and bool(one == two)


def _where_changed(model: nn.Module, calls: list[ExampleInputs], names: set[str], opaque: Collection[str]) -> str:
    """Return the path of the innermost module in whose call the state changes."""
    found: list[str] = []
    waiting: list[dict[str, Any]] = []
    recorded = list(looked_into(model, opaque))  # now: a module with hooks is not looked into

    def begin(_: str) -> Any:
        return lambda *_: waiting.append(state_of(recorded))

    def end(path: str) -> Any:
        return lambda *_: found.extend([path] if _changes(waiting.pop(), state_of(recorded)) & names else [])

    with _hooks(model, opaque, begin, end):
        for given in calls:
            _call(model, given.map(Tensor.clone))
    return found[0] if found else ""
