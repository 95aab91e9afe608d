"""The demo: its settings, the network with its weights, and run_demo()."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from safetensors.torch import load_file
from torch import nn

from depthfold.backends import get
from depthfold.core import Document
from depthfold.demo import network as network_file
from depthfold.demo.network import SHIPPED
from depthfold.errors import BudgetError
from depthfold.importance import MethodName
from depthfold.latency.choose import MARGIN, reachable_budget
from depthfold.pipeline import Compressed
from depthfold.progress import Progress
from depthfold.settings import Session, Settings, keep
from depthfold.settings.stages import compress_stage, preflight
from depthfold.store.run_folder import FALLBACK

WEIGHTS = SHIPPED / "weights.safetensors"

BUDGET = "71%"  # at least 1.4 times as fast

# Without training, on few images: a minute on two cores. One epoch of training for each block would take a day.
IMPORTANCE_METHOD: MethodName = "recalibrated"
IMPORTANCE_RECIPE = MappingProxyType({"steps": 2, "batch": 64})
RECIPE = MappingProxyType(
    {
        "steps": 280, "batch": 64, "lr": 0.02, "weight_decay": 1e-4, "warmup": 10, "clip": 5.0, "flip": True,
        "distillation": 0.9, "temperature": 2.0, "ema": 0.98, "evaluate": 70, "checkpoint": 35,
    }
)  # fmt: skip


def model() -> nn.Module:
    """Return the small MobileNetV2, trained on Fashion-MNIST, in evaluation mode."""
    network = network_file.small_mobilenet()
    network.load_state_dict(load_file(WEIGHTS))
    return network.eval()


def demo_settings(run: str | Path) -> Settings:
    """Return the settings of the demo."""
    return Settings(
        run=str(Path(run).expanduser().absolute()),
        model=f"{Path(network_file.__file__)}:{network_file.small_mobilenet.__name__}",
        weights=str(WEIGHTS),
        data=f"{Path(network_file.__file__)}:{network_file.task.__name__}",
        target="onnxruntime",
        budget=BUDGET,
        allow_doubtful=True,  # a demo shows the whole way also on a busy machine, and choose() times whole networks
        method=IMPORTANCE_METHOD,
        importance_recipe=dict(IMPORTANCE_RECIPE),
        executor="processes:threads=1",
        recipe=dict(RECIPE),
        export=("model.onnx", "model.pt2"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback(Document):
    """The budget that the demo uses because this environment cannot meet the one that was asked for."""

    FORMAT: ClassVar[str] = "depthfold.fallback"

    budget: str


def run_demo(settings: Settings, *, say: Callable[[str], None], progress: Progress | None = None) -> Compressed:
    """Compress with these settings; if this machine cannot meet the budget, with the nearest budget that it can.

    A resumed run uses the same budget again: another one might be met by now, because latencies vary.
    """
    session, asked = Session(settings=settings, progress=progress), settings.need("budget")
    traced = preflight(session)
    environment = get(session.target).environment(traced.example_tensors())
    made_from, budget = {"asked": asked, "environment": environment}, asked
    if (before := session.folder.find(FALLBACK, Fallback, made_from)) is not None:
        budget = before.budget
        say(
            f"This machine could not meet the budget of {asked} before, so the demo continues with {budget}. To try "
            f"{asked} again, delete {session.folder.path / FALLBACK}."
        )
    while True:
        keep(replace(settings, budget=budget))  # so that other commands can use this run with --run alone
        try:
            return compress_stage(session, traced, budget=budget)
        except BudgetError as error:
            if error.fastest is None or error.fastest > 1 - MARGIN:
                raise
            budget = reachable_budget(error.fastest)
            session.folder.write(FALLBACK, Fallback(budget=budget), made_from)
            say(f"{error} The demo continues with {budget}, which this machine can meet.")
