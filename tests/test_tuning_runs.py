"""Searches as a user meets them: run, killed, resumed, and refused."""

import dataclasses
import json
import math
import shutil
import signal

import numpy as np
import pytest

import small
from evenhand.config import build_config, read_settings
from evenhand.data import save_dataset
from evenhand.tuning.space import count_members, with_settings
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
    del tuning["command"]
    best = (folder / "best.toml").read_text("utf-8").splitlines()[2:]
    return tuning, best, {path.name: fruits_of(path) for path in (folder / "trials").iterdir()}


def test_the_folder_holds_all_that_was_promised_and_the_figures_are_those_of_evaluations(home):
    names = {name.partition("/")[0] for name in bytes_of(home / "whole")}
    assert names == {"base.toml", "best.toml", "tuning.json", "tradeoff.html", "trials"}
    tuning = tuning_of(home / "whole")
    expected = {
        "criterion": "recall@10 on worst tenth of region", "average": "recall@10",
        "max_drop": 0.005, "is_complete": True, "data_folder": str(home / "data"),
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
    assert "there are only 3 different trials in what is searched" in out
    tuning = tuning_of(home / "few")
    assert [trial["settings"][K_PRIME] for trial in tuning["trials"]] == [32, 8, 4]
    assert {trial["low"] for trial in tuning["trials"]} == {None}  # asked for no intervals
    base = build_config(read_settings(home / "few/base.toml"))
    for number, planned in enumerate(tuning["planned"], start=1):
        run_settings = read_settings(home / f"few/trials/{number:03d}/config.toml")
        assert build_config(run_settings) == with_settings(base, planned)
    best = max(trial["criterion"] for trial in tuning["trials"])
    assert tuning["trials"][tuning["chosen"] - 1]["criterion"] == best


def test_train_takes_k_prime_from_the_smallest_group_too(user, home):
    dataset = small.text_dataset()
    num_members, num_pairs = count_members(dataset, "style=rare")
    out = user("train", "a.toml", "--run", "guard", "--smallest-group", "style=rare")
    assert f"style=rare: {num_members} of {num_pairs} training pairs" in out
    k_prime = read_settings(home / "guard/config.toml")["mining"]["num_hard_examples"]
    assert k_prime == math.ceil(num_members / num_pairs * 32)
    small.unfinish(home / "guard")
    resume = ("train", "--resume", "--run", "guard", "--smallest-group", "style=rare")
    assert "run folder: guard" in user(*resume)


def test_a_trial_that_diverges_is_out_and_where_all_do_none_is_chosen(user, refused, home):
    out = user("tune", "a.toml", "--run", "wild", "--search", "training.learning_rate=1e38")
    tuning = tuning_of(home / "wild")
    *others, wild = tuning["trials"]
    assert not any(trial["failure"] for trial in others)
    assert wild["criterion"] is None
    assert not any((home / "wild/trials/003" / name).exists() for name in ("checkpoints", "model"))
    assert "so it is out" in out
    assert tuning["chosen"] in (1, 2)
    assert wild["failure"] in (home / "wild/tradeoff.html").read_text("utf-8")
    assert "3 of 3 trials finished already" in user("tune", "--resume", "--run", "wild")
    flags = ("--run", "hopeless", "--learning-rate", "1e38", "--search", f"{K_PRIME}=4")
    assert "no trial of hopeless came to an end" in refused("tune", "a.toml", *flags)
    assert not (home / "hopeless/best.toml").exists()


# --- searches that are disturbed ------------------------------------------------------------------

KILLS = [  # function, its n-th call, when; how many trials have been written down by then
    ("evenhand.training.loop.append_line", 9, "kill", 2),  # in the third trial
    ("evenhand.tuning.search.write_json", 3, "kill", 1),  # evaluated, but not written down
]


def kill_and_resume(home, folder, function, call, when, num_recorded):
    """A search that is killed there, goes on, and must end as one never disturbed."""
    answer = run(home, *TUNE, "--run", folder, disturb=[function, call, when])
    assert answer.code == -signal.SIGKILL, answer.err
    assert len(tuning_of(folder)["trials"]) == num_recorded
    before = bytes_of(folder / "trials")
    out = run(home, "tune", "--resume", "--run", folder).output
    assert (f"{num_recorded} of 4 trials finished already" in out) == (num_recorded > 0)
    assert fruits(folder) == fruits(home / "whole")
    after = bytes_of(folder / "trials")
    for name, data in before.items():  # no finished trial was touched
        if name[:3].isdigit() and int(name[:3]) <= num_recorded:
            assert after[name] == data


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: kill[0])
def test_a_killed_search_goes_on_and_ends_as_one_never_disturbed(home, tmp_path, kill):
    kill_and_resume(home, tmp_path / "killed", *kill)


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
    (["--search", "mining.num_hard_labels=2..41"], ["num_hard_labels", "40", "41"]),
    (["--search", f"{K_PRIME}=33"], ["num_hard_examples", "32", "33"]),
    (["--search", f"{K_PRIME}=4.5"], ["num_hard_examples", "int", "4.5"]),
    (["--search", "training.learning_rate=fast"], ["learning_rate", "'fast'"]),
    (["--search", "training.learning_rate=0.2..0.1"], ["learning_rate", "lower one first"]),
    (["--search", "training.learning_rate_shape=linear..cosine"], ["two numbers"]),
    (["--search", "training.learning_rate"], ["section.key", "training.learning_rate"]),
    (["--search", "training.learning_rate="], ["section.key"]),
    (["--search", "mining.for_each_example=true"], ["numbers or words", "true"]),
    (["--search", "evaluation.num_resamples=1,2"], ["model, loss, mining", "evaluation"]),
    (["--search", f"{K_PRIME}=3", "--search", f"{K_PRIME}=4"], ["twice"]),
    (["--search", "mining.tail_fraction=0.1,0.2"], ["num_hard_examples", "tail_fraction"]),
    (["--search", "mining.batch_size=32,600"], ["mining.batch_size", "525", "600"]),
    (["--search", f"{K_PRIME}=3,4", "--method", "snm"], [K_PRIME, "snm", "changes nothing"]),
    (["--search", "mining.anneal_fraction=0,1", "--method", "s2m"], ["anneal", "changes nothing"]),
    (["--smallest-share", 0], ["above 0", "0.0"]),
    (["--smallest-share", 1.5], ["at most 1", "1.5"]),
    (["--smallest-share", 0.1, "--set", f"{K_PRIME}=3"], ["give one"]),
    (["--smallest-share", 0.1, "--hard-examples", 3], ["--hard-examples", "give one"]),
    (["--smallest-share", 0.1, "--smallest-group", "style=odd"], ["give one"]),
    (["--smallest-share", 0.1, "--method", "snm"], ["snm", "--method s2m-annealed"]),
    (["--smallest-group", "style"], ["column=group", "'style'"]),
    (["--smallest-group", "stile=odd"], ["did you mean 'style'"]),
    (["--smallest-group", "style=od"], ["did you mean 'odd'"]),
    (["--data", "unjudged"], ["validation part", "train, test"]),
    (["--resume"], ["source"]),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "fragments"), REFUSED, ids=[str(flags) for flags, _ in REFUSED])
