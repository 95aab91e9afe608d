"""Options of compress(): everything that has a default."""

# ruff: noqa: RUF009 - _option() returns a dataclass field

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from depthfold.core import ImportanceTable, LatencyTable, Move, Space
from depthfold.core.options import MERGE
from depthfold.importance import MethodName
from depthfold.jobs import Executor
from depthfold.training import Recipe

if TYPE_CHECKING:
    from torch import nn

    from depthfold.backends import Layout

HELP = "help"  # the key of a field's description in its metadata


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={HELP: text})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of compress(). Each field describes itself in its metadata, under "help".

    The command line, config.toml and their checks use the same names and descriptions.
    """

    ignore: tuple[str | type[nn.Module], ...] = _option(
        (), "Submodules to leave alone, by name or class. Only their batch norms are folded."
    )
    at: str | None = _option(None, "Fold only this submodule, for example backbone.")
    space: Space = _option("paper", "The search space: paper, or full for every span that merges exactly.")
    moves: tuple[Move, ...] = _option(
        MERGE,
        "What a plan may do: merge (always), drop-layers (leave out convolutions that keep channels "
        "and size) and drop-branches (leave out the branches of residuals).",
    )
    latency: LatencyTable | None = _option(None, "A latency table to use instead of measuring one.")
    importance: ImportanceTable | None = _option(None, "An importance table to use instead of measuring one.")
    importance_method: MethodName = _option(
        "brief",
        "How importance is measured: brief (a few steps of distillation per block), trained (an epoch per block, as in "
        "the paper), recalibrated, local or fit (little or no training). Use trained only to reproduce the paper: with "
        "small data, an epoch is too short for reinitialised layers, and with large data it takes long.",
    )
    importance_recipe: Recipe | str | None = _option(
        None, "The recipe of the trainings that measure importance. Default: the preset of the method."
    )
    reinit: bool | None = _option(
        None,
        "Reinitialise blocks of one layer before their importance is measured, as in the paper. Only with the method "
        "trained, where it is the default. Turn it off for trainings of a few steps: a reinitialised layer does not "
        "recover in them.",
    )
    executor: Executor | None = _option(None, "Where the importance is measured. Default: in this process.")
    alpha: float | None = _option(
        None,
        "Normalise importances of the method trained with this alpha; the paper uses 1.2 to 1.8. Default: no "
        "normalisation.",
    )
    surrogate: bool = _option(
        False,
        "Train some whole plans, and fit their scores by the sum of the importances and the number of blocks. The plan "
        "is then chosen by its predicted score. Takes the place of alpha.",
    )
    recipe: Recipe | str = _option("quick", "The recipe of the fine-tuning.")
    distil: bool = _option(True, "Use the original network as the teacher of the fine-tuning.")
    exports: tuple[str, ...] = _option(
        ("model.onnx",),
        "Files to write into the run folder. The suffix is the format: .onnx, .pt2, .xml, .engine.",
    )
    raw_images: Layout | None = _option(
        None,
        "The exported files take raw images (uint8, 0 to 255) in this layout, NHWC or NCHW, and normalise them. "
        "Default: they take normalised images.",
    )
    int8: bool = _option(
        False,
        "Also write an INT8 form of each .onnx file (model-int8.onnx), calibrated on training images and scored and "
        "timed beside float32.",
    )
    allow_doubtful: bool = _option(
        False,
        "Train even if the latency table is doubtful: if it predicts whole networks poorly, or if the speed of the "
        "machine changed while it was measured.",
    )
    retry: bool = _option(
        False, "Retry what failed before: blocks that the runtime rejected, and importance trainings."
    )


def help_text(name: str) -> str:
    """Return the description of an option."""
    (text,) = (option.metadata[HELP] for option in fields(Options) if option.name == name)
    return str(text)
