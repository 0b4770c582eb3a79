"""What to know of a data set before training on it: repeats, leaks, rare labels, small groups."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenhand.data.csr import IntArray, Rows, pairs_of
from evenhand.data.dataset import Dataset, Part
from evenhand.data.groups import memberships

RARE_PAIRS = 8  # up to so many training pairs the gap to test data is wide (docs/experiments.md)
KNOWN_PAIRS = 32  # above, it is narrow for all labels alike
FEW_LABELS = 4096  # a step can score them all


class Repeats(NamedTuple):
    """How often the queries of a part stand elsewhere too."""

    part: str
    within: int  # queries that are the same as an earlier one of the part
    queries_in_train: int
    pairs_in_train: int  # (query, label) pairs


class Frequencies(NamedTuple):
    """The labels that have this many training pairs."""

    counts: str  # "3-4"
    num_labels: int
    num_pairs: int


class GroupSizes(NamedTuple):
    """A column of groups, by their training pairs."""

    column: str
    num_groups: int
    largest: list[tuple[str, int]]
    smallest: list[tuple[str, int]]
    num_without: int  # pairs in no group


def find_repeats(dataset: Dataset) -> list[Repeats]:
    """A row for each part: which queries, by text or else by features, are not only there once."""
    keys = {name: _row_keys(part) for name, part in dataset.parts.items()}
    pairs = {name: _pair_keys(keys[name], part.positives) for name, part in dataset.parts.items()}
    return [
        Repeats(
            name,
            within=len(own) - len(np.unique(own)),
            queries_in_train=0 if name == "train" else int(np.isin(own, keys["train"]).sum()),
            pairs_in_train=0
            if name == "train"
            else int(np.isin(pairs[name], pairs["train"]).sum()),
        )
        for name, own in keys.items()
    ]


def count_known_pairs(dataset: Dataset, part_name: str) -> int:
    """How many pairs of a part the training part has too, by the texts of their queries.

    0 without texts: then only `find_repeats` looks for them, which reads all features.
    """
    part, train = dataset.parts[part_name], dataset.parts.get("train")
    if train is None or train is part or part.texts is None or train.texts is None:
        return 0
    known = _pair_keys(_row_keys(train), train.positives)
    return int(np.isin(_pair_keys(_row_keys(part), part.positives), known).sum())


def _row_keys(part: Part) -> NDArray[np.int64]:
    """A hash of each query: (N,)."""
    arrays: list[tuple[IntArray, NDArray[Any]]]
    features = part.features
    if part.texts is not None:
        arrays = [(part.texts.offsets, part.texts.utf8)]
    elif isinstance(features, Rows):
        arrays = [(features.offsets, features.ids)]
        if features.values is not None:
            arrays.append((features.offsets, features.values))
    else:
        width = features.shape[1]
        arrays = [(np.arange(len(features) + 1) * width, features.reshape(-1))]
    keys = np.zeros(len(part), dtype=np.int64)
    for offsets, entries in arrays:
        spans = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        hashes = (hash(entries[start:stop].tobytes()) for start, stop in spans)
        keys = keys * 31 + np.fromiter(hashes, dtype=np.int64, count=len(part))
    return keys


def _pair_keys(keys: NDArray[np.int64], positives: Rows) -> NDArray[np.int64]:
    """A hash of each (query, label) pair: (N_pairs,)."""
    pairs = pairs_of(positives)
    return keys[pairs.query_ids] * np.int64(0x9E3779B97F4A7C1) + pairs.label_ids


def label_frequencies(dataset: Dataset) -> list[Frequencies]:
    """Labels by their number of training pairs: 0, 1, 2, 3-4, 5-8, ..., without empty bins.

    Example:
        >>> positives = Rows(np.arange(8), np.array([0, 0, 0, 1, 2, 2, 2]))
        >>> part = Part(np.zeros((7, 1), np.float32), positives)
        >>> [tuple(row) for row in label_frequencies(Dataset("d", 1, 4, {"train": part}))]
        [('0', 1, 0), ('1', 1, 1), ('3-4', 2, 6)]
    """
    counts = dataset.label_counts()  # (L,)
    bins = np.where(counts > 0, np.ceil(np.log2(np.maximum(counts, 1))).astype(np.int64) + 1, 0)
    num_labels = np.bincount(bins)
    num_pairs = np.bincount(bins, weights=counts).astype(np.int64)
    ends = [0, *(2**power for power in range(len(num_labels) - 1))]
    names = [
        f"{end:,}" if end <= 2 else f"{ends[place - 1] + 1:,}-{end:,}"
        for place, end in enumerate(ends)
    ]
    rows = map(Frequencies, names, num_labels.tolist(), num_pairs.tolist())
    return [row for row in rows if row.num_labels]


def group_sizes(dataset: Dataset, *, num_shown: int = 3) -> list[GroupSizes]:
    """Every column of groups, of queries or labels, with its largest and its smallest."""
    train, rows = dataset.parts["train"], []
    counts = dataset.label_counts()
    for column, groups in (*train.groups.items(), *dataset.label_groups.items()):
        positions, ids = memberships(groups)
        weights = np.ones(len(groups.ids))  # pairs that a position stands for
        if column in dataset.label_groups and column not in train.groups:
            weights = counts.astype(np.float64)
        elif groups.sets is None:
            weights = train.positives.lengths().astype(np.float64)
        sizes = np.bincount(ids, weights=weights[positions], minlength=len(groups.names))
        order = np.argsort(-sizes, kind="stable").tolist()
        named = [(groups.names[place], int(sizes[place])) for place in order]
        num_without = int(weights[groups.ids < 0].sum())
        smallest = named[max(num_shown, len(named) - num_shown) :][::-1]
        rows.append(GroupSizes(column, len(named), named[:num_shown], smallest, num_without))
    return rows


def mining_outlook(dataset: Dataset) -> str:
    """What mining can be expected to do here, by what it did on other data (docs/methods.md)."""
    counts = dataset.label_counts()
    total = max(1, int(counts.sum()))
    rare = int(counts[counts <= RARE_PAIRS].sum()) / total
    known = int(counts[counts > KNOWN_PAIRS].sum()) / total
    if known > 0.9:
        outlook = (
            f"little on average: {known:.0%} of the training pairs have labels with more than "
            f"{KNOWN_PAIRS} of them, and where that held it gained .002 of recall@10; look at the "
            f"smallest groups"
        )
    elif rare > 0.1:
        outlook = (
            f"a gain for small groups, as on places, but take even-handed mining (s2m-even): "
            f"{rare:.0%} of the training pairs have labels with at most {RARE_PAIRS} of them, "
            f"which are learnt by heart, and which mining by the training loss alone neglects"
        )
    else:
        outlook = (
            "something for small groups, little on average: few training pairs have rare labels"
        )
    few = f"; all {dataset.num_labels:,} labels fit into a step, so only examples need mining"
    return outlook + (few if dataset.num_labels <= FEW_LABELS else "")
