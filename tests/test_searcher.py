"""A run folder answers queries on its own: texts or features in, labels and scores out."""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy
import torch
from rich.console import Console

import small
from evenhand import run_search, runs
from evenhand.data import Rows, Strings, open_dataset, save_dataset, take_rows
from evenhand.data.text import NgramFeaturizer, WordFeaturizer
from evenhand.errors import UserError
from evenhand.run_folder import load_model, load_result, read_about
from evenhand.search import searcher as query_data_module
from evenhand.search.searcher import QueryData, load_query_data, save_query_data
from experiments.table3 import fixture

CPU, QUIET = torch.device("cpu"), Console(quiet=True)
VOTES, RANKER = {"search__num_neighbours": 5}, {"ranker__num_mined_labels": 10}
HANDICAP = {"search__frequency_discount": 0.3}


def config_of(folder, **changes):
    """A run of three steps on feature rows; changes are named section__key."""
    values = {
        "data__weighting": "tf-idf",
        "model__similarity": "dot", "model__label_bias": True, "loss__name": "softmax",
        "mining__batch_size": 64, "mining__num_sampled_labels": 32, "mining__num_hard_labels": 8,
        "mining__num_hard_examples": 32, "training__num_steps": 3, "training__checkpoint_every": 0,
        "evaluation__num_resamples": 0,
    }  # fmt: skip
    return small.config(folder, **values | changes)


def begun(home, dataset=None, config=None, name="run"):
    """A run folder that is ready to be trained, its settings and its data."""
    if not (home / "data").exists():
        save_dataset(dataset or fixture(), home / "data")
    config = config or config_of(home / "data", **VOTES, **RANKER)
    opened = runs.open_data(config.data, QUIET)
    runs.begin_run(home / name, config, opened, device=CPU)
    return home / name, config, opened


def trained(*arguments, **options):
    run = begun(*arguments, **options)
    assert runs.train_run(*run, device=CPU, console=QUIET)
    return run


# --- without the data set -------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, HANDICAP], ids=["plain", "handicap"])
def test_a_copied_run_answers_texts_without_its_data(tmp_path, capsys, monkeypatch, changes):
    save_dataset(small.text_dataset(), tmp_path / "data")
    path = small.settings_file(tmp_path / "a.toml", tmp_path / "data", **changes)
    assert small.run_main(capsys, "train", path, "--run", tmp_path / "run").code == 0
    words = ["search", tmp_path / "run", "marsaum12", "dokiba7", "--results", "4"]
    before = small.run_main(capsys, *words)
    assert (before.code, before.out.count("\n")) == (0, 12)
    with monkeypatch.context() as patch:  # nor is it opened where it is there
        patch.setattr(runs, "open_dataset", None)
        assert small.run_main(capsys, *words) == before
    shutil.copytree(tmp_path / "run", tmp_path / "elsewhere/run")
    run_search.query_data_path(tmp_path / "run").unlink()
    assert small.run_main(capsys, *words) == before  # a run of an earlier version
    shutil.rmtree(tmp_path / "data")
    assert "no dataset.json in" in small.run_main(capsys, *words).sentence
    with pytest.raises(UserError, match="train --resume --run"):
        run_search.load_searcher(words[1], device=CPU)
    words[1] = tmp_path / "elsewhere/run"
    assert small.run_main(capsys, *words) == before
    save_dataset(small.text_dataset(seed=1), tmp_path / "other")
    answer = small.run_main(capsys, *words, "--data", tmp_path / "other")
    assert "trained on another data set" in answer.sentence


@pytest.mark.parametrize(
    ("weighting", "changes"),
    [
        ("as-is", VOTES | RANKER),  # features may lie on disk
        ("unit", HANDICAP),
        ("tf-idf", VOTES),
        ("unit", RANKER),
        ("tf-idf", HANDICAP | VOTES | RANKER),
    ],
)
def test_a_copied_run_finds_for_features_what_its_evaluation_found(tmp_path, changes, weighting):
    config = config_of(tmp_path / "data", data__weighting=weighting, **changes)
    run, _, dataset = trained(tmp_path, config=config)
    runs.evaluate_run(run, dataset, "test", device=CPU, console=QUIET)
    features = open_dataset(tmp_path / "data").parts["test"].features  # not weighted
    features = Rows(*map(np.array, features))
    shutil.copytree(run, tmp_path / "elsewhere/run")
    shutil.rmtree(tmp_path / "data")
    searcher = run_search.load_searcher(tmp_path / "elsewhere/run", device=CPU)
    found, outcome = searcher.search(features, 10), load_result(run, "test").outcome
    np.testing.assert_array_equal(found.label_ids, outcome.retrieved_ids)
    np.testing.assert_allclose(found.scores, outcome.retrieved_scores, rtol=1e-5)
    assert searcher.encode(features).shape == (len(features), 8)
    one = searcher.search(take_rows(features, np.array([0])), 3)
    np.testing.assert_array_equal(one.label_ids, found.label_ids[:1, :3])


