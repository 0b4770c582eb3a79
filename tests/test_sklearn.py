"""The estimator by scikit-learn's own checks, in a pipeline and in a search for settings."""

import importlib
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")
from sklearn.base import clone
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from evenhand.build import build_training
from evenhand.data import Dataset, Part, Rows
from evenhand.errors import UserError
from evenhand.integrations import sklearn as integration
from evenhand.integrations.sklearn import Retriever
from evenhand.training.loop import train

QUICK = Retriever(num_steps=30, learning_rate=0.1, embedding_dim=8, random_state=0)
KINDS = ("shoe", "hat", "bag")
TEXTS = [f"{colour} {kind} {n}" for n in range(8) for colour in ("red", "blue") for kind in KINDS]
LABELS = np.array(["Shoes", "Hats", "Bags"] * 16)


# None is left out. Two skip themselves: there are no probabilities, and no array API is installed.
@parametrize_with_checks([QUICK])
def test_scikit_learn_knows_it_for_an_estimator(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def features():
    return TfidfVectorizer().fit_transform(TEXTS)


def test_in_a_pipeline_it_finds_labels_of_texts():
    search = make_pipeline(TfidfVectorizer(), clone(QUICK)).fit(TEXTS, LABELS)
    assert search.predict(["a red shoe", "some bag"]).tolist() == ["Shoes", "Bags"]
    assert search.score(TEXTS, LABELS) == 1
    labels, scores = search[-1].search(search[0].transform(["blue hat"]), 9)
    assert labels.shape == (1, 3)
    assert labels[0, 0] == "Hats"
    by_label = search.decision_function(["blue hat"])[
        0, np.searchsorted(search.classes_, labels[0])
    ]
    np.testing.assert_allclose(by_label, scores[0], rtol=1e-5)


def test_a_search_for_settings_sets_them(features):
    grid = {"num_hard_labels": [1, 3], "tail_fraction": [0.25, 1.0]}
    search = GridSearchCV(QUICK, grid, cv=2).fit(features, LABELS)
    best = search.best_estimator_
    assert best.config_.mining.tail_fraction == search.best_params_["tail_fraction"]
    assert best.config_.mining.num_hard_labels == search.best_params_["num_hard_labels"]
    assert search.best_score_ > 0.9


def test_several_labels_of_a_query_are_an_indicator(features):
    indicator = (LABELS[:, None] == np.unique(LABELS)).astype(int)
    indicator = np.hstack([indicator, np.array([["red" in text] for text in TEXTS])])  # a 4th label
    own = clone(QUICK).set_params(cutoff=2).fit(features, indicator)
    found = own.predict(features)
    assert (found.sum(1) == 2).all()
    is_red = indicator[:, 3] == 1
    assert (found[is_red] == indicator[is_red]).all()
    assert own.score(features, indicator) == 1
    indicator[0] = 0  # a query without a label teaches nothing
    clone(own).fit(features, indicator)


def test_it_is_the_training_of_the_package(features):
    own = clone(QUICK).fit(features, LABELS)
    ids = np.searchsorted(np.unique(LABELS), LABELS).astype(np.int32)
    rows = Rows(features.indptr.astype(np.int64), features.indices, features.data.astype("f4"))
    part = Part(rows, Rows(np.arange(len(ids) + 1), ids))
    dataset = Dataset("any", features.shape[1], 3, {"train": part})
    built = build_training(own.config_, dataset, torch.device("cpu"))
    train(built.training, built.plan, built.choose_step().step)
    for name, tensor in built.training.model.state_dict().items():
        # Not to the byte: within a row the features may stand in another order.
        torch.testing.assert_close(tensor, own.model_.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    with pytest.raises(UserError, match=r"pip install 'evenhand\[sklearn\]'"):
        importlib.reload(integration)
    monkeypatch.undo()
    importlib.reload(integration)
