"""Damaged headers of arrays, and one that would end the process inside numpy."""

import io

import numpy as np
import pytest

from evenhand.data.npy import check_npy_header


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
        ("<i8", "(-1,)", "sizes must be from 0"),
        ("<i8", "(True,)", "sizes must be from 0"),
        ("no type", "(3,)", "descr"),
    ],
)
def test_what_is_no_plain_array_is_refused(descr, shape, complaint):
    with pytest.raises(ValueError, match=complaint):
        check_npy_header(io.BytesIO(npy(descr, shape)))


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match=r"format 3\.0"):
        check_npy_header(io.BytesIO(b"\x93NUMPY\x03\x00"))
    with pytest.raises(ValueError, match="magic"):
        check_npy_header(io.BytesIO(b"something else"))
