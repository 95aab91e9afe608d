"""Fashion-MNIST: IDX files, plain or compressed, in each of the accepted folders."""

import numpy as np
import pytest

from depthfold.errors import DataError
from depthfold.tasks.datasets import FashionMnist
from layouts import write_fashion_mnist


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("below", ["", "FashionMNIST", "FashionMNIST/raw"])
def test_images_and_labels_are_read(tmp_path, below, packed):
    written = write_fashion_mnist(tmp_path / "FashionMNIST" / "raw", packed=packed)
    for part, (x, y) in written.items():
        found = FashionMnist(path=tmp_path / below).read(part)
        assert np.array_equal(found.images.pixels.numpy(), x)
        assert found.images.pixels.shape[1:] == (1, 28, 28)
        assert found.labels.tolist() == y.tolist()
        assert len(found.classes) == 10


def test_missing_files_are_refused(tmp_path):
    with pytest.raises(DataError) as error:
        FashionMnist(path=tmp_path).read("test")
    assert str(error.value) == (
        f"Expected t10k-images-idx3-ubyte or t10k-images-idx3-ubyte.gz in {tmp_path}, or in raw/ or FashionMNIST/raw/ "
        "below it, found neither. Give the folder that contains FashionMNIST/raw, or download the files from "
        "https://github.com/zalandoresearch/fashion-mnist"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: b"\0\0\x08\x01" + data[4:],
            "train-images-idx3-ubyte starts with 0x00000801, expected 0x00000803, the magic number of an IDX file "
            "of bytes in 3 dimensions",
        ),
        (lambda data: b"", "train-images-idx3-ubyte starts with 0x, expected 0x00000803, the magic number"),
        (
            lambda data: data[:9],
            "train-images-idx3-ubyte has 9 bytes, but its header says 16 or more. Downlo",
        ),
        (lambda data: data[:-1], f"has {16 + 40 * 784 - 1} bytes, but its header says {16 + 40 * 784}."),
        (lambda data: data + b"\0", f"has {16 + 40 * 784 + 1} bytes, but its header says {16 + 40 * 784}."),
    ],
)
def test_damaged_file_is_refused(tmp_path, change, message):
    write_fashion_mnist(tmp_path / "raw")
    file = tmp_path / "raw" / "train-images-idx3-ubyte"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(DataError) as error:
        FashionMnist(path=tmp_path).read("train")
    assert message in str(error.value)


def test_truncated_compressed_file_is_refused(tmp_path):
    write_fashion_mnist(tmp_path / "raw", packed=True)
    file = tmp_path / "raw" / "train-labels-idx1-ubyte.gz"
    for data in (file.read_bytes()[:-9], b"not gzip"):
        file.write_bytes(data)
        with pytest.raises(DataError, match=r"train-labels-idx1-ubyte.gz cannot be decompressed: .*Download it again"):
            FashionMnist(path=tmp_path).read("train")


def test_different_numbers_of_labels_and_images_are_refused(tmp_path):
    write_fashion_mnist(tmp_path / "raw", train=40)
    other = write_fashion_mnist(tmp_path / "other" / "raw", train=50)
    assert len(other["train"][1]) == 50
    (tmp_path / "other/raw/train-labels-idx1-ubyte").replace(tmp_path / "raw/train-labels-idx1-ubyte")
    with pytest.raises(
        DataError, match=r"raw \(train\) has 40 images and 50 labels, expected one label for each image"
    ):
        FashionMnist(path=tmp_path).read("train")
