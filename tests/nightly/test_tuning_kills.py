"""Searches killed at more moments than in the fast tests; `make nightly`."""

import signal

import pytest

from small import run
from test_tuning_runs import TUNE, home, kill_and_go_on  # noqa: F401 (a fixture)

KILLS = [  # function, its n-th call, when; how many trials are evaluated by then
    ("os.rename", 1, "kill", 0),  # the folder of the first trial is not whole
    ("evenhand.run_folder.save_outcome", 2, "kill after", 1),  # the second one is half evaluated
    ("evenhand.tuning.search._conclude", 1, "kill", 4),  # all but the choice
]


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: kill[0])
def test_a_killed_search_goes_on_and_ends_as_one_never_disturbed(home, tmp_path, kill):  # noqa: F811
    kill_and_go_on(home, tmp_path / "killed", *kill)


def test_a_trial_that_was_killed_goes_on_from_its_checkpoint(home):  # noqa: F811
    folder = home / "halfway"
    append = "evenhand.training.loop.append_line"
    answer = run(home, *TUNE, "--run", folder, disturb=[append, 7, "kill"])
    assert answer.code == -signal.SIGKILL
    names = sorted(path.name for path in folder.glob("trials/002/checkpoints/*"))
    assert names == ["step-00000006", "step-00000012"]
    # From step 12 the second trial saves once more, at its end; anew it would save at 6 and at 12.
    disturb = ["evenhand.training.checkpoint.save_tensors", 2, "kill"]
    answer = run(home, *TUNE, "--run", folder, disturb=disturb)
    names = {path.parts[-3] for path in folder.glob("trials/*/evaluation/validation")}
    assert answer.code == -signal.SIGKILL
    assert names == {"001", "002"}  # the second save was in the third trial
