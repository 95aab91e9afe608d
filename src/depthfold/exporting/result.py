"""The document of a saved result: what its tensors are, and how the network around them is made again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from depthfold.core import Document, Plan
from depthfold.errors import InvalidValue
from depthfold.exporting.probe import Probe
from depthfold.tracing import ExampleInputs

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
