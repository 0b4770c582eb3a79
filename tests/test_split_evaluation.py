"""Evaluation by several ranks, against that of one process."""

import dataclasses

import numpy as np
import pytest
import torch

from evenhand.build import build_model
from evenhand.data import Rows
from evenhand.errors import UserError
from evenhand.runs import evaluate_model
from ranks import run_ranks
from small import config, dense_dataset, text_dataset, with_parts
from split_training import rank_model

SOFTMAX = {"loss__name": "softmax"}
CASES = {
    "cosine": {},
    "scaled": {"model__scale": 7.5, **SOFTMAX},
    "dot with a bias": {"model__similarity": "dot", "model__label_bias": True, **SOFTMAX},
    "less for frequent ones": {"search__frequency_discount": 0.03},
    "bfloat16": {},
}
SLACK = {"retrieved_scores": 1e-5, "scores": 1e-5}  # an outcome keeps float32


def with_values(dataset):
    """The same features, each with a value."""
    parts = {}
    for name, part in dataset.parts.items():
        rows = part.features
        values = np.random.default_rng(1).uniform(0.5, 2, len(rows.ids)).astype(np.float32)
        parts[name] = dataclasses.replace(part, features=Rows(rows.offsets, rows.ids, values))
    return with_parts(dataset, **parts)


def without_features(dataset):
    """The first 60 queries of each part have none."""
    parts = {}
    for name, part in dataset.parts.items():
        offsets = part.features.offsets.copy()
        offsets[:61] = 0
        parts[name] = dataclasses.replace(part, features=Rows(offsets, part.features.ids))
    return with_parts(dataset, **parts)


DATASETS = {
    "bags": text_dataset,
    "weighted bags": lambda: with_values(text_dataset()),
    "empty bags": lambda: without_features(text_dataset()),
    "dense": dense_dataset,
}


def some_model(settings, dataset):
    is_sparse = isinstance(dataset.parts["train"].features, Rows)
    model = build_model(settings, dataset.num_features, dataset.num_labels, is_sparse=is_sparse)
    if model.label_bias is not None:
        model.label_bias.data.normal_(generator=torch.Generator().manual_seed(4))
    return model


def assert_same(found, expected):
    for field in dataclasses.fields(expected):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        if field.name in SLACK:
            np.testing.assert_allclose(ours, theirs, rtol=SLACK[field.name], atol=1e-6)
        elif isinstance(theirs, dict):
            assert ours.keys() == theirs.keys()
            for name, values in theirs.items():
                np.testing.assert_array_equal(ours[name], values, err_msg=name)
        else:
            np.testing.assert_array_equal(ours, theirs, err_msg=field.name)


def evaluated_by(num_ranks, model, dataset, settings, **how):
    """The outcome on each rank."""
    return run_ranks(
        num_ranks,
        lambda ranks: evaluate_model(
            rank_model(model, ranks), dataset, "validation", settings, ranks=ranks, **how
        ),
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("kind", "case"), [*(("bags", case) for case in CASES), *((k, "cosine") for k in DATASETS)]
)
def test_the_outcome_is_that_of_one_process(kind, case, num_ranks):
    dataset, settings = DATASETS[kind](), config("none", **CASES[case])
    model, told = some_model(settings, dataset), []
    if case == "bfloat16":
        for table in (model.label_table, model.encoder.weight):
            table.data = table.data.bfloat16()
    expected = evaluate_model(model, dataset, "validation", settings)
    outcomes = evaluated_by(
        num_ranks, model, dataset, settings, progress_fn=lambda *done: told.append(done)
    )
    for outcome in outcomes:
        assert_same(outcome, expected)
        np.testing.assert_array_equal(outcome.scores, outcomes[0].scores)
    assert set(told) == {(120, 120)}


def test_neighbours_are_refused_and_not_left_out():
    dataset, settings = with_values(text_dataset()), config("none", search__num_neighbours=3)
    with pytest.raises(UserError, match="neighbours and rankers are for one process"):
        evaluated_by(2, some_model(settings, dataset), dataset, settings)
