"""A run is begun, trained, resumed and evaluated; its folder is read as it was written."""

import copy
import math
import shutil

import numpy as np
import pytest
import torch
from rich.console import Console

import small
from evenhand import runs
from evenhand.build import build_training
from evenhand.data import save_dataset
from evenhand.errors import UserError
from evenhand.evaluation import Score
from evenhand.run_folder import (
    load_model,
    load_result,
    read_about,
    run_config,
    save_result,
)

CPU, QUIET = torch.device("cpu"), Console(quiet=True)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return save_dataset(small.text_dataset(), tmp_path_factory.mktemp("runs") / "data")


def train(run, config, dataset):
    """Begins a run and trains it to its end."""
    runs.begin_run(run, config, dataset, device=CPU)
    given = {"device": CPU, "console": QUIET, "keeps_checkpoints": True}
    assert runs.train_run(run, config, dataset, **given)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, dataset):
    """An evaluated run, and its scores."""
    run = tmp_path_factory.mktemp("runs") / "run"
    train(run, small.config("unused", training__num_steps=10), dataset)
    return run, runs.evaluate_run(run, dataset, "test", device=CPU, console=QUIET)


@pytest.fixture
def folder(trained, tmp_path):
    """A copy that may be spoilt."""
    return shutil.copytree(trained[0], tmp_path / "copy")


def test_a_run_begins_as_a_whole_or_not_at_all(dataset, tmp_path, monkeypatch):
    config, run = small.config("unused"), tmp_path / "a/run"
    runs.begin_run(run, config, dataset, device=CPU)
    assert sorted(path.name for path in run.iterdir()) == ["config.toml", "run.json"]
    with pytest.raises(UserError, match="exists already"):
        runs.begin_run(run, config, dataset, device=CPU)
    monkeypatch.setattr(runs, "about_run", None)
    with pytest.raises(TypeError):
        runs.begin_run(tmp_path / "b/run", config, dataset, device=CPU)
    assert not list((tmp_path / "b").iterdir())
    assert run_config(run) == runs.resumable_config(run, None) == config
    assert runs.resumable_config(run, config, dataset) == config
    other = small.config("unused", evaluation__cutoffs=[1, 10])
    message = r"evaluation\.cutoffs = \(1, 5, 10\), and now it is \(1, 1"
    with pytest.raises(UserError, match=message):
        runs.resumable_config(run, other)


def test_a_checkpoint_of_another_run_is_refused(dataset, folder, tmp_path):
    config = small.config("unused", training__num_steps=6, training__seed=1)
    train(tmp_path / "other", config, dataset)
    shutil.rmtree(folder / "checkpoints")
    shutil.copytree(tmp_path / "other/checkpoints", folder / "checkpoints")
    small.unfinish(folder)
    with pytest.raises(UserError, match=r"step 6 is of another configuration or another data set"):
        runs.train_run(folder, run_config(folder), dataset, device=CPU, console=QUIET)


@pytest.mark.parametrize("validation", [None, "validation"])
def test_a_run_without_validation_keeps_its_last_weights(dataset, tmp_path, validation):
    validation = validation and dataset.parts[validation]
    data = save_dataset(small.with_parts(dataset, validation=validation), tmp_path / "data")
    changes = {"training__num_steps": 6, "training__evaluate_every": 0}
    config, run = small.config(tmp_path / "data", **changes), tmp_path / "run"
    train(run, config, data)
    last = build_training(config, data, CPU).training
    last.load(runs.load_latest_checkpoint(run / "checkpoints"))
    assert last.step == read_about(run)["best_step"] == 6
    assert load_model(run, data, device=CPU).label_table.equal(last.model.label_table)


def test_training_time_adds_up_over_resumptions(dataset, tmp_path, monkeypatch):
    """With a clock of one second a glance: each stretch takes one second."""
    config, run = small.config("unused", training__num_steps=8), tmp_path / "run"
    runs.begin_run(run, config, dataset, device=CPU)
    seconds = iter(range(100))
    monkeypatch.setattr(runs.time, "monotonic", lambda: float(next(seconds)))
    stretch = {"device": CPU, "console": Console(quiet=True, get_time=lambda: 0.0)}
    abouts = []
    for should_stop in (True, False, False):
        runs.train_run(
            run, config, dataset, **stretch, should_stop_fn=lambda stop=should_stop: stop
        )
        abouts.append(read_about(run))
    assert [about["is_complete"] for about in abouts] == [False, True, True]
    assert [about["training_seconds"] for about in abouts] == [1.0, 2.0, 2.0]
    assert [about["milliseconds_a_step"] for about in abouts] == [1000, 142.86, 142.86]


@pytest.mark.parametrize("most_copied", [2**28, 0])
def test_tables_in_bfloat16_are_evaluated_in_float32_and_stay_as_they_are(
    dataset, most_copied, monkeypatch
):
    monkeypatch.setattr("evenhand.search.searcher.MOST_COPIED", most_copied)
    config = small.config("unused", training__precision="bfloat16")
    model = build_training(config, dataset, CPU).training.model
    outcome = runs.evaluate_model(model, dataset, "test", config)
    assert model.label_table.dtype == torch.bfloat16
    expected = runs.evaluate_model(copy.deepcopy(model).float(), dataset, "test", config)
    np.testing.assert_array_equal(outcome.ranks, expected.ranks)


def test_a_result_is_read_as_it_was_written(trained):
    run, scores = trained
    result = load_result(run)
    assert (result.name, result.part_name) == ("run", "test")
    assert repr(result.scores) == repr(scores)  # in which NaN equals NaN
    nothing = Score("recall@1", "style", "worst 3", *[math.nan] * 3, 0, False, ("a", "b"))
    save_result(run, "validation", result.outcome, [nothing])
    assert "NaN" not in (run / "evaluation/validation/scores.json").read_text("utf-8")
    assert repr(load_result(run, "validation").scores) == repr([nothing])
    assert result.about["is_complete"]
    assert result.config_text == (run / "config.toml").read_text("utf-8")
    assert len(result.outcome.retrieved_ids) == small.SIZES["test"]
