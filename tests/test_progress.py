"""Bars say what goes on; a first signal asks to stop, a second one insists."""

import errno
import io
import re
import signal

import pytest
from rich.console import Console

from evenhand.progress import PipedConsole, count_bar, step_bar, stop_requested


def text_of(console):
    return console.file.getvalue()


@pytest.mark.parametrize(("total", "told"), [(3, [1, 2, 3]), (40, list(range(4, 41, 4)))])
def test_in_a_file_training_is_about_ten_lines_and_a_line_a_step_where_there_are_fewer(total, told):
    console = Console(file=io.StringIO(), force_terminal=False, width=160)
    with step_bar(console, "training", total=total, done=0) as advance:
        for step in range(1, total + 1):
            advance(step, {})
    found = re.findall(rf"training: step (\d+) of {total}", text_of(console))
    assert [int(step) for step in found] == told


class Closed(io.StringIO):
    """A terminal, or a file, that can no longer be written."""

    is_terminal = True

    def isatty(self):
        return self.is_terminal

    def write(self, text):
        raise OSError(errno.EIO, "Input/output error")


def test_a_closed_terminal_is_no_error_and_a_broken_disk_is_one():
    PipedConsole(file=Closed()).print("a")
    Closed.is_terminal = False
    with pytest.raises(OSError, match="Input/output"):
        PipedConsole(file=Closed()).print("a")


def test_a_bar_and_prints_to_standard_output_do_not_call_each_other_for_ever(capsys):
    console = PipedConsole(force_terminal=True, width=80, color_system=None)
    with count_bar(console, "counting\x1b]0;title\x07") as advance:
        advance(1, 2)
        print("printed")
    shown = capsys.readouterr().out
    assert "printed" in shown
    assert "1/2" in shown
    assert "\x1b]" not in shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_insists(number):
    before = signal.getsignal(number)
    with stop_requested() as should_stop_fn:
        assert not should_stop_fn()
        signal.raise_signal(number)
        assert should_stop_fn()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before
