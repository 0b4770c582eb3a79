"""Tiny MNIST and CIFAR-10 files, in the forms they are published in."""

import gzip
import io
import tarfile

import numpy as np

BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


def mnist_arrays(seed=0):
    """(train images, train labels, test images, test labels)"""
    generator = np.random.default_rng(seed)
    arrays = []
    for size in (7, 3):
        arrays.append(generator.integers(256, size=(size, 28, 28), dtype=np.uint8))
        arrays.append(generator.integers(10, size=size, dtype=np.uint8))
    return arrays


def idx(array):
    """An idx file: two zero bytes, 8 for bytes, the number of dimensions, their lengths."""
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes()
    return header + array.tobytes()


def write_mnist(folder, *, mark="-", is_zipped=False, seed=0):
    folder.mkdir(parents=True, exist_ok=True)
    arrays = iter(mnist_arrays(seed))
    for side in ("train", "t10k"):
        for kind, dimensions in (("images", 3), ("labels", 1)):
            data = idx(next(arrays))
            path = folder / f"{side}-{kind}{mark}idx{dimensions}-ubyte{'.gz' * is_zipped}"
            path.write_bytes(gzip.compress(data) if is_zipped else data)


def cifar_arrays(size=4, seed=0):
    """Batch -> (images (N, 3, 32, 32), labels (N,))"""
    generator = np.random.default_rng(seed)
    return {
        name: (
            generator.integers(256, size=(size, 3, 32, 32), dtype=np.uint8),
            generator.integers(10, size=size),
        )
        for name in BATCHES
    }


def binary_batches(seed=0):
    return {
        f"{name}.bin": b"".join(
            bytes([label]) + image.tobytes() for image, label in zip(images, labels, strict=True)
        )
        for name, (images, labels) in cifar_arrays(seed=seed).items()
    }


def write_tar(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))


def write_files(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