def test_a_text_gets_the_weights_and_additions_of_the_features_that_were_trained_on(tmp_path):
    featurizer = WordFeaturizer(max_words=1, max_length=3, num_buckets=512)
    dataset = small.text_dataset(featurizer=featurizer)
    config = config_of(tmp_path / "data", **VOTES, **RANKER, **HANDICAP)
    run, _, opened = trained(tmp_path, dataset, config)
    runs.evaluate_run(run, opened, "test", device=CPU, console=QUIET)
    searcher, texts = run_search.load_searcher(run, device=CPU), list(dataset.parts["test"].texts)
    outcome, found = load_result(run, "test").outcome, searcher.search(texts, 10)
    np.testing.assert_array_equal(found.label_ids, outcome.retrieved_ids)
    np.testing.assert_allclose(found.scores, outcome.retrieved_scores, rtol=1e-5)


def test_dense_queries_are_answered_and_others_refused(tmp_path):
    config = small.config(tmp_path / "data", training__num_steps=3)
    run, _, dataset = trained(tmp_path, small.dense_dataset(), config)
    searcher, queries = run_search.load_searcher(run, device=CPU), dataset.parts["test"].features
    found = searcher.search(np.asarray(queries[:4], np.float64), 5)
    outcome = runs.evaluate_model(load_model(run, dataset, device=CPU), dataset, "test", config)
    np.testing.assert_array_equal(found.label_ids, outcome.retrieved_ids[:4, :5])
    assert searcher.label_names([3]) == ["label 3"]
    for asked, message in (
        (np.zeros((2, 11)), r"dense, of width 12, got \(2, 11\)"),
        (Rows(np.array([0, 1]), np.array([3], np.int32)), "got sparse rows"),
        (["Wien"], "cannot turn a text into features"),
    ):
        with pytest.raises((ValueError, UserError), match=message):
            searcher.search(asked)


def test_rows_that_are_none_of_the_model_are_refused(tmp_path):
    searcher = run_search.load_searcher(trained(tmp_path)[0], device=CPU)
    rows = {"offsets": np.array([0, 1]), "ids": np.array([0], np.int32)}
    rows["values"] = np.ones(1, np.float32)
    for change, words in (
        ({"ids": np.array([10**6], np.int32)}, "ids of queries must be from 0"),
        ({"offsets": np.array([0, 2])}, "offsets must go from 0 to 1"),
        ({"offsets": np.array([0, 0])}, "go from 0 to 1, and goes from 0 to 0"),
        ({"values": None}, "queries must have values"),
    ):
        with pytest.raises(ValueError, match=words):
            searcher.search(Rows(**rows | change))
    with pytest.raises(ValueError, match="sparse rows of ids below"):
        searcher.search(np.zeros((1, searcher.data.num_features)))


