"""Options of compress(): everything that has a default."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from depthfold.core import ImportanceTable, Space
from depthfold.jobs import Executor
from depthfold.training import Recipe

if TYPE_CHECKING:
    from torch import nn

HELP = "help"  # the key of a field's description in its metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of compress(). Each field describes itself in its metadata, under "help".

    The command line, config.toml and their checks use the same names and descriptions.
    """

    ignore: tuple[str | type[nn.Module], ...] = field(
        default=(), metadata={HELP: "Submodules to leave alone, by name or class. Only their batch norms are folded."}
    )
    at: str | None = field(default=None, metadata={HELP: "Fold only this submodule, for example backbone."})
    space: Space = field(
        default="paper", metadata={HELP: "The search space: paper, or full for every span that merges exactly."}
    )
    importance: ImportanceTable | None = field(
        default=None, metadata={HELP: "An importance table to use instead of measuring one."}
    )
    importance_recipe: Recipe | str = field(
        default="importance", metadata={HELP: "The recipe of the short trainings that measure importance."}
    )
    reinit: bool = field(
        default=True,
        metadata={
            HELP: "Reinitialise blocks of one layer before their importance is measured, as in the paper. Turn it off "
            "for trainings of a few steps: a reinitialised layer does not recover in them."
        },
    )
    executor: Executor | None = field(
        default=None, metadata={HELP: "Where the importance trainings run. Default: in this process."}
    )
    alpha: float | None = field(
        default=None,
        metadata={
            HELP: "Normalise the importances with this alpha; the paper uses 1.2 to 1.8. Default: no normalisation."
        },
    )
    recipe: Recipe | str = field(default="quick", metadata={HELP: "The recipe of the fine-tuning."})
    distil: bool = field(default=True, metadata={HELP: "Use the original network as the teacher of the fine-tuning."})
    exports: tuple[str, ...] = field(
        default=("model.onnx",),
        metadata={
            HELP: "Files to write into the run folder. The suffix selects the format: .onnx, .pt2, .xml, .engine."
        },
    )
    retry: bool = field(
        default=False,
        metadata={HELP: "Retry what failed before: blocks that the runtime rejected, and importance trainings."},
    )


def help_text(name: str) -> str:
    """Return the description of an option."""
    (text,) = (option.metadata[HELP] for option in fields(Options) if option.name == name)
    return str(text)
