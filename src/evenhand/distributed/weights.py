"""The weights of a trained model on disk, by one process or by many, and any rows of them.

One process writes model/weights.safetensors. Of W ranks each writes its own rows, the first one
also what all have alike, and then the first writes the index that names the files:

    model/weights.index.json
    model/shards-3/weights-00001-of-00002.safetensors
    model/shards-3/weights-00002-of-00002.safetensors

Every saving has a folder of its own, and what was there before is removed only after the index
names the new one. So whenever all is killed, one whole model can be read: the old or the new one.
All ranks must see the same folder. Where there is an index, it is what counts.
"""

import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from safetensors import SafetensorError
from torch import Tensor

from evenhand.distributed.ranks import Ranks
from evenhand.distributed.shards import Shards
from evenhand.errors import UserError
from evenhand.files import atomic_path, check_is_file, read_json, sync, write_json
from evenhand.models.encoders import BagEncoder, RowRange
from evenhand.models.retriever import Retriever
from evenhand.models.weights import copy_rows, write_weights

FORMAT_VERSION = 1
_SHARDS = re.compile(r"shards-(\d+)")
_FILE = re.compile(r"weights-\d{5,}-of-\d{5,}\.safetensors")


def index_path(folder: Path) -> Path:
    return folder / "weights.index.json"


def single_path(folder: Path) -> Path:
    return folder / "weights.safetensors"


def has_weights(folder: Path) -> bool:
    return index_path(folder).exists() or single_path(folder).exists()


def split_names(model: Retriever) -> list[str]:
    """The weights that are split by rows; ranks have all others alike."""
    names = ["label_table"]
    if model.label_bias is not None:
        names.append("label_bias")
    if isinstance(model.encoder, BagEncoder):
        names.append("encoder.weight")
    return names


# --- writing --------------------------------------------------------------------------------------


def save_whole(folder: Path, model: Retriever) -> None:
    """One process: one file."""
    with atomic_path(single_path(folder)) as staging:
        write_weights(staging, model.state_dict())
    if index_path(folder).exists():
        index_path(folder).unlink()
        sync(folder)
    _remove(_shard_folders(folder))


def save_split(folder: Path, model: Retriever, ranks: Ranks) -> None:
    """All ranks together; when it returns on one, the model is complete on disk."""
    state, device = model.state_dict(), model.label_table.device
    names = split_names(model)
    counts = torch.tensor([len(state[name]) for name in names], device=device)
    totals = dict(zip(names, ranks.sum_(counts, what="weights").tolist(), strict=True))
    own = _rows_of(totals, ranks.rank, ranks.num_ranks)
    for name, rows in own.items():
        if rows.size != len(state[name]):
            raise ValueError(f"{name} must have {rows.size} rows here, got {len(state[name])}")
    is_first = ranks.rank == 0
    number = torch.zeros(1, dtype=torch.long, device=device)

    def begin() -> None:
        number[0] = _named_number(folder) + 1
        _remove([folder / f"shards-{int(number)}"])  # what a crash may have left
        (folder / f"shards-{int(number)}").mkdir(parents=True)

    def write() -> None:
        kept = names if not is_first else state
        notes = {name: f"rows {first} to {last}" for name, (first, last) in own.items()}
        with atomic_path(shards / _file_name(ranks.rank, ranks.num_ranks)) as staging:
            write_weights(staging, {name: state[name] for name in kept}, notes=notes)

    def finish() -> None:
        sync(folder)
        write_json(index_path(folder), _index(shards.name, state, totals, ranks.num_ranks))
        single_path(folder).unlink(missing_ok=True)
        _remove(other for other in _shard_folders(folder) if other != shards)

    _together(begin if is_first else None, ranks, device=device)
    shards = folder / f"shards-{int(ranks.sum_(number, what='weights'))}"
    _together(write, ranks, device=device)
    _together(finish if is_first else None, ranks, device=device)


def _together(write_fn: Callable[[], None] | None, ranks: Ranks, *, device: torch.device) -> None:
    """Waits for all ranks; what one of them could not write is an error of all."""
    failure: Exception | None = None
    try:
        if write_fn is not None:
            write_fn()
    except (UserError, OSError) as error:
        failure = error
    have_failed = torch.zeros(ranks.num_ranks, device=device)
    have_failed[ranks.rank] = failure is not None
    ranks.sum_(have_failed, what="weights")
    if failure is not None:
        raise failure
    if have_failed.any():
        raise UserError(
            f"rank {int(have_failed.argmax())} could not write its part of the model (see what it "
            f"says); the model that was there before is untouched"
        )


def _rows_of(totals: Mapping[str, int], rank: int, num_ranks: int) -> dict[str, RowRange]:
    return {name: Shards(total, num_ranks).rows_of(rank) for name, total in totals.items()}


def _file_name(rank: int, num_ranks: int) -> str:
    return f"weights-{rank + 1:05d}-of-{num_ranks:05d}.safetensors"


