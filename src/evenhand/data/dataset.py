"""A data set in memory and on disk: queries, their positives, and the groups both belong to.

On disk a data set is a folder of .npy files and one `dataset.json`. It is written once, opened
at once (every array is memory-mapped) and holds no absolute path, so it can be carried to
another machine. Rows of different length are kept as CSR: `offsets` and one flat array.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from evenhand.data.checks import check_arrays, check_ids
from evenhand.data.npy import open_npy
from evenhand.data.scans import counted, pieces
from evenhand.errors import UserError
from evenhand.files import atomic_folder, parse_json, read_text
from evenhand.kernels.jit import jit

IntArray = NDArray[np.integer[Any]]
FloatArray = NDArray[np.float32]

FORMAT_VERSION = 1
STREAMED_VERSION = 2  # it has `streamed` as well
GROUP_SETS_VERSION = 3  # it has a column of `Groups` with sets
PARTS = ("train", "validation", "test")
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


class Rows(NamedTuple):
    """Rows of ids, as CSR: row i holds ids[offsets[i] : offsets[i + 1]]."""

    offsets: IntArray  # (N + 1,) int64
    ids: IntArray  # (nnz,) int32
    values: FloatArray | None = None  # (nnz,); None: every value is 1

    def __len__(self) -> int:  # rows, not fields of the tuple
        return len(self.offsets) - 1

    def row(self, index: int) -> IntArray:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def lengths(self) -> IntArray:
        return np.diff(self.offsets)


@dataclasses.dataclass(frozen=True, eq=False)
class Strings:
    """Many strings in two arrays, so that millions of names open without being read."""

    offsets: IntArray  # (N + 1,) int64, into `utf8`
    utf8: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: Any) -> str:
        position = range(len(self))[index]  # counts from the end below 0; IndexError beyond
        start, stop = self.offsets[position], self.offsets[position + 1]
        return self.utf8[start:stop].tobytes().decode("utf-8", "replace")  # of a damaged file

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    @classmethod
    def pack(cls, strings: Iterable[str]) -> "Strings":
        encoded = [string.encode("utf-8") for string in strings]
        lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return cls(offsets, np.frombuffer(b"".join(encoded), dtype=np.uint8))


class Groups(NamedTuple):
    """One named column of subpopulations: which group each query, or each label, belongs to.

    Groups belong to pairs: where those of one query differ, or one is in several groups, `ids` are
    of the pairs (in the order of `pairs_of`) and name sets of groups. Labels may have sets too.

    Example:
        >>> sets = Rows(np.array([0, 1, 3]), np.array([1, 0, 1]))  # US alone; AU and US
        >>> three_pairs = Groups(np.array([0, 1, -1]), ("AU", "US"), sets)
        >>> [ids.tolist() for ids in memberships(three_pairs)]  # of pairs, and of groups
        [[0, 1, 1], [1, 0, 1]]
    """

    ids: IntArray  # (N,) int32, -1: belongs to none
    names: tuple[str, ...]
    sets: Rows | None = None  # row i: the groups of set i, in order; None: set i is group i


def memberships(groups: Groups) -> tuple[IntArray, IntArray]:
    """Who belongs where: positions in `groups.ids` and group ids, (M,) and (M,)."""
    positions = np.flatnonzero(groups.ids >= 0)
    if groups.sets is None:
        return positions, groups.ids[positions]
    rows = taken_rows(groups.sets, groups.ids[positions])
    return np.repeat(positions, rows.lengths()), rows.ids


@dataclasses.dataclass(frozen=True)
class Part:
    """Train, validation or test: one row a query."""

    features: Rows | FloatArray  # sparse rows, or dense (N, F)
    positives: Rows
    groups: dict[str, Groups] = dataclasses.field(default_factory=dict)  # of queries, or pairs
    texts: Strings | None = None
    block_pairs: int = 0  # read in blocks of so many; the stored order is random. 0: in any order
    feature_weights: FloatArray | None = None  # (F,) for `weighting.unit_values`, when it is read

    def __len__(self) -> int:
        return len(self.positives)


@dataclasses.dataclass(frozen=True)
class Dataset:
    name: str
    num_features: int
    num_labels: int
    parts: dict[str, Part]
    label_names: Strings | None = None
    label_groups: dict[str, Groups] = dataclasses.field(default_factory=dict)
    label_coordinates: FloatArray | None = None  # (L, 2) latitude, longitude
    featurizer: dict[str, Any] | None = None  # how a text becomes features; None: it cannot
    attribution: str = ""
    fingerprint: str = ""  # of the content; set by `save_dataset`
    train_counts: IntArray | None = None  # (L,) `label_counts`, where they were counted before
    is_finite: bool = False  # known: every feature value is a finite number

    def label_counts(self) -> NDArray[np.int64]:
        """How many training pairs each label has: (L,)."""
        if self.train_counts is not None:
            return np.array(self.train_counts)
        ids = self.parts["train"].positives.ids
        try:
            check_ids("labels of the train part", ids, self.num_labels)
        except ValueError as error:
            raise UserError(f"{self.name} is damaged ({error}); make the data set again") from error
        return counted(ids, self.num_labels)

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


class Pairs(NamedTuple):
    """Multilabel turned multiclass: one example for each (query, positive)."""

    query_ids: IntArray  # (N_pairs,) int64
    label_ids: IntArray  # (N_pairs,) int64


def pairs_of(positives: Rows) -> Pairs:
    """Every (query, positive) pair, in the order of the queries."""
    query_ids = np.repeat(np.arange(len(positives)), positives.lengths())
    return Pairs(query_ids, positives.ids.astype(np.int64))


def padded_rows(rows: Rows, row_ids: IntArray, *, width: int | None = None) -> NDArray[np.int64]:
    """Chosen rows side by side, padded with -1: (B,) -> (B, P), P the longest row or `width`."""
    starts, lengths = _spans(rows, row_ids)
    width = max(1, int(lengths.max(initial=1)) if width is None else width)
    padded = np.full((len(starts), width), -1, dtype=np.int64)
    places = width * np.arange(len(starts))
    _copy_rows(_read_only(rows.ids), starts, np.minimum(lengths, width), padded.ravel(), places)
    return padded


def taken_rows(rows: Rows, row_ids: IntArray) -> Rows:
    """The chosen rows, in that order, as rows of their own."""
    starts, lengths = _spans(rows, row_ids)
    offsets = np.zeros(len(starts) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    ids = np.empty(offsets[-1], dtype=rows.ids.dtype)
    _copy_rows(_read_only(rows.ids), starts, lengths, ids, offsets)
    if rows.values is None:
        return Rows(offsets, ids)
    values = np.empty(offsets[-1], dtype=rows.values.dtype)
    _copy_rows(_read_only(rows.values), starts, lengths, values, offsets)
    return Rows(offsets, ids, values)


def _spans(rows: Rows, row_ids: IntArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the chosen rows start, and their lengths: (B,) and (B,)."""
    starts, ends = rows.offsets[row_ids], rows.offsets[row_ids + 1]
    num_entries = min(len(rows.ids), len(rows.ids if rows.values is None else rows.values))
    is_inside = (starts >= 0) & (starts <= ends) & (ends <= num_entries)
    if not is_inside.all():  # compiled code would read whatever lies there
        row = int(row_ids[~is_inside][0])
        raise UserError(
            f"row {row} is said to go from {rows.offsets[row]} to {rows.offsets[row + 1]} of "
            f"{num_entries} entries: the data set is damaged; make it again"
        )
    return np.asarray(starts, dtype=np.int64), np.asarray(ends - starts, dtype=np.int64)


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A view, so that arrays in memory and on disk are of one type, compiled once."""
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view


@jit
def _copy_rows(
    source: NDArray[Any],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    target: NDArray[Any],
    places: NDArray[np.int64],
) -> None:
    """Copies the row that starts at starts[i] to places[i], for each i."""
    for row in range(len(starts)):
        # Unsigned: with no code for places counted from the end, this is a copy of whole words.
        start, place = np.uint64(starts[row]), np.uint64(places[row])
        for column in range(np.uint64(lengths[row])):
            target[place + column] = source[start + column]


def count_unseen_labels(dataset: Dataset, part_name: str) -> int:
    """How many pairs of a part have a label that no training pair has: they cannot be learnt."""
    counts = dataset.label_counts()  # (L,)
    label_ids = dataset.parts[part_name].positives.ids
    return sum(int((counts[piece] == 0).sum()) for _, piece in pieces(label_ids))


# --- on disk ------------------------------------------------------------------------------------


def save_dataset(dataset: Dataset, folder: Path) -> Dataset:
    """Writes a data set to a new folder, all of it or nothing, and opens it from there."""
    if folder.exists():
        raise UserError(f"{folder} exists already; choose another folder or remove it first")
    arrays = arrays_of(dataset)
    try:
        check_arrays(_meaning(dataset), arrays)  # what is refused when opened is not written
    except ValueError as error:
        raise UserError(f"{dataset.name} cannot be saved: {error}") from error
    with atomic_folder(folder) as staging:
        _write(dataset, arrays, staging)
    return open_dataset(folder)


def open_dataset(folder: Path) -> Dataset:
    """Opens a folder written by `save_dataset`; arrays stay on disk until they are read."""
    about = _read_about(folder)
    try:
        return _dataset(folder, about)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # JSON, but not as we write
        raise UserError(
            f"{folder / 'dataset.json'} is damaged ({type(error).__name__}: {error}); "
            f"make the data set again"
        ) from error


def _dataset(folder: Path, about: dict[str, Any]) -> Dataset:
    arrays = {name: _open_array(folder, name, shape) for name, shape in about["arrays"].items()}
    check_arrays(about, arrays)
    return Dataset(
        name=about["name"],
        num_features=about["num_features"],
        num_labels=about["num_labels"],
        parts={name: _part(name, about, arrays) for name in about["parts"]},
        label_names=_strings("labels.names", arrays),
        label_groups=_groups("labels", about, arrays),
        label_coordinates=arrays.get("labels.coordinates"),
        featurizer=about["featurizer"],
        attribution=about["attribution"],
        fingerprint=about["fingerprint"],
        train_counts=arrays.get("labels.train_counts"),
        is_finite=bool(about.get("streamed", {}).get("is_finite")),
    )


def arrays_of(dataset: Dataset) -> dict[str, NDArray[Any]]:
    """Every array of the data set under the name of its file."""
    arrays: dict[str, NDArray[Any] | None] = {
        "labels.coordinates": dataset.label_coordinates,
        "labels.train_counts": dataset.train_counts,
    }

    def add_strings(name: str, strings: Strings | None) -> None:
        if strings is not None:
            arrays.update({f"{name}.offsets": strings.offsets, f"{name}.utf8": strings.utf8})

    def add_rows(name: str, rows: Rows) -> None:
        arrays.update({f"{name}.{field}": array for field, array in rows._asdict().items()})

    def add_groups(name: str, groups: Mapping[str, Groups]) -> None:
        for column, group in groups.items():
            arrays[f"{name}.groups.{column}"] = group.ids
            if group.sets is not None:
                add_rows(f"{name}.group_sets.{column}", group.sets)

    add_strings("labels.names", dataset.label_names)
    add_groups("labels", dataset.label_groups)
    for name, part in dataset.parts.items():
        if isinstance(part.features, Rows):
            add_rows(f"{name}.features", part.features)
        else:
            arrays[f"{name}.features.dense"] = part.features
        add_rows(f"{name}.positives", part.positives)
        add_groups(name, part.groups)
        add_strings(f"{name}.texts", part.texts)
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
    kinds = {"offsets": "<i8", "ids": "<i4", "utf8": "|u1", "train_counts": "<i8"}
    return np.dtype(kinds.get(name.rsplit(".", 1)[-1], "<f4"))


def array_path(folder: Path, name: str) -> Path:
    return folder / f"{quote(name, safe=' ')}.npy"  # a group column may be called a/b


def _write(dataset: Dataset, arrays: Mapping[str, NDArray[Any]], folder: Path) -> None:
    for name, array in arrays.items():
        with open(array_path(folder, name), "wb") as file:
            np.save(file, array, allow_pickle=False)
    with open(folder / "dataset.json", "w", encoding="utf-8") as file:
        json.dump(about_dataset(dataset, arrays), file, ensure_ascii=False, indent=1)


def about_dataset(dataset: Dataset, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """What `dataset.json` says."""
    about = {
        "format": "evenhand data set",
        "version": FORMAT_VERSION,
        "name": dataset.name,
        **_meaning(dataset),
        "attribution": dataset.attribution,
        "fingerprint": _fingerprint(dataset, arrays),
        "arrays": {name: list(array.shape) for name, array in arrays.items()},
    }
    if dataset.is_read_in_blocks:
        block_pairs = {name: part.block_pairs for name, part in dataset.parts.items()}
        streamed = {"block_pairs": block_pairs, "is_finite": dataset.is_finite}
        about |= {"version": STREAMED_VERSION, "streamed": streamed}
    columns = [group for groups in group_holders(dataset).values() for group in groups.values()]
    if any(group.sets is not None for group in columns):
        about["version"] = GROUP_SETS_VERSION
    return about


def group_holders(dataset: Dataset) -> dict[str, dict[str, Groups]]:
    """The group columns of the labels and of every part."""
    parts = {name: part.groups for name, part in dataset.parts.items()}
    return {"labels": dataset.label_groups, **parts}


def _meaning(dataset: Dataset) -> dict[str, Any]:
    """What the arrays mean: everything that matters and is no array."""
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


def _fingerprint(dataset: Dataset, arrays: Mapping[str, NDArray[Any]]) -> str:
    """A digest of the content; the same wherever, and under whatever name, it is written."""
    digest = hashlib.sha256(json.dumps(_meaning(dataset), sort_keys=True).encode())
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.asarray(array).data if array.size else b"")
    return digest.hexdigest()


def _read_about(folder: Path) -> dict[str, Any]:
    path = folder / "dataset.json"
    if not path.exists():
        raise UserError(f"{folder} is not an Evenhand data set: it holds no dataset.json")
    try:
        about = parse_json(read_text(path))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); make the data set again") from error
    if not isinstance(about, dict) or about.get("format") != "evenhand data set":
        raise UserError(f"{path} does not describe an Evenhand data set")
    if about.get("version") not in (FORMAT_VERSION, STREAMED_VERSION, GROUP_SETS_VERSION):
        raise UserError(
            f"{path} is of format version {about.get('version')}, this Evenhand reads "
            f"{FORMAT_VERSION} to {GROUP_SETS_VERSION}; make the data set again"
        )
    for key, kind in ABOUT.items():
        if key not in about or not isinstance(about[key], kind):
            found = repr(about[key]) if key in about else "missing"
            raise UserError(f"{path} is damaged ({key!r} is {found}); make the data set again")
    return about


def _open_array(folder: Path, name: str, shape: list[int]) -> NDArray[Any]:
    path = array_path(folder, name)
    try:
        array = open_npy(path, is_empty=0 in shape)
        found = (list(array.shape), array.dtype)
    except Exception as error:  # numpy's reader of a damaged header raises a dozen kinds
        raise UserError(
            f"{path} is missing or damaged ({error}); make the data set again"
        ) from error
    if found != (shape, _dtype_of(name)):
        raise UserError(
            f"{path} holds {found[1]} of shape {found[0]}, expected {_dtype_of(name)} of shape "
            f"{shape}; make the data set again"
        )
    return array


def _part(name: str, about: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Part:
    features: Rows | FloatArray
    if f"{name}.features.dense" in arrays:
        features = arrays[f"{name}.features.dense"]
    else:
        features = Rows(
            arrays[f"{name}.features.offsets"],
            arrays[f"{name}.features.ids"],
            arrays.get(f"{name}.features.values"),
        )
    return Part(
        features=features,
        positives=Rows(arrays[f"{name}.positives.offsets"], arrays[f"{name}.positives.ids"]),
        groups=_groups(name, about, arrays),
        texts=_strings(f"{name}.texts", arrays),
        block_pairs=_block_pairs(name, about),
    )


def _block_pairs(name: str, about: dict[str, Any]) -> int:
    found = about.get("streamed", {}).get("block_pairs", {}).get(name, 0)
    if type(found) is not int or found < 0:
        raise ValueError(f"block_pairs of {name} must be a whole number from 0, got {found!r}")
    return found


def _strings(name: str, arrays: dict[str, NDArray[Any]]) -> Strings | None:
    offsets = arrays.get(f"{name}.offsets")
    return None if offsets is None else Strings(offsets, arrays[f"{name}.utf8"])


def _groups(
    holder: str, about: dict[str, Any], arrays: dict[str, NDArray[Any]]
) -> dict[str, Groups]:
    groups = {}
    for column, names in about["group_names"][holder].items():
        sets, name = None, f"{holder}.group_sets.{column}"
        if f"{name}.offsets" in arrays:
            sets = Rows(arrays[f"{name}.offsets"], arrays[f"{name}.ids"])
        groups[column] = Groups(arrays[f"{holder}.groups.{column}"], tuple(names), sets)
    return groups
