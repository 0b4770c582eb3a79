"""From an Extreme Classification text of any size to a data set, in bounded memory.

Two passes. The first reads the text and spreads the training rows over shards: every row has a
key, 64 bits that are a hash of a seed and of its number, and a shard is a file that takes the rows
whose keys are in its range, as they come. The second takes one shard after the other, sorts its
rows by their keys and appends them to the arrays of the data set. So the training rows are stored
in a random order, and training can read them block by block (see `training.feed`). Validation and
test rows stay in the order of their files, and are appended as they are read.

The folder gets its name when it is complete. A conversion that was killed begins anew.
"""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.data.csr import Rows, RowsWriter, collect_rows, count_ids, take_rows
from evenhand.data.dataset import Dataset, Part, open_dataset, write_dataset
from evenhand.data.extreme import (
    Documents,
    Header,
    check_promises,
    check_same_ids,
    read_documents,
    read_header,
    read_label_names,
)
from evenhand.data.splits import PARTS, check_fractions, choose_validation_rows
from evenhand.errors import UserError
from evenhand.files import ProgressFn, atomic_folder, open_input
from evenhand.kernels.random import GOLDEN64, mix64

DEFAULT_MEMORY = 2**29
LEAST_MEMORY = 2**20
SHARE = 1 / 8  # of the memory: rows that wait, and a shard; either is copied while it is sorted
MOST_SHARDS = 4096
SAMPLE_BYTES = 2**22  # of the first rows, to tell how long all are
BLOCK_BYTES = 2**22  # of the training part, read at once


def stream_extreme(
    train_path: Path,
    folder: Path,
    *,
    name: str,
    test_path: Path | None = None,
    label_names_path: Path | None = None,
    validation_fraction: float = 0.1,
    validation_block: int = 1,
    seed: int = 0,
    memory_bytes: int = DEFAULT_MEMORY,
    progress_fn: ProgressFn = lambda what, done, total: None,
) -> Dataset:
    """Converts text files to a data set in a new folder, all of it or nothing.

    The rows, and which of them are for validation, are those of `load_extreme`; those of the
    training part are in a random order.

    Args:
        seed: of that order.
        memory_bytes: about the most that is held; the result does not depend on it.
        progress_fn: called with what is being done, the bytes done and, if known, those in all.
    """
    check_fractions(validation_fraction=validation_fraction, validation_block=validation_block)
    if memory_bytes < LEAST_MEMORY:
        raise UserError(f"memory must be at least {LEAST_MEMORY} bytes, got {memory_bytes}")
    if folder.exists():
        raise UserError(f"{folder} exists already; choose another folder or remove it first")
    header = read_header(train_path)
    if test_path is not None:
        test_header = read_header(test_path)
        check_same_ids(train_path, header, test_path, test_header)
    label_names = read_label_names(label_names_path, header.num_labels)
    with atomic_folder(folder) as staging:
        shards = _Shards(staging / "shards", train_path, header, int(SHARE * memory_bytes))
        writers = {
            part: [RowsWriter(staging, f"{part}.{kind}") for kind in Documents._fields]
            for part in PARTS
        }

        def append(part: str, block: Documents) -> None:
            if len(block.positives):
                for writer, rows in zip(writers[part], block, strict=True):
                    writer.append(rows)

        num_rows = 0
        for block in read_documents(train_path, header, progress_fn=progress_fn):
            row_ids = np.arange(num_rows, num_rows + len(block.positives))
            num_rows += len(row_ids)
            is_validation = choose_validation_rows(
                row_ids, fraction=validation_fraction, block=validation_block
            )
            append("validation", _take(block, np.flatnonzero(is_validation)))
            is_train = np.flatnonzero(~is_validation)
            shards.add(_take(block, is_train), row_keys(row_ids[is_train], seed))
        for block in shards.sorted_blocks(progress_fn):
            append("train", block)
        if test_path is not None:
            for block in read_documents(test_path, test_header, progress_fn=progress_fn):
                append("test", block)
        parts = {
            part: Part(features=features.finish(), positives=positives.finish())
            for part, (positives, features) in writers.items()
            if positives.arrays
        }
        if "train" not in parts:
            raise UserError(
                "no row is left to train on; use a smaller validation fraction or validation block"
            )
        (num_pairs, num_values), (more_pairs, more_values) = (
            [writer.num_ids for writer in writers[part]] for part in ("train", "validation")
        )
        check_promises(train_path, header, num_pairs + more_pairs, num_values + more_values)
        train = parts["train"]
        num_bytes = 4 * (4 * len(train) + num_pairs + 2 * num_values)
        block_pairs = max(1, int(BLOCK_BYTES * num_pairs / num_bytes))
        parts["train"] = dataclasses.replace(train, block_pairs=block_pairs)
        dataset = Dataset(
            name=name,
            num_features=header.num_features,
            num_labels=header.num_labels,
            parts=parts,
            label_names=label_names,
            train_counts=count_ids(train.positives.ids, header.num_labels),
            is_finite=True,  # the parser lets nothing else pass
        )
        write_dataset(dataset, staging)
    return open_dataset(folder)


