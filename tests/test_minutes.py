"""`evenhand train --minutes`: what is tried, what is kept, and that a stop loses nothing."""

import json
import tomllib

import numpy as np
import pytest
import torch
from rich.console import Console

import small
from evenhand.config import build_config
from evenhand.data import save_dataset
from evenhand.errors import StoppedError, UserError
from evenhand.tuning import search, time_budget
from evenhand.tuning.space import with_settings
from small import run_main

CPU = torch.device("cpu")
QUICK = {"training__num_steps": 40, "training__evaluate_every": 0, "training__checkpoint_every": 0}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("minutes")
    save_dataset(small.text_dataset(), folder / "data")
    small.settings_file(folder / "a.toml", "data", **QUICK)
    return folder


@pytest.fixture
def clock(monkeypatch):
    """A clock by which a trial takes a second for every ten steps, and a second to score."""
    now = [0.0]
    monkeypatch.setattr(time_budget.time, "monotonic", lambda: now[0])
    tried = []

    def train_run(folder, config, dataset, **more):
        (folder / "model/weights").mkdir(parents=True)
        now[0] += config.training.num_steps / 10
        about = json.loads((folder / "run.json").read_text())
        about["training_seconds"] = config.training.num_steps / 10
        (folder / "run.json").write_text(json.dumps(about))
        return True

    def value(folder, dataset, config, **more):
        """Best with a quarter of the rate, and by SNM."""
        assert "test" not in dataset.parts
        now[0] += 1
        tried.append(config)
        rate = abs(np.log2(config.training.learning_rate / 0.0125))
        return 0.5 - 0.1 * rate + 0.05 * (config.mining.method == "snm")

    monkeypatch.setattr(search, "train_run", train_run)
    monkeypatch.setattr(time_budget, "validation_value", value)
    return tried


def choose(folder, num_minutes, stop_fn=lambda: False):
    dataset, config = small.text_dataset(), build_config(small.settings("data", **QUICK))
    console = Console(quiet=True)
    return config, time_budget.choose_within(
        num_minutes, folder, config, dataset, device=CPU, console=console, should_stop_fn=stop_fn
    )


def test_changes_that_are_better_are_kept_one_on_top_of_the_other(clock, tmp_path):
    config, best = choose(tmp_path / "trials", 60)
    changed = {"training.learning_rate": 0.0125, "mining.method": "snm"}
    assert best == with_settings(config, changed)
    assert {trial.training.num_steps for trial in clock[:2]} == {10}
    assert {40, 80} < {trial.training.num_steps for trial in clock}
    assert len({str(trial) for trial in clock}) == len(clock)  # none twice
    assert not (tmp_path / "trials/best").exists()


def test_with_little_time_trials_are_short_and_with_less_so_is_the_training(clock, tmp_path):
    config, best = choose(tmp_path / "a", 0.2)  # 2 s a trial of a quarter; 6 s for the last
    assert {trial.training.num_steps for trial in clock} == {10}
    assert best == with_settings(config, {"mining.method": "snm"})  # no rate by few steps
    clock.clear()
    config, best = choose(tmp_path / "b", 0.05)
    assert len(clock) == 1
    assert best == time_budget.with_steps(config, 0.25)


def test_a_stop_between_trials_loses_none_and_other_settings_are_refused(clock, tmp_path):
    config, best = choose(tmp_path / "whole", 60)
    expected, _ = list(clock), clock.clear()

    def stop_fn():
        return len(clock) == 4

    def stopped_run(folder, config, dataset, *, should_stop_fn, **more):
        return not should_stop_fn() and original(folder, config, dataset, **more)

    original = search.train_run
    search.train_run = stopped_run
    with pytest.raises(StoppedError):
        choose(tmp_path / "stopped", 60, stop_fn)
    search.train_run = original
    assert choose(tmp_path / "stopped", 60) == (config, best)
    assert clock == expected
    saved = json.loads((tmp_path / "stopped/trials.json").read_text())
    saved["belongs_to"] = "others"
    (tmp_path / "stopped/trials.json").write_text(json.dumps(saved))
    with pytest.raises(UserError, match="other data or settings"):
        choose(tmp_path / "stopped", 60)


def test_the_command_spends_the_time_on_trials_and_trains_the_best(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    out = run_main(capsys, "train", "a.toml", "--minutes", 0.1, "--run", "run").output
    assert "trial 1, 10 steps, the best so far: 0." in out
    assert "training the best" in out
    assert "pair recall on the test part" in out
    rows = json.loads((home / "run-trials/trials.json").read_text("utf-8"))["trials"]
    assert out.count("\ntrial ") == len(rows)
    best = max(rows, key=lambda row: row["value"])
    found = tomllib.loads((home / "run/config.toml").read_text("utf-8"))
    if list(best["change"]) == ["mining.method"]:
        assert found["mining"]["method"] == best["change"]["mining.method"]
    for flags, words in (
        (["--minutes", 0], "above 0"),
        (["--minutes", 1, "--resume"], "--resume"),
        (["--minutes", 1], "exists already"),
    ):
        assert words in run_main(capsys, "train", "a.toml", "--run", "run", *flags).sentence
