"""Faults of the world: memory, signals, terminals, pipes, disks. A sentence, never a traceback."""

import contextlib
import errno
import fcntl
import io
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import time

import pytest
import torch
from rich.text import Text

import small
from evenhand.cli import guard
from evenhand.data import save_dataset
from evenhand.errors import (
    StoppedError,
    UserError,
    is_out_of_memory,
)
from evenhand.progress import PipedConsole


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    save_dataset(small.text_dataset(), folder / "data")
    small.settings_file(folder / "quick.toml", "data", training__num_steps=20)
    slow = {"training__num_steps": 10**6, "training__evaluate_every": 0}
    small.settings_file(folder / "long.toml", "data", **slow)
    (folder / "pairs.csv").write_text(
        "query,label\n" + "".join(f"q{n},l{n % 3}\n" for n in range(50))
    )
    assert small.run(folder, "train", "quick.toml", "--run", "runs/a").code == 0
    assert small.run(folder, "evaluate", "runs/a", "--part", "validation").code == 0
    return folder


# --- memory ---------------------------------------------------------------------------------------


def test_what_is_no_longer_there_is_memory_and_not_a_mistake():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    cuda = torch.OutOfMemoryError("CUDA out of memory.")
    for error in (MemoryError(), cuda, OSError(errno.ENOMEM, "none"), caught.value):
        assert is_out_of_memory(error)
    for error in (
        RuntimeError("shapes do not match"), OSError(errno.ENOSPC, "full"), UserError("x"),
        ValueError("can't allocate memory"),
    ):  # fmt: skip
        assert not is_out_of_memory(error)


def test_a_table_too_large_for_memory_is_one_sentence_with_the_remedy(home):
    words = ["train", "quick.toml", "--run", "runs/wide", "--set", "model.embedding_dim=1000000"]
    answer = small.run(home, *words, disturb=["memory", 300 * 2**20, ""])
    sentence = answer.sentence
    assert sentence.startswith("out of memory (")
    assert "model.embedding_dim" in sentence


# --- signals --------------------------------------------------------------------------------------


def newest_step(run):
    names = [path.name for path in (run / "checkpoints").glob("step-*")]
    return max(int(name.removeprefix("step-")) for name in names)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_training_after_the_step_with_a_checkpoint(home, number):
    run = f"runs/signal-{int(number)}"
    process = small.start(home, "train", "long.toml", "--run", run)
    small.wait_for(lambda: small.last_step(home / run) > 7)
    process.kill(number)
    answer = process.wait()
    assert (answer.code, answer.err) == (130, "")
    assert f"stopped; continue with: evenhand train --resume --run {run}" in answer.out
    assert 0 <= newest_step(home / run) - small.last_step(home / run) < 5  # log_every


