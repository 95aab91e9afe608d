"""Jobs of every kind for the conformance suite of executors: plain ones, and ones that go wrong in each known way.

They leave files in a folder that the workers share with the caller, which is how the suite knows what was really run,
where, how often and beside what.
"""

from __future__ import annotations

import hashlib
import os
import platform
import signal
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from depthfold.errors import NotFinite

What = Literal[
    "plain",
    "large",
    "raises",
    "not finite",
    "too large at first",
    "too large",
    "dies at first",
    "dies",
    "lambda",
    "long",
]
PAUSE = 0.02  # seconds: long enough for two jobs to meet that should not, and no more


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """A payload: what to do, and with which number or bytes."""

    key: str
    what: What = "plain"
    data: Any = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A setup. `fails` makes it raise; `dies` makes it end its process."""

    folder: str
    fails: bool = False
    dies: bool = False

    def __call__(self) -> Worker:
        if self.fails:
            raise ValueError("this setup fails on purpose")
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return Worker(Path(self.folder))


class Worker:
    """The work. It knows by itself, and by nothing else, how often it was called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name, self.calls = folder, uuid.uuid4().hex, 0
        where = f"{platform.node()}-{os.getpid()}-{threading.get_ident()}"
        _leave(folder / "setups" / self.name, where)

    def __call__(self, errand: Errand) -> Any:
        self.calls += 1
        attempt = len(list(self.folder.glob(f"starts/{errand.key}.*"))) + 1
        _leave(self.folder / "starts" / f"{errand.key}.{attempt}", f"{platform.node()} {os.getpid()}")
        try:
            result = self._do(errand, attempt)
        finally:
            _leave(self.folder / "ends" / f"{errand.key}.{attempt}", "")
        return result

    def _do(self, errand: Errand, attempt: int) -> Any:
        match errand.what:
            case "raises":
                raise ValueError(f"{errand.key} fails on purpose")
            case "not finite":
                raise NotFinite("the loss is nan at step 7", step=7, lr=0.1)
            case "too large" | "too large at first" if attempt == 1:
                raise MemoryError("this needs more than there is")
            case "too large":
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            case "too large at first":
                time.sleep(PAUSE)
                return self._others(errand)
            case "dies at first" if attempt == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            case "dies":
                os._exit(3)
            case "lambda":
                return lambda: errand
            case "long":
                self._wait()
        time.sleep(PAUSE)
        return expected(errand) | {"worker": self.name, "call": self.calls}

    def _others(self, errand: Errand) -> dict[str, Any]:
        """Which other jobs run at this moment, and how many were done before."""
        starts, ends = ({file.name for file in (self.folder / kind).glob("*")} for kind in ("starts", "ends"))
        running = sorted(name for name in starts - ends if name.partition(".")[0] != errand.key)
        return {"beside": running, "after": len({name.partition(".")[0] for name in ends} - {errand.key})}

    def _wait(self) -> None:
        while not (self.folder / "enough").exists():
            time.sleep(PAUSE)


def expected(errand: Errand) -> dict[str, Any]:
    """What the work gives for an errand that nothing keeps it from doing."""
    if errand.what == "large":
        return {"value": hashlib.sha256(errand.data).hexdigest(), "echo": errand.data[::-1]}
    return {"value": 3 * errand.data + 1}


def _leave(path: Path, text: str) -> None:
    """Whole or not at all: the suite may look at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.parent.parent / f"draft-{uuid.uuid4().hex}"
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
