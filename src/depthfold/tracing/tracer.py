"""torch.fx tracing that keeps going: a submodule whose own forward cannot be traced becomes one opaque operation."""

from __future__ import annotations

import contextlib
import operator
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from depthfold.tracing.inputs import ExampleInputs
from depthfold.tracing.modules import is_container, is_leaf, is_one_operation, mark_no_operation
from depthfold.tracing.proxies import UNKNOWN, Unrecordable, ValueProxy, WeightProxy, truthful_isinstance, value_of

_OURS = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent


def _written_by_us(filename: str) -> bool:
    """Whether a file is ours; the networks that we ship for tests are models like any other."""
    path = Path(filename)
    return path.is_relative_to(_OURS) and not path.is_relative_to(_OURS / "testing")


@dataclass(frozen=True, slots=True, eq=False)
class Failure:
    """A submodule whose forward cannot be traced: why, and what it received on the example inputs, call by call."""

    why: str
    received: list[ExampleInputs] = field(default_factory=list)


class ForgivingTracer(fx.Tracer):
    """Record a forward. Submodules that cannot be traced become one opaque operation each; `failures` says why.

    `example` are the arguments by name: every operation is also run on them, so that a proxy can answer for its value.
    `opaque` names submodules not to look into, `fixed` those that are recorded for maps of the traced size, each with
    the guard that checks the size. With `answers`, a question of the top-level forward about sizes is answered as at
    the traced size, and the graph asserts that this is still the answer.
    """

    def __init__(
        self,
        example: Mapping[str, Any] | None = None,
        opaque: Collection[str] = (),
        fixed: Mapping[str, nn.Module] | None = None,
        answers: bool = False,
    ) -> None:
        # Shapes of parameters are constants of the network: code that branches on them can be traced.
        super().__init__(param_shapes_constant=True)
        self.example, self.opaque, self.fixed = dict(example or {}), set(opaque), dict(fixed or {})
        self.failures: dict[str, Failure] = {}
        self.guards: dict[str, nn.Module] = {}  # by the names under which the graph calls them
        self.fixed_sizes = False
        self._answers = answers
        self._evaluating = False
        self._weights: dict[str, fx.Proxy] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.opaque or is_leaf(m)

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        with truthful_isinstance():
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
        if self._evaluating or self._made_in_forward(m):
            return forward(*args, **kwargs)
        path = self.path_of_module(m)
        last = next(iter(reversed(self.graph.nodes)), None)
        stack, scope = self.module_stack.copy(), (self.scope.module_path, self.scope.module_type)
        sizes = self.fixed_sizes
        try:
            if path in self.fixed:
                self.fixed_sizes = True
                guard = self._guard(path)
                return super().call_module(m, forward, (self.create_proxy("call_module", guard, args, {}),), kwargs)
            value = super().call_module(m, forward, args, kwargs)
            if self._passed_on(m, args, kwargs, value, last):
                mark_no_operation(m)
                return super().call_module(m, forward, args, kwargs)  # as one operation now
            return value
        except Exception as error:
            if _is_ours(error):
                raise
            # Innermost first: what fails here is this module's own forward, so only this module becomes opaque.
            self.opaque.add(path)
            self.failures[path] = Failure(explain(error))
            self._erase_after(last)
            self.module_stack = stack
            self.scope.module_path, self.scope.module_type = scope
            self.fixed_sizes = False
            return super().call_module(m, forward, args, kwargs)
        finally:
            self.fixed_sizes = sizes
            if path in self.failures:
                self._note_received(path, args, kwargs)

    @property
    def answers_sizes(self) -> bool:
        """Whether the top-level forward is asking, and gets an answer: a submodule that asks becomes opaque instead."""
        return self._answers and not self.module_stack

    def assert_answer(self, question: fx.Proxy, answer: bool) -> None:
        asked = question if answer else self.create_proxy("call_function", operator.not_, (question,), {})
        message = (
            "The forward asks for the size of a value, and at this size the answer is not the traced one. Trace the "
            "model at this size."
        )
        self.create_proxy("call_function", torch._assert, (asked, message), {})

    def assert_size(self, node: fx.Node, dim: int, size: int) -> None:
        found = self.create_node("call_method", "size", (node, dim), {})
        same = self.create_node("call_function", operator.eq, (found, size), {})
        message = "The forward splits a value into parts, and their number depends on its size. Trace at this size."
        self.create_node("call_function", torch._assert, (same, message), {})

    def _assert_none(self, node: fx.Node) -> None:
        """Return None for a value that is None, because `is None` cannot be asked of a proxy, and assert that it is."""
        none = self.create_node("call_function", operator.is_, (node, None), {})
        message = (
            "A module returned None for the traced inputs, and returns something else now. Trace that module alone."
        )
        self.create_node("call_function", torch._assert, (none, message), {})

    def _made_in_forward(self, m: nn.Module) -> bool:
        """Return whether the forward has just made this container, as self.features[2:] does: it has no path."""
        return m not in (self.submodule_paths or {}) and is_container(m)

    def _guard(self, path: str) -> str:
        target = f"depthfold_size_{path.replace('.', '_')}"
        self.guards[target] = self.fixed[path]
        return target

    def _note_received(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with contextlib.suppress(LookupError):
            args, kwargs = value_of((args, kwargs))
            received = ExampleInputs(args, kwargs).map(lambda tensor: tensor.detach().to("meta"))
            self.failures[path].received.append(received)

    def _evaluate(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the value of an operation on the example inputs, UNKNOWN where it cannot be run."""
        if kind == "placeholder":
            return self.example.get(str(target), UNKNOWN)
        self._evaluating = True
        try:
            args, kwargs = value_of((args, kwargs))
            with torch.no_grad():
                if kind == "call_function":
                    return target(*args, **kwargs)
                if kind == "call_method":
                    return getattr(args[0], target)(*args[1:], **kwargs)
                if kind == "call_module":
                    module = self.guards.get(target) or self.root.get_submodule(target)
                    return module(*args, **kwargs)
            return attrgetter(target)(self.root) if kind == "get_attr" else UNKNOWN
        except Exception:  # noqa: BLE001 - whatever the user's code raises; without a value it is recorded all the same
            return UNKNOWN
        finally:
            self._evaluating = False

    def _passed_on(
        self, m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any, last: fx.Node | None
    ) -> bool:
        """Whether a module of the user's gave back its argument and did nothing else: somebody's own drop-path, say.
        Recorded in evaluation, it would be gone from the student, and with it what it does in training."""
        alone = len(args) == 1 and not kwargs and value is args[0] and isinstance(value, ValueProxy)
        own = not type(m).__module__.startswith("torch.") and next(m.parameters(), None) is None
        if not (alone and own) or next(iter(reversed(self.graph.nodes)), None) is not last or is_one_operation(m):
            return False
        given = value.value  # what the module makes of it when no proxy misleads it
        found = self._evaluate("call_module", self.path_of_module(m), (given,), {})
        return isinstance(given, Tensor) and isinstance(found, Tensor) and _equal(given, found)

    def _erase_after(self, last: fx.Node | None) -> None:
        erased = set()
        for node in reversed(list(self.graph.nodes)):
            if node is last:
                break
            self.graph.erase_node(node)
            erased.add(node)
        for name in [name for name, proxy in self._weights.items() if proxy.node in erased]:
            del self._weights[name]  # torch.fx would go on using the node that is gone


def _equal(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and (one.is_meta or torch.equal(one, two) or bool(one.isnan().any()))


def _is_ours(error: BaseException) -> bool:
    """Whether our own code raised it: a bug of ours must not pass for a forward that cannot be traced."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return _written_by_us(frame.f_code.co_filename) and not isinstance(error, Unrecordable)


def explain(error: BaseException) -> str:
    """The message of an error, and the line of the user's code that raised it."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not (_written_by_us(frame.filename) or Path(frame.filename).is_relative_to(_TORCH))
    ]
    message = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
    if not frames:
        return message
    line = frames[-1]
    return f"{message} ({Path(line.filename).name}:{line.lineno}, `{line.line}`)"
