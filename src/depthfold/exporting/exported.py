"""What export() wrote, and what it found when it compared the file with the network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from depthfold.core import Environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A file that runs without depthfold.

    `error` is the largest difference between the file and the network, as a share of the largest output, and
    `environment` where it was found; both are None where nothing was compared. `batch` is the one size of the batch
    that the file takes, and `why_fixed` the reason where any size was asked for.
    """

    path: Path
    format: str
    batch: int | Literal["dynamic"]
    error: float | None = None
    environment: Environment | None = None
    why_fixed: str | None = None

    def __str__(self) -> str:
        batch = "batches of any size" if self.batch == "dynamic" else f"a batch of {self.batch}"
        text = f"{self.path}: {self.format}, for {batch}"
        text += f" ({self.why_fixed})" if self.why_fixed else ""
        if self.error is None or self.environment is None:
            return f"{text}; not compared with PyTorch"
        runtime = f"{self.environment.runtime} {self.environment.runtime_version}"
        return f"{text}; {runtime} is within {self.error:.1e} of PyTorch"
