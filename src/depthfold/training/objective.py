"""The loss of classification, with or without a teacher, and the output that counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from depthfold.errors import DataError
from depthfold.training.task import Step

_MAIN = ("logits", "out")


def classification_loss(output: Any, images: Tensor, labels: Tensor, classes: int, step: Step) -> Tensor:
    """Cross-entropy. With a teacher, a share of it is that with the teacher's outputs, softened by the temperature T
    and times T^2, so that its gradient does not depend on T; the labels are then not smoothed, as in the paper."""
    recipe, logits = step.recipe, class_scores(output, classes)
    if step.teacher is None:
        return functional.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing)
    with torch.no_grad():
        targets = (class_scores(step.teacher(images), classes) / recipe.temperature).softmax(dim=1)
    soft = functional.cross_entropy(logits / recipe.temperature, targets) * recipe.temperature**2
    hard = functional.cross_entropy(logits, labels)
    return recipe.distillation * soft + (1.0 - recipe.distillation) * hard


def class_scores(output: Any, classes: int) -> Tensor:
    """The main output, in float32 or better: one number for each class."""
    logits = main_output(output)
    if logits.ndim != 2 or logits.shape[1] != classes:
        raise DataError(
            f"The model's output has the shape {tuple(logits.shape)}, and the data has {classes} classes: expected "
            f"(batch, {classes}). Replace the model's last layer, or choose other data."
        )
    return logits if logits.dtype == torch.float64 else logits.float()


def main_output(output: Any) -> Tensor:
    """Of a model with several outputs (Inception and GoogLeNet in training, say) the one named logits or out, or else
    the first."""
    found = output
    while not isinstance(found, Tensor):
        named = found if isinstance(found, Mapping) else {name: getattr(found, name, None) for name in _MAIN}
        inner = next((named[name] for name in _MAIN if named.get(name) is not None), None)
        if inner is None and isinstance(found, Mapping | Sequence) and not isinstance(found, str) and len(found):
            inner = next(iter(found.values() if isinstance(found, Mapping) else found))
        if inner is None:
            raise DataError(
                f"The model returned {type(output).__name__}, expected a tensor, or something that has one as "
                "'logits', as 'out', or as its first item."
            )
        found = inner
    return found
