"""Image folders: files, classes, and images in memory."""

import struct
import sys
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from depthfold.errors import DataError, MissingDependency
from depthfold.progress import silent
from depthfold.tasks import ClassificationTask
from depthfold.tasks.image_folder import FileImages, ImageFolder, class_list, decode
from depthfold.tasks.images import MemoryImages
from depthfold.tasks.source import BatchRequest
from layouts import write_folder

CPU = torch.device("cpu")


def folder(path, **options):
    return ImageFolder(path=path, workers=0, **options)


def test_classes_and_files_are_sorted_by_name(tmp_path):
    written = write_folder(tmp_path)
    (tmp_path / "train/cat/.hidden.png").write_bytes(b"")
    (tmp_path / "train/cat/list.txt").write_text("not an image")
    for part, name in (("train", "train"), ("test", "val")):
        found = folder(tmp_path).read(part)
        assert found.classes == ("cat", "dog", "eel")
        assert [f"{name}/{key}" for key in found.keys] == sorted(key for key in written if key.startswith(name))
        assert found.labels.tolist() == [("cat", "dog", "eel").index(key.split("/")[0]) for key in found.keys]


def test_images_in_subfolders_are_read(tmp_path):
    """As torchvision's ImageFolder does. The keys of the others stay the same, and with them their hold-out images."""
    write_folder(tmp_path)
    before = folder(tmp_path).read("train")
    inner = tmp_path / "train/dog/by day/2024"
    inner.mkdir(parents=True)
    (tmp_path / "train/dog/003.png").rename(inner / "b.png")
    (tmp_path / "linked").mkdir()
    (tmp_path / "train/dog/004.png").rename(tmp_path / "linked/a.png")
    (tmp_path / "train/dog/link").symlink_to(tmp_path / "linked")
    hidden = tmp_path / "train/dog/.ipynb_checkpoints"
    hidden.mkdir()
    (tmp_path / "train/dog/005.png").rename(hidden / "005.png")
    found = folder(tmp_path).read("train")
    moved = {"dog/003.png": "dog/by day/2024/b.png", "dog/004.png": "dog/link/a.png"}
    assert found.keys == sorted(moved.get(key, key) for key in before.keys if key != "dog/005.png")
    assert [found.classes[label] for label in found.labels] == [key.split("/")[0] for key in found.keys]
    assert found.images.cached((8, 8), cropped=False).pixels.shape == (23, 3, 8, 8)
    identity = folder(tmp_path).identity
    assert identity.startswith("image folder of 23 images in 3 classes, ")
    (inner / "b.png").unlink()
    assert folder(tmp_path).identity != identity


def test_identity_of_a_folder_stays_the_same(tmp_path):
    """A fixed expectation: if it changed with a version, run folders that exist could not be resumed."""
    for name in ("train/a", "train/b", "train/b/notes"):
        (tmp_path / name).mkdir(parents=True)
    for number, file in enumerate(("a/2.png", "a/10.PNG", "a/.hidden.png", "b/x.jpg", "b/list.txt", "b/notes/y.txt")):
        (tmp_path / "train" / file).write_bytes(bytes(range(number, 9)))
    found = "image folder of 3 images in 2 classes, 352351e0ca014b8e (train, val; crop ratio 0.875)"
    assert folder(tmp_path).identity == found


def test_subfolder_that_contains_itself_is_refused(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "train/cat/again").symlink_to(tmp_path / "train/cat")
    for look in (lambda: folder(tmp_path).identity, lambda: folder(tmp_path).read("train")):
        with pytest.raises(DataError, match=r"train/cat/again/.* cannot be read: Too many levels of symbolic links\."):
            look()


def test_labels_follow_the_order_of_a_class_list(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "hundred.txt").write_text("eel\n\ncat \n")
    assert class_list(tmp_path / "hundred.txt") == class_list(str(tmp_path / "hundred.txt")) == ("eel", "cat")
    found = folder(tmp_path, classes=class_list(["eel", "cat"])).read("train")
    assert found.classes == ("eel", "cat")
    assert {key.split("/")[0]: int(label) for key, label in zip(found.keys, found.labels, strict=True)} == {
        "eel": 0,
        "cat": 1,
    }


