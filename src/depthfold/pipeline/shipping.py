"""The exported files of a run: the requested ones, their INT8 forms, and a model card beside each."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path, PurePath

from torch import nn

from depthfold.backends import Backend, Layout, get
from depthfold.backends.onnxruntime import OnnxRuntime
from depthfold.backends.openvino import HINTS, OpenVino
from depthfold.errors import InvalidValue
from depthfold.exporting import Exported, Int8, export, inputs_of_file
from depthfold.merging import shallow_parts
from depthfold.reporting import Findings, Int8File
from depthfold.store import put_in_place
from depthfold.tasks import Preprocessing
from depthfold.training import Task

_ONNX = ".onnx"
_CLASSES = 20  # in a card; the metadata of an ONNX file have all of them


def int8_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the INT8 files that belong to these files. Raise InvalidValue if there are none."""
    names = _once(names)
    found = tuple(
        str(PurePath(name).with_stem(f"{PurePath(name).stem}-int8")) for name in names if name.endswith(_ONNX)
    )
    if not found:
        raise InvalidValue(
            f"INT8 files are made from ONNX files, and the exports are {', '.join(names) or 'none'}. Add model.onnx."
        )
    if taken := sorted({*found} & {*names}):
        raise InvalidValue(f"The name {taken[0]!r} is that of an INT8 file. Give the other export another name.")
    return found


def export_files(
    shallow: nn.Module, folder: Path, names: Iterable[str], task: Task | None, raw_images: Layout | None
) -> tuple[Exported, ...]:
    """Export the network to all files."""
    return tuple(export(shallow, folder / name, task=task, raw_images=raw_images) for name in _once(names))


