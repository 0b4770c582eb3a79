"""Targets that read pictures and archives: idx, CIFAR-10's batches, pickles, .tar.gz, .zip."""

import gzip
import io
import pickle
import tarfile
import zipfile

import numpy as np

from evenhand.data import folders, images
from evenhand.data.catalog import ExtremeNames
from evenhand.data.files import lines_of
from evenhand.data.pickled import plain_values

from . import twins
from .target import Target, answer, require, written


def _idx(magic: int, shape: tuple[int, ...]) -> bytes:
    lengths = b"".join(length.to_bytes(4, "big") for length in shape)
    return magic.to_bytes(4, "big") + lengths + bytes(i % 10 for i in range(int(np.prod(shape))))


def _read_idx(data: bytes) -> Exception | None:
    """A file of labels or of pictures, as its own first bytes say; every other one packed."""
    magic = images.LABEL_MAGIC if data[3:4] == b"\x01" else images.IMAGE_MAGIC
    is_packed = len(data) % 16 == 0
    path = written("i.gz" if is_packed else "i", gzip.compress(data, 1) if is_packed else data)
    array, refusal = answer(lambda: images._idx_array(path, magic))
    expected = twins.idx(data, magic)
    require((refusal is None) == (expected is not None), f"{refusal}, the twin {expected}")
    if refusal is None:
        require((array.shape, array.tobytes()) == expected, "another array")
        require(array.flags.writeable, "an array that cannot be written to")
    return refusal


IDX = Target(
    "idx",
    _read_idx,
    (_idx(0x0801, (3,)), _idx(0x0803, (2, 3, 2)), _idx(0x0803, (0, 28, 28))),
    (b"\x00\x00\x08\x03", b"\x00\x00\x08\x01", b"\x00\x00\x00\x00", b"\xff\xff\xff\xff"),
)


def _read_records(data: bytes) -> Exception | None:
    """Two records are too long to mutate byte by byte: zeros fill up what a number says."""
    length = int.from_bytes(data[:2], "big")
    whole = data[2:].ljust(min(length, 2 * images.CIFAR_IMAGE_BYTES + 4), b"\x00")
    batch, refusal = answer(lambda: images._binary_batch(whole, "b"))
    record = images.CIFAR_IMAGE_BYTES + 1
    labels = list(whole[::record])
    is_right = whole and len(whole) % record == 0 and all(label < 10 for label in labels)
    require((refusal is None) == bool(is_right), f"{refusal}")
    if refusal is None:
        require(batch.labels.tolist() == labels and len(batch.images) == len(labels), "labels")
        require(batch.images[0].tobytes() == whole[1:record], "another picture")
    return refusal


RECORDS = Target(
    "cifar-binary",
    _read_records,
    ((3073).to_bytes(2, "big") + b"\x03abc", (6146).to_bytes(2, "big") + b"\x09"),
    (b"\x0c\x01", b"\x18\x02", b"\x0a"),
)

# --- pickles --------------------------------------------------------------------------------------

PYTHON_2 = (  # as its cPickle wrote it
    b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\n"
    b"q\x04K\x00\x85q\x05U\x01bq\x06\x87q\x07Rq\x08(K\x01K\x01K\x06\x86q\x09cnumpy\ndtype\nq\nU\x02u1"
    b"K\x00K\x01\x87q\x0bRq\x0c(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x06"
    b"abcdeftbU\x06labels]q\x0dK\x07au."
)
PICTURES = np.arange(24, dtype=np.uint8).reshape(4, 6)


def _pickles() -> tuple[bytes, ...]:
    values = {
        "data": PICTURES,
        "labels": [3, 1, 4, 1],
        "batch_label": "one",
        "filenames": ["a", "b"],
    }
    return (
        *(pickle.dumps(values, protocol) for protocol in (3, 4)),
        PYTHON_2,
        pickle.dumps({"data": np.asfortranarray(PICTURES), "labels": [1, None, (2, 3), True]}, 3),
        pickle.dumps({"labels": [], "data": ()}, 4),
    )


PICKLES = _pickles()