def test_pixels_are_read_exactly(tmp_path):
    written = write_folder(tmp_path, sizes=((12, 17),))
    found = folder(tmp_path).read("train")
    (images,) = found.images.read([BatchRequest(indices=np.array([5, 0, 9]))], None, CPU)
    for image, index in zip(images, (5, 0, 9), strict=True):
        assert np.array_equal(image.permute(1, 2, 0).numpy(), written[f"train/{found.keys[index]}"])


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1"])
def test_images_of_any_mode_become_rgb(tmp_path, mode):
    path = tmp_path / ("x.jpg" if mode == "CMYK" else "x.png")
    Image.new("RGB", (9, 7), (255, 255, 255)).convert(mode).save(path)
    (images,) = FileImages(paths=(str(path),), workers=0).read([BatchRequest(indices=np.array([0]))], None, CPU)
    assert images.shape == (1, 3, 7, 9) and images.dtype == torch.uint8
    assert images.min() >= 250


@pytest.mark.parametrize(
    ("mode", "kind"), [("I;16", "png"), ("I;16", "tif"), ("I;16B", "tif"), ("I", "tif"), ("F", "tif")]
)
def test_images_of_more_than_8_bits_are_refused(tmp_path, mode, kind):
    """Pillow would clip them to white or black."""
    write_folder(tmp_path)
    bad = tmp_path / "train" / "dog" / f"002.{kind}"
    values = np.linspace(300, 60000, 24 * 24).reshape(24, 24)
    kinds = {"I;16": np.uint16, "I;16B": np.dtype(">u2"), "I": np.int32, "F": np.float32}
    Image.fromarray(values.astype(kinds[mode])).save(bad)
    with Image.open(bad) as image:
        found = image.mode
    assert found in (mode, "I")  # by the version of Pillow
    message = (
        f"The image {bad} has more than 8 bits per channel (Pillow's mode {found}), which reading would clip. Convert "
        "it to 8 bits, or scale it in a dataset of your own (ClassificationTask.from_loaders)."
    )
    with pytest.raises(DataError) as error:
        decode(str(bad))
    assert str(error.value) == message
    with pytest.raises(DataError) as error:
        ClassificationTask.image_folder(tmp_path, size=16).check_files({}, silent)
    assert str(error.value) == message


