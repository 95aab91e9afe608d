"""Keep a value from being overwritten: rewriting uses it in a place where the model did not have it."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Collection
from typing import Any

from torch import fx

from depthfold.tracing.in_place import out_of_place, writes_in_place
from depthfold.tracing.modules import called_module, is_no_op
from depthfold.tracing.size_guard import SizeGuard


def protect(graph: fx.GraphModule, value: fx.Node, activations: Collection[str | None]) -> None:
    """Let no operation write to this value, also not after operations that return their input."""
    for user in list(value.users):
        module = called_module(graph, user)
        if user.name in activations and module is None:
            _call_out_of_place(user)
        elif writes_in_place(user, module):
            if module is not None:
                target = f"depthfold_{user.name}"  # other nodes may call the same module
                graph.add_module(target, copy.deepcopy(module))
                graph.get_submodule(target).inplace = False  # type: ignore[assignment]
                user.target = target
            else:
                with graph.graph.inserting_before(user):
                    copied = graph.graph.call_method("clone", (value,))
                user.replace_input_with(value, copied)
        passes = module is not None and (is_no_op(module) or isinstance(module, SizeGuard))
        if passes or user.target == "contiguous":
            protect(graph, user, activations)


def _call_out_of_place(activation: fx.Node) -> None:
    if activation.op == "call_method":
        activation.target = str(activation.target).rstrip("_")
        return
    function: Any = out_of_place(activation.target)
    activation.target = function
    with contextlib.suppress(ValueError):  # a function of C++ has no signature, and no argument for this
        bound = inspect.signature(function).bind(*activation.args, **activation.kwargs)
        if "inplace" in bound.arguments:
            bound.arguments["inplace"] = False
        activation.args, activation.kwargs = bound.args, bound.kwargs
