"""Checks of the arguments of compress(), before anything is measured."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from depthfold.backends import Backend, Layout, get
from depthfold.core import (
    ImportanceTable,
    LatencyTable,
    Move,
    Network,
    Space,
    block_options,
    check_space,
    require_moves,
)
from depthfold.errors import DataError, InvalidValue, TableError, lacks_memory, spoils_device
from depthfold.exporting import FORMATS, images_of, positional_tensors
from depthfold.importance import Method
from depthfold.jobs import Executor, Processes, RayCluster, check_is_executor
from depthfold.pipeline.options import Options
from depthfold.pipeline.shipping import int8_names
from depthfold.progress import Progress, progress_bars
from depthfold.solver import checked_alpha
from depthfold.stage_one import check_network as check_same_network
from depthfold.store import RunFolder
from depthfold.store.run_folder import CHECKED_IMAGES, NAMES
from depthfold.support.optional import load
from depthfold.support.text import count, one_line
from depthfold.tasks import ClassificationTask, class_scores
from depthfold.tracing import ExampleInputs, TracedNetwork, device_of, dtype_of, require_traced
from depthfold.training import (
    Recipe,
    Task,
    check_features,
    check_has_holdout,
    check_keeps_last,
    check_task,
    has_holdout,
    preserve_modes,
    preset,
    total_steps,
)

# The libraries that write and check the files of each suffix, and the extras that install them.
_EXPORTERS = {
    ".onnx": (("onnx", "onnx"), ("onnxruntime", "onnx")),
    ".xml": (("onnx", "openvino"), ("openvino", "openvino")),
    ".engine": (("onnx", "tensorrt"), ("tensorrt", "tensorrt")),
}
ELSEWHERE = ("machine", "device", "runtime_version", "threads")  # may differ in a latency table that the user gives
# The libraries that send jobs to workers, and their extras.
_EXECUTORS = {Processes: ("cloudpickle", "processes"), RayCluster: ("ray", "ray")}


def checked_options(options: object) -> Options:
    """Return the options with presets replaced by recipes. Raise InvalidValue for what a later stage would refuse."""
    if not isinstance(options, Options):
        raise InvalidValue(f"compress() takes options=Options(...), found {options!r:.80}.")
    check_space(options.space)
    for name, kind in (("latency", LatencyTable), ("importance", ImportanceTable)):
        given = getattr(options, name)
        if given is not None and not isinstance(given, kind):
            a = "an" if name == "importance" else "a"
            raise InvalidValue(
                f"The option {name} is {a} {kind.__name__}, found {given!r:.80}. Read a file with "
                f"{kind.__name__}.loads(text)."
            )
    if options.executor is not None:
        check_is_executor(options.executor)
    if options.alpha is not None:
        checked_alpha(options.alpha)
        if options.surrogate:
            raise InvalidValue(
                f"A fitted surrogate takes the place of alpha, found both (alpha = {options.alpha:g}). Leave out one: "
                "remove alpha from the settings (config.toml), or use surrogate=False (--no-surrogate)."
            )
    exports: object = options.exports
    if not isinstance(exports, list | tuple) or not all(isinstance(name, str) for name in exports):
        raise InvalidValue(f'The option exports is a tuple of file names, such as ("model.onnx",), found {exports!r}.')
    check_exports(exports)
    if options.int8:
        int8_names(exports)
    recipe = options.importance_recipe
    recipe = None if recipe is None else _recipe("importance_recipe", recipe)
    Method.of(options.importance_method, recipe, options.reinit)
    return replace(
        options,
        moves=require_moves(options.moves),
        importance_recipe=recipe,
        recipe=_recipe("recipe", options.recipe),
    )


def checked_inputs(
    model: nn.Module,
    task: Task,
    target: str | Backend,
    options: Options,
    example_inputs: Any,
    traced: TracedNetwork | None,
) -> Any:
    """Return the example inputs, or those of the trace or of the task if there are none. Check everything else."""
    measures_importance = options.importance is None
    check_task(task)
    check_for_nan(model)
    get(target)
    check_libraries(options.exports, options.executor if measures_importance else None)
    for recipe in (options.recipe if options.distil else None, options.importance_recipe):
        if isinstance(recipe, Recipe):
            check_features(model, recipe)
    if traced is not None:
        check_network(traced, model, options)
    inputs = inputs_of(task, example_inputs, traced)
    check_raw_images(task, options.raw_images, inputs)
    check_task_data(task, model, inputs, importances=measures_importance, exports=bool(options.exports))
    _check_recipes(task, options)
    return inputs


def _check_recipes(task: Task, options: Options) -> None:
    """Raise an error for a recipe that cannot train the task: fine-tuning comes hours after the call."""
    recipes = [_recipe("recipe", options.recipe)]
    if not has_holdout(task):
        check_keeps_last(recipes[0])
    if options.importance is None:
        recipes.append(Method.of(options.importance_method, options.importance_recipe, options.reinit).recipe)
    for recipe in recipes:
        total_steps(recipe, task)
        if isinstance(task, ClassificationTask):
            task.check_augmentation(recipe)


def check_drops(importance: ImportanceTable, network: Network, space: Space, moves: Iterable[Move]) -> None:
    """Raise TableError if a given importance table drops what is not among the moves, or lacks what they ask for."""
    moves = require_moves(moves)
    options = block_options(network, space, moves)
    for move, kind in (("drop-layers", "layers"), ("drop-branches", "branches")):
        has = any(getattr(entry.dropped, kind) for entry in importance.entries)
        if has and move not in moves:
            raise TableError(
                f"The importance table has entries with dropped {kind}, but the moves are {', '.join(moves)}. Add "
                f"{move} to the moves (--moves {move}), so that their latencies are measured."
            )
        if not has and move in moves and any(getattr(option.dropped, kind) for option in options):
            raise TableError(
                f"The importance table has no entry with dropped {kind}, which the move {move} asks for. Measure one "
                "with measure_importance(..., moves=...) or depthfold importance --moves ..., or leave out the move."
            )


class MeasuredElsewhere(UserWarning):
    """A given latency table was measured on another machine."""


def check_latency(table: LatencyTable, traced: TracedNetwork, target: str | Backend) -> None:
    """Raise TableError if a given latency table is of another network, or was measured on another runtime or input.

    One from another machine or version is used with a warning. What a CSV file does not state is not compared.
    """
    here = get(target).environment(traced.example_tensors())
    sizes = table.environment.input_size, here.input_size
    if None not in sizes and sizes[0] != sizes[1] and table.depth == traced.network.depth:
        one, two = ("x".join(map(str, size or ())) for size in sizes)
        raise TableError(
            f"The latency table was measured with inputs of {one}; now they are {two}. Give inputs of the same size "
            "(--input), or a table for these inputs."
        )
    check_same_network(traced.network, table)
    there = replace(table.environment, **dict.fromkeys(ELSEWHERE))
    if differences := there.differences(here):
        raise TableError(
            f"The latency table was measured in another environment than the target's ({'; '.join(differences)}). "
            "Give a table of this target, or the target of the table."
        )
    if differences := table.environment.differences(here):
        warnings.warn(
            f"The latency table was measured elsewhere ({'; '.join(differences)}). The chosen plan is timed here, so "
            "budgets in per cent are those of this machine.",
            MeasuredElsewhere,
            stacklevel=3,  # the caller of compress()
        )


def _recipe(name: str, given: object) -> Recipe:
    if isinstance(given, str):
        return preset(given)
    if not isinstance(given, Recipe):
        raise InvalidValue(
            f"The option {name} is a Recipe or the name of a preset, found {given!r:.80}. Make one with "
            'preset("quick").replace(steps=100).'
        )
    return given


def check_exports(names: Iterable[str]) -> None:
    """Raise InvalidValue for a file that cannot be exported, is outside the run folder, or belongs to the run."""
    for name in names:
        path = PurePath(name)
        if path.is_absolute() or ".." in path.parts or name.startswith("~"):
            raise InvalidValue(
                f"The file {name!r} is outside the run folder. Names of exports are relative to it: write {path.name}."
            )
        if path.suffix not in FORMATS:  # first, so that what remains of a reserved name is a name to recommend
            raise InvalidValue(f"The file {name!r} cannot be exported: its suffix must be one of {', '.join(FORMATS)}.")
        # Some file systems do not distinguish upper and lower case.
        if path.parts and path.parts[0].lower() in NAMES:
            raise InvalidValue(
                f"The name {name!r} is reserved: {path.parts[0]} belongs to the run. Write {path.name}, or use a "
                f"subfolder: exports/{path.name}."
            )


def check_export_inputs(traced: TracedNetwork, exports: Iterable[str]) -> None:
    """Raise InvalidValue if files are wanted, and no file can take the inputs of the network."""
    if not tuple(exports):
        return
    whole, blueprint = traced.model, traced.blueprint
    positional_tensors(
        traced.graph if whole is None else whole,
        blueprint.inputs if whole is None else blueprint.example,
        fix="Write no files, with exports=(), or compress a module that wraps it and takes tensors.",
    )


def check_raw_images(task: Task, layout: Layout | None, inputs: Any) -> None:
    """Raise InvalidValue if the exported files cannot take raw images of this task."""
    if layout is not None:
        given = ExampleInputs.of(inputs)
        images_of(task, layout, (*given.args, *given.named.values()))


def check_libraries(exports: Iterable[str], executor: Executor | None) -> None:
    """Raise MissingDependency for libraries that would be missing after hours of measuring and training.

    These are the libraries of trainings, of the executor (None if nothing is trained on one), of the exports and of the
    report.
    """
    load("accelerate.state", "train")
    load("safetensors.torch", "train")
    for kind, wanted in _EXECUTORS.items():
        if isinstance(executor, kind):
            load(*wanted)
    for name in exports:
        for library, extra in _EXPORTERS.get(Path(name).suffix, ()):
            load(library, extra)
    load("jinja2", "report")


def check_for_nan(model: object) -> None:
    """Raise InvalidValue if a parameter or a stored buffer has a NaN, because every score would be NaN."""
    if not isinstance(model, nn.Module):
        return  # trace() refuses it
    for name, tensor in model.state_dict(keep_vars=True).items():
        known = isinstance(tensor, Tensor) and not (tensor.is_meta or is_lazy(tensor))
        if known and tensor.is_floating_point() and (number := int(tensor.isnan().sum())):
            raise InvalidValue(
                f"{name} of the model is NaN in {number:,} of {count(tensor.numel(), 'value')}. Load weights without "
                "NaN, for example an earlier checkpoint."
            )


def check_network(given: object, model: nn.Module, options: Options) -> None:
    """Raise InvalidValue unless `given` was traced from this model."""
    traced = require_traced(given, "compress")
    if options.ignore or options.at is not None:
        raise InvalidValue(
            "The options ignore and at say how to trace, and the network is traced already. Give one or the other."
        )
    weights = dict((model.get_submodule(traced.blueprint.at) if traced.blueprint.at else model).named_parameters())
    for name, parameter in traced.graph.named_parameters():
        own = weights.get(name)
        if own is None or own.shape != parameter.shape or not torch.equal(own.to(parameter.device), parameter):
            raise InvalidValue(
                f"The network was not traced from this model: {name} differs. Trace the model again, or leave out "
                "traced=."
            )


def inputs_of(task: Task, example_inputs: Any, traced: TracedNetwork | None = None) -> Any:
    """Return the example inputs, or those of the trace on the device "meta", or an image of the task."""
    if example_inputs is not None:
        return example_inputs
    if traced is not None:
        return traced.blueprint.example
    if isinstance(task, ClassificationTask):
        return task.example()
    raise InvalidValue(
        "The inputs of the model are not known. Give them in the size in which the model will run: "
        "example_inputs=... in Python, --input 3x224x224 on the command line."
    )


def check_task_data(task: object, model: nn.Module, inputs: Any, *, importances: bool, exports: bool) -> None:
    """Raise DataError or InvalidValue if a split is missing, or if the images or classes do not fit the model.

    A task of the user's own is not scored here, because that may take long.
    """
    if importances:
        check_has_holdout(task)
    if not isinstance(task, ClassificationTask):
        return
    if importances:
        task.count("holdout")
    task.count("test")
    image, (found, *size) = _image(inputs), task.example().shape[1:]
    if image is not None and image.shape[1] != found:
        raise DataError(
            f"The images of the task have {count(found, 'channel')}, and the example inputs of the model have "
            f"{image.shape[1]}. Give inputs and a model of {count(found, 'channel')}, or other data."
        )
    if isinstance(model, nn.Module):  # trace() refuses anything else
        _check_scores(model, task)
    # Files would take the measured size, and their cards would state that of the task.
    if exports and image is not None and [*image.shape[2:]] != size:
        measured = tuple(image.shape[2:])
        raise DataError(
            f"The images of the task are {_sides(size)}, and the example inputs of the model {_sides(measured)}. Give "
            f"example inputs of {_sides(size)}, or let the task resize its images to {_sides(measured)}."
        )


def check_images(
    task: object, run: str | Path | None, progress: Progress | None = None, *, tested: bool = True
) -> Mapping[str, str]:
    """Raise DataError if an image file cannot be read: a training would find out only after hours of measuring.

    Return a digest of the files by the name of their split, for the record of the run. Files with the same digest in
    the record are not read again. The test set is left out if `tested` is False.
    """
    if not isinstance(task, ClassificationTask):
        return {}
    known = {} if run is None else RunFolder(Path(run)).made_from(CHECKED_IMAGES) or {}
    with contextlib.ExitStack() as stack:
        progress = progress or stack.enter_context(progress_bars("Data"))
        return {**known, **task.check_files(known, progress, tested=tested)}


def _check_scores(model: nn.Module, task: ClassificationTask) -> None:
    """Run the model on one image. Raise DataError unless it returns one score per class."""
    image, device, dtype = task.example(), device_of(model), dtype_of(model)
    try:
        with preserve_modes(model), torch.no_grad():
            output = model.eval()(image.to(device, dtype))
    except Exception as error:  # whatever the forward raises
        if lacks_memory(error) or spoils_device(error):
            raise
        raise DataError(
            f"The model cannot take an image of the task, of the shape {tuple(image.shape)}: "
            f"{one_line(error).rstrip('.')}. Give the task another size, or a model that takes its images."
        ) from error
    class_scores(output, task.classes)


def _sides(size: Iterable[int]) -> str:
    return "x".join(map(str, size))


def _image(inputs: Any) -> Tensor | None:
    """Return a batch of images; None if the inputs are something else."""
    given = ExampleInputs.of(inputs)
    values = (*given.args, *given.named.values())
    first = values[0] if len(values) == 1 else None
    return first if isinstance(first, Tensor) and first.ndim == 4 else None
