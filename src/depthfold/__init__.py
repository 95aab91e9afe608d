"""depthfold makes CNNs faster by removing activations and merging convolutions."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from depthfold.version import __version__

if TYPE_CHECKING:
    from depthfold.core import Budget as Budget
    from depthfold.core import Environment as Environment
    from depthfold.core import Frontier as Frontier
    from depthfold.core import ImportanceTable as ImportanceTable
    from depthfold.core import LatencyTable as LatencyTable
    from depthfold.core import Network as Network
    from depthfold.core import Plan as Plan
    from depthfold.core import Span as Span
    from depthfold.errors import DepthfoldError as DepthfoldError
    from depthfold.exporting import export as export
    from depthfold.exporting import load as load
    from depthfold.exporting import save as save
    from depthfold.finetuning import finetune as finetune
    from depthfold.importance import measure_importance as measure_importance
    from depthfold.latency import choose as choose
    from depthfold.latency import measure_latency as measure_latency
    from depthfold.latency import profile as profile
    from depthfold.merging import Verification as Verification
    from depthfold.merging import merge as merge
    from depthfold.merging import verify as verify
    from depthfold.pipeline import Options as Options
    from depthfold.pipeline import compress as compress
    from depthfold.reporting import Findings as Findings
    from depthfold.reporting import report as report
    from depthfold.rewriting import rewrite as rewrite
    from depthfold.solver import solve as solve
    from depthfold.tasks import ClassificationTask as ClassificationTask
    from depthfold.tracing import trace as trace
    from depthfold.training import Recipe as Recipe

# The module of each public name, imported on first use so that `import depthfold` does not import torch.
_MODULES = {
    "Budget": "depthfold.core",
    "ClassificationTask": "depthfold.tasks",
    "DepthfoldError": "depthfold.errors",
    "Environment": "depthfold.core",
    "Findings": "depthfold.reporting",
    "Frontier": "depthfold.core",
    "ImportanceTable": "depthfold.core",
    "LatencyTable": "depthfold.core",
    "Network": "depthfold.core",
    "Options": "depthfold.pipeline",
    "Plan": "depthfold.core",
    "Recipe": "depthfold.training",
    "Span": "depthfold.core",
    "Verification": "depthfold.merging",
    "choose": "depthfold.latency",
    "compress": "depthfold.pipeline",
    "finetune": "depthfold.finetuning",
    "measure_importance": "depthfold.importance",
    "export": "depthfold.exporting",
    "load": "depthfold.exporting",
    "measure_latency": "depthfold.latency",
    "merge": "depthfold.merging",
    "profile": "depthfold.latency",
    "report": "depthfold.reporting",
    "rewrite": "depthfold.rewriting",
    "save": "depthfold.exporting",
    "solve": "depthfold.solver",
    "trace": "depthfold.tracing",
    "verify": "depthfold.merging",
}

__all__ = ["__version__", *sorted(_MODULES)]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'depthfold' has no attribute {name!r}; it has {', '.join(sorted(_MODULES))}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
