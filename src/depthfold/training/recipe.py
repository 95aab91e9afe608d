"""The recipe: every hyper-parameter of a training, as frozen data."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from numbers import Integral
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self, get_args

from depthfold.core import Document
from depthfold.errors import InvalidValue
from depthfold.support.coerce import as_float, as_tuple
from depthfold.support.text import did_you_mean

Precision = Literal["float32", "bfloat16", "float16"]
Crop = Literal["none", "pad", "resized"]  # "pad": by an eighth on each side and cropped; "resized": a random part
Keep = Literal["last", "best"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Document):
    """How to train: SGD with Nesterov momentum and a learning rate that falls as a cosine to 0, step by step.

    The length is `epochs` or `steps`, one of the two. `batch` is the batch of all processes together. `warmup` steps
    raise the learning rate linearly first. `weight_decay` is on all parameters, as in the paper. `clip` is a limit on
    the norm of the gradient. With a teacher, the loss is `distillation` times the cross-entropy with the teacher's
    softened outputs plus the rest times the cross-entropy with the labels, without label smoothing. `ema` is the decay
    of an average of the weights, which is then what is scored and kept. The score is taken every `evaluate` steps and
    at the end (None: only there). Where the training has a folder, a checkpoint is written there every `checkpoint`
    steps (None: about ten times), after a score that is the best so far, and at the end. `keep` says which weights the
    training ends with: the last ones, as in the paper, or those of the best score.
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
    randaugment: tuple[int, int] | None = None  # how many operations, and their magnitude of 30
    erasing: float = 0.0
    distillation: float = 0.3
    temperature: float = 1.0
    precision: Precision = "float32"
    channels_last: bool = False
    ema: float | None = None
    evaluate: int | None = None
    checkpoint: int | None = None
    keep: Keep = "last"
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            found = "neither" if self.steps is None else f"epochs={self.epochs!r} and steps={self.steps!r}"
            raise InvalidValue(f"A recipe takes epochs=... or steps=..., one of the two; found {found}.")
        for name in ("steps", "batch", "evaluate", "checkpoint"):
            self._whole(name, least=1)
        for name in ("warmup", "seed"):
            self._whole(name, least=0)
        for name in ("epochs", "lr", "clip", "temperature"):
            self._number(name, "more than 0", lambda value: value > 0)
        self._number("weight_decay", "0 or more", lambda value: value >= 0)
        for name in ("momentum", "label_smoothing"):
            self._number(name, "from 0 to less than 1", lambda value: 0 <= value < 1)
        for name in ("erasing", "distillation"):
            self._number(name, "from 0 to 1", lambda value: 0 <= value <= 1)
        self._number("ema", "between 0 and 1", lambda value: 0 < value < 1)
        for name, kind in (("crop", Crop), ("precision", Precision), ("keep", Keep)):
            self._one_of(name, get_args(kind))
        for name in ("nesterov", "flip", "channels_last"):
            self._one_of(name, (True, False))
        self._check_randaugment()
        self._check_together()

    def but(self, **changes: Any) -> Self:
        """The same recipe with other values. A length in steps takes the place of one in epochs, and the reverse."""
        known = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                hint = did_you_mean(name, known)
                raise InvalidValue(f"A recipe has no {name!r}. {hint}It has {', '.join(known)}.")
        for given, other in (("steps", "epochs"), ("epochs", "steps")):
            if changes.get(given) is not None:
                changes.setdefault(other, None)
        return dataclasses.replace(self, **changes)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _whole(self, name: str, *, least: int) -> None:
        value = getattr(self, name)
        if value is None and name in _OPTIONAL:
            return
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise InvalidValue(f"The recipe's {name} must be a whole number from {least} on, found {value!r}.")
        self._set(name, int(value))

    def _number(self, name: str, expected: str, holds: Any) -> None:
        value = getattr(self, name)
        if value is None and name in _OPTIONAL:
            return
        number = as_float(f"The recipe's {name}", value, InvalidValue)
        if not math.isfinite(number) or not holds(number):
            raise InvalidValue(f"The recipe's {name} must be {expected}, found {value!r}.")
        self._set(name, number)

    def _one_of(self, name: str, choices: tuple[object, ...]) -> None:
        value = getattr(self, name)
        if not isinstance(value, type(choices[0])) or value not in choices:
            expected = ", ".join(map(repr, choices))
            raise InvalidValue(f"The recipe's {name} must be one of {expected}; found {value!r}.")

    def _check_randaugment(self) -> None:
        if self.randaugment is None:
            return
        pair = as_tuple("The recipe's randaugment", self.randaugment, InvalidValue)
        whole = all(isinstance(number, Integral) and not isinstance(number, bool) for number in pair)
        if len(pair) != 2 or not whole or pair[0] < 1 or not 0 <= pair[1] <= 30:  # type: ignore[operator]
            raise InvalidValue(
                "The recipe's randaugment is (how many operations, their magnitude from 0 to 30), found "
                f"{self.randaugment!r}."
            )
        self._set("randaugment", tuple(int(number) for number in pair))  # type: ignore[call-overload]

    def _check_together(self) -> None:
        if self.nesterov and self.momentum == 0:
            raise InvalidValue("Nesterov's momentum needs a momentum: raise it above 0, or set nesterov=False.")
        if self.steps is not None and self.warmup >= self.steps:
            raise InvalidValue(
                f"The recipe warms up for {self.warmup} of its {self.steps} steps; fewer must be left for the warm-up, "
                "so that the learning rate falls again."
            )


