"""Recipes by name: those of the paper, and one for a laptop."""

from __future__ import annotations

from types import MappingProxyType

from depthfold.core.wording import did_you_mean
from depthfold.errors import InvalidValue
from depthfold.training.recipe import Recipe

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
