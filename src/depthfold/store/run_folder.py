"""The folder of a run: what each stage leaves there, under which name."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from depthfold.core import Document, Network
from depthfold.errors import DepthfoldError, InvalidValue, RunError
from depthfold.store.files import put_in_place
from depthfold.support.coerce import as_path

D = TypeVar("D", bound=Document)
T = TypeVar("T")

CONFIG = "config.toml"  # what the command line was told
NETWORK = "network.json"
WEIGHTS = "weights.txt"  # their digest: importances and trainings of other weights are of no use
LATENCY, LATENCY_JOURNAL = "latency.json", "latency.jsonl"
IMPORTANCE = "importance.json"  # its journal is importance.jsonl
CHOICE = "choice.json"
FALLBACK = "fallback.json"  # the demo's budget where the one that it asks for is out of reach
STUDENTS = "students"  # a folder for each fine-tuning
RESULT = "result"  # a folder: config.json and model.safetensors
RESULT_OF = "result.txt"  # the student that the result was merged from, by the name of its folder
FINDINGS = "findings.json"
REPORT = "report.html"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Documents by name. Each is complete or not there at all, so whatever can be read was finished."""

    path: Path

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """The folder, which is made if it is not there."""
        folder = as_path("The folder of a run", expect_name(path), InvalidValue)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(folder, error) from error
        return cls(folder)

    @classmethod
    def at(cls, path: str | Path) -> RunFolder:
        """The folder, which must be there."""
        if not Path(path).is_dir():
            raise RunError(f"There is no run folder {path}. Check the path, or begin with depthfold latency.")
        return cls(Path(path))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out: two at once would overwrite each other's files, and measure each other."""
        # The kernel's lock on the folder itself: it ends with its process, however that ends, and leaves no file.
        try:
            handle = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise _unusable(self.path, error) from error
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunError(
                    f"The run folder {self.path} is in use by another process. Wait for it, or name another folder."
                ) from error
            yield
        finally:
            os.close(handle)

    def claim(self, network: Network) -> None:
        """Make the folder this network's; one that belongs to another network is refused. What an older depthfold wrote
        of the same network is brought up to date: later stages read it without tracing again."""
        if not self.knows(network) or self.read(NETWORK, Network) != network:
            self.write(NETWORK, network)

    def knows(self, network: Network) -> bool:
        """Whether the folder is this network's already; one that belongs to another network is refused."""
        there = self.read(NETWORK, Network)
        if there is not None and there.fingerprint != network.fingerprint:
            raise RunError(
                f"The run folder {self.path} belongs to another network: {there.name} with {there.depth} layers "
                f"({there.fingerprint}); this one is {network.name} with {network.depth} ({network.fingerprint}). "
                "Name another folder, or trace with the same options as before."
            )
        return there is not None

    def claim_weights(self, digest: str) -> None:
        """Make the folder that of these weights; what was trained with others is not reused in silence."""
        there = self.read_line(WEIGHTS)
        if not there:
            self.write_text(WEIGHTS, digest + "\n")
        elif there != digest:
            raise RunError(
                f"The run folder {self.path} belongs to other weights of this network ({there}; these are {digest}). "
                "Give the weights of before, or name another folder."
            )

    def forget(self, name: str) -> None:
        """Take away a document that no longer holds."""
        try:
            (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise _unusable(self.path / name, error) from error

    def write(self, name: str, document: Document) -> None:
        self.write_text(name, document.sealed() + "\n")

    def write_text(self, name: str, text: str) -> None:
        path = self.path / name
        try:
            with put_in_place(path) as partial:
                partial.write_text(text, encoding="utf-8")
        except OSError as error:
            raise _unusable(path, error) from error

    def read_line(self, name: str) -> str:
        """The text of a file of one line, or nothing if it was never written."""
        path = self.path / name
        try:
            return path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else ""
        except OSError as error:
            raise _unusable(path, error) from error

    def read(self, name: str, kind: type[D]) -> D | None:
        """The document, or None if it was never written."""
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
            raise RunError(f"{path} is damaged: {error} Delete it, and run again: it will be made anew.") from error

    def need(self, name: str, kind: type[D], command: str) -> D:
        """The document, or an error that names the command that makes it."""
        found = self.read(name, kind)
        if found is None:
            raise RunError(f"The run folder {self.path} has no {name} yet. Run: {command}")
        return found


def expect_name(path: T) -> T:
    """The name of a run's folder. An empty one, of a variable that is not set, would be the folder one stands in."""
    if isinstance(path, str) and not path.strip():
        raise InvalidValue("The run folder has an empty name. Name one with --run DIR; --run . is the current folder.")
    return path


def _unusable(path: Path, error: OSError) -> RunError:
    return RunError(
        f"{path} cannot be used: {error.strerror}. Check the folder, its permissions and its free space, or name "
        "another run folder."
    )
