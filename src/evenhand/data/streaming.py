"""From an Extreme Classification text of any size to a data set, in bounded memory.

Two passes. The first reads the text and spreads its rows over shards (see `spool`); the second
takes one shard after the other, puts its rows in their order and appends them to the arrays of the
data set. What was done so far stands in `journal.json`, which is written when the disk holds it: a
conversion that was killed goes on from there, and ends with the same bytes. The journal, the shards
and the unfinished data set are in a folder beside the one asked for, which appears when it is
complete.

The training rows are stored in a random order, so that training can read them block by block (see
`training.feed`). Validation and test rows stay in the order of their files.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from evenhand.data.dataset import (
    Dataset,
    Part,
    Rows,
    about_dataset,
    array_path,
    arrays_of,
    open_dataset,
)
from evenhand.data.extreme import (
    check_promises,
    check_same_ids,
    read_header,
    read_label_names,
    refuse_fewer_rows,
    refuse_more_rows,
)
from evenhand.data.extreme_lines import Header, parsed_blocks
from evenhand.data.files import placed_blocks, stored_size
from evenhand.data.journal import JOURNAL, Source, open_journal, total_of, write_journal
from evenhand.data.manifest import MANIFEST, write_manifest
from evenhand.data.npy import open_npy
from evenhand.data.parts import check_fractions, part_of
from evenhand.data.scans import counted
from evenhand.data.spool import (
    WORD_BYTES,
    Pending,
    Sizes,
    gathered,
    keys_of,
    open_shard,
    row_ranges,
    shards_of,
)
from evenhand.errors import UserError
from evenhand.files import sync
from evenhand.locking import locked

ProgressFn = Callable[[str, int, int | None], None]  # what is done, bytes done, bytes in all

DEFAULT_MEMORY = 2**29
LEAST_MEMORY = 2**20
PENDING_SHARE, SHARD_SHARE, CHUNK_SHARE = 1 / 4, 1 / 4, 1 / 16  # of the memory
MOST_SHARDS = 4096
JOURNAL_BYTES = 2**30  # read between two entries: what a kill can cost
SAMPLE_BYTES = 2**22  # of the text, to tell how long its rows are
BLOCK_BYTES = 2**22  # of the training part, read at once
ARRAYS: dict[str, np.dtype[Any]] = {  # of a part
    "positives.offsets": np.dtype("<i8"),
    "positives.ids": np.dtype("<i4"),
    "features.offsets": np.dtype("<i8"),
    "features.ids": np.dtype("<i4"),
    "features.values": np.dtype("<f4"),
}


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
    progress_fn: ProgressFn | None = None,
) -> Dataset:
    """Converts text files to a data set in a new folder; called again, it goes on where it was.

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
    staging = folder.with_name(f".{folder.name}.streaming")
    if folder.exists() and not (staging / "journal.json").is_file():
        raise UserError(f"{folder} exists already; choose another folder or remove it first")
    settings = {
        "train": str(train_path.resolve()),
        "test": None if test_path is None else str(test_path.resolve()),
        "validation_fraction": validation_fraction,
        "validation_block": validation_block,
        "seed": seed,
    }
    try:
        with locked(staging):
            if not folder.exists():  # else it was killed while it cleaned up
                try:
                    work = _Conversion(staging, settings, memory_bytes, progress_fn)
                    work.read("train", train_path)
                    work.check_header(train_path)
                    if test_path is not None:
                        work.read("test", test_path)
                    work.write()
                    work.finish(folder, name, label_names_path)
                except UserError:
                    if not (staging / JOURNAL).exists():  # nothing to go on from
                        shutil.rmtree(staging, ignore_errors=True)
                    raise
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"{folder} could not be written ({error.strerror or error}); make room or mend it, "
            f"then run the same command: it goes on where it was"
        ) from error
    return open_dataset(folder)