def _index(
    folder_name: str, state: Mapping[str, Tensor], totals: Mapping[str, int], num_ranks: int
) -> dict[str, Any]:
    alike = {name: [0, len(state[name])] for name in state if name not in totals}
    files = []
    for rank in range(num_ranks):
        rows = {name: list(rows) for name, rows in _rows_of(totals, rank, num_ranks).items()}
        files.append(
            {"name": _file_name(rank, num_ranks), "rows": (alike if not rank else {}) | rows}
        )
    return {"version": FORMAT_VERSION, "folder": folder_name, "files": files}


def _named_number(folder: Path) -> int:
    """Of the saving that the index names; 0: there is none that can be read."""
    try:
        found = _SHARDS.fullmatch(str(read_json(index_path(folder))["folder"]))
    except (UserError, KeyError, TypeError):
        found = None
    return int(found[1]) if found else 0


def _shard_folders(folder: Path) -> list[Path]:
    return [path for path in folder.glob("shards-*") if _SHARDS.fullmatch(path.name)]


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)  # litter is better than an error here


# --- reading --------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Some rows of one tensor, in one file."""

    path: Path
    rows: RowRange


class SavedWeights:
    """Any rows of the weights in a folder, however many files they lie in.

    Nothing is read but what is asked for.

    Raises:
        UserError: a file is missing, damaged, or does not hold what the index says.
    """

    def __init__(self, folder: Path) -> None:
        self.path = index_path(folder) if index_path(folder).exists() else single_path(folder)
        self.pieces: dict[str, list[Piece]] = {}  # ascending rows
        found = _indexed(folder) if self.path == index_path(folder) else _alone(self.path)
        for name, piece in found:
            before = self.pieces.setdefault(name, [])
            if piece.rows[0] != (before[-1].rows[1] if before else 0):
                raise UserError(f"{self.path} is damaged (rows of {name} are missing or doubled)")
            before.append(piece)

    def num_rows(self, name: str) -> int:
        return self.pieces[name][-1].rows[1]

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuses weights of other names or numbers of rows; widths are seen when rows are read."""
        if set(shapes) != set(self.pieces):
            held, wanted = ", ".join(sorted(self.pieces)), ", ".join(sorted(shapes))
            raise UserError(self._misfit(f"it holds {held}, not {wanted}"))
        for name, shape in shapes.items():
            if self.num_rows(name) != shape[0]:
                raise UserError(
                    self._misfit(f"{name} has {self.num_rows(name)} rows there, not {shape[0]}")
                )

    def read(self, name: str, target: Tensor, *, first_row: int = 0) -> None:
        """Fills `target`, of any device and type, with rows `first_row` and after."""
        for path, rows in self.pieces[name]:
            first, last = max(first_row, rows[0]), min(first_row + len(target), rows[1])
            if first >= last:
                continue
            try:
                check_is_file(path)
                with safetensors.safe_open(path, framework="pt") as file:
                    found = file.get_slice(name)
                    shape = (rows.size, *target.shape[1:])
                    if tuple(found.get_shape()) != shape:
                        raise UserError(
                            self._misfit(f"{name} is {tuple(found.get_shape())} there, not {shape}")
                        )
                    part = target[first - first_row : last - first_row]
                    copy_rows(found, part, first_row=first - rows[0])
            except OSError as error:
                raise UserError(
                    f"{path} cannot be read ({error.strerror or error}); restore it, or train anew "
                    f"in another --run folder"
                ) from error
            except SafetensorError as error:
                raise UserError(self._misfit(f"{path.name}: {error}")) from error

    def _misfit(self, reason: str) -> str:
        return f"{self.path} does not fit this run's settings and data: {reason}"


def _alone(path: Path) -> Iterable[tuple[str, Piece]]:
    try:
        check_is_file(path)
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                shape = file.get_slice(name).get_shape()
                yield name, Piece(path, RowRange(0, shape[0] if shape else 1))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} does not fit this run's settings and data: {error}") from error


def _indexed(folder: Path) -> Iterable[tuple[str, Piece]]:
    path = index_path(folder)
    index = read_json(path)
    try:
        if index["version"] != FORMAT_VERSION:
            raise UserError(
                f"{path} is of format version {index['version']}, and this version of Evenhand "
                f"reads {FORMAT_VERSION}; read it with the version that wrote it"
            )
        names = [index["folder"], *(file["name"] for file in index["files"])]
        if not _SHARDS.fullmatch(names[0]) or not all(map(_FILE.fullmatch, names[1:])):
            raise ValueError("a name in it is not one of ours")
        pieces = [
            (name, Piece(folder / index["folder"] / file["name"], _range(first, last)))
            for file in index["files"]
            for name, (first, last) in file["rows"].items()
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    return pieces


def _range(first: Any, last: Any) -> RowRange:
    if type(first) is not int or type(last) is not int or not 0 <= first <= last:
        raise ValueError(f"rows {first!r} to {last!r} are no range")
    return RowRange(first, last)
