"""Matching the features of a teacher: what the linear layer that runs last reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from depthfold.errors import InvalidValue
from depthfold.training.recipe import Recipe

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_LEAST = 1e-12  # mean square of features by which is divided


def check_features(model: nn.Module, recipe: Recipe) -> None:
    """Raise InvalidValue if the recipe matches features, and the model has none."""
    if recipe.features and not any(isinstance(part, nn.Linear) for part in model.modules()):
        raise InvalidValue(
            f"The recipe matches the input of the last linear layer (features={recipe.features:g}), but "
            f"{type(model).__name__} has no linear layer. Set the recipe's features to 0."
        )


@contextlib.contextmanager
def matched_features(
    model: nn.Module, teacher: nn.Module, weight: float, mean: Callable[[Tensor], Tensor]
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield a function that adds `weight` times the distance between the features of model and teacher to a loss.

    Call it after both have run. The distance is the mean squared difference, divided by the mean square of the
    teacher's features, so it does not depend on their scale. `mean` returns the mean over the processes.
    """
    with _watched(model) as own, _watched(teacher) as taught:

        def add(loss: Tensor) -> Tensor:
            ours, theirs = own.take("model", ""), taught.take("teacher", "The loss must call step.teacher. ")
            if ours.shape != theirs.shape:
                raise InvalidValue(
                    f"The model's features have the shape {tuple(ours.shape)} (input of {own.layer}) and those of its "
                    f"teacher {tuple(theirs.shape)} (input of {taught.layer}), so they cannot be matched. Set the "
                    "recipe's features to 0."
                )
            scale = mean(theirs.square().mean()).clamp_min(_LEAST)
            return loss + weight * (ours - theirs).square().mean() / scale

        yield add


class _Features:
    """The features of the last forward of a network: the input of its last linear layer, before dropout.

    Dropout would add noise to them, and the distance to the teacher would be smallest for features that are too small.
    """

    def __init__(self) -> None:
        self.layer = ""
        self._features: Tensor | None = None
        self._undropped: Tensor | None = None  # input and output of the last dropout
        self._dropped: Tensor | None = None

    def before_dropout(self, part: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = _input(args, named)
        self._undropped = given.clone() if part.inplace else given

    def after_dropout(self, part: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._dropped = output

    def before_linear(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        given, self.layer = _input(args, named), name
        if self._undropped is not None and self._dropped is not None and _same_memory(self._dropped, given):
            given = self._undropped.reshape(given.shape)
        self._features, self._undropped, self._dropped = given, None, None

    def take(self, name: str, hint: str) -> Tensor:
        """Return the features in float32. Nothing of a step may outlive it, since it may be captured."""
        features = self._features
        self._features = self._undropped = self._dropped = None
        if features is None:
            raise InvalidValue(
                f"The recipe matches the input of the last linear layer, but in the task's loss no linear layer of the "
                f"{name} ran. {hint}To match nothing, set the recipe's features to 0."
            )
        return features.float()


@contextlib.contextmanager
def _watched(network: nn.Module) -> Iterator[_Features]:
    features, hooks = _Features(), []
    for name, part in network.named_modules():
        if isinstance(part, nn.Linear):
            hooks.append(part.register_forward_pre_hook(_named(features, name), with_kwargs=True))
        elif isinstance(part, _DROPOUTS):
            hooks.append(part.register_forward_pre_hook(features.before_dropout, with_kwargs=True))
            hooks.append(part.register_forward_hook(features.after_dropout))
    try:
        yield features
    finally:
        for hook in hooks:
            hook.remove()


def _named(features: _Features, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    return lambda _, args, named: features.before_linear(name, args, named)


def _same_memory(one: Tensor, two: Tensor) -> bool:
    """Return True for a tensor and itself, also if it was flattened."""
    return one.data_ptr() == two.data_ptr() and one.numel() == two.numel()


def _input(args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    return args[0] if args else named["input"]  # type: ignore[no-any-return]
