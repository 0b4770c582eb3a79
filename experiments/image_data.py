"""MNIST and CIFAR-10, fetched as they are published and read from a folder.

    python -m experiments.image_data mnist cifar10      fetches both into downloads/

    images = load_mnist(Path("downloads"))
    images.train_images.shape, images.train_labels.shape  # (60000, 28, 28), (60000,)

MNIST is four idx files, plain or .gz. CIFAR-10 is its binary version, cifar-10-binary.tar.gz.
"""

import argparse
import gzip
import http.client
import math
import shutil
import sys
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenhand.cli import guard
from evenhand.errors import UserError
from evenhand.files import check_is_file, file_digest
from evenhand.progress import PipedConsole

Bytes = NDArray[np.uint8]
Labels = NDArray[np.int64]

NUM_CLASSES = 10  # of both
CIFAR_RECORD = 1 + 3 * 32 * 32  # the label, then channels, rows, columns
CIFAR_BATCHES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"
LABEL_MAGIC, IMAGE_MAGIC = 0x0801, 0x0803  # an idx file of bytes with one and three dimensions
MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
CIFAR_URL = f"https://www.cs.toronto.edu/~kriz/{CIFAR_ARCHIVE}"
FILES = {
    "mnist": {MNIST_URL + name: digest for name, digest in MNIST_MD5.items()},
    "cifar10": {CIFAR_URL: "c32a1d4ab5d03f1284b67883e8d87530"},
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
    """MNIST from its four idx files, plain or .gz, in the folder or in its folder `mnist`."""
    sides: list[Any] = []
    for side in ("train", "t10k"):
        image_path = _published_file(folder, "mnist", f"{side}-images-idx3-ubyte.gz")
        label_path = _published_file(folder, "mnist", f"{side}-labels-idx1-ubyte.gz")
        images, labels = _idx_array(image_path, IMAGE_MAGIC), _idx_array(label_path, LABEL_MAGIC)
        if images.shape != (len(labels), 28, 28):
            raise UserError(
                f"{image_path} holds images of the shape {images.shape}, and {label_path} "
                f"{len(labels)} labels; MNIST has 28 x 28 points and a label for each image"
            )
        sides += [images, _checked_labels(labels, label_path)]
    return ImageData(*sides)


def load_cifar10(folder: Path) -> ImageData:
    """CIFAR-10 from its archive, in the folder or in its folder `cifar10`; nothing is unpacked."""
    path = _published_file(folder, "cifar10", CIFAR_ARCHIVE)
    contents: dict[str, bytes] = {}
    try:
        check_is_file(path)
        with tarfile.open(path, mode="r|gz") as archive:  # a stream: each block is read once
            for member in archive:
                name = member.name.rpartition("/")[2]
                file = archive.extractfile(member) if member.isfile() else None
                if name in CIFAR_BATCHES and file is not None:
                    contents[name] = file.read()
    except Exception as error:  # Python's reader of a damaged archive raises a dozen kinds
        raise UserError(f"{path} is damaged ({error}); fetch it again") from error
    sizes = [len(contents.get(name, b"")) for name in CIFAR_BATCHES]
    if 0 in sizes or len(set(sizes)) > 1 or sizes[0] % CIFAR_RECORD:
        raise UserError(
            f"{path} must hold {', '.join(CIFAR_BATCHES)} of one size, in records of "
            f"{CIFAR_RECORD} bytes, got {sizes} bytes; fetch it again"
        )
    whole = np.frombuffer(b"".join(contents[name] for name in CIFAR_BATCHES), np.uint8)
    records = whole.reshape(-1, CIFAR_RECORD)
    images = records[:, 1:].reshape(-1, 3, 32, 32).copy()  # writable
    labels = _checked_labels(records[:, 0], path)
    num_test = sizes[-1] // CIFAR_RECORD
    return ImageData(images[:-num_test], labels[:-num_test], images[-num_test:], labels[-num_test:])


def _published_file(folder: Path, data: str, name: str) -> Path:
    """The file as it is fetched, or unpacked, in the folder or in its subfolder for the data."""
    for path in (folder / data / name, folder / name):
        for choice in (path, path.with_suffix("")):  # without .gz
            if choice.is_file():
                return choice
    raise UserError(
        f"{folder} has no {name}; `python -m experiments.image_data {data} --folder {folder}` "
        f"fetches it"
    )


def _idx_array(path: Path, magic: int) -> Bytes:
    """The array of an idx file: magic, the length of every dimension, then the bytes."""
    try:
        check_is_file(path)
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            data = file.read()
    except (EOFError, OSError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}); fetch it again") from error
    num_dimensions = magic % 256
    start = 4 + 4 * num_dimensions
    shape = [int.from_bytes(data[at : at + 4], "big") for at in range(4, start, 4)]
    if int.from_bytes(data[:4], "big") != magic or len(data) != start + math.prod(shape):
        raise UserError(
            f"{path} is no whole idx file of {num_dimensions} dimensions; fetch it again"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy()  # writable


def _checked_labels(labels: Bytes, path: Path) -> Labels:
    if len(labels) and labels.max() >= NUM_CLASSES:
        raise UserError(f"{path}: labels must be from 0 to 9, got {labels.max()}; fetch it again")
    return labels.astype(np.int64)


# --- fetching -------------------------------------------------------------------------------------


def fetch(url: str, folder: Path, *, md5: str) -> None:
    """A published file, which gets its name when its checksum is right; none is fetched twice.

    What has come before a connection broke stays in `name.part`, and the next call goes on there.
    """
    path = folder / url.rpartition("/")[2]
    part = path.with_name(f"{path.name}.part")
    if path.exists():
        _check_md5(path, md5)
        return
    folder.mkdir(parents=True, exist_ok=True)
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            is_rest = answer.status == 206  # else the server sends the whole again
            expected = (have if is_rest else 0) + (answer.length or 0)
            with open(part, "ab" if is_rest else "wb") as file:
                shutil.copyfileobj(answer, file)
                if file.tell() < expected:
                    raise http.client.IncompleteRead(b"", expected - file.tell())
    except urllib.error.HTTPError as error:
        if error.code != 416:  # nothing is missing
            raise UserError(f"{url} answers {error.code} ({error.reason}); try later") from error
    except (OSError, http.client.HTTPException) as error:
        raise UserError(
            f"{url} cannot be fetched ({error}); the same command goes on where it stopped"
        ) from error
    try:
        _check_md5(part, md5)
    except UserError:
        part.unlink()
        raise
    part.replace(path)


def _check_md5(path: Path, md5: str) -> None:
    if (found := file_digest(path, "md5")) != md5:
        raise UserError(f"{path} has the md5 {found}, but {md5} is published; fetch it again")


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
            for url, md5 in FILES[name].items():
                with console.status(f"fetching {url}"):
                    fetch(url, folder, md5=md5)
            console.print(f"{folder}. Cite: {CITATIONS[name]}")
        return 0

    return guard(run)


if __name__ == "__main__":
    sys.exit(main())
