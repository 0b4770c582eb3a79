"""Checkpoints of one process or many ranks: which are kept, and which is loaded.

Each is a store (see `evenhand.tensor_store`) called step-00001000; any number of ranks can load it.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from evenhand.distributed.ranks import Ranks
from evenhand.errors import UserError
from evenhand.tensor_store import (
    DamagedError,
    SavedTensors,
    Table,
    gather_json,
    open_store,
    remove_leftovers,
    remove_store,
    save_tensors,
)

STEP_NAME = re.compile(r"(\.?)step-(\d{8,})(?:\.replaced)?")


class Checkpoint(NamedTuple):
    """References to what training changes, not copies."""

    tensors: dict[str, Tensor]  # the same on all ranks
    state: dict[str, Any]  # as JSON
    tables: dict[str, Table] = {}  # split by rows  # noqa: RUF012

    def everything(self) -> dict[str, Tensor]:
        """All tensors by their names, of tables the rows of this process."""
        return self.tensors | {name: table.rows for name, table in self.tables.items()}


class CheckpointManager:
    """Saves checkpoints into a folder and removes the old ones."""

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 1,
        keep_best: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """
        Args:
            keep_best: never removes the checkpoint of `best_step`, if there is one.
            ranks: those that save together; each makes its manager and calls it alike.
        """
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {keep_last}")
        self.folder, self.ranks = folder, ranks
        self.keep_last, self.keep_best = keep_last, keep_best

    def save(self, checkpoint: Checkpoint, *, step: int, best_step: int = 0) -> None:
        """Saves; when it returns, the checkpoint is on the disk."""
        tensors, state, tables = checkpoint
        target = step_folder(self.folder, step)
        save_tensors(target, tensors, tables, state=state, ranks=self.ranks)
        self.clear(step=step, best_step=best_step)

    def clear(self, *, step: int, best_step: int = 0, keeps_later: bool = False) -> None:
        """Removes what a crash left behind, and every checkpoint that is not to be kept.

        Args:
            step: of the newest; those of later steps belong to a course of training given up.
            keeps_later: keeps these too, until the next save.
        """
        if self.ranks is not None and self.ranks.rank > 0:
            return
        steps = list_steps(self.folder)
        kept = set([other for other in steps if other <= step][-self.keep_last :])
        if self.keep_best:
            kept.add(best_step)
        if keeps_later:
            kept.update(other for other in steps if other > step)
        for other in list_steps(self.folder, with_staging=True):
            remove_fn = remove_leftovers if other in kept else remove_store
            remove_fn(step_folder(self.folder, other))


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def list_steps(folder: Path, *, with_staging: bool = False) -> list[int]:
    """The steps of all complete checkpoints, or with those in the making too, ascending."""
    matches = [STEP_NAME.fullmatch(path.name) for path in folder.glob("*") if path.is_dir()]
    return sorted({int(match[2]) for match in matches if match and (with_staging or not match[1])})


def load_latest_checkpoint(
    folder: Path,
    into: Checkpoint | None = None,
    *,
    ranks: Ranks | None = None,
    check_fn: Callable[[dict[str, Any]], None] = lambda state: None,
    warn_fn: Callable[[str], None] = lambda sentence: None,
) -> Checkpoint | None:
    """The newest checkpoint that is not damaged, or None where there is none yet.

    Args:
        into: its tables are filled in place; without it, all rows are read into new memory.
        ranks: those that load together; all load the same one.
        check_fn: is shown the state before a table is touched, and raises where it does not fit.
        warn_fn: is told of every newer one that is damaged, in a sentence each, on rank 0.
    """
    rank, num_ranks = (0, 1) if ranks is None else (ranks.rank, ranks.num_ranks)
    damaged: list[str] = []
    for step in reversed(gather_json(list_steps(folder), ranks)[0]):
        path, problem = step_folder(folder, step), ""
        try:
            saved = open_store(path)
            saved.verify(set(sorted(saved.files)[rank::num_ranks]))  # the ranks share the work
        except DamagedError as error:
            problem = str(error)
        if problems := list(filter(None, gather_json(problem, ranks))):
            damaged.append(problems[0])
            continue
        saved.verified.update(saved.files)
        for sentence in damaged if rank == 0 else ():
            warn_fn(f"{sentence}; {path.name} before it is used instead")
        try:
            check_fn(saved.state)
            return _read(saved, into)
        except (DamagedError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path} does not fit this run, or is of another version ({error}); remove it, and "
                f"--resume will use the one before it or begin anew"
            ) from error
    if damaged:
        raise UserError(
            f"{'; '.join(damaged)}: none is left to continue from; remove what is damaged, and "
            f"--resume will begin anew"
        )
    return None


def _read(saved: SavedTensors, into: Checkpoint | None) -> Checkpoint:
    names = {name for name, entry in saved.entries.items() if entry.is_table}
    tensors = {name: saved.load(name) for name in saved.entries if name not in names}
    if into is None:
        return Checkpoint(tensors, saved.state, {name: Table(saved.load(name)) for name in names})
    if names != into.tables.keys():
        raise ValueError(f"it has the tables {sorted(names)}, not {sorted(into.tables)}")
    for name, table in into.tables.items():
        entry, dtype = saved.entries[name], table.rows.dtype
        if (entry.shape, entry.dtype) != (table.shape, dtype):
            raise ValueError(
                f"its {name} is {entry.shape} of {entry.dtype}, "
                f"and this run's is {table.shape} of {dtype}"
            )
        saved.read(name, table.rows, first_row=table.first_row)
    return Checkpoint(tensors, saved.state, into.tables)
