"""What must be true of the arrays of a data set before anything, compiled code too, reads them.

Lengths are compared when a data set is opened, which reads two numbers of an array; ids are looked
at when a model is built, which reads all of them. Sets of groups are few, and read when opened.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]

MAX_IDS = 2**31 - 1  # ids are 32 bits wide on disk
MOST_UNSEEN = 2**24  # labels or features that may be promised whatever the rows name
LABELS_PER_ENTRY = 16  # of more labels than this for every pair, nearly none could be learnt
OFFSETS_AT_ONCE = 2**22


def check_arrays(about: Mapping[str, Any], arrays: Arrays) -> None:
    """Refuses, by a `ValueError`, arrays that are not of the same queries, labels and features.

    Args:
        about: dataset.json, with what it must hold.
        arrays: by the names of their files.
    """
    num_labels, num_features = about["num_labels"], about["num_features"]
    for name in ("num_labels", "num_features"):
        if type(about[name]) is not int or not 1 <= about[name] <= MAX_IDS:
            raise ValueError(f"{name} must be between 1 and {MAX_IDS}, got {about[name]!r}")
    if "train" not in about["parts"]:
        raise ValueError(f"there is no train part, only {str(about['parts'])[:100]}")
    if len(set(about["parts"])) < len(about["parts"]):
        raise ValueError(f"parts must be different names, got {str(about['parts'])[:100]}")
    for part in about["parts"]:
        num_rows = _num_rows(arrays, f"{part}.positives", "ids")
        dense = arrays.get(f"{part}.features.dense")
        if dense is None:
            _check_length(
                f"{part}.features", _num_rows(arrays, f"{part}.features", "ids"), num_rows
            )
        elif dense.shape != (num_rows, num_features):
            raise ValueError(
                f"{part}.features.dense must be of shape {(num_rows, num_features)}, got "
                f"{dense.shape}"
            )
        if f"{part}.texts.offsets" in arrays:
            _check_length(f"{part}.texts", _num_rows(arrays, f"{part}.texts", "utf8"), num_rows)
        num_pairs = len(arrays[f"{part}.positives.ids"])
        _check_groups(part, about, arrays, num_rows, num_pairs)
    if "labels.train_counts" in arrays:
        _check_length("labels.train_counts", len(arrays["labels.train_counts"]), num_labels)
    else:
        check_promise("num_labels", num_labels, _num_entries(arrays, "positives.ids"))
    if "train.features.ids" in arrays:
        check_promise("num_features", num_features, _num_entries(arrays, "features.ids"))
    if "labels.names.offsets" in arrays:
        _check_length("labels.names", _num_rows(arrays, "labels.names", "utf8"), num_labels)
    _check_groups("labels", about, arrays, num_labels, num_labels)
    coordinates = arrays.get("labels.coordinates")
    if coordinates is not None and coordinates.shape != (num_labels, 2):
        raise ValueError(
            f"labels.coordinates must be of shape {(num_labels, 2)}, got {coordinates.shape}"
        )


def _num_rows(arrays: Arrays, name: str, kind: str) -> int:
    """How many rows there are, whose entries are in the array of this kind."""
    offsets, entries = arrays[f"{name}.offsets"], arrays[f"{name}.{kind}"]
    values = arrays.get(f"{name}.values", entries)
    if offsets.ndim != 1 or entries.ndim != 1 or values.shape != entries.shape or not len(offsets):
        raise ValueError(f"the arrays of {name} do not belong together")
    if offsets[0] != 0 or offsets[-1] != len(entries):
        raise ValueError(
            f"{name}.offsets must go from 0 to {len(entries)}, and goes from {offsets[0]} to "
            f"{offsets[-1]}"
        )
    return len(offsets) - 1


def _num_entries(arrays: Arrays, kind: str) -> int:
    return sum(len(array) for name, array in arrays.items() if name.endswith(f".{kind}"))


def check_promise(name: str, count: int, num_entries: int) -> None:
    """Refuses a number of labels or features, by a `ValueError`, that no rows bear out.

    Tables of so many rows are made of it, and it may be a slip of the pen, or malice.
    """
    if count > max(MOST_UNSEEN, LABELS_PER_ENTRY * num_entries):
        raise ValueError(
            f"{name} is {count}, and all rows together name at most {num_entries} different ones"
        )


def check_offsets(name: str, offsets: NDArray[Any]) -> None:
    """Refuses offsets that decrease, by a `ValueError`; a piece at a time."""
    for start in range(0, len(offsets), OFFSETS_AT_ONCE):
        piece = offsets[start : start + OFFSETS_AT_ONCE + 1]
        is_lower = piece[1:] < piece[:-1]
        if is_lower.any():
            raise ValueError(f"{name}.offsets decrease after row {start + int(is_lower.argmax())}")


def _check_length(name: str, length: int, expected: int) -> None:
    if length != expected:
        raise ValueError(f"{name} has {length} rows, expected {expected}")


def _check_groups(
    holder: str, about: Mapping[str, Any], arrays: Arrays, num_rows: int, num_with_sets: int
) -> None:
    """A column holds an id for each of `num_rows`, or, if it has sets, of `num_with_sets`."""
    for column, names in about["group_names"][holder].items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"the group names of {column!r} must be a list of texts")
        ids, sets = arrays[f"{holder}.groups.{column}"], f"{holder}.group_sets.{column}"
        has_sets = f"{sets}.offsets" in arrays
        length = num_with_sets if has_sets else num_rows
        if ids.shape != (length,):
            raise ValueError(f"{holder}.groups.{column} must hold {length} numbers")
        if not has_sets:
            continue
        check_ids(f"{holder}.groups.{column}", ids, _num_rows(arrays, sets, "ids"), first=-1)
        offsets, group_ids = np.asarray(arrays[f"{sets}.offsets"]), arrays[f"{sets}.ids"]
        check_ids(f"{sets}.ids", group_ids, len(names))
        is_rising = np.diff(group_ids) > 0
        if (np.diff(offsets) < 1).any() or np.delete(~is_rising, offsets[1:-1] - 1).any():
            raise ValueError(f"every row of {sets} must hold groups, each once and in order")


def check_ids(name: str, ids: NDArray[Any], limit: int, *, first: int = 0) -> None:
    """Refuses ids that are not from `first` to `limit` - 1, by a `ValueError`."""
    if len(ids) and not first <= ids.min() <= ids.max() < limit:
        raise ValueError(
            f"{name} must be from {first} to {limit - 1}, got {ids.min()} to {ids.max()}"
        )
