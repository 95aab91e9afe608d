"""save(): a merged network as two files, from which load() makes it again without unpickling anything."""

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
from depthfold.exporting.probe import Probe, take_probe
from depthfold.merging.verification import Shallow, shallow_parts
from depthfold.store.files import put_all_in_place
from depthfold.support.text import one_line
from depthfold.tracing import ExampleInputs
from depthfold.version import __version__

# All tensors of a module by name: to be written, and to be put in place of those that are there.


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, under all of their names. A state dict leaves out the buffers that its author thought
    could be computed again; here nobody will."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def without_ties(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor under its first name, and the further names of those that have several."""
    first: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in named_tensors(module):
        if id(tensor) in first:
            tied[name] = first[id(tensor)]
        else:
            first[id(tensor)], tensors[name] = name, tensor
    return tensors, tied


def put_tensors(module: nn.Module, tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    """Put these in the place of the module's own, which may be on the device "meta". All names must be there."""
    made: dict[str, Tensor] = {}
    for name, old in list(named_tensors(module)):
        source = tied.get(name, name)
        if source not in made:
            new = tensors[source]
            made[source] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
        owner, _, own = name.rpartition(".")
        place = module.get_submodule(owner)
        (place._parameters if isinstance(old, nn.Parameter) else place._buffers)[own] = made[source]  # type: ignore[assignment]


# The document of a saved result: what its tensors are, and how the network around them is made again.

CONFIG, TENSORS = "config.json", "model.safetensors"  # the two files of a result


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype) or any(size < 0 for size in self.shape):
            raise InvalidValue(f"There is no tensor of shape {list(self.shape)} and type {self.dtype!r}.")

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=getattr(torch, self.dtype), device="cpu")

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape)) or 'a number'} in {self.dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Example inputs without their values: those that are tensors, by position or by name."""

    args: tuple[TensorSpec, ...] = ()
    named: Mapping[str, TensorSpec] | None = None

    @classmethod
    def of(cls, inputs: ExampleInputs) -> Example | None:
        """None where an input is no tensor (a list of images, say): it then has to be given again."""
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
    """What config.json says of a merged network.

    `name` and `fingerprint` are those of the network that was traced, `at`, `ignore` and `example` what trace() was
    asked for. `tensors` are in model.safetensors, whose digest is `sha256`; `tied` are further names of theirs.
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
        if lost := sorted(set(self.tied.values()) - set(self.tensors)):
            raise InvalidValue(f"Result.tied: there is no tensor {lost[0]!r}.")


def save(shallow: nn.Module, folder: str | Path) -> Path:
    """Write a merged network, as merge() returned it, to a folder: config.json and model.safetensors.

    Parent folders are made, and a result that is there already is written over: both files are complete before either
    takes its place. `load(folder, model)` makes the network again. Returns the folder.
    """
    graph, remembered, path = shallow_parts(shallow)
    blueprint, plan = remembered.blueprint, remembered.plan
    _refuse_wrappers(shallow, path, blueprint.at or "")
    _refuse_several(shallow)
    tensors, tied = without_ties(shallow)
    # Copies, each in memory of its own: safetensors refuses tensors that share theirs or are not contiguous.
    kept = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    try:
        data = safetensors.torch.save(kept, metadata={"format": "pt"})
    except Exception as error:  # a type of numbers that the format does not have
        raise ResultError(f"The tensors have no form in safetensors: {one_line(error)}.") from error
    result = Result(
        name=blueprint.network.name,
        fingerprint=blueprint.network.fingerprint,
        plan=Plan(plan.activations, plan.cuts),  # a solved plan also knows what it costs, which is no part of this
        at=blueprint.at,
        ignore=blueprint.ignore,
        example=Example.of(blueprint.example),
        tensors={name: TensorSpec.of(tensor) for name, tensor in kept.items()},
        tied=tied,
        sha256=hashlib.sha256(data).hexdigest(),
        probe=take_probe(graph, blueprint.inputs),
        depthfold=__version__,
        torch=str(torch.__version__),
    )
    folder = Path(folder)
    with writing(folder), put_all_in_place(folder / CONFIG) as config:
        config.with_name(TENSORS).write_bytes(data)
        config.write_text(result.dumps() + "\n", encoding="utf-8")
    return folder


def _refuse_wrappers(shallow: nn.Module, path: str, at: str) -> None:
    """load() makes what merge() returned, and knows nothing of a module that somebody put around it or took off."""
    if path == at:
        return
    expected = f"a model with the merged network at {at!r}" if at else "the merged network itself"
    found = f"it at {path!r}" if path else "the merged network alone"
    raise InvalidValue(
        f"save() takes what merge(student) returned, which is {expected}; found {found} in {type(shallow).__name__}."
    )


def _refuse_several(shallow: nn.Module) -> None:
    """load() replays one plan."""
    paths = [path for path, part in shallow.named_modules() if Shallow.KEY in getattr(part, "meta", ())]
    if len(paths) > 1:
        raise InvalidValue(
            f"save() keeps the plan of one merged network, found {len(paths)}: {', '.join(map(repr, paths))}. "
            "export() takes such a model as it is."
        )


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Whatever the disk says, as one error."""
    try:
        yield
    except OSError as error:
        raise ResultError(
            f"{path} cannot be written: {error.strerror or one_line(error)}. Check the folder and its free space, or "
            "name another; what was there before is still there."
        ) from error
