"""Crop boxes and resampling, compared with Pillow and torchvision."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import v2

from depthfold.tasks.images import TRIES, centre_box, crop_boxes, random_boxes, resample

sides = st.integers(1, 40)


def random_images(count, height, width, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (count, 3, height, width), dtype=np.uint8))


@given(height=sides, width=sides, to=st.tuples(sides, sides), seed=st.integers(0, 100))
def test_resampling_matches_pillow(height, width, to, seed):
    images = random_images(3, height, width, seed)
    boxes = crop_boxes(np.random.default_rng(seed).random((3, TRIES, 4)), height, width)
    found = resample(images, boxes, to)
    for image, box, ours in zip(images, boxes, found, strict=True):
        pillow = Image.fromarray(image.permute(1, 2, 0).numpy())
        theirs = np.asarray(pillow.resize((to[1], to[0]), Image.Resampling.BILINEAR, box=tuple(box)))
        # Pillow rounds between the two sides, so pixels differ by one level, rarely by two.
        assert np.abs(ours.permute(1, 2, 0).numpy().astype(int) - theirs.astype(int)).max() <= 2


def test_float_images_are_not_rounded():
    images = random_images(2, 9, 7)
    box = np.array([[1.0, 2.0, 6.0, 8.0]])
    exact = resample(images.double(), box, (5, 5))
    assert exact.dtype == torch.float64
    assert (resample(images, box, (5, 5)) - exact).abs().max() <= 0.5 + 1e-4


def test_unchanged_images_are_not_copied():
    images = random_images(2, 9, 7)
    assert resample(images, centre_box(9, 7, None, 0.875), None) is images
    assert resample(images, centre_box(9, 7, (9, 7), 1.0), (9, 7)) is images


def test_resampling_ignores_autocast():
    images, box = random_images(2, 32, 32), np.array([[1.0, 2.0, 30.0, 29.0]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = resample(images, box, (24, 24))
    assert torch.equal(under, resample(images, box, (24, 24)))


@pytest.mark.parametrize(("height", "width"), [(300, 400), (400, 300), (256, 256), (500, 375)])
def test_centre_box_matches_resize_256_and_crop_224(height, width):
    coarse = torch.rand(3, 6, 6, generator=torch.Generator().manual_seed(0))
    image = v2.functional.resize(coarse, [height, width], antialias=True)  # smooth, as photographs are
    theirs = v2.Compose([v2.Resize(256, antialias=True), v2.CenterCrop(224)])(image)
    ours = resample(image[None], centre_box(height, width, (224, 224), 0.875), (224, 224))[0]
    assert (ours - theirs).abs().max() < 0.02  # torchvision crops at whole pixels


def test_centre_box_of_another_shape():
    assert centre_box(10, 20, (5, 5), 1.0).tolist() == [[5, 0, 15, 10]]
    assert centre_box(10, 20, (10, 40), 1.0).tolist() == [[0, 2.5, 20, 7.5]]
    assert centre_box(10, 20, (10, 10), 0.5).tolist() == [[7.5, 2.5, 12.5, 7.5]]


@given(height=sides, width=sides, seed=st.integers(0, 100))
def test_crops_are_within_the_image(height, width, seed):
    boxes = crop_boxes(np.random.default_rng(seed).random((50, TRIES, 4)), height, width)
    left, top, right, bottom = boxes.T
    assert (left >= 0).all() and (top >= 0).all() and (right <= width).all() and (bottom <= height).all()
    assert (right > left).all() and (bottom > top).all()


def test_distribution_of_crops_matches_torchvision():
    """Compare quantiles of area, ratio and position over many crops."""
    ours = crop_boxes(np.random.default_rng(0).random((4000, TRIES, 4)), 60, 80)
    theirs = []
    torch.manual_seed(0)
    transform = v2.RandomResizedCrop(8)
    for _ in range(4000):
        p = transform.make_params([torch.zeros(3, 60, 80)])
        theirs.append((p["left"], p["top"], p["left"] + p["width"], p["top"] + p["height"]))
    for quantity in (
        lambda b: (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1]) / 4800,
        lambda b: np.log((b[:, 2] - b[:, 0]) / (b[:, 3] - b[:, 1])),
        lambda b: b[:, 0] / 80,
        lambda b: b[:, 1] / 60,
    ):
        levels = [0.05, 0.25, 0.5, 0.75, 0.95]
        assert (
            np.abs(np.quantile(quantity(ours), levels) - np.quantile(quantity(np.array(theirs)), levels)).max() < 0.04
        )


def test_centre_is_used_if_no_try_fits():
    # The first number is the area: no crop of the full area of a very long image has an allowed ratio.
    boxes = crop_boxes(np.full((1, TRIES, 4), 0.999999), 10, 100)
    assert boxes.tolist() == [[50 - 20 / 3, 0, 50 + 20 / 3, 10]]


def test_first_try_that_fits_is_used():
    uniform = np.full((1, TRIES, 4), 0.999999)
    uniform[0, 3] = (0.0, 0.5, 0.0, 0.0)
    uniform[0, 4] = (0.01, 0.5, 0.0, 0.0)
    boxes, found = random_boxes(uniform, 10, 100, (0.08, 1.0), (0.75, 4 / 3))
    assert found.all() and boxes.tolist() == [[0, 0, 9, 9]]  # the square root of 80 pixels


def test_centre_boxes_lie_within_the_image():
    """Pillow refuses a box that exceeds the image, if only by rounding."""
    for height in range(200, 260):
        for width in (224, 301, 500):
            left, top, right, bottom = centre_box(height, width, (224, 224), 1.0)[0]
            assert 0 <= left < right <= width and 0 <= top < bottom <= height, (height, width)
            assert min(right - left, bottom - top) == pytest.approx(min(height, width))
