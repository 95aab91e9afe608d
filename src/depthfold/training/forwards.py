"""The forward that computes a model on a CUDA device: in the precision of the recipe, with fused kernels."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import fx, nn

from depthfold.kernels import Fused, fuse, fuse_eval
from depthfold.tracing.functional import use_plain_convolutions
from depthfold.training.contexts import HALF, channels_last
from depthfold.training.recipe import Recipe


class FusedForwards:
    """Forwards with fused kernels. While it is entered, the models compute with them.

    A task still gets the models themselves, so it can use their modules and parameters. Models without a fused forward
    compute as usual: kernels need bfloat16 and channels_last, and a graph that trace() has compared with the model.
    With `fallback`, a model whose kernels fail, for example because there is no compiler, computes as usual from then
    on.
    """

    def __init__(self, models: tuple[nn.Module | None, ...], recipe: Recipe, *, fallback: bool = False) -> None:
        applies = recipe.precision == "bfloat16" and recipe.channels_last
        found = [(model, _fused(model)) for model in models if model is not None] if applies else []
        self._fused = [(model, fused) for model, fused in found if fused is not None]
        self._fallback = fallback

    def __bool__(self) -> bool:
        return bool(self._fused)

    def __enter__(self) -> Self:
        for model, fused in self._fused:
            _set_forward(model, _with_fallback(fused, model) if self._fallback else fused.forward)
        return self

    def __exit__(self, *error: object) -> None:
        for model, _ in self._fused:
            del vars(model)["forward"]

    def close(self) -> None:
        """Free the tensors of the fused forwards, and the references to those of the models."""
        for _, fused in self._fused:
            fused.close()
        self._fused = []


def _fused(model: nn.Module) -> Fused | None:
    # The trace of any other model may contain what its Python code computed for the trace, such as random numbers.
    if not isinstance(model, fx.GraphModule) or "forward" in vars(model):
        return None
    return (fuse if model.training else fuse_eval)(model, prepare=use_plain_convolutions)


def _set_forward(model: nn.Module, forward: Callable[..., Any]) -> None:
    vars(model)["forward"] = forward  # on the instance; the class may be shared


def _with_fallback(fused: Fused, model: nn.Module) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return fused(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - an error of the model itself is raised again by its own forward
            _set_forward(model, own)
            result = own(*args, **kwargs)
            warnings.warn(
                f"The fused kernels failed, so the model is scored without them: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return result

    own = type(model).forward.__get__(model)
    return forward


@contextlib.contextmanager
def scoring(model: nn.Module, recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Let a model in evaluation mode be scored on CUDA in the precision and memory format of the recipe.

    On other devices, nothing is changed.
    """
    if device.type != "cuda" or recipe.precision not in HALF:
        yield
        return
    with contextlib.ExitStack() as stack:
        # The weights are cast without gradients, so a training step must not find them in the cache.
        stack.callback(torch.clear_autocast_cache)
        stack.enter_context(channels_last(model, enabled=recipe.channels_last))
        fused = FusedForwards((model,), recipe, fallback=True)
        stack.callback(fused.close)
        stack.enter_context(fused)
        stack.enter_context(torch.autocast(device.type, dtype=HALF[recipe.precision]))
        yield