IN_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "evenhand", *sys.argv[1:]])
"""


@contextlib.contextmanager
def in_a_terminal(folder, *words):
    """A command that has a terminal of its own: (process, its other end)."""
    other, own = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, b"\x20\0\xff\0\0\0\0\0")  # 32 lines of 255 characters
    with subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, *map(str, words)], cwd=folder, stdin=own, stdout=own,
        stderr=own, env={**small.ENVIRONMENT, "TERM": "xterm"}, start_new_session=True,
    ) as process:  # fmt: skip
        os.close(own)
        try:
            yield process, other
        finally:
            process.kill()
            with contextlib.suppress(OSError):
                os.close(other)


@pytest.mark.parametrize("key", [b"\x03", None], ids=["Ctrl-C", "closed"])
def test_a_run_in_a_terminal_ends_with_a_checkpoint_and_gives_the_cursor_back(home, key):
    run, shown = home / f"runs/terminal-{key is None}", b""
    with in_a_terminal(home, "train", "long.toml", "--run", run) as (process, other):
        os.set_blocking(other, False)
        while small.last_step(run) < 8 and process.poll() is None:
            with contextlib.suppress(BlockingIOError):  # a full terminal would stop it
                shown += os.read(other, 2**16)
            time.sleep(0.05)
        if key is None:
            os.close(other)
        else:
            os.write(other, key)
            os.set_blocking(other, True)
            with contextlib.suppress(OSError):  # EIO: the command has closed its end
                while block := os.read(other, 2**16):
                    shown += block
        assert process.wait(timeout=60) == 130
    assert newest_step(run) >= 8
    assert not (run / ".lock").exists()
    if key is not None:
        assert b"continue with: evenhand train --resume" in shown
        assert b"Traceback" not in shown
        assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l")  # the cursor


# --- pipes ----------------------------------------------------------------------------------------

READERS = {
    "data show": ["data", "show", "data"],
    "data table": ["data", "table", "pairs.csv", "--out", "{}"],
    "train": ["train", "quick.toml", "--run", "{}"],
    "tune": ["tune", "quick.toml", "--run", "{}", "--trials", "2"],
    "evaluate": ["evaluate", "runs/a"], "compare": ["compare", "runs/a", "runs/a"],
    "slices": ["slices", "runs/a", "--permutations", "19"],
    "report": ["report", "runs/a"], "search": ["search", "runs/a", "wel"],
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_nobody_reads_what_a_command_prints_or_the_disk_it_goes_to_is_full(home, tmp_path, name):
    for number, output in enumerate(("closed pipe", "/dev/full")):
        words = [word.format(tmp_path / f"made-{number}") for word in READERS[name]]
        answer = small.run(home, *words, disturb=["output", 0, output])
        if output == "closed pipe":
            assert (answer.code, answer.err) == (141, "")
        else:
            assert "output" in answer.sentence
            assert "No space left" in answer.sentence


# --- disks ----------------------------------------------------------------------------------------

WRITERS = {
    "data table": ["data", "table", "pairs.csv", "--out", "{}/made"],
    "train": ["train", "quick.toml", "--run", "{}/made"],
    "tune": ["tune", "quick.toml", "--run", "{}/made", "--trials", "2"],
    "evaluate": ["evaluate", "{}/a"],
    "slices": ["slices", "{}/a", "--permutations", "19"],
    "report": ["report", "{}/a"],
    "demo": ["demo", "--run", "{}/made"],
}


@pytest.fixture
def read_only(home, tmp_path):
    """A real read-only file system with a run on it."""
    folder = tmp_path / "disk"
    shutil.copytree(home / "runs/a", folder / "a")
    for words in (["--bind", folder, folder], ["-o", "remount,bind,ro", folder]):
        mount = ["mount", *map(str, words)]
        if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("only root may make a folder read-only for root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_read_only_disk_is_named_by_writers_and_served_to_readers(home, read_only, tmp_path):
    before = small.bytes_of(read_only)
    for name, words in WRITERS.items():
        answer = small.run(home, *(word.format(read_only) for word in words))
        assert str(read_only) in answer.sentence, name
        assert "Read-only" in answer.sentence, name
    assert small.bytes_of(read_only) == before
    run = read_only / "a"
    page = tmp_path / "report.html"
    for words in (["search", run, "wel"], ["compare", run, run], ["report", run, "--out", page]):
        answer = small.run(home, *words)
        assert (answer.code, answer.err) == (0, "")


# --- what data may not do to a terminal -----------------------------------------------------------


def test_names_from_data_do_not_command_the_terminal(capsys):
    hostile = "a\x1b]0;title\x07b\x9b2Jc\x1b[31md\te\rf\u202eg"
    console = PipedConsole(file=io.StringIO(), force_terminal=True, width=80, markup=False)
    console.print(Text(hostile))
    console.print(hostile)
    console.show_cursor(False)  # its own commands go through
    shown = console.file.getvalue()
    assert not [word for word in ("\x1b]", "\x9b", "\x1b[31m", "\u202e") if word in shown]
    assert shown.endswith("\x1b[?25l")

    def stopped():
        raise StoppedError(f"stopped at {hostile}; the same command continues")

    assert guard(stopped) == 130
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert err.startswith("evenhand: stopped at a")
    assert err.endswith("; the same command continues\n")
