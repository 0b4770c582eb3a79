"""Progress bars, the console that draws them, and the signals that stop a run."""

import contextlib
import errno
import io
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import IO, Any, cast

from rich import progress
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from evenhand.errors import CONTROLS, insist, silence

LINES = 10  # of progress, where the output is a file


class SpeedColumn(progress.ProgressColumn):
    """Steps per second."""

    def render(self, task: progress.Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f}/s" if speed else "", style="progress.data.speed")


def _bars(console: Console, *columns: progress.ProgressColumn) -> progress.Progress:
    """Bars with these columns behind them; with none, those of counted work."""
    columns = columns or (
        progress.MofNCompleteColumn(),
        SpeedColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[figures]}"),
    )
    title = progress.TextColumn("{task.description}", markup=False)
    columns = (progress.SpinnerColumn(), title, progress.BarColumn(bar_width=24), *columns)
    # A file gets the last state of a bar alone: no thread needs to draw the others.
    return progress.Progress(*columns, console=console, auto_refresh=console.is_terminal)


@contextlib.contextmanager
def step_bar(
    console: Console, title: str, *, total: int, done: int
) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """A bar for the training loop: call it with the step and the figures to show."""
    with _bars(console) as bars:
        task = bars.add_task(title, total=total, completed=done, figures="")

        def advance(step: int, figures: dict[str, float]) -> None:
            shown = ""
            if figures:
                shown = (
                    f"loss {figures['loss']:.4f}  zero-loss {figures['zero_loss_share']:.0%}  "
                    f"k' {figures['num_hard_examples']:,.0f}"
                )
            bars.update(task, completed=step, figures=shown)
            if not console.is_terminal and step % max(1, total // LINES) == 0:
                console.print(f"{title}: step {step:,} of {total:,}  {shown}")

        yield advance


@contextlib.contextmanager
def count_bar(console: Console, title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for counted work: call it with the number done and the number in all."""
    with _bars(console) as bars:
        task = bars.add_task(title, total=None, figures="")
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextlib.contextmanager
def stage_bar(console: Console) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar per stage: call it with its title, how much is done and, if known, of how much."""
    with _bars(console, progress.TaskProgressColumn(), progress.TimeElapsedColumn()) as bars:
        tasks: dict[str, progress.TaskID] = {}

        def advance(title: str, done: int, total: int | None) -> None:
            if title not in tasks:
                tasks[title] = bars.add_task(title, total=None, figures="")
            bars.update(tasks[title], completed=done, total=total)

        yield advance


class PipedConsole(Console):
    """A console for `evenhand ... | head`, closed terminals and text from data.

    A reader that goes away ends the command; control characters of data are not printed.
    """

    def __init__(self, *, file: IO[str] | None = None, **options: Any) -> None:
        super().__init__(file=cast(IO[str], _Output(file)), **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence(self.file)
        raise BrokenPipeError

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for part in super().render(renderable, options):
            yield part if part.control else part._replace(text=CONTROLS.sub("\ufffd", part.text))


class _Output:
    """A file, or else standard output, where the error of a closed terminal (EIO) is ignored.

    SIGHUP comes with it and stops the run.
    """

    def __init__(self, file: IO[str] | None) -> None:
        self._file = file
        self._was_terminal = self._stream().isatty()  # a closed terminal no longer says so

    def _stream(self) -> IO[str]:
        if self._file is not None:
            return self._file
        # A moving bar replaces sys.stdout by a proxy that prints to the console, that is, to us.
        stream: IO[str] | None = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
        return io.StringIO() if stream is None else stream  # None: closed before the start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream(), name)

    def write(self, text: str) -> None:
        self._call("write", text)

    def flush(self) -> None:
        self._call("flush")

    def _call(self, name: str, *arguments: str) -> None:
        try:
            getattr(self._stream(), name)(*arguments)
        except OSError as error:
            if error.errno != errno.EIO or not self._was_terminal:
                raise
            silence(self._stream())


@contextlib.contextmanager
def stop_requested() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C, SIGTERM or SIGHUP ends training after the step, with a checkpoint.

    The second interrupts at once, and a third exits without any clean-up. Ignored signals stay
    ignored: under `nohup` a closed terminal ends nothing.
    """
    received: list[int] = []
    terminals = [stream for stream in (sys.stdout, sys.stderr) if stream.isatty()]

    def request_stop(number: int, frame: FrameType | None) -> None:
        if number == getattr(signal, "SIGHUP", None):  # the terminal is gone
            for stream in terminals:
                silence(stream)
        if received:
            insist()
            raise KeyboardInterrupt
        received.append(number)

    known = [getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")]
    previous = {
        number: signal.signal(number, request_stop)
        for number in known
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