_OPTIONAL = frozenset(field.name for field in dataclasses.fields(Recipe) if field.default is None)


# Recipes by name: those of the paper, and one for a laptop.

# The paper's section 5.1 and appendix: 180 epochs, batch 256, Nesterov momentum 0.9, weight decay 1e-5 on all
# parameters, cosine to 0 step by step, no warm-up. The plain recipe is MobileNetV2-1.0's on ImageNet.
_PLAIN = Recipe(epochs=180, batch=256, lr=0.05, weight_decay=1e-5, crop="resized", flip=True)

# MobileNetV2-1.4 on ImageNet, and everything on ImageNet-100. The paper's RandAugment is timm's rand-m5-mstd0.5-inc1:
# two operations of magnitude 5 on a scale of 10. Ours differs in three ways: magnitudes count to 30, so 5 of 10 is 15
# of 30; they do not vary from image to image (mstd 0.5); and there is no colour jitter of 0.4 besides.
_AUGMENTED = _PLAIN.but(lr=0.1, label_smoothing=0.1, clip=5.0, randaugment=(2, 15), erasing=0.25)

# With a teacher all of them distil as the paper does: 0.3 of the teacher's outputs, temperature 1. (The paper's teacher
# stays in training mode; ours is in evaluation mode.) Scores and checkpoints are taken about once an epoch.
PRESETS = MappingProxyType(
    {
        "mobilenetv2-1.0": _PLAIN.but(evaluate=5000, checkpoint=5000),
        "mobilenetv2-1.4": _AUGMENTED.but(evaluate=5000, checkpoint=5000),
        "imagenet-100": _AUGMENTED.but(evaluate=500, checkpoint=500),
        "vgg19-bn": _PLAIN.but(epochs=20, lr=0.01, evaluate=5000, checkpoint=5000),
        # One epoch from the pre-trained weights for each entry of the table. Its learning rate is not in the paper; 0.1
        # is the default of the authors' code.
        "importance": _PLAIN.but(epochs=1, lr=0.1),
        # In steps, so that it suits any task; gentle enough for a student whose activations are gone.
        "quick": Recipe(steps=500, batch=64, lr=0.01, warmup=25, clip=5.0, evaluate=100, checkpoint=100),
    }
)


def preset(name: str) -> Recipe:
    """A recipe by name; `.but(...)` changes it."""
    if name not in PRESETS:
        hint = did_you_mean(str(name), PRESETS)
        raise InvalidValue(f"There is no recipe {name!r}. {hint}Known are {', '.join(PRESETS)}.")
    return PRESETS[name]