def _read_pickle(data: bytes) -> Exception | None:
    values, refusal = answer(lambda: plain_values(data, source="p"))
    if refusal is None:
        require(type(values) is dict and all(type(key) is str for key in values), "keys")
        for value in values.values():
            if isinstance(value, np.ndarray):
                require(value.dtype == np.uint8, f"{value.dtype}")
                is_there = value.tobytes() in data or value.tobytes("F") in data
                require(is_there, "an array that is not in the file")
            else:
                allowed = (dict, list, tuple, str, bytes, int, type(None))
                require(isinstance(value, allowed), f"a {type(value).__name__}")
    wide = images.CIFAR_IMAGE_BYTES
    try:
        images.CIFAR_IMAGE_BYTES, images.CIFAR_SHAPE = 6, (1, 2, 3)  # small pictures, short inputs
        batch, batch_refusal = answer(lambda: images._python_batch(data, "p"))
    finally:
        images.CIFAR_IMAGE_BYTES, images.CIFAR_SHAPE = wide, (3, 32, 32)
    if batch_refusal is None:
        require(batch.images.shape == (len(batch.labels), 1, 2, 3), "shape")
        require(((batch.labels >= 0) & (batch.labels < 10)).all(), "labels")
    require(refusal is None or batch_refusal is not None, "a batch of a file that was refused")
    return refusal


PICKLE = Target(
    "pickle",
    _read_pickle,
    PICKLES,
    (
        b"cos\nsystem\n", b"\x8c\x02os\x8c\x06system\x93", b"R", b"b", b"(", b"t", b"\x85", b"\x86",
        b"\x87", b"]", b"}", b")", b"h\x00", b"q\x01", b"\x94", b"s", b"u", b"a", b"e", b".", b"N",
        b"K\x05", b"J\xff\xff\xff\xff", b"U\x02ab", b"X\x02\x00\x00\x00ab",
        b"\x8b\x04\x00\x00\x00aaaa",
        b"cnumpy\nndarray\n", b"cnumpy\ndtype\n", b"B\xff\xff\xff\xff", b"\x8e" + b"\xff" * 8,
        b"2", b"0",
        b"I" + b"9" * 5000 + b"\n", b"h\x01\x86q\x01", b"h\x01h\x01\x86q\x01" * 8, b"]q\x02h\x02a",
    ),
)  # fmt: skip

# --- archives -------------------------------------------------------------------------------------

NAMES = ["data_batch_1", "test_batch"]


def _tar(kind: int, names: list[str]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=kind) as archive:
        for name in names:
            member = tarfile.TarInfo(f"folder/{'x' * 110 if name == 'long' else ''}/{name}")
            member.size = 5
            archive.addfile(member, io.BytesIO(b"abcde"))
    return file.getvalue()


def _read_tar(data: bytes) -> Exception | None:
    """The archive is packed here, so that what is changed in it comes through."""
    path = written("a.tar.gz", gzip.compress(data, 1))
    contents, refusal = answer(lambda: images._tar_contents(path, NAMES))
    if refusal is None:
        require(sorted(contents) == NAMES, "names")
        require(sum(map(len, contents.values())) <= 10 * len(data), "more than there is")
    return refusal


TAR = Target(
    "tar",
    _read_tar,
    (
        _tar(tarfile.USTAR_FORMAT, NAMES)[:4096],
        _tar(tarfile.GNU_FORMAT, ["long", *NAMES]),
        _tar(tarfile.PAX_FORMAT, ["long", *NAMES]),
    ),
    (b"00000000005", b"77777777777", b"\x80" + b"\xff" * 11, b"ustar\x0000", b"ustar  \x00", b"S",
     b"x",
     b"10 size=99\n", b"GNU.sparse.map=1,2\n", b"L", b"K", b"-0000000001"),
)  # fmt: skip


def _zip(kind: int, *names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(name), b"1 2 3\n0 0:1\n", kind)
    return file.getvalue()


EXTREME_NAMES = ExtremeNames((), "train.txt", "test.txt")


def _read_zip(data: bytes) -> Exception | None:
    path = written("a.zip", data)
    files, refusal = answer(lambda: folders._in_archive(path, EXTREME_NAMES))
    _, damage = answer(lambda: folders._check_archive(path))
    if files is not None:
        for file in files[:2]:
            lines, unread = answer(lambda place=file: list(lines_of(place)))
            is_right = unread is not None or damage is not None or lines == ["1 2 3", "0 0:1"]
            require(is_right or b"1 2 3" not in data, "another text than was packed")
    return refusal or damage


ZIP = Target(
    "zip",
    _read_zip,
    (
        _zip(zipfile.ZIP_STORED, "a/train.txt", "a/test.txt", "__MACOSX/train.txt"),
        _zip(zipfile.ZIP_DEFLATED, "train.txt", "test.txt"),
        _zip(zipfile.ZIP_LZMA, "é/train.txt", "b/test.txt"),
        _zip(zipfile.ZIP_BZIP2, "/train.txt", "test.txt"),
    ),
    (
        b"PK\x01\x02",
        b"PK\x03\x04",
        b"PK\x05\x06",
        b"PK\x06\x06",
        b"PK\x06\x07",
        b"\x01\x00\x18\x00",
    ),
)

TARGETS = (IDX, RECORDS, PICKLE, TAR, ZIP)
