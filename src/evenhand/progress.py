"""Progress bars: what is going on, how fast, how long it will take; and the wish to stop it."""

import contextlib
import errno
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.segment import Segment
from rich.text import Text

from evenhand.faults import insist, silence, without_controls

LINES = 10  # of progress, where the output is a file and a bar cannot move


class SpeedColumn(ProgressColumn):
    """Steps a second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f}/s" if speed else "", style="progress.data.speed")


@contextlib.contextmanager
def step_bar(
    console: Console, title: str, *, total: int, done: int
) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """A bar for the training loop: call it with the step and the figures to show."""
    with _bar(console) as progress:
        task = progress.add_task(title, total=total, completed=done, figures="")

        def advance(step: int, figures: dict[str, float]) -> None:
            shown = ""
            if figures:
                shown = (
                    f"loss {figures['loss']:.4f}  zero-loss {figures['zero_loss_share']:.0%}  "
                    f"k' {figures['num_hard_examples']:,.0f}"
                )
            progress.update(task, completed=step, figures=shown)
            if not console.is_terminal and step % max(1, total // LINES) == 0:
                console.print(f"{title}: step {step:,} of {total:,}  {shown}")

        yield advance


@contextlib.contextmanager
def count_bar(console: Console, title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for work that is counted: call it with what is done and how much there is."""
    with _bar(console) as progress:
        task = progress.add_task(title, total=None, figures="")
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextlib.contextmanager
def file_bar(console: Console) -> Iterator[Callable[[Path, int, int], None]]:
    """A bar for reading files: call it with the file, the rows read and the rows there are."""
    with _bar(console) as progress:
        tasks: dict[Path, int] = {}

        def advance(path: Path, done: int, total: int) -> None:
            if path not in tasks:
                tasks[path] = progress.add_task(f"reading {path.name}", figures="")
            progress.update(tasks[path], completed=done, total=total)  # type: ignore[arg-type]

        yield advance


@contextlib.contextmanager
def download_bar(console: Console) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar a file: call it with the name, the bytes there are and, if known, the bytes in all."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, TaskID] = {}

        def advance(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=None)
            progress.update(tasks[name], completed=done, total=total)

        yield advance


def _bar(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        SpeedColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
        console=console,
    )


class PipedConsole(Console):
    """A console whose reader may go away, as in `evenhand ... | head`: that ends the command."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._was_terminal = self.is_terminal  # once closed, it does not say so any more

    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence(self.file)
        raise BrokenPipeError

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        """What is printed may come from data: only the console itself commands the terminal."""
        return super()._render_buffer(
            part if part.control else part._replace(text=without_controls(part.text))
            for part in buffer
        )

    def _check_buffer(self) -> None:
        """A terminal that was closed is no reason to fail: SIGHUP comes with it, and is obeyed."""
        try:
            super()._check_buffer()
        except OSError as error:
            if error.errno != errno.EIO or not self._was_terminal:
                raise
            self.quiet = True
            silence(self.file)


@contextlib.contextmanager
def stop_requested() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C, SIGTERM or SIGHUP ends training after the step, with a checkpoint.

    A second one interrupts at once, and a third would not even wait for that. A signal that is
    ignored stays so: under `nohup` a closed terminal ends nothing.
    """
    asked: list[int] = []
    terminals = [stream for stream in (sys.stdout, sys.stderr) if stream.isatty()]

    def ask(number: int, frame: FrameType | None) -> None:
        if number == getattr(signal, "SIGHUP", None):  # the terminal is gone: no one can be told
            for stream in terminals:
                silence(stream)
        if asked:
            insist()
            raise KeyboardInterrupt
        asked.append(number)

    known = [getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")]
    numbers = [number for number in known if number is not None]
    previous = {
        number: signal.signal(number, ask)
        for number in numbers
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
