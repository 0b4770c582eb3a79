"""MNIST and CIFAR-10: every published form gives the same arrays; nothing wrong gets through."""

import gzip
import os
import tarfile

import numpy as np
import pytest

from evenhand.data.download import RemoteFile
from evenhand.errors import UserError
from experiments import image_data
from experiments.image_data import load_cifar10, load_mnist, main
from experiments.tests.image_files import (
    binary_batches,
    cifar_arrays,
    idx,
    mnist_arrays,
    write_files,
    write_mnist,
    write_tar,
)
from file_server import served

NAME = "train-images-idx3-ubyte"


def assert_same(images, expected):
    for array, other in zip(images, expected, strict=True):
        np.testing.assert_array_equal(array, other)
    for array in images[::2]:
        assert array.dtype == np.uint8
        assert array.flags.writeable
    for labels in images[1::2]:
        assert labels.dtype == np.int64
        assert labels.flags.writeable


# --- MNIST ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [".", "mnist", "MNIST/raw", "raw"])
@pytest.mark.parametrize("is_zipped", [False, True])
@pytest.mark.parametrize("mark", ["-", "."])
def test_mnist_is_read_under_all_its_names(tmp_path, mark, is_zipped, place):
    write_mnist(tmp_path / place, mark=mark, is_zipped=is_zipped)
    images = load_mnist(tmp_path)
    assert images.train_images.shape == (7, 28, 28)
    assert_same(images, mnist_arrays())


def refused_mnist(folder, name, data):
    write_mnist(folder)
    (folder / name).write_bytes(data)
    with pytest.raises(UserError) as caught:
        load_mnist(folder)
    return str(caught.value)


def test_a_missing_file_is_named_with_the_remedy(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(UserError, match=r"has no t10k-labels-idx1-ubyte .*image_data mnist"):
        load_mnist(tmp_path)


@pytest.mark.parametrize("size", [0, 3, 15, 16, 1000, 7 * 784 + 15])
def test_an_idx_file_that_is_cut_short(tmp_path, size):
    message = refused_mnist(tmp_path, NAME, idx(mnist_arrays()[0])[:size])
    assert NAME in message
    assert "is cut short" in message or f"has {size} bytes, but its header promises 7" in message
    assert "again" in message


def test_an_idx_file_with_more_than_it_says(tmp_path):
    message = refused_mnist(tmp_path, NAME, idx(mnist_arrays()[0]) + b"x")
    assert "has 5505 bytes, but its header promises 7 items in 5504" in message


def test_a_header_that_promises_more_than_there_can_be(tmp_path):
    data = bytes([0, 0, 8, 3]) + b"\xff" * 12 + b"\0" * 100
    assert "promises 4294967295 items" in refused_mnist(tmp_path, NAME, data)


def test_a_wrong_magic_number(tmp_path):
    message = refused_mnist(tmp_path, NAME, b"PK\x03\x04" + bytes(100))
    assert "starts with the number 1347093252, not with 2051" in message


def test_labels_in_place_of_images(tmp_path):
    labels = np.zeros(100, dtype=np.uint8)
    assert "with the number 2049, not with 2051" in refused_mnist(tmp_path, NAME, idx(labels))


def test_images_of_another_size(tmp_path):
    data = idx(np.zeros((7, 32, 32), dtype=np.uint8))
    assert "holds images of 32 x 32 points" in refused_mnist(tmp_path, NAME, data)


def test_more_labels_than_images(tmp_path):
    data = idx(np.zeros(8, dtype=np.uint8))
    message = refused_mnist(tmp_path, "train-labels-idx1-ubyte", data)
    assert "holds 8 labels for the 7 images of" in message


def test_a_label_out_of_range(tmp_path):
    data = idx(np.array([0, 9, 3, 10, 1, 1, 1], dtype=np.uint8))
    message = refused_mnist(tmp_path, "train-labels-idx1-ubyte", data)
    assert "train-labels-idx1-ubyte: label 10 of image 3 is not between 0 and 9" in message


@pytest.mark.parametrize("size", [0, 5, 12, 200])
def test_a_gz_that_is_cut_short_or_none(tmp_path, size):
    write_mnist(tmp_path, is_zipped=True)
    path = tmp_path / f"{NAME}.gz"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match=r"idx3-ubyte\.gz .*again"):
        load_mnist(tmp_path)
    path.write_bytes(b"not compressed")
    with pytest.raises(UserError, match="cannot be read"):
        load_mnist(tmp_path)


def test_a_file_that_swells_beyond_reason_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(image_data, "MAX_BYTES", 10_000)
    write_mnist(tmp_path, is_zipped=True)
    (tmp_path / f"{NAME}.gz").write_bytes(gzip.compress(bytes(1_000_000)))
    with pytest.raises(UserError, match="holds more than 10000 bytes"):
        load_mnist(tmp_path)


# --- CIFAR-10 -------------------------------------------------------------------------------------


def expected_cifar():
    arrays = list(cifar_arrays().values())
    images = np.concatenate([images for images, _ in arrays[:5]])
    return images, np.concatenate([labels for _, labels in arrays[:5]]), *arrays[5]


