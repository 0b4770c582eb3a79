"""MNIST and CIFAR-10: every published form gives the same arrays; nothing wrong gets through."""

import gzip
import io
import os
import pickle
import re
import tarfile

import numpy as np
import pytest

import evenhand.data.images
from evenhand.data import load_cifar10, load_mnist
from evenhand.data.pickled import plain_values
from evenhand.errors import UserError
from image_files import (
    binary_batches,
    cifar_arrays,
    idx,
    mnist_arrays,
    python_2_pickle,
    python_batches,
    write_files,
    write_mnist,
    write_tar,
)

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
    with pytest.raises(UserError, match=r"has no t10k-labels-idx1-ubyte .*data fetch mnist"):
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
    monkeypatch.setattr(evenhand.data.images, "MAX_BYTES", 10_000)
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


def write_python(folder):
    write_files(folder, python_batches())


def write_python_archive(folder):
    members = {f"cifar-10-batches-py/{name}": data for name, data in python_batches().items()}
    write_tar(folder / "cifar-10-python.tar.gz", {"cifar-10-batches-py/x": b"x", **members})


@pytest.mark.parametrize("place", [".", "cifar10"])
@pytest.mark.parametrize(
    "write", [write_binary, write_binary_archive, write_python, write_python_archive]
)
def test_cifar_is_the_same_from_all_its_forms(tmp_path, write, place):
    write(tmp_path / place)
    images = load_cifar10(tmp_path)
    assert images.train_images.shape == (20, 3, 32, 32)
    assert_same(images, expected_cifar())
    assert sorted(path.name for path in tmp_path.rglob("*.part")) == []


@pytest.mark.parametrize(
    ("write", "place"),
    [(write_binary, "cifar-10-batches-bin"), (write_python, "cifar-10-batches-py")],
)
def test_cifar_is_read_from_an_unpacked_archive(tmp_path, write, place):
    write(tmp_path / place)
    assert_same(load_cifar10(tmp_path), expected_cifar())


def test_the_binary_version_goes_before_the_pickled_one(tmp_path):
    write_binary(tmp_path)
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"never opened")
    assert_same(load_cifar10(tmp_path), expected_cifar())


def test_an_empty_folder_says_what_is_missing(tmp_path):
    with pytest.raises(UserError, match=r"has neither cifar-10-binary.*data fetch cifar10"):
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


# --- the pickled version --------------------------------------------------------------------------

BATCH = {"data": np.zeros((2, 3072), dtype=np.uint8), "labels": [3, 4]}


def refused_batch(folder, data):
    write_files(folder, {**python_batches(), "data_batch_4": data})
    with pytest.raises(UserError) as caught:
        load_cifar10(folder)
    message = str(caught.value)
    assert "data_batch_4" in message
    return message


@pytest.mark.parametrize("protocol", [3, 4])
def test_batches_pickled_by_a_newer_python_are_read_too(protocol):
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    value = {b"data": array, "turned": np.asfortranarray(array), "labels": [1, 255, 256, 2**30]}
    data = pickle.dumps(value, protocol)
    values = plain_values(data, source="a")
    np.testing.assert_array_equal(values["data"], array)
    np.testing.assert_array_equal(values["turned"], array)
    assert values["labels"] == value["labels"]


def test_the_other_way_to_pickle_an_array_is_refused():
    data = pickle.dumps({"data": np.zeros(3, dtype=np.uint8)}, 5)
    with pytest.raises(UserError, match=r"STACK_GLOBAL: it asks for 'numpy\._?core.*_frombuffer'"):
        plain_values(data, source="a")


