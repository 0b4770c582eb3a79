"""Assigns queries to the train, validation and test parts.

A split by the md5 of a key is the same on every machine, and a row or a query keeps its side
when others come or go.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from evenhand.errors import UserError

PARTS = ("train", "validation", "test")


def hash_key(key: str) -> int:
    """The md5 of a key as a number from 0 to 2**128 - 1."""
    return int.from_bytes(hashlib.md5(key.encode("utf-8"), usedforsecurity=False).digest())


def choose_part(key: str, *, test_fraction: float, validation_fraction: float) -> str:
    """Train, validation or test: where the md5 of the key lies between 0 and 2**128."""
    position = hash_key(key) / 2**128
    if position < test_fraction:
        return "test"
    return "validation" if position < test_fraction + validation_fraction else "train"


def choose_validation_rows(
    row_ids: NDArray[np.int64], *, fraction: float, block: int
) -> NDArray[np.bool_]:
    """Which rows of a training file are for validation, by their numbers: (n,) -> (n,).

    `block` consecutive rows are on the same side, by the md5 of the number of their block: what
    `choose_part` says of it, but for many at once.
    """
    if not fraction:
        return np.zeros(len(row_ids), dtype=bool)
    blocks, places = np.unique(row_ids // block, return_inverse=True)
    digests = [
        hashlib.md5(b"%d" % number, usedforsecurity=False).digest() for number in blocks.tolist()
    ]
    positions = np.frombuffer(b"".join(digests), dtype=">u8")[::2] / 2**64  # by the first 8 bytes
    is_validation: NDArray[np.bool_] = (positions < fraction)[places]
    return is_validation


def check_fractions(
    *, test_fraction: float = 0.0, validation_fraction: float, validation_block: int = 1
) -> None:
    """Refuses shares that leave nothing to train on."""
    fractions = {"test_fraction": test_fraction, "validation_fraction": validation_fraction}
    for name, fraction in fractions.items():
        if not 0 <= fraction < 1:
            raise UserError(f"{name} must be at least 0 and below 1, got {fraction}")
    if validation_block < 1:
        raise UserError(f"validation_block must be at least 1, got {validation_block}")
    if test_fraction + validation_fraction >= 1:
        raise UserError(
            f"test_fraction and validation_fraction together must be below 1, so that something "
            f"is left to train on, got {test_fraction} + {validation_fraction}"
        )