def _once(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names without repetitions, such as model.onnx and ./model.onnx."""
    return tuple(dict.fromkeys(str(PurePath(name)) for name in names))


def export_int8(
    shallow: nn.Module,
    folder: Path,
    names: Iterable[str],
    task: Task,
    raw_images: Layout | None,
    target: str | Backend | None = None,
) -> tuple[Exported, ...]:
    """Export the INT8 forms of the ONNX files among the names.

    They are timed on the target if it is an ONNX Runtime, and else on one with default options.
    """
    backend = None if target is None else get(target)
    int8 = Int8(target=backend) if isinstance(backend, OnnxRuntime) else Int8()
    return tuple(
        export(shallow, folder / name, task=task, raw_images=raw_images, int8=int8) for name in int8_names(names)
    )


def with_int8(findings: Findings, exported: Iterable[Exported]) -> Findings:
    """Return the findings with the INT8 files among the exported ones."""
    found = {file.name: file for file in findings.int8}
    names = [field.name for field in fields(Int8File) if field.name != "name"]
    for each in exported:
        if each.int8 is not None:
            values = {name: getattr(each.int8, name) for name in names}
            found[each.path.name] = Int8File(name=each.path.name, **values)
    return replace(findings, int8=tuple(found.values()))


def warn_about_old_files(folder: Path, names: Iterable[str]) -> None:
    """Warn about exported files of an earlier result, which are those with a model card, except for these names."""
    new = {folder / name for name in names}
    files = (card.with_name(card.name.removesuffix(".md")) for card in folder.rglob("*.md"))
    old = sorted(str(file.relative_to(folder)) for file in files if file.is_file() and file not in new)
    if old:
        warnings.warn(
            f"Exported from an earlier result of {folder}: {', '.join(old)}. Write each again (depthfold export "
            "--export NAME), or delete it.",
            stacklevel=3,
        )


def write_cards(shallow: nn.Module, exported: Iterable[Exported], findings: Findings | None) -> tuple[Path, ...]:
    """Write a model card beside each file: its name with .md. Return the paths."""
    written = []
    for each in exported:
        path = each.path.with_name(f"{each.path.name}.md")
        with put_in_place(path) as partial:
            partial.write_text(model_card(shallow, each, findings), encoding="utf-8")
        written.append(path)
    return tuple(written)


def model_card(shallow: nn.Module, exported: Exported, findings: Findings | None) -> str:
    """Return a page about a file in Markdown: what it is, how fast and accurate it is, and how to run it."""
    origin = shallow_parts(shallow)[1]
    network = origin.blueprint.network
    lines = [f"# {exported.path.name}", "", f"{network.name}, compressed with depthfold. {exported.format}.", ""]
    lines += _measured(findings, int8=exported.int8 is not None) if findings else []
    if exported.int8 is not None:
        lines += ["## INT8", "", f"Beside the same network in float32: {exported.int8}.", ""]
        lines += [f"Measured in this environment: {exported.int8.environment}.", ""]
    lines += ["## Network", "", f"The original has {network.depth} convolutions that were traced.", ""]
    lines += ["```", str(origin.plan), "```", ""]
    if exported.images is not None:
        lines += _images(exported.images.preprocessing, exported.images.layout)
    lines += ["## How to run it", "", "```python", *_code(shallow, exported, findings), "```", ""]
    if exported.error is not None and exported.int8 is not None:
        lines += [f"The float32 file that this file was made from is within {exported.error:.1e} of PyTorch.", ""]
    elif exported.error is not None:
        lines += [f"The file was compared with PyTorch: {str(exported).partition(': ')[2]}.", ""]
    return "\n".join(lines)


def _measured(findings: Findings, *, int8: bool) -> list[str]:
    """Return the latencies and accuracies before and after, with their environment."""
    table = findings.comparison()
    rows = ["| " + " | ".join(row) + " |" for row in (table.header, ("---",) * len(table.header), *table.rows)]
    where = f"Measured in this environment: {findings.environment}." if findings.environment else ""
    title = f"{findings.title}." + (" This table describes the float32 file, not this INT8 file." if int8 else "")
    notes = [line for note in table.notes for line in (note, "")]
    return ["## Before and after", "", title, "", *rows, "", *notes, where, ""]


def _images(found: Preprocessing, layout: Layout | None) -> list[str]:
    height, width = found.size
    if layout:
        shape = (height, width, found.channels) if layout == "NHWC" else (found.channels, height, width)
        taken = f"uint8 images, {layout}: batch x {' x '.join(map(str, shape))}. The file normalises them itself"
    else:
        taken = f"float32 images, NCHW: batch x {found.channels} x {height} x {width}, normalised to {found.formula}"
    crop = f", after a centre crop of {found.crop_ratio:g} of the shorter side" if found.crop_ratio != 1 else ""
    number, names = len(found.classes), ", ".join(found.classes[:_CLASSES])
    names += f", and {number - _CLASSES} more" if number > _CLASSES else ""
    return [
        "## Inputs and outputs", "", f"- Input: {taken}.", f"- Size: {height} x {width} (height, width){crop}.",
        f"- Mean: {_numbers(found.mean)}", f"- Deviation: {_numbers(found.deviation)}",
        f"- Classes, in the order of the outputs ({number}): {names}", "",
    ]  # fmt: skip


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)


def _code(shallow: nn.Module, exported: Exported, findings: Findings | None) -> Iterator[str]:
    """Yield code that runs the file on a batch of its images, or on all of its inputs if there are several."""
    name, suffix = exported.path.name, exported.path.suffix
    library = "torch" if suffix == ".pt2" else "numpy"
    example = _several_inputs(shallow, library)
    given = "inputs" if example else "[images]"
    if example and suffix in (_ONNX, ".xml"):
        yield "import numpy"
    if suffix == _ONNX:
        yield "import onnxruntime\n"
        yield from example
        yield f'session = onnxruntime.InferenceSession("{name}")'
        yield "names = [each.name for each in session.get_inputs()]"
        yield "# NumPy arrays, in the order of session.get_outputs(), which has their names."
        yield f"outputs = session.run(None, dict(zip(names, {given})))"
    elif suffix == ".pt2":
        yield "import torch\n"
        yield from example
        yield f'outputs = torch.export.load("{name}").module()(*{given})  # as the network returns them'
    elif suffix == ".xml":
        precision = _openvino_precision(exported, findings)
        yield "import openvino\n"
        yield from example
        yield f"# Without the hint, OpenVINO may compute in another precision than {precision}."
        yield f'hint = {{"INFERENCE_PRECISION_HINT": "{HINTS[precision]}"}}'
        yield "# NumPy arrays, by number or by name."
        yield f'outputs = openvino.Core().compile_model("{name}", "CPU", hint)({given})'
    else:
        yield "import tensorrt\n"
        yield "runtime = tensorrt.Runtime(tensorrt.Logger())"
        yield f'engine = runtime.deserialize_cuda_engine(open("{name}", "rb").read())'


def _several_inputs(shallow: nn.Module, library: str) -> list[str]:
    """Return code that makes inputs of the right shapes, or none for a file with one input."""
    inputs = inputs_of_file(shallow)
    if len(inputs) == 1:
        return []
    types = [str(each.dtype) if library == "torch" else repr(str(each.dtype).removeprefix("torch.")) for each in inputs]
    made = [f"    {library}.zeros({(*each.shape,)}, dtype={kind})," for each, kind in zip(inputs, types, strict=True)]
    return [f"# In this order: {', '.join(inspect.signature(shallow.forward).parameters)}", "inputs = [", *made, "]"]


def _openvino_precision(exported: Exported, findings: Findings | None) -> str:
    """Return the precision in which OpenVINO was measured, or else in which it compared the file with PyTorch."""
    known = (findings.environment if findings else None, exported.environment)
    there = (each.precision for each in known if each is not None and each.runtime == OpenVino.name)
    return next((precision for precision in there if precision is not None), OpenVino().precision)
