"""The recipe: every hyper-parameter of a training, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from depthfold.core import Document

Precision = Literal["float32", "bfloat16", "float16"]
Crop = Literal["none", "pad", "resized"]  # "pad": by an eighth on each side and cropped; "resized": a random part


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Document):
    """How to train: SGD with Nesterov momentum and a learning rate that falls as a cosine to 0, step by step.

    The length is `epochs` or `steps`, one of the two. `batch` is the batch of all processes together. `warmup` steps
    raise the learning rate linearly first. `weight_decay` is on all parameters, as in the paper. `clip` is a limit on
    the norm of the gradient. With a teacher, the loss is `distillation` times the cross-entropy with the teacher's
    softened outputs plus the rest times the cross-entropy with the labels, without label smoothing. `ema` is the decay
    of an average of the weights, which is then what is scored and kept. A checkpoint is written every `checkpoint`
    steps, and the score taken every `evaluate` steps (both at the end, too; None: only there).
    """

    FORMAT: ClassVar[str] = "depthfold.recipe"

    epochs: float | None = None
    steps: int | None = None
    batch: int = 256
    lr: float = 0.05
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 1e-5
    warmup: int = 0
    clip: float | None = None
    label_smoothing: float = 0.0
    crop: Crop = "none"
    flip: bool = False
    randaugment: tuple[int, int] | None = None  # how many operations, and their magnitude
    erasing: float = 0.0
    distillation: float = 0.3
    temperature: float = 1.0
    precision: Precision = "float32"
    channels_last: bool = False
    ema: float | None = None
    evaluate: int | None = None
    checkpoint: int | None = None
    seed: int = 0
