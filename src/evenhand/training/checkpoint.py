"""Checkpoints of one process or of many ranks, written as training goes on.

Each is a store (see `evenhand.store`) named step-00001000, which any number of ranks can load.
"""

import contextlib
import json
import re
import shutil
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from evenhand.distributed.ranks import ProcessRanks
from evenhand.errors import UserError
from evenhand.store import (
    DamagedError,
    SavedTensors,
    Table,
    gather_json,
    open_store,
    remove_store,
    replaced_folder,
    save_tensors,
    staging_folder,
)

SECONDS_TO_WAIT = 60.0  # for a save under way when training fails
STEP_NAME = re.compile(r"\.?step-(\d{8,})(?:\.replaced)?")


class Checkpoint(NamedTuple):
    """References to what training changes, not copies."""

    tensors: dict[str, Tensor]  # the same on all ranks
    state: dict[str, Any]  # as JSON
    tables: dict[str, Table] = {}  # split by rows  # noqa: RUF012

    def everything(self) -> dict[str, Tensor]:
        """All tensors by their names, of tables the rows of this process."""
        return self.tensors | {name: table.rows for name, table in self.tables.items()}


# --- saving ---------------------------------------------------------------------------------------


class Keeper:
    """Saves checkpoints into a folder and removes the old ones.

    Saving in the background copies the tensors first, into memory that the next save uses again.
    An error of the background is raised by the next `save` or `wait`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 1,
        keep_best: bool = False,
        is_async: bool = False,
        group: ProcessRanks | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """
        Args:
            keep_best: never removes the checkpoint of `best_step`, if there is one.
            group: the ranks that save together; each makes its keeper and calls it alike.
            timeout: how long a rank waits for the files of another.
        """
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {keep_last}")
        self.folder = folder
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.is_async = is_async
        self.group = group
        self.timeout = timeout
        self.is_first = group is None or group.rank == 0
        self.own_group: ProcessRanks | None = None  # for the background, from the first save
        self.buffers: dict[str, Tensor] = {}
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def save(self, checkpoint: Checkpoint, *, step: int, best_step: int = 0) -> None:
        """Saves, or begins to; first waits for the save before."""
        self.wait()
        if self.group is not None and self.own_group is None:
            ranks = dist.get_process_group_ranks(self.group.process_group)
            self.own_group = ProcessRanks(dist.new_group(ranks, self.timeout, backend="gloo"))
        if not self.is_async:
            self._write(checkpoint, step, best_step)
            self.wait()
            return
        self.thread = threading.Thread(
            target=self._write,
            args=(self._copy(checkpoint), step, best_step),
            name="evenhand checkpoint",
            daemon=True,  # a process that must end does not wait for it
        )
        self.thread.start()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Returns when the last save is on the disk; raises what went wrong there."""
        if self.thread is not None:
            self.thread.join(timeout_seconds)
            if self.thread.is_alive():
                return
        self.thread = None
        error, self.error = self.error, None
        if error is not None:
            raise error

    def clear(self, *, step: int, best_step: int = 0, keeps_later: bool = False) -> None:
        """Removes what a crash left behind, and every checkpoint that is not to be kept.

        Args:
            step: of the newest; those of later steps belong to a course of training given up.
            keeps_later: keeps these too, until the next save.
        """
        if not self.is_first:
            return
        steps = list_steps(self.folder)
        kept = set([other for other in steps if other <= step][-self.keep_last :])
        if self.keep_best:
            kept.add(best_step)
        if keeps_later:
            kept.update(other for other in steps if other > step)
        matches = [STEP_NAME.fullmatch(path.name) for path in self.folder.glob("*")]
        for other in {int(match[1]) for match in matches if match}:
            target = step_folder(self.folder, other)
            if other not in kept:
                remove_store(target)
                continue
            shutil.rmtree(staging_folder(target), ignore_errors=True)
            if target.exists():
                shutil.rmtree(replaced_folder(target), ignore_errors=True)

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits; after an error not for ever, and the first error is the one that is raised."""
        if error is None:
            self.wait()
        elif isinstance(error, Exception):
            with contextlib.suppress(UserError):
                self.wait(SECONDS_TO_WAIT)

    @torch.no_grad()
    def _copy(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint in memory of its own; what all ranks hold alike, on rank 0 alone."""

        def copy(name: str, tensor: Tensor) -> Tensor:
            buffer = self.buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                self.buffers.pop(name, None)  # before its successor is made
                try:
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
                except (MemoryError, RuntimeError) as error:
                    raise UserError(
                        f"there is no memory for a copy of {name}, from which a checkpoint is "
                        f"written in the background; set training.async_checkpoints = false"
                    ) from error
                self.buffers[name] = buffer
            return buffer.copy_(tensor)

        tensors = checkpoint.tensors if self.is_first else {}
        return Checkpoint(
            {name: copy(name, tensor) for name, tensor in tensors.items()},
            json.loads(json.dumps(checkpoint.state)),
            {
                name: table._replace(rows=copy(f"table {name}", table.rows))
                for name, table in checkpoint.tables.items()
            },
        )

    def _write(self, checkpoint: Checkpoint, step: int, best_step: int) -> None:
        """Writes what `wait` will say went well, or raise."""
        tensors, state, tables = checkpoint
        target = step_folder(self.folder, step)
        try:
            save_tensors(target, tensors, tables, state=state, ranks=self.own_group)
            self.clear(step=step, best_step=best_step)
        except BaseException as error:
            self.error = error


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def list_steps(folder: Path) -> list[int]:
    """The steps of all complete checkpoints, ascending."""
    found = set()
    for path in folder.glob("step-*"):
        match = STEP_NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.add(int(match[1]))
    return sorted(found)


