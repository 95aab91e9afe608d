"""torch.fx tracing that keeps going: a submodule whose own forward cannot be traced becomes one opaque operation."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from depthfold.errors import TraceError
from depthfold.tracing.inputs import Inputs
from depthfold.tracing.modules import is_one_operation, mark_no_operation

_OURS = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent


def _written_by_us(filename: str) -> bool:
    """Whether a file is ours; the networks that we ship for tests are models like any other."""
    path = Path(filename)
    return path.is_relative_to(_OURS) and not path.is_relative_to(_OURS / "testing")


class ForgivingTracer(fx.Tracer):
    """Records a forward. `opaque` maps the path of each submodule that could not be traced to the reason."""

    def __init__(self) -> None:
        # Shapes of parameters are constants of the network: code that branches on them can be traced.
        super().__init__(param_shapes_constant=True)
        self.opaque: dict[str, str] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self.opaque or is_one_operation(m):
            return True
        return super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        last = next(iter(reversed(self.graph.nodes)), None)
        stack, scope = self.module_stack.copy(), (self.scope.module_path, self.scope.module_type)
        try:
            value = super().call_module(m, forward, args, kwargs)
            if self._passed_on(m, args, kwargs, value, last):
                mark_no_operation(m)
                return super().call_module(m, forward, args, kwargs)  # as one operation now
            return value
        except Exception as error:
            if _is_ours(error):
                raise
            # Innermost first: what fails here is this module's own forward, so only this module becomes opaque.
            self.opaque[self.path_of_module(m)] = explain(error)
            self._erase_after(last)
            self.module_stack = stack
            self.scope.module_path, self.scope.module_type = scope
            return super().call_module(m, forward, args, kwargs)

    def _passed_on(
        self, m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any, last: fx.Node | None
    ) -> bool:
        """Whether a module of the user's gave back its argument and did nothing else: somebody's own drop-path, say.
        Recorded in evaluation, it would be gone from the student, and with it what it does in training."""
        alone = len(args) == 1 and not kwargs and value is args[0] and isinstance(value, fx.Proxy)
        own = not type(m).__module__.startswith("torch.") and next(m.parameters(), None) is None
        return alone and own and next(iter(reversed(self.graph.nodes)), None) is last and not is_one_operation(m)

    def _erase_after(self, last: fx.Node | None) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node is last:
                return
            self.graph.erase_node(node)


def trace_graph(module: nn.Module, inputs: Inputs, where: str) -> tuple[fx.GraphModule, dict[str, str]]:
    """The module as an fx graph, and the reasons for its opaque submodules."""
    tracer = ForgivingTracer()
    defaults = _defaults(module, inputs, where)
    try:
        with _without_arguments(module, defaults):
            graph = tracer.trace(module)
    except Exception as error:
        raise TraceError(
            f"The forward of {where} cannot be traced: {explain(error)}. torch.fx records a forward that runs the same "
            'way whatever the values are. Trace a submodule instead, with at="..." (the part that holds the '
            f'convolutions, such as at="backbone"); {where} has the children {_children(module)}.'
        ) from error
    return fx.GraphModule(module, graph, class_name=type(module).__name__), tracer.opaque


def _defaults(module: nn.Module, inputs: Inputs, where: str) -> dict[str, Any]:
    """What the example does not give keeps its default: `if mask is None` is then decided while tracing."""
    signature = inspect.signature(module.forward)
    try:
        given = signature.bind(*inputs.args, **inputs.named).arguments
    except TypeError as error:
        raise TraceError(
            f"The example inputs do not fit forward{signature} of {where}: {error}. Give a tuple of positional "
            "arguments, a dict of named ones, or the single argument."
        ) from error
    return {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if name not in given and parameter.default is not inspect.Parameter.empty
    }


@contextlib.contextmanager
def _without_arguments(module: nn.Module, defaults: dict[str, Any]) -> Iterator[None]:
    """For a while, a forward that takes only the arguments that the example gives.

    torch.fx can fix arguments itself, but only numbers and None: a default may also be a tuple, a list or a tensor.
    It reads the names of the arguments off the code of the forward, so the forward must have code of its own.
    """
    own = type(module)
    parameters = inspect.signature(own.forward).parameters.values()
    if not defaults or any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        yield
        return
    taken = [p for p in parameters if p.name not in defaults][1:]
    names = ", ".join(p.name for p in taken)
    passed = ", ".join(p.name if p.kind is p.POSITIONAL_ONLY else f"{p.name}={p.name}" for p in taken)
    scope: dict[str, Any] = {"forward_of_the_model": own.forward, "defaults": defaults}
    exec(f"def forward(self, {names}): return forward_of_the_model(self, {passed}, **defaults)", scope)
    module.__class__ = type(own.__name__, (own,), {"forward": scope["forward"], "__module__": own.__module__})
    try:
        yield
    finally:
        module.__class__ = own


def _is_ours(error: BaseException) -> bool:
    """Whether our own code raised it: a bug of ours must not pass for a forward that cannot be traced."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return _written_by_us(frame.f_code.co_filename)


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


def _children(module: nn.Module) -> str:
    names = [name for name, _ in module.named_children()]
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "none"
