"""Runs and checkpoints killed at many more moments than in the fast tests; `make nightly`."""

import signal
import subprocess
import sys

import pytest

import small
from small import last_step, run, wait_for
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
