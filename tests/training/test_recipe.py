"""The recipe refuses nonsense, and goes through JSON; the presets are the paper's."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from depthfold.errors import InvalidValue
from depthfold.training.recipe import PRESETS, Recipe, preset

RANDAUGMENT = "The recipe's randaugment is (how many operations, their magnitude from 0 to 30)"
BAD = [
    (dict(batch=0), "The recipe's batch must be a whole number from 1 on, found 0."),
    (dict(batch=True), "The recipe's batch must be a whole number from 1 on, found True."),
    (dict(steps=2.5), "The recipe's steps must be a whole number from 1 on, found 2.5."),
    (dict(evaluate=0), "The recipe's evaluate must be a whole number from 1 on, found 0."),
    (dict(checkpoint="x"), "The recipe's checkpoint must be a whole number from 1 on, found 'x'."),
    (dict(warmup=-1), "The recipe's warmup must be a whole number from 0 on, found -1."),
    (dict(warmup=None), "The recipe's warmup must be a whole number from 0 on, found None."),
    (dict(seed=-1), "The recipe's seed must be a whole number from 0 on, found -1."),
    (dict(lr=0), "The recipe's lr must be more than 0, found 0."),
    (dict(lr=math.nan), "The recipe's lr must be more than 0, found nan."),
    (dict(lr=math.inf), "The recipe's lr must be more than 0, found inf."),
    (dict(lr="0.1"), "The recipe's lr must be a number, found '0.1'."),
    (dict(lr=None), "The recipe's lr must be a number, found None."),
    (dict(clip=0), "The recipe's clip must be more than 0, found 0."),
    (dict(temperature=-1), "The recipe's temperature must be more than 0, found -1."),
    (dict(weight_decay=-1e-5), "The recipe's weight_decay must be 0 or more, found -1e-05."),
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
    (dict(momentum=0), "Nesterov's momentum needs a momentum: raise it above 0, or set nesterov=False."),
    (
        dict(warmup=10),
        "The recipe warms up for 10 of its 10 steps; fewer must be left for the warm-up, so that the learning rate "
        "falls again.",
    ),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[str(fields) for fields, _ in BAD])
def test_nonsense_is_refused(fields, message):
    with pytest.raises(InvalidValue) as caught:
        Recipe(**dict(steps=10) | fields)
    assert str(caught.value) == message


def test_the_length_is_in_epochs_or_in_steps():
    with pytest.raises(InvalidValue, match=r"^A recipe takes epochs=... or steps=..., one of the two; found neither.$"):
        Recipe()
    with pytest.raises(InvalidValue, match=r"found epochs=1 and steps=2.$"):
        Recipe(epochs=1, steps=2)
    with pytest.raises(InvalidValue, match=r"^The recipe's epochs must be more than 0, found 0.$"):
        Recipe(epochs=0)


def test_numbers_of_other_kinds_are_taken():
    recipe = Recipe(steps=np.int64(3), lr=np.float32(0.5), ema=np.float64(0.9), randaugment=[2, 9], clip=5)
    assert recipe == Recipe(steps=3, lr=0.5, ema=0.9, randaugment=(2, 9), clip=5.0)
    assert type(recipe.steps) is int
    assert type(recipe.lr) is float


FULL = Recipe(epochs=0.5, clip=1.0, randaugment=(2, 15), precision="bfloat16", crop="pad", ema=0.99, keep="best")


@pytest.mark.parametrize("recipe", [FULL, Recipe(steps=3), *PRESETS.values()])
def test_a_recipe_goes_through_json(recipe):
    assert Recipe.loads(recipe.dumps()) == recipe
    assert hash(Recipe.loads(recipe.dumps())) == hash(recipe)


def test_json_that_is_wrong_is_refused():
    data = json.loads(FULL.dumps())
    with pytest.raises(InvalidValue, match=r"Recipe.precision: expected one of 'float32', .* found 'tf32'"):
        Recipe.from_json(data | {"precision": "tf32"})
    with pytest.raises(InvalidValue, match=r"The recipe's lr must be more than 0"):
        Recipe.from_json(data | {"lr": 0})
    with pytest.raises(InvalidValue, match=r"Recipe.randaugment: expected 2 items, found 3"):
        Recipe.from_json(data | {"randaugment": [1, 2, 3]})


def test_but_changes_a_recipe():
    recipe = Recipe(epochs=3, lr=0.1)
    assert recipe.but(lr=0.2, batch=8) == Recipe(epochs=3, lr=0.2, batch=8)
    assert recipe.but(steps=7) == Recipe(steps=7, lr=0.1)
    assert recipe.but(steps=7).but(epochs=2) == Recipe(epochs=2, lr=0.1)
    with pytest.raises(InvalidValue, match=r"^A recipe has no 'momentun'. Did you mean 'momentum'\? It has epochs, "):
        recipe.but(momentun=0.8)
    with pytest.raises(InvalidValue, match="must be more than 0"):
        recipe.but(lr=-1)


def test_the_presets_are_the_papers():
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
    assert all(recipe.distillation == 0.3 and recipe.temperature == 1.0 for recipe in PRESETS.values())
    assert preset("quick").steps is not None  # any task can follow it


def test_an_unknown_preset_is_refused():
    with pytest.raises(InvalidValue) as caught:
        preset("mobilnetv2-1.0")
    assert str(caught.value) == (
        "There is no recipe 'mobilnetv2-1.0'. Did you mean 'mobilenetv2-1.0'? Known are mobilenetv2-1.0, "
        "mobilenetv2-1.4, imagenet-100, vgg19-bn, importance, quick."
    )
    with pytest.raises(InvalidValue, match=r"^There is no recipe 'x'. Known are "):
        preset("x")


def test_recipes_do_not_import_torch():
    code = "import sys, depthfold.training.recipe as p; p.preset('quick'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr
