"""Example inputs of a model, and of its submodules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from depthfold.errors import TraceError


@dataclass(frozen=True, slots=True, eq=False)
class ExampleInputs:
    """The arguments of one call."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, inputs: Any) -> ExampleInputs:
        """Convert a tuple of positional arguments, a dict of keyword arguments, or any other single argument."""
        if isinstance(inputs, ExampleInputs):
            return inputs
        if isinstance(inputs, tuple):
            return cls(inputs)
        if isinstance(inputs, Mapping):
            return cls((), inputs)
        return cls((inputs,))

    @property
    def named(self) -> dict[str, Any]:
        return dict(self.kwargs or {})

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.named)) if isinstance(leaf, Tensor)]

    def map(self, function: Any) -> ExampleInputs:
        """Return the arguments with a function applied to every tensor."""
        args, kwargs = tree_map(
            lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, (self.args, self.named)
        )
        return ExampleInputs(args, kwargs)

    def like(self, module: nn.Module) -> ExampleInputs:
        """Return the arguments with the device and dtype of the module's parameters."""
        parameter = next((p for p in module.parameters() if p.is_floating_point()), None)
        if parameter is None:
            return self
        return self.map(lambda t: t.to(parameter.device, parameter.dtype if t.is_floating_point() else t.dtype))

    def random(self, seed: int) -> ExampleInputs:
        """Return normal noise of the same shapes. Example inputs that are all zero would hide an error."""
        generator = torch.Generator().manual_seed(seed)

        def noise(t: Tensor) -> Tensor:
            if not t.is_floating_point():
                return t
            return torch.randn(t.shape, generator=generator).to(t.device, t.dtype)

        return self.map(noise)

    def for_graph(self, graph: fx.GraphModule) -> list[Any]:
        """Return the arguments in the order of the graph's placeholders, with defaults for those that are missing."""
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        values = list(self.args[: len(placeholders)])
        for node in placeholders[len(values) :]:
            values.append(self.named.get(str(node.target), node.args[0] if node.args else None))
        return values

    def call(self, module: nn.Module) -> Any:
        return module(*self.args, **self.named)


class _Reached(Exception):
    """Stop the forward of the model when the submodule is called."""


def inputs_at(model: nn.Module, path: str, inputs: ExampleInputs) -> ExampleInputs:
    """Return the inputs of the submodule at `path` when the whole model is called with `inputs`."""
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
            f"The model failed on its example inputs before it called at={path!r}: {error}. Pass the inputs of the "
            "whole model: a tuple of positional arguments, a dict of keyword arguments, or a single argument."
        ) from error
    finally:
        handle.remove()
    raise TraceError(f"The model does not call at={path!r} on its example inputs. Choose a submodule that it calls.")
