"""Augmentation of a batch, against the same thing done image by image."""

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from depthfold.errors import InvalidValue
from depthfold.tasks.augment import OPERATIONS, augment, augment_normalised, erase, flip, operate, pad_crop, randaugment
from depthfold.training.recipe import Recipe
from depthfold.training.task import Step

# torchvision's names for our operations.
NAMES = {
    "shear x": "ShearX",
    "shear y": "ShearY",
    "shift x": "TranslateX",
    "shift y": "TranslateY",
    "rotate": "Rotate",
    "brightness": "Brightness",
    "colour": "Color",
    "contrast": "Contrast",
    "sharpness": "Sharpness",
    "nothing": "Identity",
    "posterise": "Posterize",
    "solarise": "Solarize",
    "stretch": "AutoContrast",
    "equalise": "Equalize",
}


def batch(count, height=16, width=24, channels=3, seed=0):
    """Photographs have structure; these have a gradient under the noise."""
    noise = np.random.default_rng(seed).integers(0, 120, (count, channels, height, width))
    slope = np.linspace(0, 130, width).astype(int) + np.linspace(0, 5, height).astype(int)[:, None]
    return torch.from_numpy((noise + slope).astype(np.uint8))


def rows(*shape, seed=0):
    return np.random.default_rng(seed).random(shape)


def test_pad_crop_image_by_image():
    images, random = batch(200), rows(200, 2)
    found = pad_crop(images, random)
    offsets = set()
    for image, (u, v), ours in zip(images.numpy(), random, found.numpy(), strict=True):
        padded = np.pad(image, ((0, 0), (2, 2), (3, 3)))
        top, left = int(u * 5), int(v * 7)
        assert np.array_equal(ours, padded[:, top : top + 16, left : left + 24])
        offsets.add((top, left))
    assert len(offsets) == 35  # every window there is
    assert pad_crop(images, np.full((200, 2), 1.0)).shape == images.shape  # a number rounded up is no error


def test_flip_half_of_the_images():
    images, random = batch(200), rows(200)
    found = flip(images, random)
    for image, u, ours in zip(images.numpy(), random, found.numpy(), strict=True):
        assert np.array_equal(ours, image[:, :, ::-1] if u < 0.5 else image)
    assert 70 < (random < 0.5).sum() < 130


def test_erase_puts_noise_in_a_rectangle_of_the_chosen():
    images = torch.zeros(300, 3, 32, 32)
    chosen = rows(300) < 0.25
    found = erase(images, chosen, rows(300, 10, 4, seed=1), torch.Generator().manual_seed(0))
    assert torch.equal(images, torch.zeros_like(images))  # what was given is not changed
    for image, is_chosen in zip(found, chosen, strict=True):
        hit = (image != 0).all(dim=0)
        assert bool(hit.any()) == is_chosen
        if is_chosen:
            y, x = hit.any(dim=1).nonzero(), hit.any(dim=0).nonzero()
            assert hit[y.min() : y.max() + 1, x.min() : x.max() + 1].all() and int(hit.sum()) == len(y) * len(x)
            assert 0.015 * 1024 < hit.sum() < 0.36 * 1024
    noise = found[found != 0]
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02


class One(v2.RandAugment):
    """torchvision's RandAugment, left with one operation."""

    def __init__(self, name, magnitude):
        super().__init__(num_ops=1, magnitude=magnitude)
        self._AUGMENTATION_SPACE = {NAMES[name]: v2.RandAugment._AUGMENTATION_SPACE[NAMES[name]]}


def test_all_of_torchvisions_operations():
    assert {NAMES[name] for name in OPERATIONS} == set(v2.RandAugment._AUGMENTATION_SPACE)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_torchvisions(name, channels):
    images, directed = batch(3, channels=channels), v2.RandAugment._AUGMENTATION_SPACE[NAMES[name]][1]
    for magnitude in (0, 5, 9, 30):
        ours = [operate(name, images, sign * magnitude / 30) for sign in ((1, -1) if directed else (1,))]
        met = set()
        for seed in range(12):
            torch.manual_seed(seed)
            theirs = One(name, magnitude)(images)
            # One level either way: their strengths are in float32, and pixels are cut off to whole numbers.
            alike = [n for n, image in enumerate(ours) if (image.int() - theirs.int()).abs().max() <= 1]
            assert alike, (magnitude, seed)
            met |= {*alike}
        assert met == {*range(len(ours))}  # both directions, and each is one of theirs


def test_each_image_goes_its_own_way():
    """A batch at once is the same as its images one by one."""
    images, random = batch(60), rows(60, 2, 2)
    found = randaugment(images, random, 9)
    one_by_one = [randaugment(images[n : n + 1], random[n : n + 1], 9) for n in range(60)]
    assert torch.equal(found, torch.cat(one_by_one))
    names = tuple(OPERATIONS)
    for n in range(60):
        image = images[n : n + 1]
        for u, v in random[n]:
            name = names[int(u * 14)]
            directed = v2.RandAugment._AUGMENTATION_SPACE[NAMES[name]][1]
            image = operate(name, image, 0.3 * (-1 if directed and v < 0.5 else 1))
        assert torch.equal(found[n : n + 1], image), n
    assert not torch.equal(found, images)
    assert torch.equal(images, batch(60))  # what was given is not changed


def test_randaugment_under_autocast_is_the_same():
    images, random = batch(60, height=64, width=96), rows(60, 2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = randaugment(images, random, 9)
    assert torch.equal(under, randaugment(images, random, 9))


def test_what_randaugment_refuses():
    with pytest.raises(InvalidValue, match=r"RandAugment works on pixels from 0 to 255 in uint8, and these images are"):
        randaugment(batch(2).float(), rows(2, 1, 2), 9)
    with pytest.raises(InvalidValue, match="The magnitude of RandAugment must lie between 0 and 30, found 31"):
        randaugment(batch(2), rows(2, 1, 2), 31)


def test_a_recipe_that_asks_for_nothing_changes_nothing():
    images, step = batch(6), Step(number=3, seed=1, recipe=Recipe(steps=9, batch=6))
    assert augment(images, step, 100) is images
    assert augment_normalised(images, step, 100) is images


@pytest.mark.parametrize(
    "asked", [dict(crop="pad"), dict(flip=True), dict(randaugment=(2, 9)), dict(erasing=0.9)], ids=str
)
def test_each_step_has_its_own_randomness(asked):
    images, recipe = batch(8), Recipe(steps=9, batch=8, **asked)

    def seen(**step):
        at = Step(recipe=recipe, **step)
        return augment_normalised(augment(images, at, 100).float(), at, 100)

    one = seen(number=3, seed=1)
    assert torch.equal(one, seen(number=3, seed=1))
    assert not torch.equal(one, seen(number=4, seed=1))
    assert not torch.equal(one, seen(number=3, seed=2))


def test_each_step_has_its_own_noise():
    images, recipe = torch.zeros(8, 3, 16, 24), Recipe(steps=9, batch=8, erasing=1.0)
    one, other = (augment_normalised(images, Step(number=n, seed=1, recipe=recipe), 100) for n in (3, 4))
    assert not {*one[one != 0].tolist()} & {*other[other != 0].tolist()}
