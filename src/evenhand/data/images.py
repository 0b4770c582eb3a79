"""MNIST and CIFAR-10 from the files they are published as, in a folder; nothing is fetched.

    images = load_mnist(Path("downloads"))
    images.train_images.shape, images.train_labels.shape  # (60000, 28, 28), (60000,)

MNIST is four idx files, plain or .gz. CIFAR-10 is its binary version (cifar-10-binary.tar.gz, or
its data_batch_1.bin ... test_batch.bin) or its python version (cifar-10-python.tar.gz, or its
data_batch_1 ... test_batch), of which nothing is unpickled. Archives are read in memory: no file
is ever written to a path that an archive names.
"""

import gzip
import math
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenhand.data.pickled import plain_values
from evenhand.errors import UserError
from evenhand.files import check_is_file

Bytes = NDArray[np.uint8]
Labels = NDArray[np.int64]

NUM_CLASSES = 10  # of both
MNIST_SIDE = 28
CIFAR_SHAPE = (3, 32, 32)  # channels, height, width
CIFAR_IMAGE_BYTES = 3 * 32 * 32
CIFAR_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
CIFAR_ARCHIVES = {".bin": "cifar-10-binary.tar.gz", "": "cifar-10-python.tar.gz"}  # by ending
LABEL_MAGIC, IMAGE_MAGIC = 0x0801, 0x0803  # an idx file of bytes with one and three dimensions
MAX_BYTES = 2**28  # a larger file is none of these
AGAIN = "fetch or copy the file again"
# Where other programs put them.
MNIST_FOLDERS = ("", "mnist", "MNIST", "MNIST/raw", "raw")
CIFAR_FOLDERS = ("", "cifar10", "cifar-10", "cifar-10-batches-bin", "cifar-10-batches-py")


class ImageData(NamedTuple):
    """Images of ten classes, as published."""

    train_images: Bytes  # (N, 28, 28) of MNIST, (N, 3, 32, 32) of CIFAR-10
    train_labels: Labels  # (N,) from 0 to 9
    test_images: Bytes
    test_labels: Labels


def load_mnist(folder: Path) -> ImageData:
    """MNIST from its four idx files in the folder, or in the folder that is called mnist there."""
    return ImageData(*_mnist_side(folder, "train"), *_mnist_side(folder, "t10k"))


def load_cifar10(folder: Path) -> ImageData:
    """CIFAR-10 from the batches or from the archive in the folder; the binary version first."""
    batches = _cifar_batches(folder)
    sizes = {source: len(labels) for source, _, labels in batches}
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{source}: {size}" for source, size in sizes.items())
        raise UserError(
            f"the batches of CIFAR-10 must all hold the same number of images, got {told}; fetch "
            f"or copy the shorter one again"
        )
    *train, test = batches
    return ImageData(
        np.concatenate([images for _, images, _ in train]),
        np.concatenate([labels for *_, labels in train]),
        test[1],
        test[2],
    )


# --- MNIST ----------------------------------------------------------------------------------------


def mnist_names(side: str, kind: str) -> list[str]:
    """How the file may be called, the best choice first."""
    dimensions = {"images": 3, "labels": 1}[kind]
    plain = [f"{side}-{kind}{mark}idx{dimensions}-ubyte" for mark in "-."]
    return [*plain, *(f"{name}.gz" for name in plain)]


def mnist_paths(folder: Path) -> list[Path]:
    """The four files: images and labels to train, images and labels to test."""
    kinds = ("images", "labels")
    return [_mnist_path(folder, side, kind) for side in ("train", "t10k") for kind in kinds]


def _mnist_side(folder: Path, side: str) -> tuple[Bytes, Labels]:
    image_path, label_path = (_mnist_path(folder, side, kind) for kind in ("images", "labels"))
    images = _idx_array(image_path, IMAGE_MAGIC)  # (N, 28, 28)
    if images.shape[1:] != (MNIST_SIDE, MNIST_SIDE):
        raise UserError(
            f"{image_path} holds images of {images.shape[1]} x {images.shape[2]} points, but "
            f"MNIST's have 28 x 28; is this another data set?"
        )
    labels = _idx_array(label_path, LABEL_MAGIC)  # (N,)
    if len(images) != len(labels):
        raise UserError(
            f"{label_path} holds {len(labels)} labels for the {len(images)} images of "
            f"{image_path}; both must be of the same side of the same data set"
        )
    return images, _checked_labels(labels, str(label_path))


def _mnist_path(folder: Path, side: str, kind: str) -> Path:
    names = mnist_names(side, kind)
    path = first_of(folder, MNIST_FOLDERS, names)
    if path is None:
        raise UserError(
            f"{folder} has no {names[0]} (nor {names[1]}, nor one of them with .gz); MNIST needs "
            f"its four files there: `evenhand data fetch mnist`, or copy them"
        )
    return path


def _idx_array(path: Path, magic: int) -> Bytes:
    """The array of an idx file: magic, the length of every dimension, then the bytes."""
    data = _content(path)
    num_dimensions = magic % 256
    start = 4 + 4 * num_dimensions
    found = int.from_bytes(data[:4], "big")
    if len(data) < start:
        raise UserError(f"{path} is cut short: it has {len(data)} bytes; {AGAIN}")
    if found != magic:
        raise UserError(
            f"{path} starts with the number {found}, not with {magic} as an idx file of "
            f"{'images' if magic == IMAGE_MAGIC else 'labels'} does; {AGAIN}, and check that it "
            f"is the file its name says"
        )
    shape = tuple(np.frombuffer(data, dtype=">u4", count=num_dimensions, offset=4).tolist())
    expected = start + math.prod(shape)
    if len(data) != expected or max(shape) > MAX_BYTES:  # of a 0 and others that are huge
        raise UserError(
            f"{path} has {len(data)} bytes, but its header promises {shape[0]} items in "
            f"{expected}; {AGAIN}"
        )
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape).copy()  # writable


# --- CIFAR-10 -------------------------------------------------------------------------------------


class _Batch(NamedTuple):
    source: str
    images: Bytes  # (N, 3, 32, 32)
    labels: Labels  # (N,)


def cifar_paths(folder: Path) -> list[Path]:
    """The six batches, or the archive alone, of whichever version is in the folder."""
    for suffix, archive_name in CIFAR_ARCHIVES.items():
        names = [f"{name}{suffix}" for name in CIFAR_BATCHES]
        found = {name: first_of(folder, CIFAR_FOLDERS, [name]) for name in names}
        paths = [path for path in found.values() if path is not None]
        if len(paths) == len(names):
            return paths
        if (archive := first_of(folder, CIFAR_FOLDERS, [archive_name])) is not None:
            return [archive]
        if paths:
            missing = ", ".join(name for name, path in found.items() if path is None)
            raise UserError(
                f"{folder} has some batches of CIFAR-10 but not {missing}; copy all six, or the "
                f"whole archive"
            )
    raise UserError(
        f"{folder} has neither {' nor '.join(CIFAR_ARCHIVES.values())} nor data_batch_1.bin and "
        f"the other batches: `evenhand data fetch cifar10`, or copy them"
    )


def _cifar_batches(folder: Path) -> list[_Batch]:
    """Five training batches and the test batch."""
    paths = cifar_paths(folder)
    is_binary = paths[0].suffix == ".bin" or paths[0].name == CIFAR_ARCHIVES[".bin"]
    batch_fn = _binary_batch if is_binary else _python_batch
    if len(paths) == len(CIFAR_BATCHES):
        return [batch_fn(_content(path), str(path)) for path in paths]
    names = [f"{name}{'.bin' if is_binary else ''}" for name in CIFAR_BATCHES]
    contents = _tar_contents(paths[0], names)
    return [batch_fn(contents[name], f"{paths[0]}: {name}") for name in names]


def _binary_batch(data: bytes, source: str) -> _Batch:
    """Records of one byte for the label and 3072 for the image."""
    record = 1 + CIFAR_IMAGE_BYTES
    if not data or len(data) % record:
        raise UserError(
            f"{source} has {len(data)} bytes, which is not a number of records of {record}: it is "
            f"cut short or another file; {AGAIN}"
        )
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, record)
    images = records[:, 1:].reshape(-1, *CIFAR_SHAPE).copy()  # writable
    return _Batch(source, images, _checked_labels(records[:, 0], source))


def _python_batch(data: bytes, source: str) -> _Batch:
    """A pickled dictionary of which `data` is (N, 3072) and `labels` a list."""
    values = plain_values(data, source=source)
    images, labels = values.get("data"), values.get("labels")
    if not isinstance(images, np.ndarray) or not isinstance(labels, list):
        raise UserError(
            f"{source} has no array 'data' with a list 'labels' but "
            f"{', '.join(sorted(values))[:100] or 'nothing'}; is this another data set?"
        )
    if images.ndim != 2 or images.shape != (len(labels), CIFAR_IMAGE_BYTES) or not labels:
        raise UserError(
            f"{source} has {len(labels)} labels and an array of shape {images.shape}, expected "
            f"({len(labels)}, {CIFAR_IMAGE_BYTES}); {AGAIN}"
        )
    for place, label in enumerate(labels):
        if type(label) is not int or not 0 <= label < NUM_CLASSES:
            raise _label_error(source, place, label)
    images = images.reshape(-1, *CIFAR_SHAPE).copy()  # writable
    return _Batch(source, images, np.array(labels, dtype=np.int64))


def _checked_labels(labels: Bytes, source: str) -> Labels:
    wrong = np.flatnonzero(labels >= NUM_CLASSES)
    if len(wrong):
        raise _label_error(source, int(wrong[0]), int(labels[wrong[0]]))
    return labels.astype(np.int64)


def _label_error(source: str, place: int, label: Any) -> UserError:
    is_plain = isinstance(label, int | str | bytes | None)  # a tuple of tuples may have no end
    told = repr(label)[:40] if is_plain else f"of type {type(label).__name__}"
    return UserError(
        f"{source}: label {told} of image {place} is not between 0 and {NUM_CLASSES - 1}; "
        f"{AGAIN}, and check that it is the file its name says"
    )


# --- files ----------------------------------------------------------------------------------------


def first_of(folder: Path, subfolders: Iterable[str], names: Iterable[str]) -> Path | None:
    """The first of these files that is in the folder or in one of its subfolders."""
    names = list(names)
    for place in (folder / subfolder for subfolder in subfolders):
        for path in (place / name for name in names):
            if path.is_file():
                return path
    return None


def _content(path: Path) -> bytes:
    """All bytes of a file, which may be .gz."""
    try:
        check_is_file(path)
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except EOFError as error:
        raise UserError(f"{path} is cut short; {AGAIN}") from error
    except (OSError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}); {AGAIN}") from error
    if len(data) > MAX_BYTES:
        raise UserError(f"{path} holds more than {MAX_BYTES} bytes; is this another data set?")
    return data


def _tar_contents(path: Path, names: list[str]) -> dict[str, bytes]:
    """The regular files of these names in a .tar.gz, whatever folder of the archive they are in."""
    contents: dict[str, bytes] = {}
    try:
        check_is_file(path)
        with tarfile.open(path, mode="r|gz") as archive:  # a stream: each block is read once
            for member in archive:
                name = member.name.rpartition("/")[2]
                if name not in names or name in contents or not member.isfile():
                    continue
                if member.size > MAX_BYTES:
                    raise UserError(
                        f"{path}: {name} has {member.size} bytes; is this another data set?"
                    )
                file = archive.extractfile(member)
                data = b"" if file is None else file.read()
                if len(data) != member.size:
                    raise EOFError
                contents[name] = data
    except UserError:
        raise
    except Exception as error:  # Python's reader of a damaged archive raises a dozen kinds
        raise UserError(f"{path} is damaged or cut short ({error}); {AGAIN}") from error
    missing = [name for name in names if name not in contents]
    if missing:
        raise UserError(f"{path} holds no {', '.join(missing)}; {AGAIN}")
    return contents