def write_binary(folder):
    write_files(folder, binary_batches())


def write_binary_archive(folder):
    members = {f"cifar-10-batches-bin/{name}": data for name, data in binary_batches().items()}
    write_tar(folder / "cifar-10-binary.tar.gz", {"cifar-10-batches-bin/readme": b"x", **members})


@pytest.mark.parametrize("place", [".", "cifar10"])
@pytest.mark.parametrize("write", [write_binary, write_binary_archive])
def test_cifar_is_the_same_from_all_its_forms(tmp_path, write, place):
    write(tmp_path / place)
    images = load_cifar10(tmp_path)
    assert images.train_images.shape == (20, 3, 32, 32)
    assert_same(images, expected_cifar())
    assert sorted(path.name for path in tmp_path.rglob("*.part")) == []


def test_cifar_is_read_from_an_unpacked_archive(tmp_path):
    write_binary(tmp_path / "cifar-10-batches-bin")
    assert_same(load_cifar10(tmp_path), expected_cifar())


def test_an_empty_folder_says_what_is_missing(tmp_path):
    with pytest.raises(UserError, match=r"has neither cifar-10-binary.*image_data cifar10"):
        load_cifar10(tmp_path)


def test_a_missing_batch_is_named(tmp_path):
    write_binary(tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(UserError, match=r"some batches of CIFAR-10 but not data_batch_3\.bin;"):
        load_cifar10(tmp_path)


def test_an_archive_without_a_batch(tmp_path):
    batches = binary_batches()
    del batches["test_batch.bin"]
    write_tar(tmp_path / "cifar-10-binary.tar.gz", batches)
    with pytest.raises(UserError, match=r"binary\.tar\.gz holds no test_batch\.bin;"):
        load_cifar10(tmp_path)


@pytest.mark.parametrize("size", [0, 1, 3072, 3074])
def test_a_binary_batch_that_is_cut_inside_a_record(tmp_path, size):
    write_binary(tmp_path)
    path = tmp_path / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match=rf"data_batch_2\.bin has {size} bytes, which is not"):
        load_cifar10(tmp_path)


def test_a_binary_batch_that_is_cut_between_records(tmp_path):
    write_binary(tmp_path)
    path = tmp_path / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[: 3 * 3073])
    with pytest.raises(UserError, match=r"same number of images.*data_batch_2\.bin: 3"):
        load_cifar10(tmp_path)


def test_a_label_of_cifar_out_of_range(tmp_path):
    write_binary(tmp_path)
    path = tmp_path / "test_batch.bin"
    data = bytearray(path.read_bytes())
    data[2 * 3073] = 10
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"test_batch\.bin: label 10 of image 2 is not between"):
        load_cifar10(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99])
def test_an_archive_that_is_cut_short(tmp_path, share):
    write_binary_archive(tmp_path)
    path = tmp_path / "cifar-10-binary.tar.gz"
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(UserError, match=r"binary\.tar\.gz (is damaged|holds no)"):
        load_cifar10(tmp_path)


def test_links_and_foreign_paths_of_an_archive_are_nothing_to_us(tmp_path):
    """Only regular files count, by their last name, and nothing is written anywhere."""
    folder = tmp_path / "data"
    batches = binary_batches()
    members = {f"../../{name}": data for name, data in batches.items()}
    write_tar(folder / "cifar-10-binary.tar.gz", members)
    assert_same(load_cifar10(folder), expected_cifar())
    assert os.listdir(tmp_path) == ["data"]
    assert os.listdir(folder) == ["cifar-10-binary.tar.gz"]
    with tarfile.open(folder / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for name in batches:
            about = tarfile.TarInfo(name)
            about.type, about.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(about)
    with pytest.raises(UserError, match=r"holds no data_batch_1\.bin"):
        load_cifar10(folder)


# --- fetching -------------------------------------------------------------------------------------


def test_only_what_is_not_there_is_fetched(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    write_mnist(tmp_path / "source", is_zipped=True)
    names = [file.name for file in image_data.FILES["mnist"]]
    with served((tmp_path / "source" / names[0]).read_bytes()) as (url, server):
        files = {"mnist": [RemoteFile(name, (url,)) for name in names]}
        monkeypatch.setattr(image_data, "FILES", files)
        (tmp_path / "d/mnist").mkdir(parents=True)
        for name in names[1:]:
            (tmp_path / "d/mnist" / name).write_bytes((tmp_path / "source" / name).read_bytes())
        assert main(["mnist", "--folder", str(tmp_path / "d")]) == 0
        assert len(server.requests) == 1
    assert "Cite: LeCun" in capsys.readouterr().out
    assert_same(load_mnist(tmp_path / "d"), mnist_arrays())


def test_a_file_of_another_checksum_is_refused(tmp_path, capsys):
    write_tar(tmp_path / "cifar10/cifar-10-binary.tar.gz", binary_batches())
    assert main(["cifar10", "--folder", str(tmp_path)]) == 2
    assert "but c32a1d4ab5d03f1284b67883e8d87530 is published" in capsys.readouterr().err
