"""Rows on their way from a text to a data set: first spread over shards, then in their order.

Every row has a key, 64 bits that are a hash of a seed and of the row's number; the rows of a data
set are stored by their keys. That is a bucket sort: a shard is a file that takes the rows whose
keys are in its range, as they come, and when all are there each shard is sorted by itself.

A row is a record of 32-bit words: its key (2), how many labels and features it has (2), its labels,
its feature ids, its values.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenhand.data.extreme_lines import Block
from evenhand.errors import UserError
from evenhand.kernels.jit import jit
from evenhand.kernels.mix import GOLDEN64, mix64

Words = NDArray[np.int32]

HEAD_WORDS = 4
WORD_BYTES = 4
WHOLE = 2**64


class Sizes(NamedTuple):
    """What a shard, or a part, holds."""

    words: int = 0
    rows: int = 0
    labels: int = 0
    features: int = 0

    def plus(self, other: "Sizes") -> "Sizes":
        return Sizes(*(mine + more for mine, more in zip(self, other, strict=True)))


# --- keys ---------------------------------------------------------------------------------------


def keys_of(row_ids: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """A random number for each row, as SplitMix64 makes them: different for different rows.

    Example:
        >>> keys_of(np.arange(2, dtype=np.uint64), 0)
        array([16294208416658607535,  7960286522194355700], dtype=uint64)
    """
    start = np.uint64(_mix_seed(seed))
    return mix64((row_ids + np.uint64(1)) * GOLDEN64 + start)


def _mix_seed(seed: int) -> int:
    """Far from one another for neighbouring seeds; 0 for the seed 0."""
    number = seed % WHOLE
    for multiplier, shift in ((0xFF51AFD7ED558CCD, 33), (0xC4CEB9FE1A85EC53, 33)):
        number = ((number ^ (number >> shift)) * multiplier) % WHOLE
    return number ^ (number >> 33)


def shards_of(keys: NDArray[np.uint64], num_shards: int) -> NDArray[np.int64]:
    """The shard of each key: equal ranges, in the order of the keys."""
    high = keys >> np.uint64(32)
    return ((high * np.uint64(num_shards)) >> np.uint64(32)).astype(np.int64)


# --- from blocks of text to shards --------------------------------------------------------------


class Pending:
    """Records in memory, as they came, until they are written to their shards."""

    def __init__(self, num_bytes: int, *, num_shards: int) -> None:
        self.words: Words = np.empty(num_bytes // WORD_BYTES, dtype=np.int32)
        self.num_shards = num_shards
        self.clear()

    def clear(self) -> None:
        self.length = 0
        self.row_words: list[NDArray[np.int64]] = []
        self.shards: list[NDArray[np.int64]] = []
        self.sizes = np.zeros((len(Sizes._fields), self.num_shards), dtype=np.int64)

    def fits(self, block: Block) -> bool:
        return self.length + _num_words(block) <= len(self.words)

    def add(self, block: Block, keys: NDArray[np.uint64], shards: NDArray[np.int64]) -> None:
        if not self.fits(block):  # one block alone: its lines are long
            assert self.length == 0
            self.words = np.empty(_num_words(block), dtype=np.int32)
        self.length = _pack(
            np.asarray(block.label_counts, dtype=np.int64),
            np.asarray(block.label_ids, dtype=np.int32),
            np.asarray(block.feature_counts, dtype=np.int64),
            np.asarray(block.feature_ids, dtype=np.int32),
            np.asarray(block.values, dtype=np.float32).view(np.int32),
            keys.view(np.int64),
            self.words,
            self.length,
        )
        labels, features = block.label_counts, block.feature_counts
        row_words = HEAD_WORDS + labels + 2 * features
        self.row_words.append(row_words.astype(np.int64))
        self.shards.append(shards)
        for sizes, more in zip(
            self.sizes, (row_words, np.ones_like(labels), labels, features), strict=True
        ):
            np.add.at(sizes, shards, more)

    def write(self, paths: Sequence[Path]) -> list[Sizes]:
        """Appends every record to the file of its shard, and forgets it; how much each got."""
        written = [Sizes(*column) for column in self.sizes.T.tolist()]
        if self.length:
            row_words, shards = np.concatenate(self.row_words), np.concatenate(self.shards)
            starts = np.cumsum(row_words) - row_words
            order, first = np.argsort(shards, kind="stable"), 0
            for path, sizes in zip(paths, written, strict=True):
                rows = order[first : first + sizes.rows]
                first += sizes.rows
                if sizes.rows:
                    segment = np.empty(sizes.words, dtype=np.int32)
                    _join(self.words, starts[rows], row_words[rows], segment)
                    with open(path, "ab") as file:
                        file.write(segment.data)
        self.clear()
        return written


def _num_words(block: Block) -> int:
    return HEAD_WORDS * len(block.label_counts) + len(block.label_ids) + 2 * len(block.feature_ids)


@jit
def _pack(
    label_counts: NDArray[np.int64],
    label_ids: Words,
    feature_counts: NDArray[np.int64],
    feature_ids: Words,
    values: Words,
    keys: NDArray[np.int64],
    words: Words,
    at: int,
) -> int:
    label, feature = 0, 0
    for row in range(len(keys)):
        words[at] = np.int32(keys[row] & 0xFFFFFFFF)
        words[at + 1] = np.int32(keys[row] >> 32)
        words[at + 2] = label_counts[row]
        words[at + 3] = feature_counts[row]
        at += HEAD_WORDS
        for place in range(label_counts[row]):
            words[at + place] = label_ids[label + place]
        at += label_counts[row]
        label += label_counts[row]
        for place in range(feature_counts[row]):
            words[at + place] = feature_ids[feature + place]
            words[at + feature_counts[row] + place] = values[feature + place]
        at += 2 * feature_counts[row]
        feature += feature_counts[row]
    return at


@jit
def _join(
    words: Words, starts: NDArray[np.int64], lengths: NDArray[np.int64], segment: Words
) -> None:
    at = 0
    for row in range(len(starts)):
        for place in range(lengths[row]):
            segment[at + place] = words[starts[row] + place]
        at += lengths[row]


# --- from a shard to rows in their order --------------------------------------------------------


class Shard(NamedTuple):
    """The records of a file, found; the words stay on disk until they are read."""

    words: Words
    starts: NDArray[np.int64]  # (R,) of the records, in the order they are to be stored in
    label_counts: NDArray[np.int64]  # (R,)
    feature_counts: NDArray[np.int64]  # (R,)


def open_shard(path: Path, sizes: Sizes, *, is_sorted: bool) -> Shard:
    """Finds the records of a shard: by their keys, or as they came."""
    if not sizes.rows:
        nothing = np.zeros(0, dtype=np.int64)
        return Shard(np.zeros(0, dtype=np.int32), nothing, nothing, nothing)
    words: Words = np.memmap(path, dtype=np.int32, mode="r")
    starts, keys, label_counts, feature_counts = np.empty((4, sizes.rows), dtype=np.int64)
    view = np.asarray(words)
    found = _find(view, starts, keys, label_counts, feature_counts)
    if len(words) != sizes.words or found != sizes.words:
        raise UserError(f"{path} is damaged; remove its folder and begin anew")
    if is_sorted:
        order = np.argsort(keys.view(np.uint64), kind="stable")
        starts, label_counts, feature_counts = (
            array[order] for array in (starts, label_counts, feature_counts)
        )
    return Shard(view, starts, label_counts, feature_counts)


@jit
def _find(
    words: Words,
    starts: NDArray[np.int64],
    keys: NDArray[np.int64],
    label_counts: NDArray[np.int64],
    feature_counts: NDArray[np.int64],
) -> int:
    """Where the records end; -1: they are not as many, or do not fit."""
    at = np.int64(0)
    for row in range(len(starts)):
        if at + HEAD_WORDS > len(words) or words[at + 2] < 0 or words[at + 3] < 0:
            return -1
        starts[row] = at
        keys[row] = (np.int64(words[at + 1]) << 32) | (np.int64(words[at]) & 0xFFFFFFFF)
        label_counts[row], feature_counts[row] = words[at + 2], words[at + 3]
        at += HEAD_WORDS + label_counts[row] + 2 * feature_counts[row]
    return int(at)


def row_ranges(shard: Shard, num_words: int) -> list[tuple[int, int]]:
    """The rows in consecutive ranges of at most so many words, or of one row."""
    ends = np.cumsum(shard.label_counts + 2 * shard.feature_counts)
    ranges, first, before = [], 0, 0
    while first < len(ends):
        last = int(np.searchsorted(ends, before + num_words, side="right"))
        last = max(last, first + 1)
        ranges.append((first, last))
        first, before = last, int(ends[last - 1])
    return ranges


def gathered(shard: Shard, first: int, last: int) -> tuple[Words, Words, Words]:
    """Label ids, feature ids and values (as words) of a range of rows, one after the other."""
    labels, features = shard.label_counts[first:last], shard.feature_counts[first:last]
    label_ids = np.empty(int(labels.sum()), dtype=np.int32)
    feature_ids, values = np.empty((2, int(features.sum())), dtype=np.int32)
    _gather(shard.words, shard.starts[first:last], labels, features, label_ids, feature_ids, values)
    return label_ids, feature_ids, values


@jit
def _gather(
    words: Words,
    starts: NDArray[np.int64],
    label_counts: NDArray[np.int64],
    feature_counts: NDArray[np.int64],
    label_ids: Words,
    feature_ids: Words,
    values: Words,
) -> None:
    label, feature = 0, 0
    for row in range(len(starts)):
        at = starts[row] + HEAD_WORDS
        for place in range(label_counts[row]):
            label_ids[label + place] = words[at + place]
        at += label_counts[row]
        label += label_counts[row]
        for place in range(feature_counts[row]):
            feature_ids[feature + place] = words[at + place]
            values[feature + place] = words[at + feature_counts[row] + place]
        feature += feature_counts[row]
