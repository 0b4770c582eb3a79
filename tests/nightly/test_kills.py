"""Runs and checkpoints killed at many more moments than in the fast tests; `make nightly`."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

import small
from evenhand import tensor_store
from evenhand.training.checkpoint import CheckpointManager, load_latest_checkpoint
from ranks import SERVER, exit_codes
from small import bytes_of, last_step, run, wait_for
from test_checkpoint import assert_holds, die, load, made, save_all, save_twice, steps_in
from test_resume import (  # noqa: F401 (fixtures)
    APPEND,
    RESUME,
    assert_same,
    home,
    kill_and_resume,
    resumed,
    undisturbed,
)

WRITE, REPLACE = "evenhand.tensor_store.write_file", "evenhand.tensor_store._replace"
KILLS = [  # kind, function, its n-th call, when, the folders of checkpoints it leaves
    ("sparse", "evenhand.runs.train", 1, "kill", []),  # nothing is there but the settings
    ("sparse", APPEND, 2, "kill", []),
    # A best model that no checkpoint knows of; half a model.
    ("sparse", "evenhand.runs.save_model", 2, "kill after", [15]),
    ("sparse", WRITE, 3, "kill after", [15]),
    ("sparse", REPLACE, 3, "kill", [15]),
    # Staging is empty; then it has its tensors; then all, but not its name.
    ("sparse", WRITE, 2, "kill", [-15]),
    ("sparse", WRITE, 2, "kill after", [-15]),
    ("sparse", REPLACE, 2, "kill", [-15]),
    ("sparse", REPLACE, 7, "kill after", [15, 30, 40]),  # 15 not yet removed
    ("sparse", "evenhand.runs.write_json", 3, "kill", [30, 40]),  # trained, not said
    ("sparse", "evenhand.run_folder.save_outcome", 1, "kill after", [30, 40]),  # half evaluated
    ("best", REPLACE, 5, "kill", None),
    ("dense", REPLACE, 5, "kill", [-30, 15]),
    ("several groups", APPEND, 7, "kill", [15]),
    ("tired", APPEND, 5, "kill", [15]),
    ("tired", "evenhand.runs.write_json", 3, "kill", [15, 20]),  # had stopped early already
    ("without validation", "evenhand.runs.save_model", 1, "kill", [30, 40]),
]


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: " ".join(map(str, kill[:4])))
def test_a_killed_run_resumed_equals_one_never_stopped(home, undisturbed, kill):  # noqa: F811
    kill_and_resume(home, undisturbed(kill[0]), f"killed/more-{KILLS.index(kill)}", kill)


def test_a_run_killed_twice_and_resumed_twice_equals_one_never_stopped(home, undisturbed):  # noqa: F811
    expected = undisturbed("sparse")
    arguments = ("train", "sparse.toml", "--run", "twice")
    assert run(home, *arguments, disturb=[APPEND, 6, "kill"]).code == -signal.SIGKILL
    assert run(home, *RESUME, "twice", disturb=[APPEND, 4, "kill"]).code == -signal.SIGKILL
    assert_same(resumed(home, "twice"), expected)


def test_a_real_process_killed_from_outside_and_resumed_equals_one_never_stopped(home, undisturbed):  # noqa: F811
    expected = undisturbed("long")
    with subprocess.Popen(
        [sys.executable, "-m", "evenhand", "train", "long.toml", "--run", "outside"],
        cwd=home,
        env=small.ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        wait_for(lambda: last_step(home / "outside") >= 117 or process.poll() is not None)
        process.kill()
        _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err
    assert 117 <= last_step(home / "outside") < 260
    assert_same(resumed(home, "outside"), expected)


# --- kill -9 of a process that saves --------------------------------------------------------------

POINTS = [
    (os, "fsync"), (os, "replace"), (os, "mkdir"), (os, "unlink"), (os, "rmdir"),
    (shutil, "rmtree"), (tensor_store, "write_file"),
]  # fmt: skip


def save_and_die(folder, step, call):
    """Saves, and is killed before the n-th call of any of the functions that change the disk."""
    calls = [0]

    def deadly(function):
        def counted(*arguments, **options):
            calls[0] += 1
            if calls[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return counted

    torch.set_num_threads(1)
    os.fsync = lambda handle: None  # a kill does not lose what the kernel has; this saves minutes
    for place, name in POINTS:
        setattr(place, name, deadly(getattr(place, name)))
    CheckpointManager(folder, keep_last=1).save(made(9), step=step)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("step", [9, 5, 3], ids=["a new one", "the same step", "an earlier step"])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path, step):
    save_all(tmp_path / "base", 5)
    code, call, found = 1, 0, []
    while code:
        call += 1
        folder = tmp_path / str(call)
        shutil.copytree(tmp_path / "base", folder)
        process = SERVER.Process(target=save_and_die, args=(folder, step, call))
        process.start()
        process.join(30)
        code = process.exitcode
        assert code in (-signal.SIGKILL, 0)
        said = []
        newest = load_latest_checkpoint(folder, warn_fn=said.append)
        assert not said
        found.append(newest.state["step"])
        assert_holds(newest, found[-1])
        CheckpointManager(folder).save(made(1), step=10)  # and what it left is cleared away
        assert steps_in(folder) == [10]
    assert call > 10
    assert found[0] == 5
    assert found[-1] == 9


@pytest.mark.timeout(240)
def test_the_first_rank_killed_in_a_save_leaves_the_one_before(tmp_path):
    folder = tmp_path / "checkpoints"
    assert exit_codes(2, tmp_path, save_twice, folder) == [0, 0]
    before = bytes_of(folder)
    assert exit_codes(2, tmp_path, die, folder, 0) == [-signal.SIGKILL, 7]
    shutil.rmtree(folder / ".step-00000003")  # the next save would remove it
    assert bytes_of(folder) == before
    assert exit_codes(3, tmp_path, load, folder, 2, 0) == [0] * 3
