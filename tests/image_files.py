"""Tiny MNIST and CIFAR-10 files, in every form they are published in."""

import gzip
import io
import pickle
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


def python_batches(seed=0):
    return {
        name: python_2_pickle(
            {
                "batch_label": f"batch {name}",
                "labels": labels.tolist(),
                "data": images.reshape(len(images), -1),
                "filenames": [f"{number}.png" for number in labels],
            }
        )
        for name, (images, labels) in cifar_arrays(seed=seed).items()
    }


class Python2Pickler(pickle._Pickler):
    """Writes as Python 2 did with protocol 2: every text is a string of bytes."""

    dispatch = dict(pickle._Pickler.dispatch)  # noqa: RUF012

    def save_text(self, value):
        data = value.encode("latin-1") if isinstance(value, str) else value
        short = b"U" + bytes([len(data)]) if len(data) < 256 else None
        self.write((short or b"T" + len(data).to_bytes(4, "little")) + data)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_text


def python_2_pickle(value):
    file = io.BytesIO()
    Python2Pickler(file, 2).dump(value)
    return file.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


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
