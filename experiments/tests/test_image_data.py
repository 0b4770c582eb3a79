"""MNIST and CIFAR-10: the published files give their arrays; nothing wrong gets through."""

import gzip
import hashlib
import http.server
import io
import tarfile
import threading

import numpy as np
import pytest

from evenhand.errors import UserError
from experiments import image_data
from experiments.image_data import (
    CIFAR_ARCHIVE,
    CIFAR_BATCHES,
    fetch,
    load_cifar10,
    load_mnist,
    main,
)

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def mnist_arrays():
    """(train images, train labels, test images, test labels)"""
    generator = np.random.default_rng(0)
    arrays = []
    for size in (7, 3):
        arrays.append(generator.integers(256, size=(size, 28, 28), dtype=np.uint8))
        arrays.append(generator.integers(10, size=size, dtype=np.uint8))
    return arrays


def idx(array):
    """An idx file: two zero bytes, 8 for bytes, the number of dimensions, their lengths."""
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes()
    return header + array.tobytes()


def write_mnist(folder, *, is_zipped=False):
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(image_data.MNIST_MD5, mnist_arrays(), strict=True):
        data = idx(array)
        path = folder / (name if is_zipped else name.removesuffix(".gz"))
        path.write_bytes(gzip.compress(data) if is_zipped else data)


def cifar_arrays(size=4):
    """Images (6 N, 3, 32, 32) and labels (6 N,) of five training batches and the test batch."""
    generator = np.random.default_rng(0)
    images = generator.integers(256, size=(6 * size, 3, 32, 32), dtype=np.uint8)
    return images, generator.integers(10, size=6 * size)


def cifar_members(size=4):
    images, labels = cifar_arrays(size)
    records = [bytes([y]) + x.tobytes() for x, y in zip(images, labels, strict=True)]
    return {
        f"cifar-10-batches-bin/{name}": b"".join(records[size * place : size * (place + 1)])
        for place, name in enumerate(CIFAR_BATCHES)
    }


def write_cifar(folder, members, kind=tarfile.REGTYPE):
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / CIFAR_ARCHIVE, "w:gz") as archive:
        for name, data in members.items():
            about = tarfile.TarInfo(name)
            about.size, about.type, about.linkname = len(data), kind, "/etc/passwd"
            archive.addfile(about, io.BytesIO(data))


def assert_same(images, expected):
    for array, other in zip(images, expected, strict=True):
        np.testing.assert_array_equal(array, other)
        assert array.flags.writeable


@pytest.mark.parametrize("place", [".", "mnist"])
@pytest.mark.parametrize("is_zipped", [False, True])
def test_mnist_is_read_plain_and_compressed(tmp_path, is_zipped, place):
    write_mnist(tmp_path / place, is_zipped=is_zipped)
    assert_same(load_mnist(tmp_path), mnist_arrays())


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        *((IMAGES, idx(mnist_arrays()[0])[:n], "no whole idx") for n in (0, 15, 5503)),
        (IMAGES, idx(mnist_arrays()[0]) + b"x", "no whole idx"),
        (IMAGES, idx(np.zeros(100, np.uint8)), "no whole idx"),
        (IMAGES, idx(np.zeros((7, 32, 32), np.uint8)), "28 x 28 points"),
        (LABELS, idx(np.zeros(8, np.uint8)), "8 labels"),
        (LABELS, idx(np.array([0, 9, 3, 10, 1, 1, 1], np.uint8)), "from 0 to 9, got 10"),
    ],
)
def test_a_file_of_mnist_that_is_damaged_or_another_is_refused(tmp_path, name, data, message):
    write_mnist(tmp_path)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message):
        load_mnist(tmp_path)


def test_a_compressed_file_that_is_damaged_and_a_missing_one_are_refused(tmp_path):
    write_mnist(tmp_path, is_zipped=True)
    path = tmp_path / f"{IMAGES}.gz"
    for data in (path.read_bytes()[:200], b"not compressed"):
        path.write_bytes(data)
        with pytest.raises(UserError, match="cannot be read"):
            load_mnist(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=rf"has no {IMAGES}.gz; .*image_data mnist"):
        load_mnist(tmp_path)