# --- loading --------------------------------------------------------------------------------------


def load_latest_checkpoint(
    folder: Path,
    into: Checkpoint | None = None,
    *,
    group: ProcessRanks | None = None,
    check_fn: Callable[[dict[str, Any]], None] | None = None,
    warn_fn: Callable[[str], None] | None = None,
) -> Checkpoint | None:
    """The newest checkpoint that is not damaged, or None where there is none yet.

    Args:
        into: its tables are filled in place; without it, all rows are read into new memory.
        group: the ranks that load together; all load the same one.
        check_fn: is shown the state before a table is touched, and raises where it does not fit.
        warn_fn: is told of every newer one that is damaged, in a sentence each.
    """
    rank, num_ranks = (0, 1) if group is None else (group.rank, group.num_ranks)
    damaged: list[str] = []
    for step in reversed(gather_json(list_steps(folder), group)[0]):
        path = step_folder(folder, step)
        problem = ""
        try:
            saved = open_store(path)
            saved.verify(set(sorted(saved.files)[rank::num_ranks]))  # the ranks share the work
        except DamagedError as error:
            problem = str(error)
        problem = next(filter(None, gather_json(problem, group)), "")
        if problem:
            damaged.append(problem)
            continue
        saved.verified.update(saved.files)
        if warn_fn is not None and rank == 0:
            for sentence in damaged:
                warn_fn(f"{sentence}; {path.name} before it is used instead")
        try:
            if check_fn is not None:
                check_fn(saved.state)
            return _read(saved, into)
        except (DamagedError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path} does not fit this run, or is of another version ({error}); remove it, and "
                f"--resume will use the one before it or begin anew"
            ) from error
    if damaged:
        raise UserError(
            f"{'; '.join(damaged)}: none is left to continue from; remove "
            f"{'that folder' if len(damaged) == 1 else 'those folders'}, and --resume will begin "
            f"anew"
        )
    return None


def _read(saved: SavedTensors, into: Checkpoint | None) -> Checkpoint:
    names = {name for name, entry in saved.entries.items() if entry.is_table}
    tensors = {name: saved.load(name) for name in saved.entries if name not in names}
    if into is None:
        tables = {name: Table(saved.load(name)) for name in names}
        return Checkpoint(tensors, saved.state, tables)
    if names != into.tables.keys():
        raise ValueError(f"it has the tables {sorted(names)}, not {sorted(into.tables)}")
    for name, (rows, first_row, _) in into.tables.items():
        entry = saved.entries[name]
        shape = (into.tables[name].total, *rows.shape[1:])
        if (entry.shape, entry.dtype) != (shape, rows.dtype):
            raise ValueError(
                f"its {name} is {entry.shape} of {entry.dtype}, "
                f"and this run's is {shape} of {rows.dtype}"
            )
        saved.read(name, rows, first_row=first_row)
    return Checkpoint(tensors, saved.state, into.tables)
