"""Fashion-MNIST: IDX files, packed or not, in each of the folders that people name."""

import numpy as np
import pytest

from depthfold.errors import DataError
from depthfold.tasks.datasets import FashionMnist
from layouts import write_fashion_mnist


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("below", ["", "FashionMNIST", "FashionMNIST/raw"])
def test_what_was_written_is_read(tmp_path, below, packed):
    written = write_fashion_mnist(tmp_path / "FashionMNIST" / "raw", packed=packed)
    for part, (x, y) in written.items():
        found = FashionMnist(path=tmp_path / below).read(part)
        assert np.array_equal(found.pictures.pixels.numpy(), x)
        assert found.pictures.pixels.shape[1:] == (1, 28, 28)
        assert found.labels.tolist() == y.tolist()
        assert len(found.classes) == 10


def test_missing(tmp_path):
    with pytest.raises(DataError) as error:
        FashionMnist(path=tmp_path).read("test")
    assert str(error.value) == (
        f"Expected t10k-images-idx3-ubyte or t10k-images-idx3-ubyte.gz in {tmp_path}, in raw/ or in FashionMNIST/raw/ "
        "below it, found neither. Name the folder that holds FashionMNIST/raw, or fetch the files from "
        "https://github.com/zalandoresearch/fashion-mnist"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: b"\0\0\x08\x01" + data[4:],
            "train-images-idx3-ubyte begins with 0x00000801, expected the magic number 0x00000803 of an IDX file of "
            "bytes in 3 dimensions",
        ),
        (lambda data: b"", "train-images-idx3-ubyte begins with 0x, expected the magic number"),
        (lambda data: data[:9], "train-images-idx3-ubyte has 9 bytes, expected 16 or more by its header. It was cut"),
        (lambda data: data[:-1], f"has {16 + 40 * 784 - 1} bytes, expected {16 + 40 * 784} by its header"),
        (lambda data: data + b"\0", f"has {16 + 40 * 784 + 1} bytes, expected {16 + 40 * 784} by its header"),
    ],
)
def test_damage(tmp_path, change, message):
    write_fashion_mnist(tmp_path / "raw")
    file = tmp_path / "raw" / "train-images-idx3-ubyte"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(DataError) as error:
        FashionMnist(path=tmp_path).read("train")
    assert message in str(error.value)


def test_a_packed_file_cut_short(tmp_path):
    write_fashion_mnist(tmp_path / "raw", packed=True)
    file = tmp_path / "raw" / "train-labels-idx1-ubyte.gz"
    for data in (file.read_bytes()[:-9], b"not gzip"):
        file.write_bytes(data)
        with pytest.raises(DataError, match=r"train-labels-idx1-ubyte.gz cannot be unpacked: .*Fetch it again"):
            FashionMnist(path=tmp_path).read("train")


def test_more_labels_than_images(tmp_path):
    write_fashion_mnist(tmp_path / "raw", train=40)
    other = write_fashion_mnist(tmp_path / "other" / "raw", train=50)
    assert len(other["train"][1]) == 50
    (tmp_path / "other/raw/train-labels-idx1-ubyte").replace(tmp_path / "raw/train-labels-idx1-ubyte")
    with pytest.raises(
        DataError, match=r"raw \(train\) has 40 images and 50 labels; expected one label for each image"
    ):
        FashionMnist(path=tmp_path).read("train")
