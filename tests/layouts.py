"""Small datasets in the file formats of the real ones."""

import gzip
import struct

import numpy as np
from PIL import Image

CIFAR10_NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def pictures(count, side=32, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, channels, side, side), dtype=np.uint8)


def labels(count, classes, seed=0):
    """Return balanced labels in random order."""
    return np.random.default_rng(seed).permutation(np.arange(count) % classes).astype(np.uint8)


def write_cifar10(folder, train=100, test=20):
    """Write `train` images to five files. Return the pixels and labels of both parts."""
    folder.mkdir(parents=True)
    parts = {}
    for part, count, files in (
        ("train", train, [f"data_batch_{n}.bin" for n in range(1, 6)]),
        ("test", test, ["test_batch.bin"]),
    ):
        x, y = pictures(count, seed=len(part)), labels(count, 10, seed=len(part))
        for n, file in enumerate(files):
            rows = range(n * count // len(files), (n + 1) * count // len(files))
            (folder / file).write_bytes(b"".join(bytes([y[row]]) + x[row].tobytes() for row in rows))
        parts[part] = x, y
    (folder / "batches.meta.txt").write_text("\n".join(CIFAR10_NAMES) + "\n\n")
    return parts


def write_cifar100(folder, train=300, test=100):
    folder.mkdir(parents=True)
    parts = {}
    for part, count in (("train", train), ("test", test)):
        x, y = pictures(count, seed=count), labels(count, 100, seed=count)
        records = (bytes([fine // 5, fine]) + image.tobytes() for fine, image in zip(y.tolist(), x, strict=True))
        (folder / f"{part}.bin").write_bytes(b"".join(records))
        parts[part] = x, y
    (folder / "fine_label_names.txt").write_text("".join(f"class {n}\n" for n in range(100)))
    return parts


def write_fashion_mnist(folder, train=40, test=20, packed=False):
    folder.mkdir(parents=True)
    parts = {}
    for part, prefix, count in (("train", "train", train), ("test", "t10k", test)):
        x, y = pictures(count, side=28, channels=1, seed=count), labels(count, 10, seed=count)
        images = struct.pack(">IIII", 0x803, count, 28, 28) + x.tobytes()
        for name, data in (
            (f"{prefix}-images-idx3-ubyte", images),
            (f"{prefix}-labels-idx1-ubyte", struct.pack(">II", 0x801, count) + y.tobytes()),
        ):
            (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(data) if packed else data)
        parts[part] = x, y
    return parts


def write_folder(folder, classes=("cat", "dog", "eel"), train=8, test=3, sizes=((20, 30), (25, 20), (24, 24))):
    """Write PNG files, which are lossless. Return the pixels by relative path."""
    written = {}
    rng = np.random.default_rng(0)
    for part, count in (("train", train), ("val", test)):
        for name in classes:
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                height, width = sizes[number % len(sizes)]
                # Smooth like photographs, because resampling methods differ on noise.
                coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
                image = coarse.resize((width, height), Image.Resampling.BICUBIC)
                image.save(folder / part / name / f"{number:03}.png")
                written[f"{part}/{name}/{number:03}.png"] = np.asarray(image)
    return written
