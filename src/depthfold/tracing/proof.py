"""Does the recorded graph compute what the model computes? If not: the smallest part of the model that is at fault."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from depthfold.errors import TraceError
from depthfold.tracing.inputs import Inputs
from depthfold.tracing.modules import is_container, is_leaf
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


def spare(module: nn.Module) -> Any:
    """Return a copy to run: it has the parameters of the module itself, and its own buffers and attributes."""
    return copy_model(module, {id(parameter): parameter for parameter in module.parameters()})


Record = Callable[[nn.Module, Inputs, Collection[str]], fx.GraphModule]


def find_fault(
    part: nn.Module, graph: fx.GraphModule, inputs: Inputs, opaque: Collection[str], record: Record
) -> Fault | None:
    """Compare the graph with the model, on the example inputs and on random ones.

    Return None where both compute the same. `opaque` are the submodules that the graph calls as they are, `record`
    records a submodule in the same way as the whole.
    """
    calls = [inputs, inputs.random(seed=0), inputs.random(seed=1)]
    states = _Watched(spare(part), opaque)
    alike = _behave_alike(states.model, spare(graph), calls, states.note)
    changed = states.changed
    if alike and not changed:
        return None
    if changed:
        path = _where_changed(spare(part), calls, changed, opaque)
        name = sorted(changed)[0].rpartition(".")[2]
        place = where_changed(part.get_submodule(path), name)
        return Fault(path, ("state", f"its forward changes {name}, and the next call may read it{place}"))
    path = _smallest(part, inputs, opaque, record)
    return Fault(path, suspect(part.get_submodule(path)))


def run_model(part: nn.Module, inputs: Inputs) -> None:
    """Raise TraceError if the model does not run on its example inputs."""
    try:
        _call(spare(part), inputs.map(Tensor.clone))
    except Exception as error:
        raise TraceError(
            f"The model does not run on its example inputs: {explain(error)}. Give the inputs that it takes, on its "
            "device and in its precision: a tuple of positional arguments, a dict of named ones, or a single argument."
        ) from error


def _call(module: nn.Module, given: Inputs) -> Any:
    """Call a module, with the same random numbers every time."""
    devices = {leaf.device for leaf in tree_leaves((given.args, given.named)) if isinstance(leaf, Tensor)}
    with torch.random.fork_rng([device for device in devices if device.type == "cuda"]), torch.no_grad():
        torch.manual_seed(0)
        if isinstance(module, fx.GraphModule):
            return module(*given.for_graph(module))
        return given.call(module)


def _behave_alike(
    model: nn.Module, graph: nn.Module, calls: list[Inputs], after: Callable[[], None] = lambda: None
) -> bool:
    """Return whether both give the same outputs, call after call, and write the same to their inputs."""
    for given in calls:
        one, two = given.map(Tensor.clone), given.map(Tensor.clone)
        try:
            wanted = _call(model, one)
        except Exception:  # noqa: BLE001 - random inputs need not make sense to the model
            return True
        after()
        try:
            found = _call(graph, two)
        except Exception:  # noqa: BLE001 - whatever it is, the model itself has run
            return False
        if not _same((wanted, one.args, one.named), (found, two.args, two.named)):
            return False
    return True


def _same(wanted: Any, found: Any) -> bool:
    one, two = tree_leaves(wanted), tree_leaves(found)
    return len(one) == len(two) and all(map(_same_leaf, one, two))


def _same_leaf(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor) != isinstance(two, Tensor):
        return False
    if not isinstance(one, Tensor):
        return one == two if isinstance(one, int | float | str | None) else True
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


def _smallest(part: nn.Module, inputs: Inputs, opaque: Collection[str], record: Record) -> str:
    """Return the path of the smallest submodule whose recording differs from what it does: the first one to end."""
    for path, module, given in _calls(spare(part), inputs, opaque):
        inside = [name.removeprefix(f"{path}.") for name in opaque if name.startswith(f"{path}.")]
        try:
            graph = record(spare(module), given, inside)
        except TraceError:
            return path
        if not _behave_alike(spare(module), graph, [given, given.random(seed=0)]):
            return path
    return ""


def _calls(model: nn.Module, inputs: Inputs, opaque: Collection[str]) -> list[tuple[str, nn.Module, Inputs]]:
    """Return every call of a submodule that was looked into, with what it received, in the order in which they end."""
    waiting: list[Inputs] = []
    ended: list[tuple[str, nn.Module, Inputs]] = []

    def begin(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        waiting.append(Inputs(args, named).map(Tensor.clone))

    def end(path: str) -> Any:
        return lambda module, *_: ended.append((path, module, waiting.pop()))

    with _hooks(model, opaque, lambda _: begin, end):
        _call(model, inputs.map(Tensor.clone))
    return ended


@contextmanager
def _hooks(model: nn.Module, opaque: Collection[str], begin: Any, end: Any) -> Iterator[None]:
    handles = []
    for path, module in looked_into(model, opaque):
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


class _Watched:
    """A model, and what its forward changes on itself from one call to the next. A value that is set once and kept, as
    a cache is, does not count: it is compared only after the second call."""

    def __init__(self, model: nn.Module, opaque: Collection[str]) -> None:
        self.model, self.opaque = model, opaque
        self.states: list[Mapping[str, Any]] = []

    def note(self) -> None:
        self.states.append(state_of(self.model, self.opaque))

    @property
    def changed(self) -> set[str]:
        if len(self.states) < 3:
            return set()
        before, after = self.states[-2:]
        return {name for name in before.keys() | after.keys() if not _equal(before.get(name), after.get(name))}


def state_of(model: nn.Module, opaque: Collection[str]) -> dict[str, Any]:
    """Return buffers, versions of parameters and plain attributes of every module that was looked into."""
    state: dict[str, Any] = {}
    for path, module in looked_into(model, opaque):
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


def _where_changed(model: nn.Module, calls: list[Inputs], names: set[str], opaque: Collection[str]) -> str:
    """Return the path of the innermost module in whose call the state changes."""
    found: list[str] = []
    waiting: list[dict[str, Any]] = []

    def state() -> dict[str, Any]:
        return {name: value for name, value in state_of(model, opaque).items() if name in names}

    def begin(_: str) -> Any:
        return lambda *_: waiting.append(state())

    def end(path: str) -> Any:
        def compare(*_: Any) -> None:
            before, after = waiting.pop(), state()
            if any(not _equal(before.get(name), after.get(name)) for name in names):
                found.append(path)

        return compare

    with _hooks(model, opaque, begin, end):
        for given in calls:
            _call(model, given.map(Tensor.clone))
    return found[0] if found else ""
