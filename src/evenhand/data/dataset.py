"""A data set in memory and on disk: queries, their positives, and the groups both belong to.

On disk a data set is a folder of .npy files and one `dataset.json`. It is written once, opened
at once (every array is memory-mapped) and holds no absolute path, so it can be carried to
another machine.
"""

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from evenhand.data.csr import (
    MAX_IDS,
    FloatArray,
    IntArray,
    Rows,
    Strings,
    array_path,
    check_ids,
    check_offsets,
    check_row_spans,
    check_shape,
    check_spans,
    count_ids,
    iterate_pieces,
    release_pages,
)
from evenhand.data.groups import Groups
from evenhand.errors import UserError
from evenhand.files import ProgressFn, atomic_folder, open_npy, parse_json, read_text

FORMAT_VERSION = 3  # 1 had no `streamed`, and 1 and 2 had no groups with sets; all are read
ABOUT: dict[str, Any] = {  # what dataset.json holds
    "name": str,
    "num_features": int,
    "num_labels": int,
    "parts": list,
    "group_names": dict,
    "featurizer": dict | None,
    "attribution": str,
    "fingerprint": str,
    "arrays": dict,
}
DTYPES = {"offsets": "<i8", "ids": "<i4", "utf8": "|u1", "train_counts": "<i8"}  # others: floats


@dataclasses.dataclass(frozen=True)
class Part:
    """Train, validation or test: one row a query."""

    features: Rows | FloatArray  # sparse rows, or dense (N, F)
    positives: Rows
    groups: dict[str, Groups] = dataclasses.field(default_factory=dict)  # of queries, or pairs
    texts: Strings | None = None
    block_pairs: int = 0  # read in blocks of so many; the stored order is random. 0: in any order
    feature_weights: FloatArray | None = None  # (F,) for `weighting.unit_values`, when it is read
    is_read_as_text: bool = False  # the encoder takes the texts in place of the features

    def __len__(self) -> int:
        return len(self.positives)


@dataclasses.dataclass(frozen=True)
class Dataset:
    name: str
    num_features: int
    num_labels: int
    parts: dict[str, Part]
    label_names: Strings | None = None
    label_texts: Strings | None = None  # what each label says, beyond its name
    label_groups: dict[str, Groups] = dataclasses.field(default_factory=dict)
    label_coordinates: FloatArray | None = None  # (L, 2) latitude, longitude
    featurizer: dict[str, Any] | None = None  # how a text becomes features; None: it cannot
    attribution: str = ""
    query_columns: tuple[str, ...] = ()  # of the table it was made of
    fingerprint: str = ""  # of the content; set by `save_dataset`
    train_counts: IntArray | None = None  # (L,) `label_counts`, where they were counted before
    is_finite: bool = False  # known: every feature value is a finite number

    def label_counts(self) -> NDArray[np.int64]:
        """How many training pairs each label has: (L,)."""
        if self.train_counts is not None:
            return np.array(self.train_counts)
        return count_ids(self.parts["train"].positives.ids, self.num_labels)

    @property
    def is_sparse(self) -> bool:
        """Whether queries are rows of feature ids; False: dense vectors."""
        return isinstance(self.parts["train"].features, Rows)

    @property
    def is_read_in_blocks(self) -> bool:
        """Whether it may be larger than memory."""
        return any(part.block_pairs for part in self.parts.values())

    def label_name(self, label_id: int) -> str:
        return f"label {label_id}" if self.label_names is None else self.label_names[label_id]


def group_holders(dataset: Dataset) -> dict[str, dict[str, Groups]]:
    """The group columns of the labels and of every part."""
    parts = {name: part.groups for name, part in dataset.parts.items()}
    return {"labels": dataset.label_groups, **parts}


def count_unseen_labels(dataset: Dataset, part_name: str) -> int:
    """How many pairs of a part have a label that no training pair has: they cannot be learnt."""
    counts = dataset.label_counts()  # (L,)
    label_ids = dataset.parts[part_name].positives.ids
    return sum(int((counts[piece] == 0).sum()) for _, piece in iterate_pieces(label_ids))


def release_memory(dataset: Dataset) -> None:
    """Gives back the pages read of its files, and what the allocators of Arrow and C keep.

    Between the stages of a run, so that the peak is that of one of them.
    """
    for array in _arrays_of(dataset).values():
        release_pages(array)
    pa.default_memory_pool().release_unused()
    with contextlib.suppress(AttributeError, OSError):  # only glibc can
        ctypes.CDLL(None).malloc_trim(0)


# --- writing --------------------------------------------------------------------------------------


def save_dataset(dataset: Dataset, folder: Path) -> Dataset:
    """Writes a data set to a new folder, all of it or nothing, and opens it from there."""
    try:
        check_lengths(dataset)  # what is refused when opened is not written
    except ValueError as error:
        raise UserError(f"{dataset.name} cannot be saved: {error}") from error
    with atomic_folder(folder) as staging:
        write_dataset(dataset, staging)
    return open_dataset(folder)


def write_dataset(dataset: Dataset, folder: Path) -> None:
    """Writes arrays that are not there yet, and `dataset.json`."""
    arrays = _arrays_of(dataset)
    for name, array in arrays.items():
        path = array_path(folder, name)
        if not path.exists():
            with open(path, "wb") as file:
                np.save(file, array, allow_pickle=False)
    about = {
        "format": "evenhand data set",
        "version": FORMAT_VERSION,
        "name": dataset.name,
        **_meaning(dataset),
        "attribution": dataset.attribution,
        "query_columns": list(dataset.query_columns),
        "fingerprint": make_fingerprint(dataset),
        "arrays": {name: list(array.shape) for name, array in arrays.items()},
    }
    if dataset.is_read_in_blocks:
        block_pairs = {name: part.block_pairs for name, part in dataset.parts.items()}
        about["streamed"] = {"block_pairs": block_pairs, "is_finite": dataset.is_finite}
    with open(folder / "dataset.json", "w", encoding="utf-8") as file:
        json.dump(about, file, ensure_ascii=False, indent=1)


def _meaning(dataset: Dataset) -> dict[str, Any]:
    """Everything that matters and is no array."""
    return {
        "num_features": dataset.num_features,
        "num_labels": dataset.num_labels,
        "parts": list(dataset.parts),
        "group_names": {
            holder: {column: list(group.names) for column, group in groups.items()}
            for holder, groups in group_holders(dataset).items()
        },
        "featurizer": dataset.featurizer,
    }


def make_fingerprint(dataset: Dataset, *, progress_fn: ProgressFn | None = None) -> str:
    """A SHA-256 of the content: the same wherever it lies, and under whatever name."""
    digest = hashlib.sha256(json.dumps(_meaning(dataset), sort_keys=True).encode())
    for name, array in _arrays_of(dataset).items():
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        for start, piece in iterate_pieces(np.asarray(array).reshape(-1)):
            digest.update(piece.data)
            if progress_fn is not None:
                progress_fn(name, (start + len(piece)) * array.itemsize, array.nbytes)
    return digest.hexdigest()


def check_content(folder: Path, *, progress_fn: ProgressFn | None = None) -> None:
    """Reads all of a data set and compares it with its fingerprint, as after it was copied."""
    dataset = open_dataset(folder)
    if make_fingerprint(dataset, progress_fn=progress_fn) != dataset.fingerprint:
        raise UserError(
            f"{folder} is damaged: its content does not match the fingerprint in its dataset.json; "
            f"copy it again, or remove the folder and make it again"
        )


def _arrays_of(dataset: Dataset) -> dict[str, NDArray[Any]]:
    """Every array of the data set by the name of its file."""
    arrays: dict[str, NDArray[Any] | None] = {
        "labels.coordinates": dataset.label_coordinates,
        "labels.train_counts": dataset.train_counts,
    }

    def add(name: str, value: Rows | Strings | None) -> None:
        if value is not None:
            fields = value._asdict() if isinstance(value, Rows) else vars(value)
            arrays.update({f"{name}.{field}": array for field, array in fields.items()})

    add("labels.names", dataset.label_names)
    add("labels.texts", dataset.label_texts)
    for name, part in dataset.parts.items():
        if isinstance(part.features, Rows):
            add(f"{name}.features", part.features)
        else:
            arrays[f"{name}.features.dense"] = part.features
        add(f"{name}.positives", part.positives)
        add(f"{name}.texts", part.texts)
    for holder, groups in group_holders(dataset).items():
        for column, group in groups.items():
            arrays[f"{holder}.groups.{column}"] = group.ids
            add(f"{holder}.group_sets.{column}", group.sets)
    return {
        name: np.ascontiguousarray(array, dtype=_dtype_of(name))
        for name, array in sorted(arrays.items())
        if array is not None
    }