class Attack:
    """What a pickle can do: on loading it, the file would be made."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_nothing_of_a_pickle_is_ever_executed(tmp_path, protocol):
    path = tmp_path / "made"
    data = pickle.dumps({"data": Attack(path)}, protocol)
    message = refused_batch(tmp_path / "a", data)
    assert "nothing of it was executed" in message
    assert not path.exists()
    pickle.loads(data)["data"].close()
    assert path.exists()  # the attack was a real one


def test_the_refusal_names_the_instruction_and_what_it_asked_for(tmp_path):
    data = pickle.dumps({"data": Attack("x")}, 2)
    assert "instruction GLOBAL: it asks for 'io.open'" in refused_batch(tmp_path, data)
    data = pickle.dumps({"a": 1.5}, 2)
    assert "instruction BINFLOAT: such a file has no need of it" in refused_batch(tmp_path, data)


@pytest.mark.parametrize(
    "value",
    [{"a": np.zeros(3)}, {"a": np.array(["x", None])}, [1], {1: 2}, {"a": {2, 3}}, {"a": 2**40},
     {"a": np.dtype("u1")}, {"a": np.uint8(3)}, {"a": np.ndarray}],
)  # fmt: skip
def test_other_values_are_refused_or_are_not_batches(tmp_path, value):
    refused_batch(tmp_path, python_2_pickle(value))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.999])
def test_a_pickle_that_is_cut_short(tmp_path, share):
    data = python_batches()["data_batch_4"]
    assert "again" in refused_batch(tmp_path, data[: int(share * len(data))])


def test_a_pickle_with_any_byte_changed_is_read_or_refused_but_never_breaks():
    data = python_2_pickle({**BATCH, "data": np.zeros((2, 2), dtype=np.uint8)})
    generator = np.random.default_rng(0)
    num_refused = 0
    for _ in range(4000):
        changed = bytearray(data)
        for place in generator.integers(len(data), size=2):
            changed[place] = generator.integers(256)
        try:
            plain_values(bytes(changed), source="a")
        except UserError:
            num_refused += 1
    assert num_refused > 2000


@pytest.mark.parametrize(
    "program",
    [b".", b"0.", b"(.", b"}(.", b"h\x01.", b"q\x01.", b"R.", b"b.", b"u.", b"s.", b"e.", b"a.",
     b"t.", b"\x85.", b"}}b.", b"(e.", b"](}e.", b"}(K\x01u.", b"cnumpy\ndtype\n)R.", b"N.",
     b"(" * 5000 + b"t" * 5000 + b".", b"X\x00\x00\x00\xffabc.", b"T\xff\xff\xff\xff.",
     b"cnumpy\ndtype\n" + b"(" * 5000 + b"t" * 5000 + b"R.", b"]q\x00h\x00a.", b"\xff"],
)  # fmt: skip
def test_senseless_programs_are_refused(program):
    with pytest.raises(UserError, match="a is not a batch of CIFAR-10: at byte"):
        plain_values(program, source="a")


def test_an_array_whose_shape_is_nested_beyond_any_depth():
    nested = b"(" * 50_000 + b"t" * 50_000
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
    program = array + b"(K\x01" + nested + b"cnumpy\ndtype\n(U\x02u1tR\x89U\x00tb."
    with pytest.raises(UserError, match="instruction BUILD"):
        plain_values(program, source="a")


def test_an_array_of_another_size_than_its_bytes(tmp_path):
    data = python_2_pickle({"data": np.zeros((2, 3072), dtype=np.uint8), "labels": [1, 2]})
    wrong = data.replace(b"K\x02M\x00\x0c\x86", b"K\x03M\x00\x0c\x86")
    assert wrong != data
    assert "with another number of bytes" in refused_batch(tmp_path, wrong)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"labels": [1]}, r"has 1 labels and an array of shape \(2, 3072\)"),
        ({"labels": []}, "has 0 labels"),
        ({"labels": [1, 10]}, "label 10 of image 1 is not between"),
        ({"labels": [1, -1]}, "label -1 of image 1 is not between"),
        ({"labels": [1, "a"]}, "label b'a' of image 1"),
        ({"labels": [1, True]}, "label True of image 1"),
        ({"labels": "ab"}, "no array 'data' with a list 'labels'"),
        ({"data": 3}, "no array 'data' with a list 'labels' but data, labels"),
        ({"data": np.zeros((2, 3), dtype=np.uint8)}, r"shape \(2, 3\), expected \(2, 3072\)"),
    ],
)
def test_a_batch_that_does_not_fit_together(tmp_path, changes, said):
    assert re.search(said, refused_batch(tmp_path, python_2_pickle({**BATCH, **changes})))


def test_the_fixture_is_what_python_2_wrote():
    """The first bytes of the published file, but for the numbers of its memory."""
    data = python_batches()["data_batch_1"]
    assert data.startswith(b"\x80\x02}q\x00(U\x0bbatch_labelq\x01U")
    assert b"cnumpy.core.multiarray\n_reconstruct\n" in data
    values = pickle.load(io.BytesIO(data), encoding="bytes")
    np.testing.assert_array_equal(
        values[b"data"], cifar_arrays()["data_batch_1"][0].reshape(4, 3072)
    )
