"""Image folders: the listing, the classes, and what is held in memory."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from depthfold.errors import DataError, MissingDependency
from depthfold.tasks.collection import Request
from depthfold.tasks.image_folder import Files, ImageFolder, class_list
from depthfold.tasks.pictures import Held
from layouts import write_folder

CPU = torch.device("cpu")


def folder(path, **options):
    return ImageFolder(path=path, workers=0, **options)


def test_classes_by_name_and_files_in_order(tmp_path):
    written = write_folder(tmp_path)
    (tmp_path / "train/cat/.hidden.png").write_bytes(b"")
    (tmp_path / "train/cat/list.txt").write_text("no image")
    for part, name in (("train", "train"), ("test", "val")):
        found = folder(tmp_path).read(part)
        assert found.classes == ("cat", "dog", "eel")
        assert [f"{name}/{key}" for key in found.keys] == sorted(key for key in written if key.startswith(name))
        assert found.labels.tolist() == [("cat", "dog", "eel").index(key.split("/")[0]) for key in found.keys]


def test_classes_by_a_list_or_a_file_and_labels_by_its_order(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "hundred.txt").write_text("eel\n\ncat \n")
    assert class_list(tmp_path / "hundred.txt") == class_list(str(tmp_path / "hundred.txt")) == ("eel", "cat")
    found = folder(tmp_path, classes=class_list(["eel", "cat"])).read("train")
    assert found.classes == ("eel", "cat")
    assert {key.split("/")[0]: int(label) for key, label in zip(found.keys, found.labels, strict=True)} == {
        "eel": 0,
        "cat": 1,
    }


def test_pixels_come_back(tmp_path):
    written = write_folder(tmp_path, sizes=((12, 17),))
    found = folder(tmp_path).read("train")
    (images,) = found.pictures.read([Request(indices=np.array([5, 0, 9]))], None, CPU)
    for image, index in zip(images, (5, 0, 9), strict=True):
        assert np.array_equal(image.permute(1, 2, 0).numpy(), written[f"train/{found.keys[index]}"])


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_whatever_a_file_holds_becomes_rgb(tmp_path, mode):
    path = tmp_path / ("x.jpg" if mode == "CMYK" else "x.png")
    Image.new("RGB", (9, 7), (255, 255, 255)).convert(mode).save(path)
    (images,) = Files(paths=(str(path),), workers=0).read([Request(indices=np.array([0]))], None, CPU)
    assert images.shape == (1, 3, 7, 9) and images.dtype == torch.uint8
    assert images.min() >= 250


def test_centres_are_held_where_they_fit_and_read_alike_where_they_do_not(tmp_path):
    write_folder(tmp_path)
    pictures = folder(tmp_path).read("train").pictures
    held = pictures.settle((16, 16), cropped=False)
    assert isinstance(held, Held) and held.pixels.shape == (24, 3, 16, 16)
    small = folder(tmp_path, memory=24 * 3 * 16 * 16 - 1).read("train").pictures
    assert small.settle((16, 16), cropped=False) is small
    request = Request(indices=np.array([3, 7, 1]))
    (from_memory,) = held.read([request], (16, 16), CPU)
    (from_files,) = small.read([request], (16, 16), CPU)
    assert torch.equal(from_memory, from_files)


def test_random_parts_are_of_whole_images(tmp_path):
    """Held if all have one size; else each is cut from its file. Both see the same parts."""
    write_folder(tmp_path / "mixed")
    mixed = folder(tmp_path / "mixed").read("train").pictures
    assert mixed.settle((16, 16), cropped=True) is mixed
    write_folder(tmp_path / "alike", sizes=((20, 26),))
    alike = folder(tmp_path / "alike").read("train").pictures
    held = alike.settle((16, 16), cropped=True)
    assert isinstance(held, Held) and held.pixels.shape == (24, 3, 20, 26)
    request = Request(indices=np.arange(24), crop=np.random.default_rng(0).random((24, 10, 4)))
    (from_memory,) = held.read([request], (16, 16), CPU)
    (from_files,) = alike.read([request], (16, 16), CPU)
    assert (from_memory.int() - from_files.int()).abs().max() <= 2  # Pillow rounds between the two sides
    centre = Request(indices=np.arange(24))
    (from_memory,), (from_files,) = held.read([centre], (16, 16), CPU), alike.read([centre], (16, 16), CPU)
    assert (from_memory.int() - from_files.int()).abs().max() <= 2


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("data", [b"no image at all", None])
def test_an_image_that_cannot_be_read_is_named(tmp_path, workers, data):
    write_folder(tmp_path)
    bad = tmp_path / "train" / "dog" / "002.png"
    bad.write_bytes(bad.read_bytes()[:100] if data is None else data)
    pictures = ImageFolder(path=tmp_path, workers=workers).read("train").pictures
    with pytest.raises(DataError) as error:
        pictures.settle((8, 8), cropped=False)
    assert str(error.value).startswith(f"The image {bad} cannot be read: ")
    assert str(error.value).endswith(". Fetch it again, or take it out of its folder.")
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize("cropped", [False, True])
def test_an_image_that_is_too_large_is_named(tmp_path, monkeypatch, cropped):
    """Pillow refuses what has more than twice its limit: the file may be made to fill the memory."""
    write_folder(tmp_path)
    bad = tmp_path / "train" / "dog" / "002.png"
    Image.new("RGB", (60, 50)).save(bad)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1400)
    pictures = ImageFolder(path=tmp_path, workers=0).read("train").pictures
    with pytest.raises(DataError) as error:
        pictures.subset([8 + 2]).settle(None if cropped else (8, 8), cropped=cropped)
    assert str(error.value) == (
        f"The image {bad} is too large: Image size (3000 pixels) exceeds limit of 2800 pixels, could be decompression "
        "bomb DOS attack. Make it smaller, or take it out of its folder."
    )


def test_sizes_that_differ_without_a_size(tmp_path):
    write_folder(tmp_path)
    pictures = folder(tmp_path).read("train").pictures
    with pytest.raises(DataError) as error:
        pictures.settle(None, cropped=False)
    here = tmp_path / "train" / "cat"
    assert str(error.value) == (
        f"The images differ in size: {here / '000.png'} is 20 x 30, {here / '001.png'} is 25 x 20. "
        "Give the task size=..., to bring them to one."
    )


def test_a_path_without_the_folders(tmp_path):
    write_folder(tmp_path)
    with pytest.raises(DataError) as error:
        folder(tmp_path, test="test").read("test")
    assert str(error.value) == (
        f"Expected a folder test in {tmp_path}, found train, val. Name the folder that holds train/ and test/, or give "
        "train=... and test=..., the names that they have."
    )
    with pytest.raises(DataError, match=r"Expected a folder train in .*nowhere, found no folder .*nowhere\. Name"):
        folder(tmp_path / "nowhere").read("train")


def test_all_empty_classes_are_named_together(tmp_path):
    write_folder(tmp_path)
    for name in ("ant", "yak"):
        (tmp_path / "train" / name).mkdir()
    with pytest.raises(DataError) as error:
        folder(tmp_path).read("train")
    assert str(error.value).startswith("2 class folders without an image (.jpg, .jpeg, .png, ")
    assert f":\n  {tmp_path}/train/ant\n  {tmp_path}/train/yak\nFetch the images again" in str(error.value)


def test_train_and_test_with_different_classes(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "val/dog").rename(tmp_path / "val/dingo")
    assert folder(tmp_path).read("train").classes == ("cat", "dog", "eel")  # which needs no val/
    with pytest.raises(DataError) as error:
        folder(tmp_path).read("test")
    assert str(error.value) == (
        f"train/ and val/ of {tmp_path} have different classes:\n  only in val/: dingo\n  only in train/: dog\n"
        "Fetch what is missing, or name the classes that you want by classes=..."
    )
    assert folder(tmp_path, classes=("cat", "eel")).read("test").classes == ("cat", "eel")


def test_classes_that_are_not_there(tmp_path):
    write_folder(tmp_path)
    with pytest.raises(DataError, match=r"lacks 2 of the 3 classes:\n  dgo \(did you mean dog\?\)\n  yak\nA class is"):
        folder(tmp_path, classes=("cat", "dgo", "yak")).read("train")


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (["a", "b", "a"], "The list of classes has 'a' more than once, expected every class once."),
        ([], "The list of classes is empty, expected every class once."),
        ("no/such/file", "classes='no/such/file' is no file, expected one with the name of a class in each line."),
    ],
)
def test_lists_of_classes(classes, message):
    with pytest.raises(DataError) as error:
        class_list(classes)
    assert str(error.value) == message


def test_a_folder_without_folders(tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match=r"train has no folders, expected one for every class"):
        folder(tmp_path).read("train")


def test_without_pillow(tmp_path, monkeypatch):
    write_folder(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingDependency) as error:
        folder(tmp_path).read("train").pictures.settle((8, 8), cropped=False)
    assert str(error.value) == (
        "Pillow, which reads images, is not installed. Install it with: pip install depthfold[train]"
    )
