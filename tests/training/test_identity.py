"""The identity of a task depends on its data, not on the path."""

import pickle
import shutil

import numpy as np
import pytest
from PIL import Image

import depthfold as df
from depthfold.errors import DataError
from layouts import write_cifar10, write_cifar100, write_fashion_mnist, write_folder

KINDS = {
    "cifar10": (df.ClassificationTask.cifar10, write_cifar10, "data_batch_3.bin"),
    "cifar100": (df.ClassificationTask.cifar100, write_cifar100, "train.bin"),
    "fashion_mnist": (df.ClassificationTask.fashion_mnist, write_fashion_mnist, "train-images-idx3-ubyte"),
    "image_folder": (df.ClassificationTask.image_folder, write_folder, "train/cat/000.png"),
}
each_kind = pytest.mark.parametrize(("task", "write", "file"), KINDS.values(), ids=KINDS)


@each_kind
def test_same_data_at_another_path_has_the_same_identity(task, write, file, tmp_path):
    write(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "deep/under another name")
    assert task(tmp_path / "one").identity == task(tmp_path / "deep/under another name").identity


@each_kind
def test_changed_byte_changes_the_identity(task, write, file, tmp_path):
    """One byte in the middle of the training set differs; all file sizes are equal."""
    write(tmp_path / "one/data")
    before = task(tmp_path / "one/data").identity
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    changed = bytearray((tmp_path / "two/data" / file).read_bytes())
    changed[len(changed) // 2] ^= 1
    (tmp_path / "two/data" / file).write_bytes(changed)
    assert task(tmp_path / "two/data").identity != before


def test_compressed_and_plain_files_have_the_same_identity(tmp_path):
    for name in ("packed", "unpacked"):
        write_fashion_mnist(tmp_path / name, packed=name == "packed")
    one, two = (df.ClassificationTask.fashion_mnist(tmp_path / name).identity for name in ("packed", "unpacked"))
    assert one == two


def _enlarge(folder):
    Image.fromarray(np.zeros((40, 40, 3), dtype=np.uint8)).save(folder / "train/dog/005.png")


def _rename(folder):
    (folder / "train/dog/005.png").rename(folder / "train/dog/105.png")


def _move(folder):
    (folder / "train/dog/005.png").rename(folder / "train/eel/100.png")


@pytest.mark.parametrize("change", [_enlarge, _rename, _move])
def test_changed_image_folder_changes_the_identity(change, tmp_path):
    write_folder(tmp_path)
    before = df.ClassificationTask.image_folder(tmp_path).identity
    assert "image folder of 24 images in 3 classes, " in before
    change(tmp_path)
    assert df.ClassificationTask.image_folder(tmp_path).identity != before


def test_other_files_and_the_test_set_do_not_change_the_identity(tmp_path):
    """Importances do not depend on them, so entries that were trained stay valid."""
    write_folder(tmp_path)
    before = df.ClassificationTask.image_folder(tmp_path).identity
    (tmp_path / "train/cat/notes.txt").write_text("not an image")
    shutil.rmtree(tmp_path / "val")
    assert df.ClassificationTask.image_folder(tmp_path).identity == before


def test_order_of_the_classes_changes_the_identity(tmp_path):
    write_folder(tmp_path)
    names = (("cat", "dog"), ("dog", "cat"), ("cat",))
    assert len({df.ClassificationTask.image_folder(tmp_path, classes=chosen).identity for chosen in names}) == 3


def test_identity_is_pickled_with_the_task(tmp_path):
    write_folder(tmp_path)
    task = df.ClassificationTask.image_folder(tmp_path)
    before = task.identity
    shutil.rmtree(tmp_path)
    assert pickle.loads(pickle.dumps(task)).identity == before
    with pytest.raises(DataError, match="Expected a folder train in"):
        _ = df.ClassificationTask.image_folder(tmp_path).identity