def _take(block: Documents, row_ids: NDArray[np.intp]) -> Documents:
    return Documents(take_rows(block.positives, row_ids), take_rows(block.features, row_ids))


# --- the order of training rows -------------------------------------------------------------------


def row_keys(row_ids: NDArray[np.int64], seed: int) -> NDArray[np.uint64]:
    """A random number for each row, as SplitMix64 makes them: different for different rows.

    Example:
        >>> row_keys(np.arange(2), 0)
        array([16294208416658607535,  7960286522194355700], dtype=uint64)
    """
    start = seed % 2**64
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):  # far apart for neighbouring seeds
        start = ((start ^ (start >> 33)) * multiplier) % 2**64
    start ^= start >> 33
    return mix64((row_ids.astype(np.uint64) + np.uint64(1)) * GOLDEN64 + np.uint64(start))


def choose_shards(keys: NDArray[np.uint64], num_shards: int) -> NDArray[np.int64]:
    """The shard of each key: equal ranges, in the order of the keys."""
    high = keys >> np.uint64(32)
    return ((high * np.uint64(num_shards)) >> np.uint64(32)).astype(np.int64)


class _Shards:
    """A bucket sort of rows by their keys, on disk.

    Args:
        num_bytes: about what is held in memory of rows that wait, and what a shard takes there.
    """

    def __init__(self, folder: Path, path: Path, header: Header, num_bytes: int) -> None:
        folder.mkdir()
        rows = size = 0
        for block in read_documents(path, header):  # all are as long, about
            rows, size = rows + len(block.positives), size + _num_bytes(block)
            if size >= SAMPLE_BYTES:
                break
        expected = header.num_rows * size / max(1, rows)
        num_shards = int(np.clip(np.ceil(expected / num_bytes), 1, MOST_SHARDS))
        self.folder, self.num_bytes = folder, num_bytes
        self.paths = [folder / f"{shard:04d}.rows" for shard in range(num_shards)]
        self.waiting: list[tuple[NDArray[np.uint64], Documents]] = []  # keys and rows
        self.num_waiting = 0  # bytes

    def add(self, block: Documents, keys: NDArray[np.uint64]) -> None:
        self.waiting.append((keys, block))
        self.num_waiting += _num_bytes(block)
        if self.num_waiting > self.num_bytes:
            self._write()

    def _write(self) -> None:
        """Appends the rows that wait to the files of their shards."""
        keys, rows = _join(self.waiting)
        self.waiting, self.num_waiting = [], 0
        shard_ids = choose_shards(keys, len(self.paths))
        order = np.argsort(shard_ids, kind="stable")
        ends = np.cumsum(np.bincount(shard_ids, minlength=len(self.paths)))
        for path, row_ids in zip(self.paths, np.split(order, ends[:-1]), strict=True):
            if len(row_ids):
                positives, features = _take(rows, row_ids)
                with open(path, "ab") as file:
                    for array in (keys[row_ids], *positives[:2], *features):
                        np.save(file, np.asarray(array), allow_pickle=False)

    def sorted_blocks(self, progress_fn: ProgressFn) -> Iterator[Documents]:
        """All rows in the order of their keys, shard by shard; the files are removed on the way."""
        if self.waiting:
            self._write()
        paths = [path for path in self.paths if path.exists()]
        total, done = sum(path.stat().st_size for path in paths), 0
        for path in paths:
            segments: list[tuple[NDArray[Any], Documents]] = []
            size = path.stat().st_size
            with open_input(path) as file:
                while file.tell() < size:
                    keys, *arrays = (np.load(file, allow_pickle=False) for _ in range(6))
                    segments.append((keys, Documents(Rows(*arrays[:2]), Rows(*arrays[2:]))))
            path.unlink()
            keys, rows = _join(segments)
            yield _take(rows, np.argsort(keys, kind="stable"))
            done += size
            progress_fn("shuffling", done, total)
        shutil.rmtree(self.folder)


def _join(segments: list[tuple[NDArray[Any], Documents]]) -> tuple[NDArray[Any], Documents]:
    keys, blocks = zip(*segments, strict=True)
    return np.concatenate(keys), Documents(*map(collect_rows, zip(*blocks, strict=True)))


def _num_bytes(block: Documents) -> int:
    """What the arrays of a block take, with the keys of its rows."""
    return 24 * len(block.positives) + 4 * len(block.positives.ids) + 8 * len(block.features.ids)
