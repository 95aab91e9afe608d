"""The recipe: all hyper-parameters of a training run, and the presets."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self, get_args

from depthfold.core import Document
from depthfold.errors import InvalidValue
from depthfold.support.coerce import as_float, as_tuple, as_whole
from depthfold.support.document import SPARSE
from depthfold.support.text import did_you_mean

Precision = Literal["float32", "bfloat16", "float16"]
Crop = Literal["none", "pad", "resized"]  # "pad": pad by an eighth and crop at random; "resized": resize a random part
Keep = Literal["last", "best"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Document):
    """The hyper-parameters of a training run: SGD with a learning rate that follows a cosine to 0, updated every step.

    - The length is either `epochs` or `steps`. `batch` is the batch of all processes together.
    - `warmup` is the number of steps in which the learning rate first rises linearly to `lr`.
    - `weight_decay` applies to all parameters, as in the paper. `clip` is the largest norm of the gradient.
    - With a teacher, the loss is `distillation` times the cross-entropy with the teacher's outputs at `temperature`,
      plus the rest times the cross-entropy with the labels, without label smoothing. `features` is the weight of the
      distance between the features of model and teacher, which is added: the inputs of the linear layer that runs last,
      before dropout, in the last forward of each.
    - `ema` is the decay of an average of the weights; the averaged weights are then scored and kept.
    - The model is scored every `evaluate` steps and at the end (None: only at the end).
    - A training run with a folder writes a checkpoint every `checkpoint` steps (None: about ten in total), after each
      score that is the best so far, and at the end.
    - `keep` selects the weights at the end: the last ones, as in the paper, or those of the best score.
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
    randaugment: tuple[int, int] | None = None  # number of operations, and their magnitude from 0 to 30
    erasing: float = 0.0
    distillation: float = 0.3
    temperature: float = 1.0
    features: float = field(default=0.0, metadata=SPARSE)
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
            raise InvalidValue(f"A recipe takes either epochs=... or steps=..., found {found}.")
        for name in ("steps", "batch", "evaluate", "checkpoint"):
            self._whole(name, least=1)
        for name in ("warmup", "seed"):
            self._whole(name, least=0)
        for name in ("epochs", "lr", "clip", "temperature"):
            self._number(name, "more than 0", lambda value: value > 0)
        for name in ("weight_decay", "features"):
            self._number(name, "0 or more", lambda value: value >= 0)
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

    def replace(self, **changes: Any) -> Self:
        """Return a copy with changes. A length in steps replaces one in epochs, and the reverse."""
        known = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                hint = did_you_mean(name, known)
                raise InvalidValue(f"A recipe has no field {name!r}. {hint}Its fields are {', '.join(known)}.")
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
        self._set(name, as_whole(f"The recipe's {name}", value, InvalidValue, least))

    def _number(self, name: str, expected: str, valid: Callable[[float], bool]) -> None:
        value = getattr(self, name)
        if value is None and name in _OPTIONAL:
            return
        number = as_float(f"The recipe's {name}", value, InvalidValue)
        if not math.isfinite(number) or not valid(number):
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
                "The recipe's randaugment must be (number of operations, magnitude from 0 to 30), found "
                f"{self.randaugment!r}."
            )
        self._set("randaugment", tuple(int(number) for number in pair))  # type: ignore[call-overload]

    def _check_together(self) -> None:
        if self.nesterov and self.momentum == 0:
            raise InvalidValue("Nesterov momentum needs a momentum above 0. Raise it, or set nesterov=False.")
        if self.steps is not None and self.warmup >= self.steps:
            raise InvalidValue(f"The recipe's warmup ({self.warmup}) must be shorter than its {self.steps} steps.")


_OPTIONAL = frozenset(field.name for field in dataclasses.fields(Recipe) if field.default is None)


# --- Presets ---

# The paper's fine-tuning (Section 5.1 and appendix): 180 epochs, batch 256, weight decay 1e-5, a cosine to 0. From the
# authors' code: Nesterov momentum 0.9, decay on all parameters, an update every step, no warm-up. This one is for
# MobileNetV2-1.0 on ImageNet.
_PLAIN = Recipe(epochs=180, batch=256, lr=0.05, weight_decay=1e-5, crop="resized", flip=True)

# MobileNetV2-1.4 on ImageNet, and all networks on ImageNet-100. The paper uses timm's rand-m5-mstd0.5-inc1: two
# operations of magnitude 5 on a scale of 10. There are three differences: our magnitudes go up to 30, so 5 becomes 15;
# they do not vary from image to image (mstd 0.5); and there is no additional colour jitter of 0.4.
_AUGMENTED = _PLAIN.replace(lr=0.1, label_smoothing=0.1, clip=5.0, randaugment=(2, 15), erasing=0.25)

# With a teacher, all but "brief" and "plans" distil as in the paper: 0.3 of its outputs, temperature 1. (In the paper,
# it stays in training mode; here it is in evaluation mode.) Scores and checkpoints come about once an epoch.
PRESETS = MappingProxyType(
    {
        "mobilenetv2-1.0": _PLAIN.replace(evaluate=5000, checkpoint=5000),
        "mobilenetv2-1.4": _AUGMENTED.replace(evaluate=5000, checkpoint=5000),
        "imagenet-100": _AUGMENTED.replace(evaluate=500, checkpoint=500),
        "vgg19-bn": _PLAIN.replace(epochs=20, lr=0.01, evaluate=5000, checkpoint=5000),
        # One epoch from the pre-trained weights for each entry of the table. The paper does not give the
        # learning rate; 0.1 is the default in the authors' code.
        "importance": _PLAIN.replace(epochs=1, lr=0.1),
        # The cheap methods of importance, each with its own recipe. "local" uses Adam, "recalibrated" and "fit" have no
        # learning rate.
        "brief": Recipe(steps=4, batch=256, lr=0.03, weight_decay=0.0, clip=5.0, distillation=1.0, temperature=2.0),
        "recalibrated": Recipe(steps=8, batch=256),
        "local": Recipe(steps=100, batch=256, lr=1e-3),
        "fit": Recipe(steps=4, batch=256),
        # A short distillation of whole plans, which the surrogate is fitted to.
        "plans": Recipe(
            steps=200, batch=256, lr=0.02, warmup=10, clip=5.0, crop="pad", flip=True, distillation=0.9, temperature=2.0
        ),
        # In steps, so that it works with any task, and with a low learning rate for a student that lost activations.
        "quick": Recipe(steps=500, batch=64, lr=0.01, warmup=25, clip=5.0, evaluate=100, checkpoint=100),
    }
)


def preset(name: str) -> Recipe:
    """Return the recipe with this name."""
    if name not in PRESETS:
        hint = did_you_mean(str(name), PRESETS)
        raise InvalidValue(f"There is no recipe {name!r}. {hint}The presets are {', '.join(PRESETS)}.")
    return PRESETS[name]
