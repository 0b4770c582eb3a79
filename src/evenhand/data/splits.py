"""Assigns queries, rows of a table, or rows of a file to the train, validation and test parts.

A split by the md5 of a key is the same on every machine, and a row or a query keeps its side
when others come or go. Rows with a time can be split by it, and the last rows of each entity
(a user, a session) can be held out.
"""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from evenhand.data.csr import IntArray
from evenhand.errors import UserError

PARTS = ("train", "validation", "test")
PART_IDS = {"train": 0, "validation": 1, "val": 1, "valid": 1, "dev": 1, "test": 2}

PartIds = NDArray[np.int8]  # places in PARTS


def hash_key(key: str) -> int:
    """The md5 of a key as a number from 0 to 2**128 - 1."""
    return int.from_bytes(hashlib.md5(key.encode("utf-8"), usedforsecurity=False).digest())


def split_by_hash(
    keys: Iterable[str], *, test_fraction: float, validation_fraction: float
) -> PartIds:
    """The part of each key, by where its md5 lies between 0 and 2**128: (N,) -> (N,).

    The lowest are for the test, the next for the validation.
    """
    positions = np.fromiter((hash_key(key) / 2**128 for key in keys), dtype=np.float64)
    return _pick_parts(positions < test_fraction + validation_fraction, positions < test_fraction)


def split_by_time(
    times: NDArray[np.float64], *, test_fraction: float, validation_fraction: float
) -> PartIds:
    """The part of each row: the latest rows are for the test, those before for the validation.

    Rows of one time are in one part, so a share may be smaller than asked for.

    Example:
        >>> split_by_time(np.arange(10.0), test_fraction=0.2, validation_fraction=0.1).tolist()
        [0, 0, 0, 0, 0, 0, 0, 1, 2, 2]
    """
    in_order = np.sort(times)

    def is_late(fraction: float) -> NDArray[np.bool_]:
        num_early = max(1, len(times) - round(fraction * len(times)))
        late: NDArray[np.bool_] = times > in_order[num_early - 1]
        return late

    return _pick_parts(is_late(test_fraction + validation_fraction), is_late(test_fraction))


def hold_out_last(
    entity_ids: IntArray, times: NDArray[np.float64], *, has_validation: bool
) -> PartIds:
    """The part of each row: the last one of an entity is for the test, the last but one validates.

    Every entity keeps a row to train on. Rows of one time are in the order of the table.

    Example:
        >>> hold_out_last(np.array([5, 5, 7, 5]), np.array([1.0, 3, 1, 2]), has_validation=True)
        array([0, 2, 0, 1], dtype=int8)
    """
    order = np.lexsort((times, entity_ids))
    _, starts, counts = np.unique(entity_ids[order], return_index=True, return_counts=True)
    lasts = starts + counts - 1
    parts = np.zeros(len(entity_ids), dtype=np.int8)
    parts[order[lasts[counts >= 2]]] = PART_IDS["test"]
    if has_validation:
        parts[order[lasts[counts >= 3] - 1]] = PART_IDS["validation"]
    return parts


def split_by_name(names: Sequence[str], where: str) -> PartIds:
    """The part that each name says, such as `train`, `val` or `Test`: (N,) -> (N,)."""
    for name in names:
        if name.lower() not in PART_IDS:
            raise UserError(f"{where} holds {name!r}; it must say train, validation or test")
    return np.array([PART_IDS[name.lower()] for name in names], dtype=np.int8)


def _pick_parts(is_held_out: NDArray[np.bool_], is_test: NDArray[np.bool_]) -> PartIds:
    return np.where(is_test, PART_IDS["test"], is_held_out * PART_IDS["validation"]).astype(np.int8)


def choose_validation_rows(
    row_ids: NDArray[np.int64], *, fraction: float, block: int
) -> NDArray[np.bool_]:
    """Which rows of a training file are for validation, by their numbers: (n,) -> (n,).

    `block` consecutive rows are on the same side, by the md5 of the number of their block.
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
