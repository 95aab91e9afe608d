"""Example inputs: how they are given, and what a submodule receives of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from depthfold.errors import TraceError


@dataclass(frozen=True, slots=True, eq=False)
class ExampleInputs:
    """The arguments of one call."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, given: Any) -> ExampleInputs:
        """A tuple holds positional arguments, a dict named ones; anything else (a tensor, a list of images) is the
        single argument."""
        if isinstance(given, ExampleInputs):
            return given
        if isinstance(given, tuple):
            return cls(given)
        if isinstance(given, Mapping):
            return cls((), given)
        return cls((given,))

    @property
    def named(self) -> dict[str, Any]:
        return dict(self.kwargs or {})

    def map(self, change: Any) -> ExampleInputs:
        """The same arguments with every tensor changed."""
        args, kwargs = tree_map(
            lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, (self.args, self.named)
        )
        return ExampleInputs(args, kwargs)

    def like(self, module: nn.Module) -> ExampleInputs:
        """The same arguments on the device and in the precision of the module's parameters."""
        parameter = next((p for p in module.parameters() if p.is_floating_point()), None)
        if parameter is None:
            return self
        return self.map(lambda t: t.to(parameter.device, parameter.dtype if t.is_floating_point() else t.dtype))

    def random(self, seed: int) -> ExampleInputs:
        """Normal noise of the same shapes: an example of zeros would hide an error."""
        generator = torch.Generator().manual_seed(seed)

        def noise(t: Tensor) -> Tensor:
            if not t.is_floating_point():
                return t
            return torch.randn(t.shape, generator=generator).to(t.device, t.dtype)

        return self.map(noise)

    def for_graph(self, graph: fx.GraphModule) -> list[Any]:
        """The arguments in the order of the graph's placeholders; what is not given keeps its default."""
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        values = list(self.args[: len(placeholders)])
        for node in placeholders[len(values) :]:
            values.append(self.named.get(str(node.target), node.args[0] if node.args else None))
        return values

    def call(self, module: nn.Module) -> Any:
        return module(*self.args, **self.named)


class _Reached(Exception):
    """Ends the outer forward as soon as the submodule is called: what follows need not run."""


def inputs_at(model: nn.Module, path: str, inputs: ExampleInputs) -> ExampleInputs:
    """What the submodule at `path` receives when the whole model is called with `inputs`."""
    received: list[ExampleInputs] = []

    def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        received.append(ExampleInputs(args, kwargs))
        raise _Reached

    handle = model.get_submodule(path).register_forward_pre_hook(take, with_kwargs=True)
    try:
        with torch.no_grad():
            inputs.map(Tensor.clone).call(model)
    except _Reached:
        return received[0]
    except Exception as error:
        raise TraceError(
            f"The model failed on its example inputs before it reached at={path!r}: {error}. Give the inputs that the "
            "whole model takes: a tuple of positional arguments, a dict of named ones, or a single argument."
        ) from error
    finally:
        handle.remove()
    raise TraceError(f"The model ran on its example inputs without ever calling at={path!r}. Is it part of forward?")
