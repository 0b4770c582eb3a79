"""Bounds checks of a data set's arrays, before compiled code reads by them.

Lengths are compared when a data set is opened, which reads two numbers of an array. Ids, offsets
and values are read when a model is built, all of them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evenhand.data.csr import IntArray, Rows, iterate_pieces
from evenhand.data.groups import Groups
from evenhand.errors import UserError

if TYPE_CHECKING:
    from evenhand.data.dataset import Dataset

MAX_IDS = 2**31 - 1  # ids are 32 bits wide on disk
MOST_UNSEEN = 2**24  # labels or features that may be promised whatever the rows name
LABELS_PER_ENTRY = 16  # of more labels than this for every pair, nearly none could be learnt


# --- lengths --------------------------------------------------------------------------------------


def check_lengths(dataset: "Dataset") -> None:
    """Refuses, by a `ValueError`, arrays that are not of the same queries, labels and features."""
    num_labels, num_features = dataset.num_labels, dataset.num_features
    for name, count in (("num_labels", num_labels), ("num_features", num_features)):
        if type(count) is not int or not 1 <= count <= MAX_IDS:
            raise ValueError(f"{name} must be between 1 and {MAX_IDS}, got {count!r}")
    if "train" not in dataset.parts:
        raise ValueError(f"there is no train part, only {str(list(dataset.parts))[:100]}")
    num_pairs = num_values = 0
    for name, part in dataset.parts.items():
        num_rows, features = len(part), part.features
        _check_rows(f"{name}.positives", part.positives, num_rows)
        num_pairs += len(part.positives.ids)
        if isinstance(features, Rows):
            _check_rows(f"{name}.features", features, num_rows)
            num_values += len(features.ids)
        else:
            check_shape(f"{name}.features.dense", features, (num_rows, num_features))
        if part.texts is not None:
            check_spans(f"{name}.texts", num_rows, part.texts.offsets, part.texts.utf8)
        _check_groups(name, part.groups, num_rows, num_with_sets=len(part.positives.ids))
    promises = {"num_labels": (num_labels, num_pairs), "num_features": (num_features, num_values)}
    if dataset.train_counts is not None:
        check_shape("labels.train_counts", dataset.train_counts, (num_labels,))
        del promises["num_labels"]
    if not isinstance(dataset.parts["train"].features, Rows):
        del promises["num_features"]
    for name, (count, num_entries) in promises.items():
        if not is_borne_out(count, num_entries):
            raise ValueError(
                f"{name} is {count}, and all rows together name at most {num_entries} different "
                f"ones"
            )
    if dataset.label_names is not None:
        names = dataset.label_names
        check_spans("labels.names", num_labels, names.offsets, names.utf8)
    if dataset.label_coordinates is not None:
        check_shape("labels.coordinates", dataset.label_coordinates, (num_labels, 2))
    _check_groups("labels", dataset.label_groups, num_labels, num_with_sets=num_labels)


def is_borne_out(count: int, num_entries: int) -> bool:
    """Whether a promised number of labels or features is plausible for so many entries of rows.

    Tables of so many rows are made of it, and it may be a slip of the pen, or malice.
    """
    return count <= max(MOST_UNSEEN, LABELS_PER_ENTRY * num_entries)


def check_shape(name: str, array: NDArray[Any], shape: tuple[int, ...]) -> None:
    """Refuses an array of another shape."""
    if array.shape != shape:
        raise ValueError(f"{name} must be of shape {shape}, got {array.shape}")


def _check_rows(name: str, rows: Rows, num_rows: int) -> None:
    """Refuses rows whose arrays do not belong together, or that are not so many."""
    check_spans(name, num_rows, rows.offsets, *(array for array in rows[1:] if array is not None))


def check_spans(name: str, num_rows: int, offsets: IntArray, *entries: NDArray[Any]) -> None:
    """Refuses offsets that are not of all rows, or do not go from 0 to the end of the entries."""
    length = len(entries[0]) if entries[0].ndim else 0
    if offsets.ndim != 1 or not len(offsets) or any(e.shape != (length,) for e in entries):
        raise ValueError(f"the arrays of {name} do not belong together")
    if offsets[0] != 0 or offsets[-1] != length:
        raise ValueError(
            f"{name}.offsets must go from 0 to {length}, and goes from {offsets[0]} to "
            f"{offsets[-1]}"
        )
    if len(offsets) - 1 != num_rows:
        raise ValueError(f"{name} has {len(offsets) - 1} rows, expected {num_rows}")


def _check_groups(
    holder: str, groups: Mapping[str, Groups], num_rows: int, *, num_with_sets: int
) -> None:
    """A column holds an id for each of `num_rows`, or, if it has sets, of `num_with_sets`."""
    for column, (ids, names, sets) in groups.items():
        name, set_name = f"{holder}.groups.{column}", f"{holder}.group_sets.{column}"
        check_shape(name, ids, (num_rows if sets is None else num_with_sets,))
        if sets is not None:
            _check_rows(set_name, sets, len(sets))
            check_ids(name, ids, len(sets), first=-1)
            check_ids(f"{set_name}.ids", sets.ids, len(names))
            offsets, is_rising = np.asarray(sets.offsets), np.diff(sets.ids) > 0
            if (np.diff(offsets) < 1).any() or np.delete(~is_rising, offsets[1:-1] - 1).any():
                raise ValueError(f"rows of {set_name} must hold groups, each once and in order")


# --- entries --------------------------------------------------------------------------------------


def check_all_ids(dataset: "Dataset") -> None:
    """Refuses ids that name no label, feature or group, and offsets that decrease.

    Whoever reads rows, compiled code too, relies on both.
    """
    # Rows of a streamed one were seen when it was made: to read all takes as long as an epoch.
    are_rows_read = not dataset.is_read_in_blocks
    groups = {"labels": dataset.label_groups, **{n: p.groups for n, p in dataset.parts.items()}}
    try:
        if dataset.label_names is not None:
            check_offsets("labels.names", dataset.label_names.offsets)
        for name, part in dataset.parts.items():
            if are_rows_read:
                check_offsets(f"{name}.positives", part.positives.offsets)
                check_ids(f"labels of the {name} part", part.positives.ids, dataset.num_labels)
            if are_rows_read and isinstance(part.features, Rows):
                check_offsets(f"{name}.features", part.features.offsets)
                check_ids(f"features of the {name} part", part.features.ids, dataset.num_features)
            if part.texts is not None:
                check_offsets(f"{name}.texts", part.texts.offsets)
        for holder, columns in groups.items():
            for column, group in columns.items():
                num_ids = len(group.names if group.sets is None else group.sets)
                check_ids(f"{column} of {holder}", group.ids, num_ids, first=-1)
    except ValueError as error:
        raise UserError(f"{dataset.name} is damaged ({error}); make it again") from error


def check_finite(dataset: "Dataset") -> None:
    """Refuses feature values that are NaN or infinite."""
    if dataset.is_finite:
        return
    for name, part in dataset.parts.items():
        rows = part.features
        values = rows.values if isinstance(rows, Rows) else rows
        if values is None:
            continue
        width = max(1, int(np.prod(values.shape[1:])))
        for start, piece in iterate_pieces(values, max(1, 2**22 // width)):
            is_finite = np.isfinite(piece)
            if not is_finite.all():
                place = start + int(np.argwhere(~is_finite)[0][0])
                if isinstance(rows, Rows):
                    place = int(np.searchsorted(rows.offsets, place, side="right")) - 1
                raise UserError(
                    f"query {place} of the {name} part of {dataset.name} has a feature value that "
                    f"is NaN or infinite; leave the query out or mend it"
                )


def check_offsets(name: str, offsets: IntArray) -> None:
    """Refuses offsets that decrease."""
    for start, piece in iterate_pieces(offsets[1:]):
        is_lower = piece < offsets[start : start + len(piece)]
        if is_lower.any():
            raise ValueError(f"{name}.offsets decrease after row {start + int(is_lower.argmax())}")


def check_ids(name: str, ids: IntArray, limit: int, *, first: int = 0) -> None:
    """Refuses ids that are not from `first` to `limit` - 1."""
    if len(ids) and not first <= ids.min() <= ids.max() < limit:
        raise ValueError(
            f"{name} must be from {first} to {limit - 1}, got {ids.min()} to {ids.max()}"
        )
