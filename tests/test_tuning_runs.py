"""Searches as a user meets them: run, killed, resumed, and refused."""

import dataclasses
import json
import shutil
import signal

import numpy as np
import pytest

import small
from evenhand.config import build_config, read_settings
from evenhand.data import save_dataset
from evenhand.tuning.space import with_settings
from small import bytes_of, fruits_of, run, run_main, settings_file

K_PRIME = "mining.num_hard_examples"

# --- whole searches -------------------------------------------------------------------------------

QUICK = {
    "training__num_steps": 16,
    "training__evaluate_every": 0,
    "training__checkpoint_every": 6,
    "evaluation__num_resamples": 10,
}
TUNE = ("tune", "a.toml", "--trials", 4)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with data sets, a settings file, and a search that was never disturbed."""
    folder = tmp_path_factory.mktemp("tuning")
    texts = small.text_dataset()
    save_dataset(texts, folder / "data")
    save_dataset(small.with_parts(texts, validation=None), folder / "unjudged")
    settings_file(folder / "a.toml", "data", **QUICK)
    (folder / "whole.out").write_text(run(folder, *TUNE, "--run", "whole").output, "utf-8")
    return folder


@pytest.fixture
def user(home, monkeypatch, capsys):
    """Runs a command there that must succeed, and returns what it prints."""
    monkeypatch.chdir(home)
    return lambda *arguments: run_main(capsys, *arguments).output


@pytest.fixture
def refused(home, monkeypatch, capsys):
    """Runs a command there that must be refused, and returns the sentence."""
    monkeypatch.chdir(home)
    return lambda *arguments: run_main(capsys, *arguments).sentence


def tuning_of(folder):
    """What is written down of a search, without the times."""
    tuning = json.loads((folder / "tuning.json").read_text("utf-8"))
    for trial in tuning["trials"]:
        assert trial.pop("seconds") >= 0
    return tuning


def fruits(folder):
    """What must not depend on how often a search was stopped: all but times and folders' names."""
    tuning = tuning_of(folder)
    best = (folder / "best.toml").read_text("utf-8").splitlines()[2:]
    return tuning, best, {path.name: fruits_of(path) for path in (folder / "trials").iterdir()}


def test_the_folder_holds_all_that_was_promised_and_the_figures_are_those_of_evaluations(home):
    names = {name.partition("/")[0] for name in bytes_of(home / "whole")}
    assert names == {"best.toml", "tuning.json", "trials"}
    tuning = tuning_of(home / "whole")
    expected = {
        "criterion": "recall@10 on worst tenth of region", "average": "recall@10",
        "max_drop": 0.005,
    }  # fmt: skip
    assert tuning | expected == tuning
    for trial in tuning["trials"]:
        folder = home / f"whole/trials/{trial['number']:03d}"
        assert set(bytes_of(folder)) == {  # no weights
            "config.toml", "run.json", "metrics.jsonl",
            "evaluation/validation/outcome.npz", "evaluation/validation/scores.json",
        }  # fmt: skip
        rows = json.loads((folder / "evaluation/validation/scores.json").read_text("utf-8"))
        rows = {(r["column"], r["group"]): r for r in rows if r["metric"] == "recall@10"}
        worst, figures = rows["region", "worst tenth"], trial["figures"]
        assert trial["average"] == rows["all", "all"]["value"]
        figures_of_worst = {"criterion": worst["value"], "low": worst["low"], "high": worst["high"]}
        assert trial | figures_of_worst == trial
        assert figures["tail"] == rows["frequency", "tail"]["value"]
        assert {"all", "head", "torso", "tail", "worst 3 regions"} <= set(figures)


def test_the_best_settings_train_as_their_first_line_says(home, user):
    first, second, *_ = (home / "whole/best.toml").read_text("utf-8").splitlines()
    assert first == "# evenhand train whole/best.toml --run whole-best"
    assert "on the validation part" in second
    assert "pair recall on the test part" in user(*first.removeprefix("# evenhand ").split())
    chosen, best = home / f"whole/trials/{tuning_of(home / 'whole')['chosen']:03d}", "whole-best"
    assert (home / best / "metrics.jsonl").read_bytes() == (chosen / "metrics.jsonl").read_bytes()
    assert read_settings(home / best / "config.toml") == read_settings(chosen / "config.toml")


