"""A run that is killed, stopped or cut off from its disk, and resumed, ends as if nothing was."""

import json
import shutil
import signal

import pytest

import small
from evenhand.data import save_dataset
from small import fruits_of, last_step, run, settings_file, start, wait_for

TRAIN = ("train", "--keep-checkpoints")  # what a checkpoint holds is compared too
RESUME = (*TRAIN, "--resume", "--run")
KINDS = {  # the data set, and what differs from `small.settings`; 40 steps if not said otherwise
    "sparse": ("data", {}),
    "best": ("data", {"training__keep_last": 1, "training__keep_best": True}),
    "dense": ("dense", {"model__hidden_widths": [10], "mining__method": "s2m"}),
    "biased": ("data", {
        "loss__name": "softmax", "model__similarity": "dot", "model__label_bias": True,
        "mining__sampler": "mixed", "mining__num_sampled_labels": 50,
        "mining__in_batch_share": 0.7, "training__optimizer": "row-adagrad",
        "training__max_gradient_norm": 1.0,
        "training__log_every": 4,  # so that a checkpoint comes between two rows
    }),
    # Nothing is learnt, so that the second validation is no better than the first.
    "tired": ("data", {"training__learning_rate": 1e-12, "training__patience": 1}),
    "long": ("data", {
        "training__num_steps": 260, "training__log_every": 1, "training__evaluate_every": 130,
        "training__checkpoint_every": 100,
    }),
    "cvar": ("data", {"mining__method": "cvar", "risk__window": 3}),
    "groups": ("data", {
        "mining__method": "group-dro", "risk__group": "region", "risk__step_size": 0.5,
    }),
    "several groups": ("tagged", {
        "mining__method": "group-dro", "risk__group": "tag", "risk__step_size": 0.5,
    }),
    "even": ("data", {"mining__method": "s2m-even", "risk__held_out_share": 0.3}),
    "without validation": ("trained", {"training__evaluate_every": 0}),
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with data sets, and a settings file for each kind of run."""
    folder = tmp_path_factory.mktemp("resume")
    texts = small.text_dataset()
    save_dataset(texts, folder / "data")
    save_dataset(small.dense_dataset(), folder / "dense")
    save_dataset(small.tagged_dataset(), folder / "tagged")
    save_dataset(small.with_parts(texts, validation=None), folder / "trained")
    for kind, (data, changes) in KINDS.items():
        settings_file(folder / f"{kind}.toml", data, **{"training__num_steps": 40} | changes)
    return folder


@pytest.fixture(scope="module")
def undisturbed(home):
    """The fruits of a run of a kind that is never stopped."""
    fruits = {}

    def of(kind):
        if kind not in fruits:
            answer = run(home, *TRAIN, f"{kind}.toml", "--run", f"whole/{kind}")
            assert answer.code == 0, answer.err
            fruits[kind] = fruits_of(home / "whole" / kind)
        return fruits[kind]

    return of


def assert_same(actual, expected):
    """As equality, but says which files differ."""
    assert not [name for name in {*actual, *expected} if actual.get(name) != expected.get(name)]


def resumed(home, folder):
    answer = run(home, *RESUME, folder)
    assert answer.code == 0, answer.err
    return fruits_of(home / folder)


APPEND = "evenhand.training.loop.append_line"
TRAINED = ["evenhand.runs.write_json", 3]  # run.json will say that the run is complete
KILLS = [  # kind, function, its n-th call, when, the folders of checkpoints it leaves
    ("sparse", APPEND, 6, "kill after", [15]),
    ("sparse", "evenhand.tensor_store._replace", 5, "kill", [-30, 15]),  # all but its name
    ("dense", APPEND, 7, "kill", [15]),
    ("biased", APPEND, 8, "kill", [15]),
    ("cvar", APPEND, 7, "kill", [15]),
    ("groups", APPEND, 7, "kill", [15]),
    ("even", APPEND, 7, "kill", [15]),
]  # more of them are in tests/nightly/test_kills.py


def kill_and_resume(home, expected, folder, kill):
    """A run that is killed once, and resumed, must end as if nothing had happened."""
    kind, function, call, when, left = kill
    arguments = (*TRAIN, f"{kind}.toml", "--run", folder)
    answer = run(home, *arguments, disturb=[function, call, when])
    assert answer.code == -signal.SIGKILL, answer.err
    names = sorted(path.name for path in (home / folder / "checkpoints").glob("*"))
    if left is not None:
        assert names == [f"{'.' if step < 0 else ''}step-{abs(step):08d}" for step in left]
    if not json.loads((home / folder / "run.json").read_text("utf-8"))["is_complete"]:
        with open(home / folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write('{"step": 4')  # what a kill in the middle of a write leaves
    assert_same(resumed(home, folder), expected)


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: " ".join(map(str, kill[:4])))
def test_a_killed_run_resumed_equals_one_never_stopped(home, undisturbed, kill):
    kill_and_resume(home, undisturbed(kill[0]), f"killed/{KILLS.index(kill)}", kill)


def test_a_damaged_newest_is_named_and_the_run_goes_on_from_the_one_before(home, undisturbed):
    """What crashes left behind is cleared away."""
    expected, folder = undisturbed("sparse"), home / "damaged"
    answer = run(home, *TRAIN, "sparse.toml", "--run", folder, disturb=[*TRAINED, "kill"])
    assert answer.code == -signal.SIGKILL, answer.err
    stale = folder / "checkpoints/.step-00000017"  # as of a run stopped by a signal
    shutil.copytree(folder / "checkpoints/step-00000030", stale)
    shutil.copytree(folder / "model/weights", folder / "model/.weights")
    path = folder / "checkpoints/step-00000040/rank-0-file-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    answer = run(home, *RESUME, "damaged")
    assert answer.code == 0, answer.err
    words = " ".join(answer.out.split())
    assert "step-00000040 is damaged (rank-0-file-0.safetensors has" in words
    assert "step-00000030 before it is used instead" in words
    assert_same(fruits_of(folder), expected)


def test_a_finished_run_keeps_its_model_alone_also_if_killed_before_its_checkpoints_go(
    home, undisturbed
):
    kept = {k: v for k, v in undisturbed("sparse").items() if not k.startswith("checkpoints")}
    words = ("train", "sparse.toml", "--run", "light")
    answer = run(home, *words, disturb=[*TRAINED, "kill after"])
    assert answer.code == -signal.SIGKILL, answer.err
    assert json.loads((home / "light/run.json").read_text("utf-8"))["is_complete"]
    assert len(list((home / "light/checkpoints").iterdir())) == 2
    assert run(home, "train", "--resume", "--run", "light").code == 0
    assert_same(fruits_of(home / "light"), kept)
    for folder in ("light", "whole/sparse"):  # the other one kept them
        before = small.bytes_of(home / folder)
        sentence = run(home, "train", "--resume", "--run", folder).sentence
        assert f"{folder} is finished, and there is nothing to resume" in sentence
        again = f"evenhand train {folder}/config.toml --steps 80 --run {folder}-longer"
        assert sentence.endswith(again)
        assert small.bytes_of(home / folder) == before


def test_a_run_that_a_signal_ended_is_resumed_as_if_nothing_had_happened(home, undisturbed):
    expected, folder = undisturbed("long"), "stopped"
    process = start(home, *TRAIN, "long.toml", "--run", folder)
    wait_for(lambda: last_step(home / folder) >= 7)
    process.kill(signal.SIGTERM)
    assert process.wait().code == 130
    step = int(max((home / folder / "checkpoints").iterdir()).name.removeprefix("step-"))
    assert 7 <= step < 260
    assert last_step(home / folder) == step
    about = json.loads((home / folder / "run.json").read_text("utf-8"))
    assert not about["is_complete"]
    assert "training_seconds" in about
    assert_same(resumed(home, folder), expected)
    assert json.loads((home / folder / "run.json").read_text("utf-8"))["is_complete"]
