"""show(): what `depthfold compress` does, with everything it needs at hand."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from depthfold.backends import get
from depthfold.core import Document
from depthfold.demo import network as network_file
from depthfold.demo.shipped import IMPORTANCE, SHIPPED, WEIGHTS
from depthfold.errors import BudgetError
from depthfold.latency.candidates import network_inputs
from depthfold.latency.choose import MARGIN
from depthfold.pipeline import Compressed
from depthfold.pipeline.config_file import keep
from depthfold.pipeline.settings import Settings, given
from depthfold.pipeline.stages import begin, compress_stage
from depthfold.pipeline.subject import Subject
from depthfold.progress import Progress
from depthfold.store.run_folder import FALLBACK

BUDGET = "71%"  # at least 1.4 times as fast
ALPHA = 1.6  # the paper's are 1.2 to 1.8

# An entry is trained for a few steps only: 143 of them take half an hour on two cores, not a day.
TRAININGS = MappingProxyType({"steps": 24, "batch": 64, "lr": 0.02, "clip": 5.0, "flip": True})
TUNING = MappingProxyType(
    {
        "steps": 400, "batch": 64, "lr": 0.02, "weight_decay": 1e-4, "warmup": 10, "clip": 5.0, "flip": True,
        "distillation": 0.9, "temperature": 2.0, "ema": 0.98, "evaluate": 100, "checkpoint": 50,
    }
)  # fmt: skip


def demo_settings(run: str | Path, *, remeasure: bool = False) -> Settings:
    """The settings of the demo. `remeasure` trains for the importances here instead of taking the table that ships."""
    return Settings(
        run=str(Path(run).expanduser().absolute()),
        model=f"{Path(network_file.__file__)}:{network_file.small_mobilenet.__name__}",
        weights=str(WEIGHTS),
        data=f"fashion-mnist:{SHIPPED}",
        target="onnxruntime",
        budget=BUDGET,
        trainings=dict(TRAININGS),
        importance=None if remeasure else str(IMPORTANCE),
        executor=f"processes:{os.cpu_count() or 1},threads=1",
        afresh=False,  # in so few steps no layer would come back
        alpha=ALPHA,
        recipe=dict(TUNING),
        export=("model.onnx", "model.pt2"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback(Document):
    """The budget that took the place of the one that was asked for, which this environment does not meet."""

    FORMAT: ClassVar[str] = "depthfold.fallback"

    budget: str


def show(settings: Settings, *, say: Callable[[str], None], progress: Progress | None = None) -> Compressed:
    """Compress as the settings say; where this machine cannot meet the budget, as fast as it can. A run that goes on
    takes the budget that it took before: by a stopwatch, another one might be within reach now."""
    subject, asked = Subject.of(settings, progress), given(settings.budget, "budget")
    network = begin(subject)  # refuses the folder of another network, before it is told anything
    environment = get(subject.target).environment(network_inputs(network))
    made_from = {"budget": asked, "environment": environment}
    before = subject.folder.find(FALLBACK, Fallback, made_from)
    if before is not None:
        settings = replace(settings, budget=before.budget)
        say(
            f"This machine cannot meet the budget of {asked}, as was found before. The demo goes on with "
            f"{before.budget}. To try {asked} again, delete {subject.folder.path / FALLBACK}."
        )
    while True:
        keep(settings)  # the other commands can go on in this run, and need only --run
        try:
            return compress_stage(replace(subject, settings=settings), network, retry=False)
        except BudgetError as error:
            if error.fastest is None:
                raise
            budget = within_reach(error.fastest)
            subject.folder.write(FALLBACK, Fallback(budget=budget), made_from)
            settings = replace(settings, budget=budget)
            say(f"{error} The demo goes on with {budget}, the best that can be had here.")


def within_reach(fastest: float) -> str:
    """The budget that a plan meets which takes this share of the original: what is spared, and a per cent for noise."""
    return f"{math.ceil(100 * fastest / (1 - MARGIN)) + 1}%"
