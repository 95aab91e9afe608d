"""Recipes: validation, JSON, and the presets of the paper."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from depthfold.errors import InvalidValue
from depthfold.training import Recipe, preset
from depthfold.training.recipe import PRESETS

RANDAUGMENT = "The recipe's randaugment must be (number of operations, magnitude from 0 to 30)"
BAD = [
    (dict(batch=0), "The recipe's batch must be an integer of at least 1, found 0."),
    (dict(batch=True), "The recipe's batch must be an integer of at least 1, found True."),
    (dict(steps=2.5), "The recipe's steps must be an integer of at least 1, found 2.5."),
    (dict(evaluate=0), "The recipe's evaluate must be an integer of at least 1, found 0."),
    (dict(checkpoint="x"), "The recipe's checkpoint must be an integer of at least 1, found 'x'."),
    (dict(warmup=-1), "The recipe's warmup must be an integer of at least 0, found -1."),
    (dict(warmup=None), "The recipe's warmup must be an integer of at least 0, found None."),
    (dict(seed=-1), "The recipe's seed must be an integer of at least 0, found -1."),
    (dict(lr=0), "The recipe's lr must be more than 0, found 0."),
    (dict(lr=math.nan), "The recipe's lr must be more than 0, found nan."),
    (dict(lr=math.inf), "The recipe's lr must be more than 0, found inf."),
    (dict(lr="0.1"), "The recipe's lr must be a number, found '0.1'."),
    (dict(lr=None), "The recipe's lr must be a number, found None."),
    (dict(clip=0), "The recipe's clip must be more than 0, found 0."),
    (dict(temperature=-1), "The recipe's temperature must be more than 0, found -1."),
    (dict(weight_decay=-1e-5), "The recipe's weight_decay must be 0 or more, found -1e-05."),
    (dict(features=-1), "The recipe's features must be 0 or more, found -1."),
    (dict(momentum=1), "The recipe's momentum must be from 0 to less than 1, found 1."),
    (dict(label_smoothing=1.0), "The recipe's label_smoothing must be from 0 to less than 1, found 1.0."),
    (dict(distillation=1.5), "The recipe's distillation must be from 0 to 1, found 1.5."),
    (dict(erasing=-0.1), "The recipe's erasing must be from 0 to 1, found -0.1."),
    (dict(ema=1.0), "The recipe's ema must be between 0 and 1, found 1.0."),
    (dict(ema=0), "The recipe's ema must be between 0 and 1, found 0."),
    (dict(crop="centre"), "The recipe's crop must be one of 'none', 'pad', 'resized'; found 'centre'."),
    (dict(precision="fp16"), "The recipe's precision must be one of 'float32', 'bfloat16', 'float16'; found 'fp16'."),
    (dict(keep="first"), "The recipe's keep must be one of 'last', 'best'; found 'first'."),
    (dict(flip=1), "The recipe's flip must be one of True, False; found 1."),
    (dict(randaugment=(2,)), f"{RANDAUGMENT}, found (2,)."),
    (dict(randaugment=(0, 9)), f"{RANDAUGMENT}, found (0, 9)."),
    (dict(randaugment=(2, 31)), f"{RANDAUGMENT}, found (2, 31)."),
    (dict(randaugment=(2, 1.5)), f"{RANDAUGMENT}, found (2, 1.5)."),
    (dict(momentum=0), "Nesterov momentum needs a momentum above 0. Raise it, or set nesterov=False."),
    (dict(warmup=10), "The recipe's warmup (10) must be shorter than its 10 steps."),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[str(fields) for fields, _ in BAD])
def test_invalid_value_is_refused(fields, message):
    with pytest.raises(InvalidValue) as caught:
        Recipe(**dict(steps=10) | fields)
    assert str(caught.value) == message


def test_length_is_either_epochs_or_steps():
    with pytest.raises(InvalidValue, match=r"^A recipe takes either epochs=... or steps=..., found neither.$"):
        Recipe()
    with pytest.raises(InvalidValue, match=r"found epochs=1 and steps=2.$"):
        Recipe(epochs=1, steps=2)
    with pytest.raises(InvalidValue, match=r"^The recipe's epochs must be more than 0, found 0.$"):
        Recipe(epochs=0)


def test_numpy_numbers_and_lists_are_accepted():
    recipe = Recipe(steps=np.int64(3), lr=np.float32(0.5), ema=np.float64(0.9), randaugment=[2, 9], clip=5)
    assert recipe == Recipe(steps=3, lr=0.5, ema=0.9, randaugment=(2, 9), clip=5.0)
    assert type(recipe.steps) is int
    assert type(recipe.lr) is float


FULL = Recipe(epochs=0.5, clip=1.0, randaugment=(2, 15), precision="bfloat16", crop="pad", ema=0.99, keep="best")


@pytest.mark.parametrize("recipe", [FULL, Recipe(steps=3), *PRESETS.values()])
def test_recipe_survives_json(recipe):
    assert Recipe.loads(recipe.dumps()) == recipe
    assert hash(Recipe.loads(recipe.dumps())) == hash(recipe)


def test_invalid_json_is_refused():
    data = json.loads(FULL.dumps())
    with pytest.raises(InvalidValue, match=r"Recipe.precision: expected one of 'float32', .* found 'tf32'"):
        Recipe.from_json(data | {"precision": "tf32"})
    with pytest.raises(InvalidValue, match=r"The recipe's lr must be more than 0"):
        Recipe.from_json(data | {"lr": 0})
    with pytest.raises(InvalidValue, match=r"Recipe.randaugment: expected 2 items, found 3"):
        Recipe.from_json(data | {"randaugment": [1, 2, 3]})


def test_replace_returns_a_changed_copy():
    recipe = Recipe(epochs=3, lr=0.1)
    assert recipe.replace(lr=0.2, batch=8) == Recipe(epochs=3, lr=0.2, batch=8)
    assert recipe.replace(steps=7) == Recipe(steps=7, lr=0.1)
    assert recipe.replace(steps=7).replace(epochs=2) == Recipe(epochs=2, lr=0.1)
    with pytest.raises(
        InvalidValue, match=r"^A recipe has no field 'momentun'. Did you mean 'momentum'\? Its fields are epochs, "
    ):
        recipe.replace(momentun=0.8)
    with pytest.raises(InvalidValue, match="must be more than 0"):
        recipe.replace(lr=-1)


def test_recipes_without_features_are_written_as_before_there_were_features():
    """So that journals and folders of earlier versions are still used."""
    assert "features" not in Recipe(steps=1).to_json()
    recipe = Recipe(steps=1, features=2)
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_presets_match_the_paper():
    plain = dict(batch=256, momentum=0.9, nesterov=True, weight_decay=1e-5, warmup=0, crop="resized", flip=True)
    rich = dict(lr=0.1, label_smoothing=0.1, clip=5.0, erasing=0.25, randaugment=(2, 15))
    bare = dict(label_smoothing=0.0, clip=None, erasing=0.0, randaugment=None)
    expected = {
        "mobilenetv2-1.0": dict(epochs=180, lr=0.05) | bare,
        "mobilenetv2-1.4": dict(epochs=180) | rich,
        "imagenet-100": dict(epochs=180) | rich,
        "vgg19-bn": dict(epochs=20, lr=0.01) | bare,
        "importance": dict(epochs=1, lr=0.1) | bare,
    }
    for name, fields in expected.items():
        for field, value in (plain | fields).items():
            assert getattr(preset(name), field) == value, (name, field)
    others = [recipe for name, recipe in PRESETS.items() if name not in ("brief", "plans")]
    assert all(recipe.distillation == 0.3 and recipe.temperature == 1.0 for recipe in others)
    assert preset("quick").steps is not None  # so that it works with any task


def test_unknown_preset_is_refused():
    with pytest.raises(InvalidValue) as caught:
        preset("mobilnetv2-1.0")
    assert str(caught.value) == (
        "There is no recipe 'mobilnetv2-1.0'. Did you mean 'mobilenetv2-1.0'? The presets are mobilenetv2-1.0, "
        "mobilenetv2-1.4, imagenet-100, vgg19-bn, importance, brief, recalibrated, local, fit, plans, quick."
    )
    with pytest.raises(InvalidValue, match=r"^There is no recipe 'x'. The presets are "):
        preset("x")


def test_recipes_do_not_import_torch():
    code = "import sys, depthfold.training.recipe as p; p.preset('quick'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr
