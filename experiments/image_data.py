"""MNIST and CIFAR-10, fetched as they are published and read from a folder.

    python -m experiments.image_data mnist cifar10      fetches both into downloads/

    images = load_mnist(Path("downloads"))
    images.train_images.shape, images.train_labels.shape  # (60000, 28, 28), (60000,)

MNIST is four idx files, plain or .gz. CIFAR-10 is its binary version: cifar-10-binary.tar.gz, or
the six .bin files of that archive. Archives are read in memory, and nothing is unpacked.
"""

import argparse
import gzip
import math
import sys
import tarfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenhand.data.download import Checksum, RemoteFile, fetch
from evenhand.errors import UserError
from evenhand.faults import guard
from evenhand.files import check_is_file
from evenhand.progress import PipedConsole, download_bar

Bytes = NDArray[np.uint8]
Labels = NDArray[np.int64]

NUM_CLASSES = 10  # of both
MNIST_SIDE = 28
CIFAR_SHAPE = (3, 32, 32)  # channels, height, width
CIFAR_IMAGE_BYTES = 3 * 32 * 32
CIFAR_BATCHES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"
LABEL_MAGIC, IMAGE_MAGIC = 0x0801, 0x0803  # an idx file of bytes with one and three dimensions
MAX_BYTES = 2**28  # a larger file is none of these
AGAIN = "fetch or copy the file again"
# Where other programs put them.
MNIST_FOLDERS = ("", "mnist", "MNIST", "MNIST/raw", "raw")
CIFAR_FOLDERS = ("", "cifar10", "cifar-10", "cifar-10-batches-bin")
MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
CIFAR_URL = f"https://www.cs.toronto.edu/~kriz/{CIFAR_ARCHIVE}"
FILES = {
    "mnist": [
        RemoteFile(name, tuple(mirror + name for mirror in MNIST_MIRRORS), Checksum("md5", digest))
        for name, digest in MNIST_MD5.items()
    ],
    "cifar10": [
        RemoteFile(CIFAR_ARCHIVE, (CIFAR_URL,), Checksum("md5", "c32a1d4ab5d03f1284b67883e8d87530"))
    ],
}
CITATIONS = {
    "mnist": "LeCun, Bottou, Bengio, Haffner: Gradient-based learning applied to document "
    "recognition, 1998; CC BY-SA 3.0",
    "cifar10": "Krizhevsky: Learning multiple layers of features from tiny images, 2009; no "
    "licence is stated",
}


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
    """CIFAR-10 from the batches or from the archive in the folder."""
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


def _mnist_names(side: str, kind: str) -> list[str]:
    """How the file may be called, the best choice first."""
    dimensions = {"images": 3, "labels": 1}[kind]
    plain = [f"{side}-{kind}{mark}idx{dimensions}-ubyte" for mark in "-."]
    return [*plain, *(f"{name}.gz" for name in plain)]


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
    names = _mnist_names(side, kind)
    path = _first_file(folder, MNIST_FOLDERS, names)
    if path is None:
        raise UserError(
            f"{folder} has no {names[0]} (nor {names[1]}, nor one of them with .gz); MNIST needs "
            f"its four files there: `python -m experiments.image_data mnist --folder {folder}`, "
            f"or copy them"
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


def _cifar_batches(folder: Path) -> list[_Batch]:
    """Five training batches and the test batch."""
    found = {name: _first_file(folder, CIFAR_FOLDERS, [name]) for name in CIFAR_BATCHES}
    paths = {name: path for name, path in found.items() if path is not None}
    if len(paths) == len(CIFAR_BATCHES):
        return [_binary_batch(_content(path), str(path)) for path in paths.values()]
    archive = _first_file(folder, CIFAR_FOLDERS, [CIFAR_ARCHIVE])
    if archive is not None:
        contents = _tar_contents(archive, list(CIFAR_BATCHES))
        return [_binary_batch(contents[name], f"{archive}: {name}") for name in CIFAR_BATCHES]
    if paths:
        missing = ", ".join(name for name in CIFAR_BATCHES if name not in paths)
        raise UserError(
            f"{folder} has some batches of CIFAR-10 but not {missing}; copy all six, or the "
            f"whole archive"
        )
    raise UserError(
        f"{folder} has neither {CIFAR_ARCHIVE} nor data_batch_1.bin and the other batches: "
        f"`python -m experiments.image_data cifar10 --folder {folder}`, or copy them"
    )


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


def _checked_labels(labels: Bytes, source: str) -> Labels:
    wrong = np.flatnonzero(labels >= NUM_CLASSES)
    if len(wrong):
        raise UserError(
            f"{source}: label {labels[wrong[0]]} of image {wrong[0]} is not between 0 and "
            f"{NUM_CLASSES - 1}; {AGAIN}, and check that it is the file its name says"
        )
    return labels.astype(np.int64)


# --- files ----------------------------------------------------------------------------------------


def _first_file(folder: Path, subfolders: Iterable[str], names: Iterable[str]) -> Path | None:
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


# --- fetching -------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.image_data", description="Fetches MNIST and CIFAR-10."
    )
    parser.add_argument("names", nargs="+", choices=list(FILES))
    parser.add_argument("--folder", default="downloads", help="to write to (%(default)s)")
    options = parser.parse_args(arguments)
    console = PipedConsole(markup=False, emoji=False, highlight=False, soft_wrap=True)

    def run() -> int:
        for name in options.names:
            folder = Path(options.folder) / name
            with download_bar(console) as advance:
                for file in FILES[name]:
                    fetch(file, folder, progress_fn=advance)
            console.print(f"{folder}. Cite: {CITATIONS[name]}")
        return 0

    return guard(run)


if __name__ == "__main__":
    sys.exit(main())
