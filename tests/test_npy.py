"""Damaged headers of arrays, and one that would end the process inside numpy."""

import io
import zipfile

import numpy as np
import pytest

from evenhand.data.npy import check_npy_header, open_npy
from evenhand.errors import UserError
from evenhand.evaluation.outcome import load_outcome


def npy(descr, shape):
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


@pytest.mark.parametrize("shape", ["(0,)", "(3,)", "(3, 0, 2)", "()"])
@pytest.mark.parametrize("descr", ["<i8", "<f4", "|u1"])
def test_plain_arrays_pass(descr, shape):
    check_npy_header(io.BytesIO(npy(descr, shape)))
    saved = io.BytesIO()
    np.save(saved, np.zeros((2, 3), descr))
    saved.seek(0)
    check_npy_header(saved)


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


def test_arrays_are_mapped_and_odd_ones_refused_wherever_they_are_read(tmp_path):
    path = tmp_path / "array.npy"
    np.save(path, np.arange(3))
    assert isinstance(open_npy(path, is_empty=False), np.memmap)
    np.save(path, np.arange(0))
    assert len(open_npy(path, is_empty=True)) == 0
    path.write_bytes(npy("<(2,)i8", "(3,)") + bytes(48))
    with pytest.raises(ValueError, match="plain numbers"):
        open_npy(path, is_empty=False)
    with zipfile.ZipFile(tmp_path / "outcome.npz", "w") as file:
        file.write(path, "ranks.npy")
    with pytest.raises(UserError, match=r"outcome\.npz is damaged .*plain numbers"):
        load_outcome(tmp_path)
