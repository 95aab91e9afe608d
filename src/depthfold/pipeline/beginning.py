"""What compress() is given, looked at before anything is measured: hours later would be too late."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from depthfold.backends import get
from depthfold.core import ImportanceTable
from depthfold.errors import DataError, InvalidValue, lacks_memory, spoils_device
from depthfold.jobs import check_is_executor
from depthfold.pipeline.checks import expect_exports, expect_space
from depthfold.solver import checked_alpha
from depthfold.support.text import count, one_line
from depthfold.tasks import ClassificationTask, class_scores
from depthfold.tracing import ExampleInputs, device_of, dtype_of, expect_traced
from depthfold.training import Recipe, expect_holdout, expect_task, preserve_modes, preset


def recipe_given(name: str, given: object) -> Recipe:
    """A recipe, or a preset by name, as the argument of this name."""
    if isinstance(given, str):
        return preset(given)
    if not isinstance(given, Recipe):
        raise InvalidValue(
            f"compress() takes as {name} a Recipe or the name of one, found {given!r:.80}. "
            'preset("quick").replace(steps=100) makes one, say.'
        )
    return given


def expect_arguments(
    task: object, target: Any, space: object, importance: object, executor: object, alpha: object, exports: object
) -> None:
    """Refuse what a later stage would refuse."""
    expect_task(task)
    get(target)
    expect_space(space)
    if importance is not None and not isinstance(importance, ImportanceTable):
        raise InvalidValue(
            f"compress() takes as importance an ImportanceTable, found {importance!r:.80}. "
            "ImportanceTable.loads(text) makes one of the text of a file."
        )
    if executor is not None:
        check_is_executor(executor)
    if alpha is not None:
        checked_alpha(alpha)
    if (
        isinstance(exports, str)
        or not isinstance(exports, list | tuple)
        or not all(isinstance(e, str) for e in exports)
    ):
        raise InvalidValue(f'exports must be several names of files, such as ("model.onnx",), found {exports!r:.80}.')
    expect_exports(exports)


def expect_network(given: object, model: nn.Module, ignore: object, at: object) -> None:
    """Refuse a network that is not this model, traced."""
    traced = expect_traced(given, "compress")
    if ignore or at is not None:
        raise InvalidValue("ignore and at say how to trace, and the network was traced already: give one or the other.")
    weights = dict((model.get_submodule(traced.blueprint.at) if traced.blueprint.at else model).named_parameters())
    for name, parameter in traced.graph.named_parameters():
        own = weights.get(name)
        if own is None or own.shape != parameter.shape or not torch.equal(own.to(parameter.device), parameter):
            raise InvalidValue(
                f"The network was not traced from this model as it is: {name} differs. Trace the model again, or leave "
                "out traced."
            )


def expect_data(task: object, model: nn.Module, inputs: Any, *, importances: bool) -> None:
    """Refuse data that lacks a part that will be scored, that the model does not take, or whose classes it does not
    have. Of a task of the user's own only what it says is asked, as its score may take long."""
    if importances:
        expect_holdout(task)
    if not isinstance(task, ClassificationTask):
        return
    if importances:
        task.count("holdout")
    task.count("test")
    wanted, found = _channels(inputs), task.example().shape[1]
    if wanted is not None and wanted != found:
        raise DataError(
            f"The images of the task have {count(found, 'channel')}, and the inputs that the model was to be traced "
            f"with have {wanted}. Give inputs and a model of {count(found, 'channel')}, or other data."
        )
    if isinstance(model, nn.Module):  # trace() refuses anything else
        _expect_scores(model, task)


def _expect_scores(model: nn.Module, task: ClassificationTask) -> None:
    """Refuse a model that has not one score for each class. It runs once, on one image."""
    image, device, dtype = task.example(), device_of(model), dtype_of(model)
    try:
        with preserve_modes(model), torch.no_grad():
            output = model.eval()(image.to(device, dtype))
    except Exception as error:  # whatever a forward of the user's raises
        if lacks_memory(error) or spoils_device(error):
            raise
        raise DataError(
            f"The model cannot take an image of the task, of the shape {tuple(image.shape)}: "
            f"{one_line(error).rstrip('.')}. Give the task another size, or a model that takes its images."
        ) from error
    class_scores(output, task.classes)


def _channels(inputs: Any) -> int | None:
    """Of a batch of images; None where the inputs are something else."""
    given = ExampleInputs.of(inputs)
    values = (*given.args, *given.named.values())
    first = values[0] if len(values) == 1 else None
    return first.shape[1] if isinstance(first, Tensor) and first.ndim == 4 else None