def test_colour_images_of_16_bits_are_scaled(tmp_path):
    """Pillow reads their upper 8 bits."""
    row = struct.pack(">BHHHHHH", 0, 0, 0x8000, 0xFFFF, 0x1234, 0x4567, 0x89AB)
    parts = (b"IHDR", struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(row)), (b"IEND", b"")
    chunks = (struct.pack(">I", len(d)) + name + d + struct.pack(">I", zlib.crc32(name + d)) for name, d in parts)
    (tmp_path / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    assert np.asarray(decode(str(tmp_path / "x.png"))).tolist() == [[[0, 0x80, 0xFF], [0x12, 0x45, 0x89]]]


def test_centre_crops_in_memory_equal_those_from_files(tmp_path):
    write_folder(tmp_path)
    pictures = folder(tmp_path).read("train").images
    held = pictures.cached((16, 16), cropped=False)
    assert isinstance(held, MemoryImages) and held.pixels.shape == (24, 3, 16, 16)
    small = folder(tmp_path, memory=24 * 3 * 16 * 16 - 1).read("train").images
    assert small.cached((16, 16), cropped=False) is small
    request = BatchRequest(indices=np.array([3, 7, 1]))
    (from_memory,) = held.read([request], (16, 16), CPU)
    (from_files,) = small.read([request], (16, 16), CPU)
    assert torch.equal(from_memory, from_files)


def test_random_crops_need_whole_images(tmp_path):
    """Images of equal size are kept in memory; others are cropped from their files. The crops are the same."""
    write_folder(tmp_path / "mixed")
    mixed = folder(tmp_path / "mixed").read("train").images
    assert mixed.cached((16, 16), cropped=True) is mixed
    write_folder(tmp_path / "alike", sizes=((20, 26),))
    alike = folder(tmp_path / "alike").read("train").images
    held = alike.cached((16, 16), cropped=True)
    assert isinstance(held, MemoryImages) and held.pixels.shape == (24, 3, 20, 26)
    request = BatchRequest(indices=np.arange(24), crop=np.random.default_rng(0).random((24, 10, 4)))
    (from_memory,) = held.read([request], (16, 16), CPU)
    (from_files,) = alike.read([request], (16, 16), CPU)
    assert (from_memory.int() - from_files.int()).abs().max() <= 2  # Pillow rounds between the two sides
    centre = BatchRequest(indices=np.arange(24))
    (from_memory,), (from_files,) = held.read([centre], (16, 16), CPU), alike.read([centre], (16, 16), CPU)
    assert (from_memory.int() - from_files.int()).abs().max() <= 2


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("data", [b"not an image", None])
def test_unreadable_image_is_named(tmp_path, workers, data):
    write_folder(tmp_path)
    bad = tmp_path / "train" / "dog" / "002.png"
    bad.write_bytes(bad.read_bytes()[:100] if data is None else data)
    pictures = ImageFolder(path=tmp_path, workers=workers).read("train").images
    with pytest.raises(DataError) as error:
        pictures.cached((8, 8), cropped=False)
    assert str(error.value).startswith(f"The image {bad} cannot be read: ")
    assert str(error.value).endswith(". Download it again, or remove it from its folder.")
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize("cropped", [False, True])
def test_too_large_image_is_named(tmp_path, monkeypatch, cropped):
    """Pillow refuses images with more than twice its limit of pixels."""
    write_folder(tmp_path)
    bad = tmp_path / "train" / "dog" / "002.png"
    Image.new("RGB", (60, 50)).save(bad)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1400)
    pictures = ImageFolder(path=tmp_path, workers=0).read("train").images
    with pytest.raises(DataError) as error:
        pictures.subset([8 + 2]).cached(None if cropped else (8, 8), cropped=cropped)
    assert str(error.value) == (
        f"The image {bad} is too large: Image size (3000 pixels) exceeds limit of 2800 pixels, could be decompression "
        "bomb DOS attack. Resize it, or remove it from its folder."
    )


def test_broken_links_matter_only_for_images(tmp_path):
    write_folder(tmp_path)
    identity = folder(tmp_path).identity
    (tmp_path / "train/cat/notes.txt").symlink_to(tmp_path / "gone.txt")
    (tmp_path / "train/cat/more").symlink_to(tmp_path / "gone")
    task = ClassificationTask.image_folder(tmp_path, size=16)
    assert folder(tmp_path).identity == identity
    assert sorted(task.check_files({}, silent)) == ["test", "train"]
    bad = tmp_path / "train/cat/004.png"
    bad.unlink()
    bad.symlink_to(tmp_path / "gone.png")
    task = ClassificationTask.image_folder(tmp_path, size=16)
    for look in (lambda: task.identity, lambda: task.check_files({}, silent)):
        with pytest.raises(DataError) as error:
            look()
        assert str(error.value) == (
            f"{bad} cannot be read: No such file or directory. Check its permissions and links, or remove it."
        )


def test_different_sizes_without_a_size_are_refused(tmp_path):
    write_folder(tmp_path)
    pictures = folder(tmp_path).read("train").images
    with pytest.raises(DataError) as error:
        pictures.cached(None, cropped=False)
    here = tmp_path / "train" / "cat"
    assert str(error.value) == (
        f"The images differ in size: {here / '000.png'} is 20 x 30, {here / '001.png'} is 25 x 20. "
        "Give the size: size=... of the task in Python, --input 3x224x224 on the command line."
    )