class _Conversion:
    """The work in a staging folder, from wherever the journal says it is."""

    def __init__(
        self,
        staging: Path,
        settings: dict[str, Any],
        memory_bytes: int,
        progress_fn: ProgressFn | None,
    ) -> None:
        self.staging = staging
        self.memory_bytes = memory_bytes
        self.progress_fn = progress_fn or (lambda what, done, total: None)
        self.journal = open_journal(staging, settings)
        for name in ("spool", "whole"):
            (staging / name).mkdir(exist_ok=True)

    def _note(self) -> None:
        write_journal(self.staging, self.journal)

    # --- the first pass ---

    def read(self, source: str, path: Path) -> None:
        """Spreads the rows of a text over the shards of its part or parts."""
        journal = self.journal
        state = journal.sources.setdefault(source, Source())
        if state.is_read:
            return
        facts = {"bytes": stored_size(path), "header": list(read_header(path))}
        if journal.settings.setdefault(f"{source} file", facts) != facts:
            raise UserError(
                f"{path} has changed since its conversion began; remove {self.staging} to begin "
                f"anew"
            )
        header = Header(*facts["header"])  # type: ignore[misc]
        if source == "test":
            train_header = Header(*journal.settings["train file"]["header"])
            check_same_ids(Path(journal.settings["train"]), train_header, path, header)
        if source == "train" and not journal.num_shards:
            journal.num_shards = self._num_shards(path, header)
        num_shards = journal.num_shards if source == "train" else 0
        self._spread(path, header, state, num_shards)

    def _num_shards(self, path: Path, header: Header) -> int:
        """So many that a shard fits its share of the memory, if all rows are like the first."""
        words, rows = 0, 0
        for block in placed_blocks(path, block_bytes=SAMPLE_BYTES):
            text = block.text.partition(b"\n")[2]
            for parsed in parsed_blocks(text, header, path=path, first_line=2):
                rows += len(parsed.label_counts)
                words += len(parsed.label_ids) + 2 * len(parsed.feature_ids)
            break
        num_bytes = WORD_BYTES * header.num_rows * (4 + words / max(1, rows))
        return int(np.clip(np.ceil(num_bytes / (SHARD_SHARE * self.memory_bytes)), 1, MOST_SHARDS))

    def _spread(self, path: Path, header: Header, state: Source, num_shards: int) -> None:
        """Shards of `num_shards` and one more, for rows that stay in the order of the file."""
        journal, total = self.journal, stored_size(path)
        kept = "validation" if num_shards else "test"
        for part, count in (("train", num_shards), (kept, 1)):
            if count:
                journal.shards.setdefault(part, [Sizes()] * count)
        names = [("train", index) for index in range(num_shards)] + [(kept, 0)]
        paths = [self._shard_path(*name) for name in names]
        for (part, index), shard_path in zip(names, paths, strict=True):
            with open(shard_path, "ab") as file:  # what came after the last entry is forgotten
                file.truncate(WORD_BYTES * journal.shards[part][index].words)
        pending = Pending(int(PENDING_SHARE * self.memory_bytes), num_shards=len(names))
        unnoted = [Sizes()] * len(names)

        def flush() -> None:
            for index, sizes in enumerate(pending.write(paths)):
                unnoted[index] = unnoted[index].plus(sizes)

        def note() -> None:
            flush()
            for index, (part, shard) in enumerate(names):
                if unnoted[index].rows:
                    sync(paths[index])
                    journal.shards[part][shard] = journal.shards[part][shard].plus(unnoted[index])
                    unnoted[index] = Sizes()
            self._note()

        noted_at = state.end
        for block in placed_blocks(path, start=state.end, first_line=state.line):
            text, line = block.text, block.first_line
            if line == 1:
                text, line = text.partition(b"\n")[2], 2
            for parsed in parsed_blocks(text, header, path=path, first_line=line):
                count = len(parsed.label_counts)
                if not count:
                    continue
                keys, shards = self._keys_and_shards(state.rows, count, num_shards)
                if not pending.fits(parsed):
                    flush()
                pending.add(parsed, keys, shards)
                state.rows += count
            refuse_more_rows(path, header, state.rows)
            state.end, state.line = block.end, state.rows + 2
            self.progress_fn(f"reading {path.name}", block.stored_end, total)
            if state.end - noted_at >= JOURNAL_BYTES:
                note()
                noted_at = state.end
        refuse_fewer_rows(path, header, state.rows)
        state.is_read = True
        note()

    def _keys_and_shards(
        self, first_row: int, count: int, num_shards: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        row_ids = np.arange(first_row, first_row + count)
        if not num_shards:
            return np.zeros(count, dtype=np.uint64), np.zeros(count, dtype=np.int64)
        settings = self.journal.settings
        keys = keys_of(row_ids.astype(np.uint64), settings["seed"])
        shards = shards_of(keys, num_shards)
        if settings["validation_fraction"]:
            blocks, places = np.unique(row_ids // settings["validation_block"], return_inverse=True)
            is_validation = _are_validation(blocks, settings["validation_fraction"])[places]
            shards = np.where(is_validation, num_shards, shards)
        return keys, shards

    def _shard_path(self, part: str, index: int) -> Path:
        return self.staging / "spool" / f"{part}-{index:04d}.rows"

    def check_header(self, path: Path) -> None:
        journal = self.journal
        seen = total_of([*journal.shards["train"], *journal.shards["validation"]])
        header = Header(*journal.settings["train file"]["header"])
        try:
            check_promises(path, header, seen.labels, seen.features)
        except UserError:
            (self.staging / JOURNAL).unlink()  # with another header all begins anew
            raise

    # --- the second pass ---

    def write(self) -> None:
        journal = self.journal
        if not total_of(journal.shards["train"]).rows:
            raise UserError(
                "no row is left to train on; use a smaller validation fraction or validation block"
            )
        total = WORD_BYTES * sum(total_of(shards).words for shards in journal.shards.values())
        done = 0
        for part in journal.parts():
            shards = journal.shards[part]
            for index in range(len(shards)):
                if index >= journal.num_written.get(part, 0):
                    self._write_shard(part, index)
                    journal.num_written[part] = index + 1
                    self._note()
                self._shard_path(part, index).unlink(missing_ok=True)
                done += WORD_BYTES * shards[index].words
                self.progress_fn("shuffling" if part == "train" else part, done, total)

    def _write_shard(self, part: str, index: int) -> None:
        """Appends the rows of a shard to the arrays of its part."""
        shards, path = self.journal.shards[part], self._shard_path(part, index)
        before, total = total_of(shards[:index]), total_of(shards)
        lengths = [total.rows + 1, total.labels, total.rows + 1, total.features, total.features]
        with contextlib.ExitStack() as stack:
            files = {
                name: stack.enter_context(_ArrayFile(self._array_path(part, name), dtype, length))
                for (name, dtype), length in zip(ARRAYS.items(), lengths, strict=True)
            }
            if not index:
                for name in ("positives.offsets", "features.offsets"):
                    files[name].write(0, np.zeros(1, dtype=np.int64))
            _fetch(path)
            shard = open_shard(path, shards[index], is_sorted=part == "train")
            chunk_words = max(1, int(CHUNK_SHARE * self.memory_bytes) // WORD_BYTES)
            for first, last in row_ranges(shard, chunk_words):
                label_ids, feature_ids, values = gathered(shard, first, last)
                label_ends = before.labels + np.cumsum(shard.label_counts[first:last])
                feature_ends = before.features + np.cumsum(shard.feature_counts[first:last])
                files["positives.offsets"].write(before.rows + 1, label_ends)
                files["positives.ids"].write(before.labels, label_ids)
                files["features.offsets"].write(before.rows + 1, feature_ends)
                files["features.ids"].write(before.features, feature_ids)
                files["features.values"].write(before.features, values.view(np.float32))
                before = before.plus(Sizes(0, last - first, len(label_ids), len(feature_ids)))

    def _array_path(self, part: str, name: str) -> Path:
        return array_path(self.staging / "whole", f"{part}.{name}")

    # --- the end ---

    def finish(self, folder: Path, name: str, label_names_path: Path | None) -> None:
        """What is known of the whole, the checksums, and last the name it was asked for."""
        whole, journal = self.staging / "whole", self.journal
        header = Header(*journal.settings["train file"]["header"])
        parts = {}
        for part in (p for p in ("train", "validation", "test") if p in journal.parts()):
            arrays = [open_npy(self._array_path(part, array), is_empty=empty)
                      for array, empty in self._emptiness(part)]  # fmt: skip
            parts[part] = Part(Rows(*arrays[2:]), Rows(*arrays[:2]))
        train = total_of(journal.shards["train"])
        parts["train"] = dataclasses.replace(parts["train"], block_pairs=_block_pairs(train))
        dataset = Dataset(
            name=name,
            num_features=header.num_features,
            num_labels=header.num_labels,
            parts=parts,
            label_names=read_label_names(label_names_path, header.num_labels),
            train_counts=counted(parts["train"].positives.ids, header.num_labels),
            is_finite=True,  # the parser lets nothing else pass
        )
        arrays_by_name = arrays_of(dataset)
        for array_name, array in arrays_by_name.items():
            path = array_path(whole, array_name)
            if array_name.startswith("labels."):
                with open(path, "wb") as file:
                    np.save(file, array, allow_pickle=False)
        about = json.dumps(about_dataset(dataset, arrays_by_name), ensure_ascii=False, indent=1)
        paths = [array_path(whole, array_name) for array_name in arrays_by_name]
        write_manifest(whole / MANIFEST, paths, progress_fn=self.progress_fn)
        with open(whole / "dataset.json", "w", encoding="utf-8") as file:
            file.write(about)
        for path in whole.iterdir():
            sync(path)
        sync(whole)
        os.rename(whole, folder)
        sync(folder.parent)

    def _emptiness(self, part: str) -> list[tuple[str, bool]]:
        """The arrays of a part, and whether each is empty: then it cannot be memory-mapped."""
        total = total_of(self.journal.shards[part])
        sizes = {"positives.ids": total.labels, "features.ids": total.features}
        sizes["features.values"] = total.features
        return [(name, not sizes.get(name, 1)) for name in ARRAYS]


class _ArrayFile:
    """A .npy file of known length that is filled piece by piece."""

    def __init__(self, path: Path, dtype: np.dtype[Any], length: int) -> None:
        self.file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115
        self.dtype = dtype
        about = {"descr": dtype.str, "fortran_order": False, "shape": (length,)}
        npy_format.write_array_header_1_0(self.file, about)
        self.start = self.file.tell()

    def write(self, first: int, array: NDArray[Any]) -> None:
        self.file.seek(self.start + first * self.dtype.itemsize)
        self.file.write(np.ascontiguousarray(array, dtype=self.dtype).data)

    def __enter__(self) -> "_ArrayFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


def _are_validation(blocks: NDArray[np.int64], fraction: float) -> NDArray[np.bool_]:
    """What `part_of` says of each block, in a third of the time: (n,) -> (n,)."""
    digests = [
        hashlib.md5(b"%d" % block, usedforsecurity=False).digest()[:8] for block in blocks.tolist()
    ]
    positions = np.frombuffer(b"".join(digests), dtype=">u8") / 2**64
    sides = positions < fraction
    for place in np.flatnonzero(abs(positions - fraction) < 1e-12):  # not certain by 8 bytes
        part = part_of(str(blocks[place]), test_fraction=0.0, validation_fraction=fraction)
        sides[place] = part == "validation"
    return sides


def _block_pairs(train: Sizes) -> int:
    """Pairs of about `BLOCK_BYTES`."""
    return max(1, int(BLOCK_BYTES * train.labels / (WORD_BYTES * max(1, train.words))))


def _fetch(path: Path) -> None:
    """Asks for a file to be read ahead: its records are wanted in another order."""
    if path.exists() and hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
