"""`evenhand train` as several ranks: the same run, stopped, continued by others, killed, hung."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import small
from evenhand.data import open_dataset, save_dataset
from evenhand.run_folder import load_model, read_about
from small import last_step, run, settings_file, start_ranks, wait_for

pytestmark = pytest.mark.timeout(180)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    save_dataset(small.text_dataset(), folder / "data")
    settings_file(folder / "short.toml", "data", training__num_steps=40)
    settings_file(
        folder / "long.toml",
        "data",
        training__num_steps=120,
        training__log_every=1,
        training__evaluate_every=60,
        training__checkpoint_every=50,
    )
    for name in ("short", "long"):
        assert run(folder, "train", f"{name}.toml", "--run", f"one-{name}").code == 0
    return folder


def answers(processes):
    return [process.wait() for process in processes]


def assert_same_model(home, folder, expected):
    dataset = open_dataset(home / "data")
    ours, theirs = (
        load_model(home / name, dataset, device=CPU).state_dict() for name in (folder, expected)
    )
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).abs().max() <= 1e-5, name


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_ranks_train_validate_save_and_evaluate_as_one_process(home):
    command = ("train", "short.toml", "--run", "two")
    first, second = answers(start_ranks(home, *command, num_ranks=2))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "pair recall on the test part" in first.out
    assert second.out == ""  # only the first rank speaks
    assert_same_model(home, "two", "one-short")
    scores = [home / name / "evaluation/test/scores.json" for name in ("two", "one-short")]
    assert scores[0].read_bytes() == scores[1].read_bytes()
    for ours, theirs in zip(metrics(home / "two"), metrics(home / "one-short"), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5) if "loss" in theirs else ours == theirs
    about = read_about(home / "two")
    assert about["num_ranks"] == 2
    assert about["bytes_sent_a_step"]["labels: rows"] > 0
    assert about["is_complete"]
    assert "interruptions" not in about


def test_what_two_ranks_saved_others_continue(home):
    """A signal to one rank stops both after the same step; 1, 3 and 4 ranks go on from there."""
    processes = start_ranks(home, "train", "long.toml", "--run", "stopped", num_ranks=2)
    wait_for(lambda: last_step(home / "stopped") >= 20)
    processes[1].kill(signal.SIGTERM)
    first, second = answers(processes)
    assert (first.code, second.code) == (130, 130), first.err + second.err
    assert "continue with: evenhand train --resume" in first.out
    assert 20 <= last_step(home / "stopped") < 120
    for num_ranks in (1, 3, 4):
        name = f"by-{num_ranks}"
        subprocess.run(["cp", "-r", home / "stopped", home / name], check=True)
        command = ("train", "--resume", "--run", name)
        if num_ranks == 1:
            assert run(home, *command).code == 0
        else:
            told = answers(start_ranks(home, *command, num_ranks=num_ranks))
            assert [answer.code for answer in told] == [0] * num_ranks, told
        assert_same_model(home, name, "one-long")
        assert "interruptions" not in read_about(home / name)  # it was asked to stop


def test_a_killed_rank_is_told_of_and_the_same_command_started_again_continues(home):
    command = ("train", "long.toml", "--run", "killed")
    processes = start_ranks(home, *command, num_ranks=2)
    wait_for(lambda: last_step(home / "killed") >= 60)
    processes[1].kill(signal.SIGKILL)
    first, second = answers(processes)
    assert second.code == -signal.SIGKILL
    assert "rank 0 lost the others" in first.sentence
    again = answers(start_ranks(home, *command, num_ranks=2, num_restarts=1))
    assert [answer.code for answer in again] == [0, 0], again
    assert_same_model(home, "killed", "one-long")
    (interruption,) = read_about(home / "killed")["interruptions"]
    assert interruption["resumed_at_step"] == 50
    assert interruption["lost_steps"] >= 10


def test_a_rank_does_not_wait_for_ever_for_one_that_hangs(home):
    """The first one hangs, which the others meet in everything."""
    name, hung = "hung", 0
    command = ("train", "long.toml", "--run", name, "--rank-timeout", "8")
    processes = start_ranks(home, *command, num_ranks=2)
    wait_for(lambda: last_step(home / name) >= 5)
    processes[hung].kill(signal.SIGSTOP)
    other = processes[1 - hung].wait()
    processes[hung].kill(signal.SIGKILL)
    processes[hung].wait()
    assert f"rank {1 - hung} lost the others" in other.sentence
    assert "--resume" in other.sentence


@pytest.mark.parametrize(
    ("flag", "value", "complaint"),
    [
        ("--ranks", "0", "--ranks must be at least 1, got 0"),
        ("--ranks", "-3", "--ranks must be at least 1, got -3"),
        ("--max-restarts", "-1", "--max-restarts must be at least 0, got -1"),
        ("--rank-timeout", "0", "--rank-timeout must be above 0 seconds, got 0.0"),
        ("--rank-timeout", "nan", "--rank-timeout must be above 0 seconds, got nan"),
    ],
)
def test_odd_flags_are_refused_before_anything_begins(home, flag, value, complaint):
    ranks = () if flag == "--ranks" else ("--ranks", "2")
    told = run(home, "train", "short.toml", "--run", "odd", *ranks, f"{flag}={value}")
    assert complaint in told.sentence
    assert not (home / "odd").exists()


def test_a_folder_that_exists_is_refused_by_all_ranks(home):
    command = ("train", "short.toml", "--run", "one-short")
    first, second = answers(start_ranks(home, *command, num_ranks=2))
    assert "exists already" in first.sentence
    assert second.code == 2


def test_more_ranks_than_examples_are_refused(home):
    settings_file(home / "tiny.toml", "data", mining__batch_size=2, mining__num_hard_examples=1)
    told = answers(start_ranks(home, "train", "tiny.toml", "--run", "tiny", num_ranks=3))
    assert all("must be at least 3 (one example a rank), got 2" in a.err for a in told), told


def test_the_launcher_starts_the_ranks_again_by_itself(home):
    """`evenhand train --ranks 2`, a real torchrun, and one real kill."""
    words = ["train", "long.toml", "--run", "launched", "--ranks", "2", "--max-restarts", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "evenhand", *words],
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(lambda: last_step(home / "launched") >= 55)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    out, _ = process.communicate(timeout=150)
    assert process.returncode == 0, out
    assert_same_model(home, "launched", "one-long")
    assert len(read_about(home / "launched")["interruptions"]) == 1
