"""save(): write a merged network to two files, from which load() rebuilds it without pickle."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import safetensors.torch
import torch
from torch import Tensor, nn

from depthfold.core import Document, Plan
from depthfold.errors import InvalidValue, ResultError
from depthfold.exporting.probe import Probe, record_probe
from depthfold.merging import Shallow, shallow_parts
from depthfold.store import put_all_in_place
from depthfold.support.text import one_line
from depthfold.tracing import ExampleInputs
from depthfold.version import __version__


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers under all of their names, including non-persistent buffers."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def without_ties(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return every tensor under its first name, and a mapping from other names to the first."""
    first: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in named_tensors(module):
        if id(tensor) in first:
            tied[name] = first[id(tensor)]
        else:
            first[id(tensor)], tensors[name] = name, tensor
    return tensors, tied


def assign_tensors(module: nn.Module, tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    """Replace the tensors of the module, which may be on the device "meta".

    All names must be in `tensors` or `tied`.
    """
    made: dict[str, Tensor] = {}
    for name, old in list(named_tensors(module)):
        source = tied.get(name, name)
        if source not in made:
            new = tensors[source]
            made[source] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
        owner, _, own = name.rpartition(".")
        part = module.get_submodule(owner)
        (part._parameters if isinstance(old, nn.Parameter) else part._buffers)[own] = made[source]  # type: ignore[assignment]


CONFIG, TENSORS = "config.json", "model.safetensors"  # the two files of a result


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype) or any(size < 0 for size in self.shape):
            raise InvalidValue(f"A tensor cannot have shape {list(self.shape)} and dtype {self.dtype!r}.")

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=getattr(torch, self.dtype), device="cpu")

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape)) or 'a number'} in {self.dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """The shapes and dtypes of example inputs, positional and named."""

    args: tuple[TensorSpec, ...] = ()
    named: Mapping[str, TensorSpec] | None = None

    @classmethod
    def of(cls, inputs: ExampleInputs) -> Example | None:
        """Return None if an input is not a tensor (for example a list of images)."""
        if not all(isinstance(value, Tensor) for value in (*inputs.args, *inputs.named.values())):
            return None
        named = {name: TensorSpec.of(value) for name, value in inputs.named.items()}
        return cls(args=tuple(map(TensorSpec.of, inputs.args)), named=named or None)

    def zeros(self) -> ExampleInputs:
        named = {name: spec.zeros() for name, spec in (self.named or {}).items()}
        return ExampleInputs(tuple(spec.zeros() for spec in self.args), named)

    def __str__(self) -> str:
        named = (f"{name}: {spec}" for name, spec in (self.named or {}).items())
        return ", ".join((*map(str, self.args), *named)) or "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Document):
    """The contents of config.json.

    `name` and `fingerprint` are those of the traced network; `at`, `ignore` and `example` are the arguments of trace().
    `tensors` are in model.safetensors, whose digest is `sha256`; `tied` maps other names to names in `tensors`.
    """

    FORMAT: ClassVar[str] = "depthfold.result"

    name: str
    fingerprint: str
    plan: Plan
    at: str | None
    ignore: tuple[str, ...]
    example: Example | None
    tensors: Mapping[str, TensorSpec]
    tied: Mapping[str, str]
    sha256: str
    probe: Probe
    depthfold: str
    torch: str

    def __post_init__(self) -> None:
        if missing := sorted(set(self.tied.values()) - set(self.tensors)):
            raise InvalidValue(f"Result.tied: there is no tensor {missing[0]!r}.")


def save(shallow: nn.Module, folder: str | Path) -> Path:
    """Write the result of merge() to a folder: config.json and model.safetensors. Return the folder.

    Parent folders are created. An existing result is replaced after both files are complete. `load(folder, model)`
    rebuilds the network.
    """
    graph, origin, path = shallow_parts(shallow)
    blueprint, plan = origin.blueprint, origin.plan
    _check_not_wrapped(shallow, path, blueprint.at or "")
    _check_single(shallow)
    tensors, tied = without_ties(shallow)
    # Copies, because safetensors refuses tensors that share memory or are not contiguous.
    kept = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    try:
        data = safetensors.torch.save(kept, metadata={"format": "pt"})
    except Exception as error:  # a dtype that the format does not support
        raise ResultError(
            f"The tensors cannot be written as safetensors: {one_line(error)}. Convert them to a supported dtype."
        ) from error
    result = Result(
        name=blueprint.network.name,
        fingerprint=blueprint.network.fingerprint,
        plan=plan,
        at=blueprint.at,
        ignore=blueprint.ignore,
        example=Example.of(blueprint.example),
        tensors={name: TensorSpec.of(tensor) for name, tensor in kept.items()},
        tied=tied,
        sha256=hashlib.sha256(data).hexdigest(),
        probe=record_probe(graph, blueprint.inputs),
        depthfold=__version__,
        torch=str(torch.__version__),
    )
    folder = Path(folder)
    with write_errors(folder), put_all_in_place(folder / CONFIG) as config:
        config.with_name(TENSORS).write_bytes(data)
        config.write_text(result.dumps() + "\n", encoding="utf-8")
    return folder


def _check_not_wrapped(shallow: nn.Module, path: str, at: str) -> None:
    """Raise InvalidValue unless `shallow` is exactly the result of merge(), which load() rebuilds."""
    if path == at:
        return
    expected = f"a model with the merged network at {at!r}" if at else "the merged network itself"
    found = f"it at {path!r}" if path else "the merged network alone"
    raise InvalidValue(
        f"save() needs the result of merge(student), which is {expected}; found {found} in {type(shallow).__name__}."
    )


def _check_single(shallow: nn.Module) -> None:
    """Raise InvalidValue if the module contains several merged networks, because load() applies one plan."""
    paths = [path for path, part in shallow.named_modules() if Shallow.KEY in getattr(part, "meta", ())]
    if len(paths) > 1:
        raise InvalidValue(
            f"save() stores the plan of one merged network, found {len(paths)}: {', '.join(map(repr, paths))}. Use "
            "export() for such a model."
        )


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Convert an OSError to a ResultError."""
    try:
        yield
    except OSError as error:
        raise ResultError(
            f"{path} cannot be written: {error.strerror or one_line(error)}. Check the folder and its free space; "
            "existing files were not changed."
        ) from error