def test_missing_folders_are_refused(tmp_path):
    write_folder(tmp_path)
    with pytest.raises(DataError) as error:
        folder(tmp_path, test="test").read("test")
    assert str(error.value) == (
        f"Expected a folder test in {tmp_path}, found train, val. Give the folder that contains train/ and test/, "
        "rename its folders, or give their names: train=... and test=... of the task in Python."
    )
    with pytest.raises(DataError, match=r"Expected a folder train in .*nowhere, found no folder .*nowhere\. Give"):
        folder(tmp_path / "nowhere").read("train")


def test_all_empty_classes_are_listed(tmp_path):
    write_folder(tmp_path)
    for name in ("ant", "yak"):
        (tmp_path / "train" / name).mkdir()
    with pytest.raises(DataError) as error:
        folder(tmp_path).read("train")
    assert str(error.value).startswith("2 class folders without an image (.jpg, .jpeg, .png, ")
    assert f":\n  {tmp_path}/train/ant\n  {tmp_path}/train/yak\nDownload the images again" in str(error.value)


def test_different_classes_in_train_and_test_are_refused(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "val/dog").rename(tmp_path / "val/dingo")
    assert folder(tmp_path).read("train").classes == ("cat", "dog", "eel")  # val/ is not needed
    with pytest.raises(DataError) as error:
        folder(tmp_path).read("test")
    assert str(error.value) == (
        f"train/ and val/ of {tmp_path} have different classes:\n  only in val/: dingo\n  only in train/: dog\n"
        "Download the missing classes, or select classes with classes=..."
    )
    assert folder(tmp_path, classes=("cat", "eel")).read("test").classes == ("cat", "eel")


def test_missing_classes_are_listed(tmp_path):
    write_folder(tmp_path)
    with pytest.raises(DataError, match=r"lacks 2 of the 3 classes:\n  dgo \(did you mean dog\?\)\n  yak\nThe name of"):
        folder(tmp_path, classes=("cat", "dgo", "yak")).read("train")


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (["a", "b", "a"], "The list of classes has 'a' more than once, expected each class once."),
        ([], "The list of classes is empty, expected each class once."),
        ("no/such/file", "classes='no/such/file' is not a file, expected one with a class name per line."),
    ],
)
def test_wrong_class_list_is_refused(classes, message):
    with pytest.raises(DataError) as error:
        class_list(classes)
    assert str(error.value) == message


def test_folder_without_class_folders_is_refused(tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match=r"train has no folders, expected one with images for each class"):
        folder(tmp_path).read("train")


def test_missing_pillow_names_the_extra(tmp_path, monkeypatch):
    write_folder(tmp_path)
    for name in ("PIL", "PIL.Image"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(MissingDependency) as error:
        folder(tmp_path).read("train").images.cached((8, 8), cropped=False)
    assert str(error.value) == 'PIL.Image is not installed. In a clone of depthfold, run: pip install -e ".[train]"'


@pytest.mark.parametrize("ratio", [0.0, -1.0, 1.2, float("nan")])
def test_crop_ratio_outside_its_range_is_refused(tmp_path, ratio):
    with pytest.raises(DataError, match="crop_ratio is the part of an image that is scored, above 0 and at most 1"):
        ImageFolder(path=tmp_path, crop_ratio=ratio)


@pytest.mark.parametrize(("size", "ratio"), [(None, 1.0), (16, 0.875)])
def test_stated_crop_is_the_one_that_is_scored(tmp_path, size, ratio):
    written = write_folder(tmp_path, sizes=((32, 32),))
    task = ClassificationTask.image_folder(tmp_path, size=size, workers=0, normalise=((0.0,), (1.0,)), holdout=0)
    stated = task.preprocessing
    assert stated.crop_ratio == ratio
    edge = 16 * (1 - stated.crop_ratio)
    image = Image.fromarray(written["train/cat/000.png"])
    wanted = image.resize(stated.size, Image.Resampling.BILINEAR, box=(edge, edge, 32 - edge, 32 - edge))
    assert np.array_equal((task.example()[0] * 255).round().numpy(), np.asarray(wanted).transpose(2, 0, 1))
