"""CIFAR in its binary layout: pixels and labels where they belong, and errors that name the file."""

import numpy as np
import pytest

from depthfold.errors import DataError
from depthfold.tasks.datasets import Cifar10, Cifar100
from layouts import CIFAR10_NAMES, write_cifar10, write_cifar100


@pytest.mark.parametrize("below", ["", "cifar-10-batches-bin"])
def test_cifar10_by_its_folder_or_the_one_above(tmp_path, below):
    written = write_cifar10(tmp_path / "cifar-10-batches-bin")
    for part, (x, y) in written.items():
        found = Cifar10(path=tmp_path / below).read(part)
        assert found.classes == tuple(CIFAR10_NAMES)
        assert np.array_equal(found.pictures.pixels.numpy(), x)
        assert found.labels.tolist() == y.tolist()


@pytest.mark.parametrize("below", ["", "cifar-100-binary"])
def test_cifar100_has_the_fine_labels(tmp_path, below):
    written = write_cifar100(tmp_path / "cifar-100-binary")
    for part, (x, y) in written.items():
        found = Cifar100(path=tmp_path / below).read(part)
        assert len(found.classes) == 100
        assert np.array_equal(found.pictures.pixels.numpy(), x)
        assert found.labels.tolist() == y.tolist()


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(DataError) as error:
        Cifar10(path=tmp_path / "nowhere").read("train")
    assert str(error.value) == (
        "Expected data_batch_1.bin, data_batch_2.bin, data_batch_3.bin, data_batch_4.bin, data_batch_5.bin, "
        f"test_batch.bin in {tmp_path / 'nowhere'}, which does not exist. Name the folder cifar-10-batches-bin or the "
        "one it lies in; fetch it, in the binary version, from https://www.cs.toronto.edu/~kriz/cifar.html"
    )


def test_the_pickled_version_is_named_and_not_read(tmp_path):
    (tmp_path / "cifar-100-python").mkdir()
    for path in (tmp_path, tmp_path / "cifar-100-python"):
        with pytest.raises(DataError, match=r"\(but cifar-100-python, which is pickled, and not read\)"):
            Cifar100(path=path).read("train")


def test_all_missing_files_are_named_together(tmp_path):
    write_cifar10(tmp_path / "c")
    for name in ("data_batch_2.bin", "data_batch_5.bin", "batches.meta.txt"):
        (tmp_path / "c" / name).unlink()
    with pytest.raises(
        DataError, match=r"c lacks files of its binary layout:\n  data_batch_2.bin\n  data_batch_5.bin\n  batches.meta"
    ):
        Cifar10(path=tmp_path / "c").read("train")


@pytest.mark.parametrize("size", [0, 3072, 3073 * 4 - 1])
def test_a_file_cut_short(tmp_path, size):
    write_cifar10(tmp_path / "c")
    file = tmp_path / "c" / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(DataError, match=rf"data_batch_3.bin has {size} bytes, expected a multiple of 3073, the length"):
        Cifar10(path=tmp_path / "c").read("train")


def test_a_label_out_of_range(tmp_path):
    write_cifar10(tmp_path / "c")
    file = tmp_path / "c" / "data_batch_1.bin"
    data = bytearray(file.read_bytes())
    data[3073 * 2] = 10
    file.write_bytes(data)
    with pytest.raises(
        DataError, match=r"c \(train\): the label of image 2 is 10, expected 0 to 9 \(1 such label in all\)"
    ):
        Cifar10(path=tmp_path / "c").read("train")


def test_the_wrong_number_of_class_names(tmp_path):
    write_cifar10(tmp_path / "c")
    (tmp_path / "c" / "batches.meta.txt").write_text("cat\ndog\n")
    with pytest.raises(DataError, match=r"batches.meta.txt has 2 class names, expected 10, one a line"):
        Cifar10(path=tmp_path / "c").read("test")
