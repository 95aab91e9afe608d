"""The run folder: the artefacts of a run under fixed names, and run.json, which records what each was made from."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from depthfold.core import Document, Network
from depthfold.errors import DepthfoldError, InvalidValue, RunError
from depthfold.store.files import lock, put_in_place
from depthfold.support.coerce import as_path
from depthfold.support.document import encode

D = TypeVar("D", bound=Document)
T = TypeVar("T")

RUN = "run.json"
CONFIG = "config.toml"  # the settings of the command line
NETWORK = "network.json"
LATENCY, LATENCY_JOURNAL = "latency.json", "latency.jsonl"
IMPORTANCE, IMPORTANCE_JOURNAL = "importance.json", "importance.jsonl"
SURROGATE, SURROGATE_JOURNAL = "surrogate.json", "surrogate.jsonl"
PLAN = "plan.json"
CHECKED_IMAGES = "images"  # a record without a file: the image files that can be read
FALLBACK = "fallback.json"  # the demo's budget if the machine cannot meet the one it asks for
STUDENTS = "students"  # a folder for each fine-tuning
RESULT = "result"  # a folder: config.json and model.safetensors
PROFILES = "profiles.json"
FINDINGS = "findings.json"
REPORT = "report.html"
GIVEN = "given table"  # the input of a table that the user gave

# The names that no export may take.
_TABLES = (LATENCY, LATENCY_JOURNAL, IMPORTANCE, IMPORTANCE_JOURNAL, SURROGATE, SURROGATE_JOURNAL)
NAMES = frozenset((RUN, CONFIG, NETWORK, *_TABLES, PLAN, FALLBACK, STUDENTS, RESULT, PROFILES, FINDINGS, REPORT))

Inputs = Mapping[str, Any]
_NOTHING: Inputs = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Records(Document):
    """The contents of run.json: the digest of the weights, and the inputs of each artefact as text."""

    FORMAT: ClassVar[str] = "depthfold.run"

    weights: str | None = None
    made_from: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run folder of one network and its weights.

    Each artefact is complete or absent. An artefact is reused if it was made from the same inputs, and otherwise built
    again: see `make`.
    """

    path: Path

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Return the folder; create it if it does not exist."""
        folder = as_path("The run folder", require_name(path), InvalidValue)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(folder, error) from error
        return cls(folder)

    @classmethod
    def at(cls, path: str | Path) -> RunFolder:
        """Return the folder; raise RunError if it does not exist."""
        if not Path(path).is_dir():
            raise RunError(f"There is no run folder {path}. Check the path, or start with depthfold latency.")
        return cls(Path(path))

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Keep other processes out: two at once would overwrite each other's files and disturb each other's timing."""
        return lock(self.path, RunError)

    def make(self, name: str, kind: type[D], made_from: Inputs, build: Callable[[], D]) -> D:
        """Return the artefact if it was made from these inputs; otherwise build it, write it and return it."""
        found = self.find(name, kind, made_from)
        if found is None:
            found = build()
            self.write(name, found, made_from)
        return found

    def find(self, name: str, kind: type[D], made_from: Inputs) -> D | None:
        """Return the artefact if it was made from these inputs."""
        return self.read(name, kind) if self.made_from(name) == _as_text(made_from) else None

    def made_from(self, name: str) -> Mapping[str, str] | None:
        """Return the inputs of an artefact; None if it was not finished."""
        return self._records().made_from.get(name)

    @contextlib.contextmanager
    def making(self, name: str, made_from: Inputs) -> Iterator[Path]:
        """Yield the path of an artefact to write, and record its inputs when the block ends without an error.

        Until then it has no record, so a kill leaves an artefact that is built again.
        """
        self._record(name, None)
        yield self.path / name
        self._record(name, _as_text(made_from))

    def write(self, name: str, document: Document, made_from: Inputs = _NOTHING) -> None:
        """Write an artefact and record its inputs."""
        with self.making(name, made_from):
            self.write_text(name, document.dumps() + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a file that has no inputs."""
        path = self.path / name
        try:
            with put_in_place(path) as partial:
                partial.write_text(text, encoding="utf-8")
        except OSError as error:
            raise _unusable(path, error) from error

    def read(self, name: str, kind: type[D]) -> D | None:
        """Return the document, whatever it was made from; None if it does not exist."""
        path = self.path / name
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            return kind.loads(text)
        except DepthfoldError as error:
            raise RunError(f"{path} is damaged: {error} Delete it and run again: it will be rebuilt.") from error

    def need(self, name: str, kind: type[D], command: str) -> D:
        """Return the document; raise RunError with the command that makes it if it does not exist."""
        found = self.read(name, kind)
        if found is None:
            raise RunError(f"The run folder {self.path} has no {name} yet. Run: {command}")
        return found

    def forget(self, name: str) -> None:
        """Delete a document and its record."""
        self._record(name, None)
        try:
            (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise _unusable(self.path / name, error) from error

    def claim(self, network: Network) -> None:
        """Assign the folder to this network. Raise RunError if it belongs to another one.

        A description of the same network by an older depthfold is replaced: later stages read it without tracing.
        """
        if not self.knows(network) or self.read(NETWORK, Network) != network:
            self.write_text(NETWORK, network.dumps() + "\n")

    def knows(self, network: Network) -> bool:
        """Return True if the folder belongs to this network, False if it has none. Raise RunError for another one."""
        there = self.read(NETWORK, Network)
        if there is not None and there.fingerprint != network.fingerprint:
            if sizes := _other_sizes(there, network):
                raise RunError(
                    f"The run folder {self.path} was measured with inputs of {sizes[0]} at layer 1; now they are "
                    f"{sizes[1]}. Leave out --input (in Python, give inputs of the same size), or use another run "
                    "folder."
                )
            raise RunError(
                f"The run folder {self.path} belongs to another network: {there.name} with {there.depth} layers "
                f"({there.fingerprint}); this one is {network.name} with {network.depth} ({network.fingerprint}). Use "
                "another folder, or trace with the same options as before."
            )
        return there is not None

    def claim_weights(self, digest: str) -> None:
        """Assign the folder to the weights with this digest. Raise RunError if it belongs to others."""
        records = self._records()
        if records.weights is None:
            self._save(replace(records, weights=digest))
        elif records.weights != digest:
            raise RunError(
                f"The run folder {self.path} belongs to other weights of this network ({records.weights}; these are "
                f"{digest}). Give the same weights as before, or use another folder."
            )

    def _records(self) -> Records:
        return self.read(RUN, Records) or Records()

    def _record(self, name: str, made_from: Mapping[str, str] | None) -> None:
        records = self._records()
        if records.made_from.get(name) != made_from:
            others = {key: value for key, value in records.made_from.items() if key != name}
            self._save(replace(records, made_from=others if made_from is None else others | {name: made_from}))

    def _save(self, records: Records) -> None:
        self.write_text(RUN, records.dumps() + "\n")


def require_name(path: T) -> T:
    """Return the name of a run folder unless it is empty: that would be the current folder."""
    if isinstance(path, str) and not path.strip():
        raise InvalidValue("The run folder has an empty name. Name one with --run DIR; --run . is the current folder.")
    return path


def _other_sizes(there: Network, here: Network) -> tuple[str, str] | None:
    """Return the input sizes of layer 1 if the networks have the same layers, with inputs of different sizes."""
    kernels, others = (
        [(layer.where, layer.shape.in_channels, layer.shape.out_channels, layer.shape.kernel) for layer in each.layers]
        for each in (there, here)
    )
    if not kernels or kernels != others or there.layers[0].in_size == here.layers[0].in_size:
        return None
    first = (each.layers[0] for each in (there, here))
    one, two = ("x".join(map(str, (layer.shape.in_channels, *layer.in_size))) for layer in first)
    return one, two


def _as_text(made_from: Inputs) -> dict[str, str]:
    return {
        name: value if isinstance(value, str) else json.dumps(encode(value), sort_keys=True)
        for name, value in made_from.items()
    }


def _unusable(path: Path, error: OSError) -> RunError:
    return RunError(
        f"{path} cannot be used: {error.strerror}. Check the folder, its permissions and its free space, or use "
        "another run folder."
    )
