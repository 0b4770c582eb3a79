"""Votes of neighbours: against loops over all training queries and all labels."""

import numpy as np
import pytest
import torch

from evenhand.data.dataset import Rows
from evenhand.errors import UserError
from evenhand.search import ExactIndex, NeighbourIndex
from experiments.table3 import fixture


def rows_of(dense):
    offsets = np.concatenate([[0], np.cumsum((dense != 0).sum(1))])
    return Rows(offsets, np.nonzero(dense)[1].astype(np.int32), dense[dense != 0])


def problem(seed, *, num_train=12, num_features=6, num_labels=9, num_queries=5):
    generator = np.random.default_rng(seed)

    def features(count):
        dense = generator.random((count, num_features)) * (
            generator.random((count, num_features)) < 0.5
        )
        return dense.astype(np.float32)

    has_label = generator.random((num_train, num_labels)) < 0.3
    labels = Rows(
        np.concatenate([[0], np.cumsum(has_label.sum(1))]),
        np.nonzero(has_label)[1].astype(np.int32),
    )
    vectors = torch.from_numpy(generator.standard_normal((num_queries, 4))).float()
    table = torch.from_numpy(generator.standard_normal((num_labels, 4))).float()
    return features(num_train), has_label, labels, features(num_queries), vectors, table


def oracle(train, has_label, queries, vectors, table, *, count, weight, power):
    """(Q, L) scores: every label, every training query, in loops."""
    scores = (vectors @ table.T).double().numpy()
    for place, query in enumerate(queries):
        similarities = train @ query
        nearest = sorted(range(len(train)), key=lambda row: (-similarities[row], row))[:count]
        nearest = [row for row in nearest if similarities[row] > 0]
        total = sum(float(similarities[row]) ** power for row in nearest)
        for row in nearest:
            scores[place] += has_label[row] * weight * float(similarities[row]) ** power / total
    return scores


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [1, 3, 12])
def test_search_and_scores_are_those_of_the_loops(seed, count):
    train, has_label, labels, queries, vectors, table = problem(seed)
    index = NeighbourIndex(
        ExactIndex(table), rows_of(train), labels,
        num_features=train.shape[1], num_neighbours=count, weight=2.5, power=3.0,
    )  # fmt: skip
    expected = oracle(train, has_label, queries, vectors, table, count=count, weight=2.5, power=3.0)
    asked = index.asked(vectors, rows_of(queries))
    found = index.search(asked, 4)
    order = np.argsort(-expected, axis=1)[:, :4]
    assert found.label_ids.tolist() == order.tolist()
    np.testing.assert_allclose(found.scores, np.take_along_axis(expected, order, 1), rtol=1e-4)
    every = torch.arange(len(table)).expand(len(queries), -1)
    np.testing.assert_allclose(index.scores_of(asked, every), expected, rtol=1e-4, atol=1e-5)
    assert index.scores_of(asked, torch.full((len(queries), 1), -1)).isneginf().all()


def test_a_query_like_no_other_keeps_the_scores_of_the_model():
    train, _, labels, _, vectors, table = problem(0)
    exact = ExactIndex(table)
    index = NeighbourIndex(
        exact, rows_of(train), labels, num_features=6, num_neighbours=3, weight=9.0, power=1.0
    )
    nothing = rows_of(np.zeros((len(vectors), 6), np.float32))
    found, alone = index.search(index.asked(vectors, nothing), 5), exact.search(vectors, 5)
    assert found.label_ids.tolist() == alone.label_ids.tolist()
    torch.testing.assert_close(found.scores, alone.scores)


def test_of_equally_similar_queries_the_first_are_the_neighbours():
    train = np.array([[1, 0], [2, 0], [1, 0], [1, 0], [0, 1]], np.float32)
    index = NeighbourIndex(
        ExactIndex(torch.eye(5)), rows_of(train), Rows(np.arange(6), np.arange(5, dtype=np.int32)),
        num_features=2, num_neighbours=3, weight=1.0, power=1.0,
    )  # fmt: skip
    ids, similarities = index.neighbours(rows_of(np.array([[1, 0]], np.float32)))
    assert ids.tolist() == [[1, 0, 2]]
    assert similarities.tolist() == [[2, 1, 1]]


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_training_queries_without_a_feature_in_common_have_no_vote(power):
    train = np.array([[0, 1], [1, 0], [0, 1]], np.float32)
    index = NeighbourIndex(
        ExactIndex(torch.eye(3)), rows_of(train), Rows(np.arange(4), np.arange(3, dtype=np.int32)),
        num_features=2, num_neighbours=3, weight=1.0, power=power,
    )  # fmt: skip
    asked = index.asked(torch.zeros(1, 3), rows_of(np.array([[1, 0]], np.float32)))
    assert index.scores_of(asked, torch.arange(3).unsqueeze(0)).tolist() == [[0, 1, 0]]


def test_queries_asked_one_at_a_time_have_the_same_result():
    train, _, labels, queries, vectors, table = problem(3)
    index = NeighbourIndex(
        ExactIndex(table), rows_of(train), labels,
        num_features=6, num_neighbours=4, weight=1.0, power=1.0,
    )  # fmt: skip
    whole = index.search(index.asked(vectors, rows_of(queries)), 6)
    for row in range(len(queries)):
        one = slice(row, row + 1)
        alone = index.search(index.asked(vectors[one], rows_of(queries[one])), 6)
        assert whole.label_ids[one].tolist() == alone.label_ids.tolist()


@pytest.mark.parametrize("count", [0, 13])
def test_a_number_of_neighbours_that_there_are_not_is_refused(count):
    train, _, labels, _, _, table = problem(0)
    with pytest.raises(ValueError, match="between 1 and 12"):
        NeighbourIndex(
            ExactIndex(table), rows_of(train), labels,
            num_features=6, num_neighbours=count, weight=1.0, power=1.0,
        )  # fmt: skip


def test_settings_that_the_data_cannot_meet_are_refused_before_training():
    from evenhand.build import check_against_data
    from evenhand.config import build_config

    mining = {"batch_size": 64, "num_sampled_labels": 32, "num_hard_labels": 8,
              "num_hard_examples": 8}  # fmt: skip
    config = build_config({"search": {"num_neighbours": 401}, "mining": mining})
    with pytest.raises(UserError, match=r"search\.num_neighbours must be at most 400"):
        check_against_data(config, fixture())
    with pytest.raises(UserError, match=r"search\.neighbour_power must be at least 0"):
        build_config({"search": {"neighbour_power": -1.0}})
