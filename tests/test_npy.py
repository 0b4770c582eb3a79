"""Arrays written in pieces; damaged headers, and one that would end the process inside numpy."""

import io

import numpy as np
import pytest

from evenhand.files import NpyWriter, check_npy_header, open_npy


def npy(descr, shape):
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


@pytest.mark.parametrize(
    ("descr", "shape", "complaint"),
    [
        ("<(0,)i8", "(-1,)", "plain numbers"),  # numpy divides by the size of it: SIGFPE
        ("<(2,)i8", "(3,)", "plain numbers"),
        ("|V0", "(3,)", "plain numbers"),
        ("|O", "(3,)", "plain numbers"),
        ("<i8", "(-1,)", r"whole numbers from 0, got \(-1,\)"),
        ("<i8", "(True,)", r"whole numbers from 0, got \(True,\)"),
        ("no type", "(3,)", "descr"),
    ],
)
def test_what_is_no_plain_array_is_refused(descr, shape, complaint):
    with pytest.raises(ValueError, match=complaint):
        check_npy_header(io.BytesIO(npy(descr, shape)))


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match=r"must be 1\.0 or 2\.0, got 3\.0"):
        check_npy_header(io.BytesIO(b"\x93NUMPY\x03\x00"))
    with pytest.raises(ValueError, match="magic"):
        check_npy_header(io.BytesIO(b"something else"))


@pytest.mark.parametrize("dtype", ["<i8", "<f4", "|u1"])
@pytest.mark.parametrize("shape", [(0,), (3,), (0, 2), (5, 2)])
def test_what_is_written_in_pieces_is_what_numpy_writes_and_is_mapped(tmp_path, dtype, shape):
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    np.save(tmp_path / "whole.npy", array)
    writer = NpyWriter(tmp_path / "pieces.npy", dtype, shape[1:])
    for piece in (array[:2], array[2:2], array[2:]):
        writer.append(piece)
    writer.close()
    assert (tmp_path / "pieces.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
    opened = open_npy(tmp_path / "pieces.npy", is_empty=0 in shape)
    assert isinstance(opened, np.memmap) == (0 not in shape)
    assert np.array_equal(opened, array)