@pytest.mark.parametrize("place", [".", "cifar10"])
def test_cifar_is_read_from_its_archive_and_nothing_is_unpacked(tmp_path, place):
    members = {f"../../{name}": data for name, data in cifar_members().items()}
    write_cifar(tmp_path / place, {"cifar-10-batches-bin/readme": b"x", **members})
    images, labels = cifar_arrays()
    found = load_cifar10(tmp_path)
    assert_same(found, (images[:20], labels[:20], images[20:], labels[20:]))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [CIFAR_ARCHIVE]


def test_an_archive_that_is_damaged_or_another_is_refused(tmp_path):
    whole, one = cifar_members(), f"cifar-10-batches-bin/{CIFAR_BATCHES[1]}"
    for change, message in (
        ({one: b""}, "must hold"),
        ({one: whole[one][:-1]}, "of one size"),
        ({one: whole[one][: 3 * 3073]}, "of one size"),
        ({one: bytes([10]) + whole[one][1:]}, "got 10"),
    ):
        write_cifar(tmp_path, whole | change)
        with pytest.raises(UserError, match=message):
            load_cifar10(tmp_path)
    write_cifar(tmp_path, whole, kind=tarfile.SYMTYPE)
    with pytest.raises(UserError, match="must hold"):
        load_cifar10(tmp_path)
    write_cifar(tmp_path, whole)
    data = (tmp_path / CIFAR_ARCHIVE).read_bytes()
    for share in (0.0, 0.001, 0.5, 0.99):
        (tmp_path / CIFAR_ARCHIVE).write_bytes(data[: int(share * len(data))])
        with pytest.raises(UserError, match=r"is damaged|must hold"):
            load_cifar10(tmp_path)
    with pytest.raises(UserError, match=r"has no cifar-10-binary.*image_data cifar10"):
        load_cifar10(tmp_path / "nowhere")


def test_a_file_of_another_checksum_is_refused(tmp_path, capsys):
    write_cifar(tmp_path / "cifar10", cifar_members())
    assert main(["cifar10", "--folder", str(tmp_path)]) == 2
    assert "but c32a1d4ab5d03f1284b67883e8d87530 is published" in capsys.readouterr().err


@pytest.fixture
def server():
    """Sends `content`, or what a Range asks for; only the first `cut` bytes where that is set."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            own = self.server
            wanted = self.headers.get("Range") if own.knows_ranges else None
            first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
            own.asked.append(first)
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(len(own.content) - first))
            self.end_headers()
            self.wfile.write(own.content[first : own.cut])

        def log_message(self, *words):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as own:
        own.content, own.cut, own.knows_ranges, own.asked = bytes(range(256)) * 40, None, True, []
        threading.Thread(target=own.serve_forever, daemon=True).start()
        yield own
        own.shutdown()


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_a_download_that_broke_off_goes_on_where_it_stopped(tmp_path, server, knows_ranges):
    url, md5 = f"http://127.0.0.1:{server.server_port}/a.bin", hashlib.md5(server.content)
    server.cut = 1000
    with pytest.raises(UserError, match="goes on where it stopped"):
        fetch(url, tmp_path, md5=md5.hexdigest())
    assert not (tmp_path / "a.bin").exists()
    server.cut, server.knows_ranges = None, knows_ranges
    for _ in range(2):  # the second finds it there
        fetch(url, tmp_path, md5=md5.hexdigest())
    assert (tmp_path / "a.bin").read_bytes() == server.content
    assert server.asked == [0, 1000 if knows_ranges else 0]


def test_a_download_of_another_checksum_leaves_nothing(tmp_path, server):
    with pytest.raises(UserError, match="but 0123 is published"):
        fetch(f"http://127.0.0.1:{server.server_port}/a.bin", tmp_path, md5="0123")
    assert not list(tmp_path.iterdir())