def _dtype_of(name: str) -> np.dtype[Any]:
    """The type an array has on disk, by the name of its file."""
    kind = re.search(r"\.(groups|group_sets)\.", name)  # the first: a column may be called so too
    if kind is not None and kind[1] == "groups":
        return np.dtype("<i4")
    return np.dtype(DTYPES.get(name.rsplit(".", 1)[-1], "<f4"))


# --- opening --------------------------------------------------------------------------------------


def open_dataset(folder: Path) -> Dataset:
    """Opens a folder written by `save_dataset`; arrays stay on disk until they are read."""
    path = folder / "dataset.json"
    if not path.exists():
        raise UserError(f"{folder} is not an Evenhand data set: it holds no dataset.json")
    try:
        about = parse_json(read_text(path))
        if not isinstance(about, dict) or about.get("format") != "evenhand data set":
            raise UserError(f"{path} does not describe an Evenhand data set")
        if about.get("version") not in range(1, FORMAT_VERSION + 1):
            raise UserError(
                f"{path} is of format version {about.get('version')}, this Evenhand reads 1 to "
                f"{FORMAT_VERSION}; remove {folder} and make the data set again"
            )
        dataset = _read_dataset(folder, about)
        check_lengths(dataset)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # not as we write it
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise UserError(
            f"{path} is damaged ({kind}{error}); remove {folder} and make the data set again"
        ) from error
    return dataset


def _read_dataset(folder: Path, about: dict[str, Any]) -> Dataset:
    for key, kind in ABOUT.items():
        if key not in about or not isinstance(about[key], kind):
            raise ValueError(f"{key!r} is {repr(about[key]) if key in about else 'missing'}")
    if len(set(about["parts"])) < len(about["parts"]):
        raise ValueError(f"parts must be different names, got {str(about['parts'])[:100]}")
    arrays = {name: _open_array(folder, name, shape) for name, shape in about["arrays"].items()}
    streamed = about.get("streamed", {})

    def rows(name: str) -> Rows:
        values = arrays.get(f"{name}.values")
        return Rows(arrays[f"{name}.offsets"], arrays[f"{name}.ids"], values)

    def strings(name: str) -> Strings | None:
        if f"{name}.offsets" not in arrays:
            return None
        return Strings(arrays[f"{name}.offsets"], arrays[f"{name}.utf8"])

    def groups(holder: str) -> dict[str, Groups]:
        found = {}
        for column, names in about["group_names"][holder].items():
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"the group names of {column!r} must be a list of texts")
            ids, sets = arrays[f"{holder}.groups.{column}"], f"{holder}.group_sets.{column}"
            has_sets = f"{sets}.offsets" in arrays
            found[column] = Groups(ids, tuple(names), rows(sets) if has_sets else None)
        return found

    parts = {}
    for name in about["parts"]:
        block_pairs = streamed.get("block_pairs", {}).get(name, 0)
        if type(block_pairs) is not int or block_pairs < 0:
            raise ValueError(
                f"block_pairs of {name} must be a whole number from 0, got {block_pairs!r}"
            )
        dense = arrays.get(f"{name}.features.dense")
        parts[name] = Part(
            rows(f"{name}.features") if dense is None else dense,
            rows(f"{name}.positives"),
            groups(name),
            strings(f"{name}.texts"),
            block_pairs,
        )
    query_columns = about.get("query_columns", [])  # missing in what was made before 0.2
    if not isinstance(query_columns, list) or not all(isinstance(c, str) for c in query_columns):
        raise ValueError(f"query_columns must be a list of texts, got {query_columns!r:.40}")
    names = ("name", "num_features", "num_labels", "featurizer", "attribution", "fingerprint")
    return Dataset(
        **{name: about[name] for name in names},
        parts=parts,
        query_columns=tuple(query_columns),
        label_names=strings("labels.names"),
        label_texts=strings("labels.texts"),
        label_groups=groups("labels"),
        label_coordinates=arrays.get("labels.coordinates"),
        train_counts=arrays.get("labels.train_counts"),
        is_finite=bool(streamed.get("is_finite")),
    )


