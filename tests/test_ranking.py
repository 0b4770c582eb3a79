"""Runs with a ranker: trained, stopped, killed and resumed, evaluated, averaged."""

import dataclasses
import json
import mmap

import numpy as np
import pytest
import torch
from rich.console import Console

import small
from evenhand import ranking, runs
from evenhand.building import check_against_data, check_ranker
from evenhand.cli import main
from evenhand.config import build_config, to_toml
from evenhand.data import save_dataset
from evenhand.errors import UserError
from evenhand.ranking import fitted_ranker, load_ranker, ranker_path, save_ranker
from evenhand.run_folder import load_result, read_about
from evenhand.runs import begin_run, evaluate_model, evaluate_run, train_run
from evenhand.saved_models import load_model, weights_path
from experiments.table3 import fixture

CPU, QUIET = torch.device("cpu"), Console(quiet=True)


def config_of(folder, **ranker):
    return build_config(
        {
            "data": {"dataset": str(folder), "weighting": "tf-idf"},
            "model": {"similarity": "dot", "label_bias": True, "embedding_dim": 8},
            "loss": {"name": "softmax"},
            "mining": {
                "batch_size": 64, "num_sampled_labels": 32, "num_hard_labels": 8,
                "num_hard_examples": 32,
            },
            "training": {"num_steps": 3, "checkpoint_every": 0},
            "search": {"num_neighbours": 5},
            "ranker": {"num_mined_labels": 10, **ranker},
            "evaluation": {"num_resamples": 0},
        }
    )  # fmt: skip


@pytest.fixture
def begun(tmp_path):
    """A run folder that is ready to be trained, its settings and its data."""
    save_dataset(fixture(), tmp_path / "data")
    config = config_of(tmp_path / "data")
    dataset = runs.open_data(config.data, QUIET)
    begin_run(tmp_path / "run", config, dataset, device=CPU)
    return tmp_path / "run", config, dataset


def test_a_run_leaves_a_ranker_that_its_evaluation_uses(begun):
    folder, config, dataset = begun
    assert train_run(*begun, device=CPU, console=QUIET)
    about = read_about(folder)
    assert about["is_complete"]
    assert about["ranker_seconds"] >= 0
    ranker, model = load_ranker(folder, config, dataset), load_model(folder, dataset, device=CPU)
    evaluate_run(folder, dataset, "test", device=CPU, console=QUIET)
    found = load_result(folder, "test").outcome
    expected = evaluate_model(model, dataset, "test", config, ranker=ranker)
    alone = evaluate_model(model, dataset, "test", config)
    np.testing.assert_array_equal(found.ranks, expected.ranks)
    assert (found.ranks != alone.ranks).any()


def test_a_ranker_is_saved_and_loaded_to_the_bit(begun):
    folder, config, dataset = begun
    train_run(*begun, device=CPU, console=QUIET)
    model = load_model(folder, dataset, device=CPU)
    again = fitted_ranker(model, dataset, config, console=QUIET)
    loaded = load_ranker(folder, config, dataset)
    for one, other in zip(
        (*again.weights, again.biases), (*loaded.weights, loaded.biases), strict=False
    ):
        np.testing.assert_array_equal(one, other)
    assert loaded.num_features == dataset.num_features
    assert sorted(path.name for path in (folder / "model").iterdir()) == [
        "ranker.safetensors", "weights.safetensors",
    ]  # fmt: skip


def test_features_may_lie_on_disk(begun, tmp_path):
    plain = {**dataclasses.asdict(begun[1])}
    plain["data"]["weighting"] = "as-is"
    config = build_config(plain)
    dataset = runs.open_data(config.data, QUIET)
    assert isinstance(dataset.parts["train"].features.values.base, np.memmap | mmap.mmap)
    begin_run(tmp_path / "other", config, dataset, device=CPU)
    assert train_run(tmp_path / "other", config, dataset, device=CPU, console=QUIET)
    evaluate_run(tmp_path / "other", dataset, "test", device=CPU, console=QUIET)


def test_after_a_kill_between_model_and_ranker_only_the_ranker_is_fitted(begun, monkeypatch):
    folder, _config, dataset = begun

    def killed(*arguments, **settings):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runs, "fitted_ranker", killed)
        with pytest.raises(KeyboardInterrupt):
            train_run(*begun, device=CPU, console=QUIET)
    assert not read_about(folder)["is_complete"]
    with pytest.raises(UserError, match="no fitted ranker yet; finish it: evenhand train --resume"):
        evaluate_run(folder, dataset, "test", device=CPU, console=QUIET)
    weights = weights_path(folder).read_bytes()
    monkeypatch.setattr(runs, "train", killed)  # the model must not be trained again
    assert train_run(*begun, device=CPU, console=QUIET)
    assert weights_path(folder).read_bytes() == weights
    assert read_about(folder)["is_complete"]
    ranker = ranker_path(folder).read_bytes()
    monkeypatch.setattr(runs, "fitted_ranker", killed)  # nor fitted, once all is there
    assert train_run(*begun, device=CPU, console=QUIET)
    assert ranker_path(folder).read_bytes() == ranker


