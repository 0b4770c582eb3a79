"""A run folder is read as it was written, and what is wrong with it is said."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from rich.console import Console

import small
from evenhand.data import save_dataset
from evenhand.errors import UserError
from evenhand.evaluation import Score
from evenhand.run_folder import (
    about_run,
    check_trained_on,
    load_result,
    read_about,
    read_metrics,
    save_result,
)
from evenhand.runs import begin_run, evaluate_run, train_run

CPU = torch.device("cpu")
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return save_dataset(small.text_dataset(), tmp_path_factory.mktemp("runs") / "data")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, dataset):
    """An evaluated run, and its scores."""
    run = tmp_path_factory.mktemp("runs") / "run"
    config = small.config("unused", training__num_steps=10)
    begin_run(run, config, dataset, device=CPU)
    train_run(run, config, dataset, device=CPU, console=QUIET)
    return run, evaluate_run(run, dataset, "test", device=CPU, console=QUIET)


@pytest.fixture
def copy(trained, tmp_path):
    return shutil.copytree(trained[0], tmp_path / "copy")


def as_text(scores):
    """Scores in a form in which NaN equals NaN."""
    return [repr(score) for score in scores]


def test_a_result_is_read_as_it_was_written(trained):
    run, scores = trained
    result = load_result(run)
    assert (result.name, result.part_name) == ("run", "test")
    assert as_text(result.scores) == as_text(scores)
    assert result.about["is_complete"]
    assert result.config_text == (run / "config.toml").read_text("utf-8")
    assert [row["step"] for row in result.metrics] == [5, 10, 10]
    assert len(result.outcome.retrieved_ids) == small.SIZES["test"]


def test_scores_without_a_value_stay_without(trained, copy):
    outcome = load_result(copy).outcome
    nothing = Score("recall@1", "style", "worst 3", *[math.nan] * 3, 0, False, ("a", "b"))
    save_result(copy, "test", outcome, [nothing])
    assert "NaN" not in (copy / "evaluation/test/scores.json").read_text("utf-8")
    (score,) = load_result(copy).scores
    assert repr(score) == repr(nothing)
    assert isinstance(score.members, tuple)


def test_the_name_of_a_run_does_not_depend_on_how_its_folder_is_written(copy, monkeypatch):
    monkeypatch.chdir(copy)
    assert load_result(copy / "model" / "..").name == "copy"
    assert load_result(small.Path(".")).name == "copy"


def test_what_is_missing_is_said(copy, tmp_path):
    with pytest.raises(UserError, match=r"is not a run folder: it holds no run\.json"):
        load_result(tmp_path)
    with pytest.raises(UserError, match="evaluated on the train part; run: evenhand evaluate"):
        load_result(copy, "train")
    (copy / "config.toml").unlink()
    with pytest.raises(UserError, match=r"config\.toml does not exist"):
        load_result(copy)


@pytest.mark.parametrize("text", ["[]", "{}", '{"dataset": 3}', "3", "{"])
def test_a_run_json_that_does_not_say_what_was_trained_on_is_damaged(copy, dataset, text):
    (copy / "run.json").write_text(text)
    for reader in (read_about, load_result, lambda run: check_trained_on(run, dataset)):
        with pytest.raises(UserError, match=r"run\.json is damaged"):
            reader(copy)


@pytest.mark.parametrize("text", ["3", "[3]", "[{}]", '[{"value": 1}]', '{"a": 1}', "["])
def test_scores_that_are_no_scores_are_damaged(copy, text):
    (copy / "evaluation/test/scores.json").write_text(text)
    with pytest.raises(UserError, match=r"scores\.json is damaged"):
        load_result(copy)


def test_a_last_line_cut_short_is_left_out_and_one_before_is_damage(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: is damaged"):
        read_metrics(path)
    path.write_bytes(b"\xff\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged"):
        read_metrics(path)


def test_another_data_set_is_refused_by_its_fingerprint(copy, dataset, tmp_path):
    check_trained_on(copy, dataset)
    other = save_dataset(small.text_dataset(seed=1), tmp_path / "other")
    with pytest.raises(UserError) as caught:
        check_trained_on(copy, other)
    assert dataset.fingerprint[:12] in str(caught.value)
    assert other.fingerprint[:12] in str(caught.value)


def test_the_same_data_elsewhere_and_under_another_name_is_the_same(copy, tmp_path):
    check_trained_on(copy, save_dataset(small.text_dataset(name="moved"), tmp_path / "moved"))


def test_what_is_said_of_a_run_can_be_written_and_read(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/bin/evenhand", "train", "--run", "a b"])
    config = small.config("unused", training__seed=5, mining__method="snm")
    about = about_run(tmp_path / "a b", config, dataset, CPU)
    assert json.loads(json.dumps(about)) == about
    assert about["command"] == "evenhand train --run 'a b'"
    assert (about["name"], about["method"], about["seed"]) == ("a b", "snm", 5)
    assert about["is_complete"] is False
    assert about["versions"]["torch"] == torch.__version__
    assert about["versions"]["numpy"] == np.__version__
    assert about["dataset"]["fingerprint"] == dataset.fingerprint


def test_without_git_there_is_no_commit(dataset, tmp_path, monkeypatch):
    def absent(*arguments, **options):
        raise FileNotFoundError("git")

    monkeypatch.setattr("subprocess.run", absent)
    about = about_run(tmp_path, small.config("unused"), dataset, CPU)
    assert about["commit"] is None
