"""A tracer for torch.fx that records submodules that cannot be traced as opaque operations."""

from __future__ import annotations

import contextlib
import copy
import operator
import traceback
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from depthfold.tracing.constant_sizes import ConstantSizes, perform
from depthfold.tracing.inputs import ExampleInputs
from depthfold.tracing.modules import is_atomic, is_container, is_leaf, mark_no_op
from depthfold.tracing.proxies import (
    FLAGS,
    SIZES,
    UNKNOWN,
    Unrecordable,
    ValueProxy,
    WeightProxy,
    depends_only_on,
    functions_of_values,
    value_of,
)

_PACKAGE = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent


def _in_package(filename: str) -> bool:
    """Return True if a file is part of this package, except for its test networks, which are user models."""
    path = Path(filename)
    return path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "testing")


@dataclass(frozen=True, slots=True, eq=False)
class Failure:
    """A submodule whose forward cannot be traced: the reason, and the inputs of each of its calls."""

    why: str
    inputs: list[ExampleInputs] = field(default_factory=list)


class FallbackTracer(fx.Tracer):
    """Record a forward. Each submodule that cannot be traced becomes one opaque operation, with a reason in `failures`.

    `example` has the arguments by name. Every operation also runs on them, so that proxies know their values. `opaque`
    lists submodules to call as a whole. `fixed` maps submodules that are recorded only for the traced size to their
    size guards. With `answer_sizes`, conditions on sizes in the top-level forward are decided for the traced size, and
    the graph asserts them.
    """

    def __init__(
        self,
        example: Mapping[str, Any] | None = None,
        opaque: Collection[str] = (),
        fixed: Mapping[str, nn.Module] | None = None,
        answer_sizes: bool = False,
    ) -> None:
        # Shapes of parameters are constants of the network: code that branches on them can be traced.
        super().__init__(param_shapes_constant=True)
        self.example, self.opaque, self.fixed = dict(example or {}), set(opaque), dict(fixed or {})
        self.failures: dict[str, Failure] = {}
        self.guards: dict[str, nn.Module] = {}  # by the name of the module in the graph
        self.fixed_sizes = False
        self._answer_sizes = answer_sizes
        self._evaluating = False
        self._constant_sizes: ConstantSizes | None = None
        self._weights: dict[str, fx.Proxy] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.opaque or is_leaf(m)

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        with functions_of_values():
            return super().trace(root, concrete_args)

    def create_proxy(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any | None = None,
        proxy_factory_fn: Callable[[fx.Node], fx.Proxy] | None = None,
    ) -> fx.Proxy:
        def proxy(node: fx.Node) -> Any:
            value = self._evaluate(kind, target, args, kwargs)
            if value is None and target is operator.getitem:
                return self._assert_none(node)
            if kind == "get_attr" and isinstance(value, nn.Parameter):
                return WeightProxy(self, node, target, value)
            return ValueProxy(node, self, value)

        return super().create_proxy(kind, target, args, kwargs, name, type_expr, proxy)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        self._weights = parameter_proxy_cache
        return attr_val if self._evaluating else super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._evaluating or self._is_unregistered(m):
            return forward(*args, **kwargs)
        path = self.path_of_module(m)
        last = next(iter(reversed(self.graph.nodes)), None)
        stack, scope = self.module_stack.copy(), (self.scope.module_path, self.scope.module_type)
        sizes = self.fixed_sizes
        containers = [(each, copy.copy(each)) for each in _containers((args, kwargs))]
        try:
            if path in self.fixed:
                self.fixed_sizes = True
                guard = f"depthfold_size_{path.replace('.', '_')}"
                self.guards[guard] = self.fixed[path]
                return super().call_module(m, forward, (self.create_proxy("call_module", guard, args, {}),), kwargs)
            value = super().call_module(m, forward, args, kwargs)
            if self._returned_its_input(m, args, kwargs, value, last):
                mark_no_op(m)
                return super().call_module(m, forward, args, kwargs)  # now as one operation
            return value
        except Exception as error:
            if _is_own_bug(error):
                raise
            # Failures of inner modules were handled before, so only this module becomes opaque.
            self.opaque.add(path)
            self.failures[path] = Failure(describe_error(error))
            self._erase_after(last)
            for each, before in containers:  # what was written to them has just been erased
                each.clear()
                each.extend(before) if isinstance(each, list) else each.update(before)
            self.module_stack = stack
            self.scope.module_path, self.scope.module_type = scope
            self.fixed_sizes = False
            return super().call_module(m, forward, args, kwargs)
        finally:
            self.fixed_sizes = sizes
            if path in self.failures:
                self._store_inputs(path, args, kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        value = _known_value(obj)
        if not isinstance(value, int):
            return super().to_bool(obj)
        # A network also runs on other devices and in other precisions, so the answer for the example is not asserted.
        if depends_only_on(FLAGS, obj.node) or self._is_constant(obj):
            return bool(value)
        if self._answers_sizes(obj):
            self._assert_answer(obj, bool(value))
            return bool(value)
        return super().to_bool(obj)

    def number(self, obj: fx.Proxy, kind: Any = int | float) -> Any:
        """Return a number that depends on sizes only, and assert it if they vary.

        Raise the TraceError of a condition otherwise.
        """
        value = _known_value(obj)
        if isinstance(value, kind) and self._is_constant(obj):
            return value
        if not (isinstance(value, kind) and self._answers_sizes(obj)):
            return super().to_bool(obj)
        self._assert_answer(self.create_proxy("call_function", operator.eq, (obj, value), {}), True)
        return value

    def _is_constant(self, obj: fx.Proxy) -> bool:
        """Return True if this depends only on sizes that are the same for all inputs, such as numbers of channels."""
        if not depends_only_on(SIZES, obj.node):
            return False
        self._evaluating = True
        try:
            self._constant_sizes = self._constant_sizes or ConstantSizes(self.root, self.example, self.guards)
            return self._constant_sizes.decide(obj.node)
        except Exception:  # noqa: BLE001 - the network, or the copy, may not run at other sizes
            return False
        finally:
            self._evaluating = False

    def _answers_sizes(self, obj: fx.Proxy) -> bool:
        """Return True if this depends on sizes only and is decided now. In a submodule it makes it opaque instead."""
        return self._answer_sizes and not self.module_stack and depends_only_on(SIZES, obj.node)

    def _assert_answer(self, condition: fx.Proxy, answer: bool) -> None:
        """Add an assertion that a condition on sizes has the same answer as at the traced size."""
        expected = condition if answer else self.create_proxy("call_function", operator.not_, (condition,), {})
        message = (
            "The forward depends on the size of a value, and at this size it differs from the traced forward. Trace "
            "the model at this size."
        )
        self.create_proxy("call_function", torch._assert, (expected, message), {})

    def assert_size(self, node: fx.Node, dim: int, size: int) -> None:
        """Add an assertion that a value that is split into parts has the traced size."""
        found = self.create_node("call_method", "size", (node, dim), {})
        same = self.create_node("call_function", operator.eq, (found, size), {})
        message = "The forward splits a value into parts whose number depends on its size. Trace at this size."
        self.create_node("call_function", torch._assert, (same, message), {})

    def _assert_none(self, node: fx.Node) -> None:
        """Return None instead of a proxy, so that `is None` works, and add an assertion that the value is None."""
        none = self.create_node("call_function", operator.is_, (node, None), {})
        message = "A module returned None for the traced inputs, but something else now. Trace that module alone."
        self.create_node("call_function", torch._assert, (none, message), {})

    def _is_unregistered(self, m: nn.Module) -> bool:
        """Return True for a module that the forward has just created, as nn.ReLU()(x) and self.features[2:] do.

        Only a container may have weights. A graph would lose those of other modules.
        """
        if m in (self.submodule_paths or {}):
            return False
        if is_container(m) or not [*m.parameters(), *m.buffers()]:
            return True
        raise Unrecordable(
            f"it calls a {type(m).__name__} that is not a submodule, so assign that to an "
            "attribute, or put it into an nn.ModuleList instead of a list"
        )

    def _store_inputs(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with contextlib.suppress(LookupError):
            args, kwargs = value_of((args, kwargs))
            inputs = ExampleInputs(args, kwargs).map(lambda tensor: tensor.detach().to("meta"))
            self.failures[path].inputs.append(inputs)

    def _evaluate(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the value of an operation on the example inputs, or UNKNOWN if it cannot be run."""
        if kind == "placeholder":
            return self.example.get(str(target), UNKNOWN)
        self._evaluating = True
        try:
            args, kwargs = value_of((args, kwargs))
            with torch.no_grad():
                return perform(self.root, kind, target, args, kwargs, self.guards)
        except Exception:  # noqa: BLE001 - any error of the user's code; the operation is still recorded
            return UNKNOWN
        finally:
            self._evaluating = False

    def _returned_its_input(
        self, m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any, last: fx.Node | None
    ) -> bool:
        """Return True if a user's module returned its argument and did nothing else, as a drop-path in evaluation does.

        Such a module is recorded as one operation, so that it still works in training.
        """
        alone = len(args) == 1 and not kwargs and value is args[0] and isinstance(value, ValueProxy)
        own = not type(m).__module__.startswith("torch.") and next(m.parameters(), None) is None
        if not (alone and own) or next(iter(reversed(self.graph.nodes)), None) is not last or is_atomic(m):
            return False
        tensor = value.value  # also call the module with a tensor, because it may treat proxies differently
        found = self._evaluate("call_module", self.path_of_module(m), (tensor,), {})
        return isinstance(tensor, Tensor) and isinstance(found, Tensor) and _equal(tensor, found)

    def _erase_after(self, last: fx.Node | None) -> None:
        """Erase all nodes after this one."""
        erased = set()
        for node in reversed(list(self.graph.nodes)):
            if node is last:
                break
            self.graph.erase_node(node)
            erased.add(node)
        for name in [name for name, proxy in self._weights.items() if proxy.node in erased]:
            del self._weights[name]  # otherwise torch.fx would reuse the erased node


def _containers(value: Any, seen: dict[int, Any] | None = None) -> Iterator[list[Any] | dict[Any, Any]]:
    """Yield the lists and dicts in the arguments of a call, to which a forward can write."""
    seen = {} if seen is None else seen
    if id(value) in seen or type(value) not in (list, tuple, dict, OrderedDict, defaultdict):
        return
    seen[id(value)] = value
    if not isinstance(value, tuple):
        yield value
    for each in value.values() if isinstance(value, dict) else value:
        yield from _containers(each, seen)


def _known_value(proxy: fx.Proxy) -> Any:
    try:
        return value_of(proxy)
    except LookupError:
        return UNKNOWN


def _equal(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and (one.is_meta or torch.equal(one, two) or bool(one.isnan().any()))


def _is_own_bug(error: BaseException) -> bool:
    """Return True if this package raised the error, so that its bugs do not look like untraceable forwards."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return _in_package(frame.f_code.co_filename) and not isinstance(error, Unrecordable)


def describe_error(error: BaseException) -> str:
    """Return the message of an error and the line of the user's code that raised it."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not (_in_package(frame.filename) or Path(frame.filename).is_relative_to(_TORCH))
    ]
    message = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
    if not frames:
        return message
    line = frames[-1]
    return f"{message} ({Path(line.filename).name}:{line.lineno}, `{line.line}`)"