def _open_array(folder: Path, name: str, shape: list[int]) -> NDArray[Any]:
    path = array_path(folder, name)
    try:
        array = open_npy(path, is_empty=0 in shape)
    except Exception as error:  # numpy's reader of a damaged header raises a dozen kinds
        raise UserError(
            f"{path} is missing or damaged ({error}); remove {folder} and make the data set again"
        ) from error
    if list(array.shape) != shape or array.dtype != _dtype_of(name):
        raise UserError(
            f"{path} holds {array.dtype} of shape {list(array.shape)}, expected {_dtype_of(name)} "
            f"of shape {shape}; remove {folder} and make the data set again"
        )
    return array


# --- checks ---------------------------------------------------------------------------------------
# Lengths are compared when a data set is opened, which reads two numbers of an array. Ids, offsets
# and values are read when a model is built, all of them.

MOST_UNSEEN = 2**24  # labels or features that may be promised whatever the rows name
LABELS_PER_ENTRY = 16  # of more labels than this for every pair, nearly none could be learnt


def check_lengths(dataset: Dataset) -> None:
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
        check_row_spans(f"{name}.positives", part.positives, num_rows)
        num_pairs += len(part.positives.ids)
        if isinstance(features, Rows):
            check_row_spans(f"{name}.features", features, num_rows)
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
    for name, strings in (("names", dataset.label_names), ("texts", dataset.label_texts)):
        if strings is not None:
            check_spans(f"labels.{name}", num_labels, strings.offsets, strings.utf8)
    if dataset.label_coordinates is not None:
        check_shape("labels.coordinates", dataset.label_coordinates, (num_labels, 2))
    _check_groups("labels", dataset.label_groups, num_labels, num_with_sets=num_labels)


def is_borne_out(count: int, num_entries: int) -> bool:
    """Whether a promised number of labels or features is plausible for so many entries of rows.

    Tables of so many rows are made of it, and it may be a slip of the pen, or malice.
    """
    return count <= max(MOST_UNSEEN, LABELS_PER_ENTRY * num_entries)


def _check_groups(
    holder: str, groups: Mapping[str, Groups], num_rows: int, *, num_with_sets: int
) -> None:
    """A column holds an id for each of `num_rows`, or, if it has sets, of `num_with_sets`."""
    for column, (ids, names, sets) in groups.items():
        name, set_name = f"{holder}.groups.{column}", f"{holder}.group_sets.{column}"
        check_shape(name, ids, (num_rows if sets is None else num_with_sets,))
        if sets is not None:
            check_row_spans(set_name, sets, len(sets))
            check_ids(name, ids, len(sets), first=-1)
            check_ids(f"{set_name}.ids", sets.ids, len(names))
            offsets, is_rising = np.asarray(sets.offsets), np.diff(sets.ids) > 0
            if (np.diff(offsets) < 1).any() or np.delete(~is_rising, offsets[1:-1] - 1).any():
                raise ValueError(f"rows of {set_name} must hold groups, each once and in order")


def check_all_ids(dataset: Dataset, folder: Path | None = None) -> None:
    """Refuses ids that name no label, feature or group, and offsets that decrease.

    Whoever reads rows, compiled code too, relies on both. The folder is for the message.
    """
    # Rows of a streamed one were seen when it was made: to read all takes as long as an epoch.
    are_rows_read = not dataset.is_read_in_blocks
    try:
        for strings in filter(None, (dataset.label_names, dataset.label_texts)):
            check_offsets("the names or texts of labels", strings.offsets)
        for name, part in dataset.parts.items():
            if are_rows_read:
                check_offsets(f"{name}.positives", part.positives.offsets)
                check_ids(f"labels of the {name} part", part.positives.ids, dataset.num_labels)
            if are_rows_read and isinstance(part.features, Rows):
                check_offsets(f"{name}.features", part.features.offsets)
                check_ids(f"features of the {name} part", part.features.ids, dataset.num_features)
            if part.texts is not None:
                check_offsets(f"{name}.texts", part.texts.offsets)
        for holder, columns in group_holders(dataset).items():
            for column, group in columns.items():
                num_ids = len(group.names if group.sets is None else group.sets)
                check_ids(f"{column} of {holder}", group.ids, num_ids, first=-1)
    except ValueError as error:
        raise UserError(
            f"{folder or dataset.name} is damaged ({error}); remove its folder and make it again"
        ) from error


def check_finite(dataset: Dataset) -> None:
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