def test_a_model_that_is_trained_anew_gets_another_ranker(begun):
    folder, _config, _dataset = begun
    train_run(*begun, device=CPU, console=QUIET)
    ranker = ranker_path(folder).read_bytes()
    weights_path(folder).unlink()
    ranker_path(folder).write_bytes(b"of another model")
    assert train_run(*begun, device=CPU, console=QUIET)
    assert ranker_path(folder).read_bytes() == ranker


def test_a_wish_to_stop_is_heard_while_the_ranker_is_fitted(begun, monkeypatch):
    folder = begun[0]
    assert train_run(*begun, device=CPU, console=QUIET)
    ranker_path(folder).unlink()
    monkeypatch.setattr("evenhand.search.ranker.PAIRS_OF_TASK", 64)
    assert not train_run(*begun, device=CPU, console=QUIET, should_stop_fn=lambda: True)
    assert not ranker_path(folder).exists()
    assert train_run(*begun, device=CPU, console=QUIET)
    assert ranker_path(folder).exists()


@pytest.mark.parametrize("damage", ["cut", "other data", "missing array", "ids"])
def test_a_damaged_ranker_is_refused(begun, damage):
    folder, config, dataset = begun
    train_run(*begun, device=CPU, console=QUIET)
    path, ranker = ranker_path(folder), load_ranker(folder, config, dataset)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-7])
    elif damage == "other data":
        weights = ranking.Rows(*(ranker.weights.offsets[:-1], *ranker.weights[1:]))
        save_ranker(folder, ranking.LinearRanker(weights, ranker.biases[:-1], 5))
    elif damage == "missing array":
        ranking.safetensors.numpy.save_file({"biases": ranker.biases}, path)
    else:
        ranker.weights.ids[0] = dataset.num_features
        save_ranker(folder, ranker)
    with pytest.raises(UserError, match=r"ranker\.safetensors does not fit .* or is damaged"):
        load_ranker(folder, config, dataset)


def test_an_average_has_a_ranker_of_its_own(tmp_path, capsys):
    save_dataset(fixture(), tmp_path / "data")
    runs = []
    for seed in (1, 2):
        config = config_of(tmp_path / "data")
        (tmp_path / f"{seed}.toml").write_text(to_toml(config))
        runs.append(str(tmp_path / f"run{seed}"))
        words = ["train", str(tmp_path / f"{seed}.toml"), "--run", runs[-1], "--seed", str(seed)]
        assert main(words) == 0
    out = tmp_path / "both"
    assert main(["average", *runs, "--run", str(out)]) == 0
    assert main(["evaluate", str(out), "--part", "validation"]) == 0
    bytes_of = {ranker_path(folder).read_bytes() for folder in map(type(out), [*runs, out])}
    assert len(bytes_of) == 3
    assert "ranker_seconds" in json.loads((out / "run.json").read_text())
    text = (tmp_path / "run2/config.toml").read_text().replace("weight = 12.0", "weight = 13.0")
    (tmp_path / "run2/config.toml").write_text(text)
    capsys.readouterr()
    assert main(["average", *runs, "--run", str(tmp_path / "other")]) == 2
    assert "differ in their [ranker] settings" in capsys.readouterr().err


def test_settings_that_make_no_sense_are_refused(tmp_path):
    dataset = fixture()
    with pytest.raises(UserError, match=r"ranker\.num_mined_labels must be at most \d+ \(the lab"):
        check_against_data(config_of("unused", num_mined_labels=10**6), dataset)
    for name, value in {
        "num_mined_labels": -1, "weight": -1.0, "smallest_weight": -0.1,
        "positive_cost": 0.0, "negative_cost": 0.0, "num_candidates": 0,
    }.items():  # fmt: skip
        with pytest.raises(UserError, match=rf"ranker\.{name} must be (at least|above) 0"):
            config_of("unused", **{name: value})


@pytest.mark.parametrize("dataset", [small.text_dataset(), small.dense_dataset()])
def test_features_without_values_have_no_ranker(dataset):
    with pytest.raises(UserError, match=r"num_mined_labels needs sparse features with values"):
        check_ranker(config_of("unused", num_mined_labels=3), dataset)