def test_what_cannot_be_searched_is_refused_in_a_sentence_and_leaves_nothing(
    home, refused, flags, fragments
):
    names = {path.name for path in home.iterdir()}
    sentence = refused("tune", "a.toml", "--run", "refused", *flags)
    assert all(fragment in sentence for fragment in fragments), sentence
    assert {path.name for path in home.iterdir()} == names


def test_a_folder_that_is_there_is_not_touched_and_another_is_not_resumed(home, refused):
    before = bytes_of(home / "whole")
    assert "exists already" in refused(*TUNE, "--run", "whole")
    for words, sentence in (
        (["--run", "data"], "no tuning.json"),
        ([], "--run"),
        (["--run", "whole", "--seed", 3], "no seed"),
    ):
        assert sentence in refused("tune", "--resume", *words)
    assert bytes_of(home / "whole") == before


def test_a_search_is_resumed_on_its_own_data_and_not_on_other_or_from_a_damaged_file(
    home, user, refused, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(home / "whole", "copy")
    resume = ("tune", "--resume", "--run", "copy")
    user(*resume)  # here is no data: it is where the search found it
    save_dataset(small.text_dataset(seed=1), tmp_path / "data")
    assert "begun on another data set" in refused(*resume)
    for damage in ('{"space": 3}', "[]", '{"planned": '):
        (tmp_path / "copy/tuning.json").write_text(damage, "utf-8")
        assert "damaged" in refused(*resume)