def test_a_test_part_that_training_would_refuse_is_not_even_looked_at(user, refused, home):
    dataset = small.text_dataset()
    features = dataset.parts["test"].features
    features = features.with_values(np.full(len(features.ids), np.nan, dtype=np.float32))
    part = dataclasses.replace(dataset.parts["test"], features=features)
    save_dataset(small.with_parts(dataset, test=part), home / "poisoned")
    flags = ("a.toml", "--data", "poisoned", "--run", "poison")
    assert "NaN" in refused("train", *flags)
    user("tune", *flags, "--trials", 4)
    assert tuning_of(home / "poison")["trials"] == tuning_of(home / "whole")["trials"]
    about = json.loads((home / "poison/trials/001/run.json").read_text("utf-8"))
    assert set(about["dataset"]["num_queries"]) == {"train", "validation"}
    assert not list(home.glob("*/trials/*/evaluation/test"))


def test_a_few_settings_can_be_searched_and_the_rest_stays(user, home):
    out = user(
        "tune", "a.toml", "--run", "few", "--trials", 9, "--search", f"{K_PRIME}=4,32",
        "--criterion", "recall@1 on style=rare", "--average", "mrr", "--max-drop", 1,
        "--set", "evaluation.num_resamples=0",
    )  # fmt: skip
    assert "3 trials, judged on the validation part" in out
    tuning = tuning_of(home / "few")
    assert [trial["settings"][K_PRIME] for trial in tuning["trials"]] == [32, 8, 4]
    assert {trial["low"] for trial in tuning["trials"]} == {None}  # asked for no intervals
    base = build_config(read_settings(home / "few/trials/002/config.toml"))  # as given
    for number, trial in enumerate(tuning["trials"], start=1):
        run_settings = read_settings(home / f"few/trials/{number:03d}/config.toml")
        assert build_config(run_settings) == with_settings(base, trial["settings"])
    best = max(trial["criterion"] for trial in tuning["trials"])
    assert tuning["trials"][tuning["chosen"] - 1]["criterion"] == best


def test_a_trial_that_diverges_is_out_and_where_all_do_none_is_chosen(user, refused, home):
    out = user("tune", "a.toml", "--run", "wild", "--search", "training.learning_rate=1e38")
    tuning = tuning_of(home / "wild")
    *others, wild = tuning["trials"]
    assert not any(trial["failure"] for trial in others)
    assert wild["criterion"] is None
    assert not any((home / "wild/trials/003" / name).exists() for name in ("checkpoints", "model"))
    assert "so it is out" in out
    assert tuning["chosen"] in (1, 2)
    again = user("tune", "a.toml", "--run", "wild", "--search", "training.learning_rate=1e38")
    assert again == out
    assert tuning_of(home / "wild") == tuning
    flags = ("--run", "hopeless", "--learning-rate", "1e38", "--search", f"{K_PRIME}=4")
    assert "no trial of hopeless came to an end" in refused("tune", "a.toml", *flags)
    assert not (home / "hopeless/best.toml").exists()


# --- searches that are disturbed ------------------------------------------------------------------

KILLS = [  # function, its n-th call, when; how many trials are evaluated by then
    ("evenhand.training.loop.append_line", 9, "kill", 2),  # in the third trial
    ("evenhand.tuning.search.write_json", 2, "kill", 2),  # evaluated, but not said in run.json
]


