"""Checkpoints of one process or of many ranks: written whole or not at all, as training goes on.

A checkpoint can be loaded by any number of ranks. The files are told in checkpoint_files.
"""

import contextlib
import json
import shutil
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from evenhand.errors import UserError
from evenhand.files import parse_json, read_text, sync
from evenhand.training.checkpoint_files import (
    STATE,
    TABLES,
    TENSORS,
    Group,
    Table,
    about_file,
    complete,
    gathered,
    move_into_place,
    problem_of,
    remove_others,
    staging_of,
    step_folder,
    write_manifest,
)

SECONDS_TO_WAIT = 60.0  # for a save under way when training fails
Files = dict[str, dict[str, Any]]


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
        group: Group | None = None,
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
        self.rank = 0 if group is None else group.rank
        self.process_group: dist.ProcessGroup | None = None  # its own, from the first save
        self.buffers: dict[str, Tensor] = {}
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def save(self, checkpoint: Checkpoint, *, step: int, best_step: int = 0) -> None:
        """Saves, or begins to; first waits for the save before."""
        import evenhand.training.checkpoint_tables  # noqa: F401 (slow, and not in the background)

        self.wait()
        if self.group is not None and self.process_group is None:
            ranks = dist.get_process_group_ranks(self.group.process_group)
            self.process_group = dist.new_group(ranks, self.timeout, backend="gloo")
        if not self.is_async:
            self._write(checkpoint, step, best_step)
            return
        staged = self._staged(checkpoint)
        self.thread = threading.Thread(
            target=self._write_in_background,
            args=(staged, step, best_step),
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
        """Removes what a crash left behind, and every checkpoint that is not to be kept."""
        if self.rank == 0:
            remove_others(
                self.folder,
                newest_step=step,
                keep_last=self.keep_last,
                best_step=best_step if self.keep_best else step,
                keeps_later=keeps_later,
            )

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits; after an error not for ever, and the first error is the one that is told."""
        if error is None:
            self.wait()
        elif isinstance(error, Exception):
            with contextlib.suppress(UserError):
                self.wait(SECONDS_TO_WAIT)

    @torch.no_grad()
    def _staged(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint in memory of its own; what all ranks hold alike, on rank 0 alone."""
        tables = {
            name: table._replace(rows=self._copied(f"table {name}", table.rows))
            for name, table in checkpoint.tables.items()
        }
        tensors = {
            name: self._copied(name, tensor)
            for name, tensor in checkpoint.tensors.items()
            if self.rank == 0
        }
        return Checkpoint(tensors, json.loads(json.dumps(checkpoint.state)), tables)

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self.buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            self.buffers.pop(name, None)  # before its successor is made
            try:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
            except (MemoryError, RuntimeError) as error:
                raise UserError(
                    f"there is no memory for a copy of {name}, from which a checkpoint is written "
                    f"in the background; set training.async_checkpoints = false"
                ) from error
            self.buffers[name] = buffer
        return buffer.copy_(tensor)

    def _write_in_background(self, checkpoint: Checkpoint, step: int, best_step: int) -> None:
        try:
            self._write(checkpoint, step, best_step)
        except BaseException as error:
            self.error = error

    def _write(self, checkpoint: Checkpoint, step: int, best_step: int) -> None:
        """All ranks: an empty folder, the files of each, then the manifest and the name."""
        from evenhand.training.checkpoint_tables import write_tables

        target = step_folder(self.folder, step)
        staging = staging_of(target)

        def begin() -> Files:
            if self.rank == 0:
                shutil.rmtree(staging, ignore_errors=True)  # what a crash may have left
                (staging / TABLES).mkdir(parents=True)
            return {}

        def write() -> Files:
            files = write_tables(staging / TABLES, checkpoint.tables, rank=self.rank)
            if self.rank == 0:
                files |= _write_common(staging, checkpoint)
            return files

        def finish() -> Files:
            if self.rank == 0:
                write_manifest(staging, files)
                move_into_place(staging, target)
            return {}

        try:
            self._together(begin)
            files = self._together(write)
            self._together(finish)
        except _NotWrittenError as error:
            if self.rank == 0:
                shutil.rmtree(staging, ignore_errors=True)
            raise UserError(
                f"{target} could not be written ({error}); the checkpoint before it is untouched: "
                f"free some space, then continue with --resume"
            ) from error
        self.clear(step=step, best_step=best_step)

    def _together(self, part_fn: Callable[[], Files]) -> Files:
        """Each rank does its part; all know what was written, or that one of them failed."""
        files, cause = Files(), None
        try:
            files = part_fn()
        except Exception as error:  # also what is no OSError: the other ranks wait to be told
            cause = error
        said = "" if cause is None else str(cause) or type(cause).__name__
        try:
            reports = gathered({"problem": said, "files": files}, self.process_group)
        except RuntimeError as error:
            raise _NotWrittenError(f"a rank was lost: {error}") from error
        for rank, report in enumerate(reports):
            if report["problem"]:
                where = f"rank {rank}: " if len(reports) > 1 else ""
                raise _NotWrittenError(where + report["problem"]) from cause
        return {name: about for report in reports for name, about in report["files"].items()}


class _NotWrittenError(Exception):
    pass


def save_checkpoint(folder: Path, checkpoint: Checkpoint, *, step: int) -> None:
    """Writes folder/step-N and then removes the others."""
    Keeper(folder).save(checkpoint, step=step)


def _write_common(folder: Path, checkpoint: Checkpoint) -> Files:
    tensors = {
        name: tensor.detach().contiguous().cpu() for name, tensor in checkpoint.tensors.items()
    }
    safetensors.torch.save_file(tensors, folder / TENSORS)
    (folder / STATE).write_text(json.dumps(checkpoint.state), encoding="utf-8")
    for name in (TENSORS, STATE):
        sync(folder / name)
    return {name: about_file(folder / name) for name in (TENSORS, STATE)}


# --- loading --------------------------------------------------------------------------------------


def load_latest_checkpoint(
    folder: Path,
    into: Checkpoint | None = None,
    *,
    group: Group | None = None,
    check_fn: Callable[[dict[str, Any]], None] | None = None,
    warn_fn: Callable[[str], None] | None = None,
) -> Checkpoint | None:
    """The newest checkpoint that is sound, or None where there is none yet.

    Args:
        into: its tables are filled in place; without it, all rows are read into new memory.
        group: the ranks that load together; all load the same one.
        check_fn: is shown the state before a table is touched, and raises where it does not fit.
        warn_fn: is told of every newer one that is damaged, in a sentence each.
    """
    process_group = None if group is None else group.process_group
    rank, num_ranks = (0, 1) if group is None else (group.rank, group.num_ranks)
    names = gathered([path.name for _, path in complete(folder)], process_group)[0]
    damaged: list[str] = []
    for name in reversed(names):
        path = folder / name
        found = gathered(problem_of(path, part=rank, num_parts=num_ranks), process_group)
        problem = next(filter(None, found), "")
        if problem:
            damaged.append(f"{path} is damaged ({problem})")
            continue
        if warn_fn is not None and rank == 0:
            for sentence in damaged:
                warn_fn(f"{sentence}; {path.name} before it is used instead")
        return _read(path, into, check_fn)
    if damaged:
        raise UserError(
            f"{'; '.join(damaged)}: none is left to continue from; remove "
            f"{'that folder' if len(damaged) == 1 else 'those folders'}, and --resume will begin "
            f"anew"
        )
    return None


def _read(
    path: Path, into: Checkpoint | None, check_fn: Callable[[dict[str, Any]], None] | None
) -> Checkpoint:
    from evenhand.training.checkpoint_tables import read_tables, read_whole_tables

    try:
        state = parse_json(read_text(path / STATE))
        if check_fn is not None:
            check_fn(state)
        tensors = safetensors.torch.load_file(path / TENSORS)
        if into is None:
            return Checkpoint(tensors, state, read_whole_tables(path / TABLES))
        read_tables(path / TABLES, into.tables)
        return Checkpoint(tensors, state, into.tables)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} does not fit this run, or is of another version ({error}); remove it, and "
            f"--resume will use the one before it or begin anew"
        ) from error
