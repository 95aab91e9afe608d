"""Matching the features of a teacher: what its last linear layer reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from depthfold.errors import InvalidValue

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


@contextlib.contextmanager
def matched_features(
    model: nn.Module, teacher: nn.Module, weight: float, mean: Callable[[Tensor], Tensor]
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield a function that adds `weight` times the distance between the features of model and teacher to a loss.

    Call it after both have run. The distance is the mean squared difference, divided by the mean square of the
    teacher's features, so it does not depend on their scale. `mean` returns the mean over the processes.
    """
    with _watched(model, "model") as own, _watched(teacher, "teacher") as taught:

        def add(loss: Tensor) -> Tensor:
            ours, theirs = own.take().float(), taught.take().float()
            if ours.shape != theirs.shape:
                raise InvalidValue(
                    f"The model's features have the shape {tuple(ours.shape)} and those of its teacher "
                    f"{tuple(theirs.shape)}, so they cannot be matched. Set the recipe's features to 0."
                )
            return loss + weight * (ours - theirs).square().mean() / mean(theirs.square().mean())

        yield add


class _Features:
    """The features of the last forward of a network: the input of its last linear layer, before dropout.

    Dropout would add noise to them, and the distance to the teacher would be smallest for features that are too small.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._features: Tensor | None = None
        self._undropped: Tensor | None = None  # input and output of the last dropout
        self._dropped: Tensor | None = None

    def before_dropout(self, part: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._undropped = inputs[0].clone() if part.inplace else inputs[0]

    def after_dropout(self, _: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        self._dropped = output

    def before_linear(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._features = self._undropped if inputs[0] is self._dropped else inputs[0]
        self._undropped = self._dropped = None

    def take(self) -> Tensor:
        features, self._features = self._features, None
        if features is None:
            raise InvalidValue(
                f"The recipe matches features, but the task's loss did not run the {self._name}. Set the recipe's "
                "features to 0, or call step.teacher in the loss."
            )
        return features


@contextlib.contextmanager
def _watched(network: nn.Module, name: str) -> Iterator[_Features]:
    linears = [part for part in network.modules() if isinstance(part, nn.Linear)]
    if not linears:
        raise InvalidValue(
            f"The recipe matches the input of the last linear layer, but the {name} has no linear layer. Set the "
            "recipe's features to 0."
        )
    features = _Features(name)
    dropouts = [part for part in network.modules() if isinstance(part, _DROPOUTS)]
    hooks = [linears[-1].register_forward_pre_hook(features.before_linear)]
    hooks += [part.register_forward_pre_hook(features.before_dropout) for part in dropouts]
    hooks += [part.register_forward_hook(features.after_dropout) for part in dropouts]
    try:
        yield features
    finally:
        for hook in hooks:
            hook.remove()
