"""Evaluation by several ranks, against that of one process."""

import dataclasses

import numpy as np
import pytest
import torch

from evenhand.build import build_model
from evenhand.data import Rows
from evenhand.distributed.evaluation import evaluate_split
from evenhand.distributed.shards import Shards
from evenhand.errors import UserError
from evenhand.evaluation import evaluate
from evenhand.models.encoders import features_of
from evenhand.pipeline import evaluate_model
from evenhand.search import ExactIndex
from experiments.simulated_ranks import run_ranks
from small import config, dense_dataset, text_dataset, with_parts
from split import rank_model

CASES = {
    "cosine": {},
    "scaled": {"model__scale": 7.5, "loss__name": "softmax"},
    "dot with a bias": {
        "model__similarity": "dot",
        "model__label_bias": True,
        "loss__name": "softmax",
    },
    "less for frequent ones": {"search__frequency_discount": 0.03},
}
SLACK = {"retrieved_scores": 1e-6, "scores": 1e-6}  # an outcome keeps float32


def with_values(dataset):
    """The same features, each with a value."""
    parts = {}
    for name, part in dataset.parts.items():
        rows = part.features
        values = np.random.default_rng(1).uniform(0.5, 2, len(rows.ids)).astype(np.float32)
        parts[name] = dataclasses.replace(part, features=Rows(rows.offsets, rows.ids, values))
    return with_parts(dataset, **parts)


def some_model(settings, dataset, *, dtype=torch.float32):
    is_sparse = isinstance(dataset.parts["train"].features, Rows)
    model = build_model(settings, dataset.num_features, dataset.num_labels, is_sparse=is_sparse)
    if model.label_bias is not None:
        model.label_bias.data.normal_(generator=torch.Generator().manual_seed(4))
    return model.to(dtype)


def assert_same(found, expected):
    for field in dataclasses.fields(expected):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        if field.name in SLACK:
            np.testing.assert_allclose(ours, theirs, rtol=SLACK[field.name])
        elif isinstance(theirs, dict):
            assert ours.keys() == theirs.keys()
            for name, values in theirs.items():
                np.testing.assert_array_equal(ours[name], values, err_msg=name)
        else:
            np.testing.assert_array_equal(ours, theirs, err_msg=field.name)


def evaluated_in_double(model, dataset, part_name, *, ranks=None):
    """The labels by their vectors alone, in float64."""
    index = ExactIndex(model.label_vectors(), label_bias=model.biases())
    part, figures = dataset.parts[part_name], {"num_results": 10, "cutoffs": (1, 5, 10)}
    if ranks is not None:
        return evaluate_split(
            model, index, dataset, part_name, ranks=ranks, batch_size=50, **figures
        )
    return evaluate(
        lambda rows: model.query_vectors(features_of(part, rows, device=torch.device("cpu"))),
        index,
        part,
        dataset.label_counts(),
        num_train_queries=len(dataset.parts["train"]),
        **figures,
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("case", ["cosine", "dot with a bias"])
@pytest.mark.parametrize("kind", ["bags", "weighted bags", "dense"])
def test_the_outcome_is_that_of_one_process(case, kind, num_ranks):
    dataset = dense_dataset() if kind == "dense" else text_dataset()
    if kind == "weighted bags":
        dataset = with_values(dataset)
    if kind == "dense":
        part = dataset.parts["test"]
        dataset = with_parts(
            dataset, test=dataclasses.replace(part, features=part.features.astype(np.float64))
        )
    model = some_model(config("none", **CASES[case]), dataset, dtype=torch.float64)
    expected = evaluated_in_double(model, dataset, "test")
    outcomes = run_ranks(
        num_ranks,
        lambda ranks: evaluated_in_double(rank_model(model, ranks), dataset, "test", ranks=ranks),
    )
    for outcome in outcomes:
        assert_same(outcome, expected)
        np.testing.assert_array_equal(outcome.scores, outcomes[0].scores)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("case", CASES)
def test_evaluate_model_does_the_same_with_ranks(case, num_ranks):
    dataset, settings = text_dataset(), config("none", **CASES[case])
    model = some_model(settings, dataset)
    expected = evaluate_model(model, dataset, "validation", settings)
    told = []
    outcomes = run_ranks(
        num_ranks,
        lambda ranks: evaluate_model(
            rank_model(model, ranks),
            dataset,
            "validation",
            settings,
            ranks=ranks,
            progress_fn=lambda done, total: told.append((done, total)),
        ),
    )
    for outcome in outcomes:
        assert_same(outcome, expected)
    assert set(told) == {(120, 120)}


def test_neighbours_are_refused_and_not_left_out():
    dataset, settings = with_values(text_dataset()), config("none", search__num_neighbours=3)
    model = some_model(settings, dataset)

    def rank_fn(ranks):
        with pytest.raises(UserError, match="neighbours and rankers are for one process"):
            evaluate_model(rank_model(model, ranks), dataset, "test", settings, ranks=ranks)

    run_ranks(2, rank_fn)


def test_frequent_labels_are_counted_from_the_right_row():
    """A discount so large that it alone decides."""
    dataset, settings = text_dataset(), config("none", search__frequency_discount=1000.0)
    model = some_model(settings, dataset)
    counts = dataset.label_counts()
    rarest = set(np.flatnonzero(counts == counts.min()))
    assert len(rarest) < 5
    assert max(rarest) >= Shards(60, 3).rows_of(1)[0]  # or else the first row would do
    for outcome in run_ranks(
        3,
        lambda ranks: evaluate_model(
            rank_model(model, ranks), dataset, "test", settings, ranks=ranks
        ),
    ):
        assert set(outcome.retrieved_ids[:, 0]) == rarest
