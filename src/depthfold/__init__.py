"""depthfold makes CNNs faster by removing activations and merging convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from depthfold.support.optional import lazy_getattr
from depthfold.version import __version__

if TYPE_CHECKING:
    from depthfold.core import Budget, Drops, Environment, Frontier, ImportanceTable, LatencyTable, Network, Plan, Span
    from depthfold.errors import DepthfoldError
    from depthfold.exporting import export, load, save
    from depthfold.finetuning import finetune
    from depthfold.importance import measure_importance
    from depthfold.latency import choose, measure_latency, profile
    from depthfold.merging import Verification, merge, verify
    from depthfold.pipeline import Options, compress
    from depthfold.reporting import Findings, report
    from depthfold.rewriting import rewrite
    from depthfold.solver import solve
    from depthfold.tasks import ClassificationTask
    from depthfold.tracing import trace
    from depthfold.training import Recipe

# Imported on first use, so that `import depthfold` does not import torch.
__getattr__ = lazy_getattr(
    __name__,
    {
        "core": "Budget Drops Environment Frontier ImportanceTable LatencyTable Network Plan Span",
        "errors": "DepthfoldError",
        "exporting": "export load save",
        "finetuning": "finetune",
        "importance": "measure_importance",
        "latency": "choose measure_latency profile",
        "merging": "Verification merge verify",
        "pipeline": "Options compress",
        "reporting": "Findings report",
        "rewriting": "rewrite",
        "solver": "solve",
        "tasks": "ClassificationTask",
        "tracing": "trace",
        "training": "Recipe",
    },
)

__all__ = [
    "Budget", "ClassificationTask", "DepthfoldError", "Drops", "Environment", "Findings", "Frontier", "ImportanceTable",
    "LatencyTable", "Network", "Options", "Plan", "Recipe", "Span", "Verification", "__version__", "choose",
    "compress", "export", "finetune", "load", "measure_importance", "measure_latency", "merge", "profile", "report",
    "rewrite", "save", "solve", "trace", "verify",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