def kill_and_go_on(home, folder, function, call, when, num_evaluated):
    """A search that is killed there, goes on, and must end as one never disturbed."""
    answer = run(home, *TUNE, "--run", folder, disturb=[function, call, when])
    assert answer.code == -signal.SIGKILL, answer.err
    assert not (folder / "tuning.json").exists()
    finished = [path.parents[2] for path in folder.glob("trials/*/evaluation/*/scores.json")]
    assert len(finished) == num_evaluated
    before = {path: fruits_of(path) for path in finished}
    run(home, *TUNE, "--run", folder)
    assert fruits(folder) == fruits(home / "whole")
    for path, data in before.items():  # no finished trial was touched but for its weights
        after = fruits_of(path)
        assert after == {name: data[name] for name in after}


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: kill[0])
def test_a_killed_search_goes_on_and_ends_as_one_never_disturbed(home, tmp_path, kill):
    kill_and_go_on(home, tmp_path / "killed", *kill)


# --- what is refused ------------------------------------------------------------------------------

REFUSED = [  # flags, what the sentence must hold
    (["--trials", 1], ["--trials", "2", "got 1"]),
    (["--max-drop", "nan"], ["--max-drop", "nan"]),
    (["--seed", -1], ["--seed", "-1"]),
    (["--criterion", "recall@10 on worst 3 of regio"], ["regio", "did you mean 'region'"]),
    (["--criterion", "recall@10 on worst 3 of style", "--set", "evaluation.min_pairs={style=999}"],
     ["worst 3 of style", "no value"]),
    (["--average", "recall@11"], ["recall@11", "did you mean 'recall@1'"]),
    (["--search", "mining.num_hard_label=3"], ["num_hard_label", "did you mean 'num_hard_labels'"]),
    (["--search", f"{K_PRIME}=33"], ["num_hard_examples", "32", "33"]),
    (["--search", f"{K_PRIME}=4.5"], ["num_hard_examples", "int", "4.5"]),
    (["--search", "training.learning_rate=fast"], ["learning_rate", "'fast'"]),
    (["--search", "training.learning_rate"], ["section.key", "training.learning_rate"]),
    (["--search", "training.learning_rate="], ["section.key"]),
    (["--search", "mining.for_each_example=true"], ["numbers or words", "true"]),
    (["--search", "evaluation.num_resamples=1,2"], ["model, loss, mining", "evaluation"]),
    (["--search", f"{K_PRIME}=3", "--search", f"{K_PRIME}=4"], ["twice"]),
    (["--search", "mining.tail_fraction=0.1,0.2"], ["num_hard_examples", "tail_fraction"]),
    (["--search", "mining.batch_size=32,600"], ["mining.batch_size", "525", "600"]),
    (["--search", f"{K_PRIME}=3,4", "--method", "snm"], [K_PRIME, "snm", "changes nothing"]),
    (["--search", "mining.anneal_fraction=0,1", "--method", "s2m"], ["anneal", "changes nothing"]),
    (["--data", "unjudged"], ["validation part", "train, test"]),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "fragments"), REFUSED, ids=[str(flags) for flags, _ in REFUSED])
def test_what_cannot_be_searched_is_refused_in_a_sentence_and_leaves_nothing(
    home, refused, flags, fragments
):
    names = {path.name for path in home.iterdir()}
    sentence = refused("tune", "a.toml", "--run", "refused", *flags)
    assert all(fragment in sentence for fragment in fragments), sentence
    assert {path.name for path in home.iterdir()} == names


def test_a_folder_of_other_settings_or_data_is_refused_and_not_touched(
    home, refused, tmp_path, monkeypatch
):
    before = bytes_of(home / "whole/trials")
    assert "begun with training.num_steps = 16" in refused(*TUNE, "--run", "whole", "--steps", 17)
    save_dataset(small.text_dataset(seed=1), tmp_path / "data")
    shutil.copyfile(home / "a.toml", tmp_path / "a.toml")
    shutil.copytree(home / "whole", tmp_path / "whole")
    monkeypatch.chdir(tmp_path)
    assert "trained on another data set" in refused(*TUNE, "--run", "whole")
    assert bytes_of(home / "whole/trials") == before
    (tmp_path / "whole/trials/001/run.json").write_text("[]", "utf-8")
    assert "damaged" in refused(*TUNE, "--run", "whole")