DAMAGES = {
    "cut": (None, "SafetensorError"),
    "no about": ({"about": None}, "version must be 1"),
    "no number": ({"num_labels": "4"}, "num_labels must be"),
    "many labels": ({"num_labels": 2**31}, "there must be 1 to"),
    "other labels": ({"num_labels": 5}, "rows, expected 5"),
    "buckets": ({"num_features": 3}, "got 0 to 4|more buckets|of shape"),
    "featurizer": ({"featurizer": {"kind": "images"}}, "kind 'ngrams' or 'words'"),
    "types": ({"label_counts": np.zeros(4, np.float32)}, "expected int64"),
    "shape": ({"label_counts": np.zeros((2, 2), np.int64)}, "expected int64"),
    "negative": ({"label_counts": np.array([0, 1, -1, 0])}, "at least 0, got -1"),
    "infinite": ({"feature_weights": np.full(5, np.inf, np.float32)}, "not finite"),
    "falling": ({"label_names.offsets": np.array([0, 3, 2, 3, 4])}, "offsets decrease"),
    "features": ({"train_features.ids": np.array([0, 5, 2], np.int32)}, "from 0 to 4, got 0 to 5"),
    "queries": ({"train_positives.offsets": np.array([0, 2])}, "1 rows, expected 2"),
    "places": ({"label_coordinates": np.ones(7, np.float32)}, "expected \\(8,\\)|of shape|7"),
    "unknown": ({"other": np.zeros(1)}, "expected None"),
    "no type of numpy": (b'"F8_E4M3"', "AttributeError|TypeError"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_query_data_are_refused_in_one_sentence(tmp_path, damage):
    rows = Rows(np.array([0, 2, 3]), np.array([0, 4, 2], np.int32), np.ones(3, np.float32))
    data = QueryData(
        "a", "b", 5, 4, True, NgramFeaturizer(num_buckets=5).settings(), Strings.pack("wxyz"),
        np.ones(5, np.float32), np.arange(4), rows, Rows(np.arange(3), np.array([3, 0], np.int32)),
        np.arange(8, dtype=np.float32).reshape(4, 2),
    )  # fmt: skip
    path, (changes, words) = tmp_path / "model/query_data.safetensors", DAMAGES[damage]
    save_query_data(path, data)
    loaded = load_query_data(path)
    assert str(loaded._replace(label_names=None)) == str(data._replace(label_names=None))
    arrays, content = safetensors.numpy.load_file(path), path.read_bytes()
    about = {"version": 1, **{name: getattr(data, name) for name in query_data_module.KINDS}}
    if changes is None:
        content = content[:-3]
    elif isinstance(changes, bytes):
        end = 8 + int.from_bytes(content[:8], "little")
        header = content[8:end].replace(b'"U8"', changes)
        content = len(header).to_bytes(8, "little") + header + content[end:]
    elif changes == {"about": None}:
        content = safetensors.numpy.save(arrays)
    else:
        arrays |= {name: value for name, value in changes.items() if name not in about}
        about |= {name: value for name, value in changes.items() if name in about}
        content = safetensors.numpy.save(arrays, metadata={"about": json.dumps(about)})
    path.write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        load_query_data(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_frequency_discount_takes_the_logarithm_of_its_pairs_off_every_label(has_bias):
    dataset = small.text_dataset()
    changes = {"loss__name": "softmax", "model__similarity": "dot", "model__label_bias": has_bias}
    plain = small.config("unused", **changes)
    config = small.config("unused", search__frequency_discount=0.7, **changes)
    model = runs.build_training(plain, dataset, CPU).training.model
    if has_bias:
        torch.nn.init.normal_(model.label_bias)
    scores, labels = [], torch.arange(dataset.num_labels).expand(2, -1)
    for one in (plain, config):
        searcher = run_search.build_searcher(model, run_search.query_data_of(dataset, one), one)
        scores.append(searcher.index.scores_of(searcher.encode(["a", "b"]), labels))
    pairs = dataset.parts["train"].positives.ids.tolist()
    taken = [0.7 * np.log(1 + pairs.count(label)) for label in range(dataset.num_labels)]
    expected = torch.tensor(taken).expand(2, -1).float()
    torch.testing.assert_close(scores[0] - scores[1], expected, rtol=1e-4, atol=1e-5)


# --- runs with a ranker ---------------------------------------------------------------------------


def test_a_run_leaves_a_ranker_that_its_evaluation_uses(tmp_path):
    folder, config, dataset = trained(tmp_path)
    about = read_about(folder)
    assert about["is_complete"]
    assert about["ranker_seconds"] >= 0
    names = sorted(path.name for path in (folder / "model").iterdir())
    assert names == ["query_data.safetensors", "ranker.safetensors", "weights"]
    ranker = run_search.load_run_ranker(folder, config, dataset)
    model = load_model(folder, dataset, device=CPU)
    again = runs.mine_and_fit_ranker(model, dataset, config, console=QUIET)
    arrays = [(*one.weights, one.biases) for one in (ranker, again)]
    for one, other in zip(*arrays, strict=True):
        np.testing.assert_array_equal(one, other)
    runs.evaluate_run(folder, dataset, "test", device=CPU, console=QUIET)
    found = load_result(folder, "test").outcome
    expected = runs.evaluate_model(model, dataset, "test", config, ranker=ranker)
    np.testing.assert_array_equal(found.ranks, expected.ranks)
    assert (found.ranks != runs.evaluate_model(model, dataset, "test", config).ranks).any()


def killed(*arguments, **settings):
    raise KeyboardInterrupt


def test_a_kill_or_a_wish_to_stop_costs_no_more_than_the_ranker(tmp_path, monkeypatch):
    folder, _config, dataset = run = begun(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(runs, "mine_and_fit_ranker", killed)
        with pytest.raises(KeyboardInterrupt):
            runs.train_run(*run, device=CPU, console=QUIET)
    assert not read_about(folder)["is_complete"]
    with pytest.raises(UserError, match="no fitted ranker yet; finish it: evenhand train --resume"):
        runs.evaluate_run(folder, dataset, "test", device=CPU, console=QUIET)
    weights = small.weights_file(folder).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(runs, "train", killed)  # the model must not be trained again
        patch.setattr("evenhand.search.reranker.PAIRS_OF_TASK", 64)
        assert not runs.train_run(*run, device=CPU, console=QUIET, should_stop_fn=lambda: True)
        assert not run_search.ranker_path(folder).exists()
        assert runs.train_run(*run, device=CPU, console=QUIET)
        ranker = run_search.ranker_path(folder).read_bytes()
        patch.setattr(runs, "mine_and_fit_ranker", killed)  # nor fitted, once all is there
        assert runs.train_run(*run, device=CPU, console=QUIET)
    assert read_about(folder)["is_complete"]
    assert small.weights_file(folder).read_bytes() == weights
    shutil.rmtree(folder / "model/weights")  # trained anew, it gets a ranker of its own
    run_search.ranker_path(folder).write_bytes(b"of another model")
    assert runs.train_run(*run, device=CPU, console=QUIET)
    assert run_search.ranker_path(folder).read_bytes() == ranker
