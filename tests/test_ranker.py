"""The linear ranker: against the objective minimised by other means, and loops over all labels."""

import numpy as np
import pytest
import scipy.optimize
import torch

from evenhand.data import Rows
from evenhand.search import ExactIndex, linear_svm
from evenhand.search import reranker as ranker_module
from evenhand.search.reranker import fit_ranker, hardest_labels

COSTS = {"positive_cost": 0.5, "negative_cost": 0.2}
EXACT = {"tolerance": 1e-6, "max_passes": 20_000, "smallest_weight": 0.0}


def rows_of(dense):
    """Features or labels, as rows; zeros are left out."""
    offsets = np.concatenate([[0], np.cumsum((dense != 0).sum(1))])
    values = dense[dense != 0].astype(np.float32)
    return Rows(offsets, np.nonzero(dense)[1].astype(np.int32), values)


def problem(seed, *, num_rows=30, num_features=7, num_labels=5, num_mined=3, density=0.5):
    """Features (N, F), which labels are right (N, L), mined ones (N, M) that are not."""
    generator = np.random.default_rng(seed)
    features = generator.standard_normal((num_rows, num_features))
    features *= generator.random(features.shape) < density
    is_right = generator.random((num_rows, num_labels)) < 0.3
    mined = np.argsort(generator.random((num_rows, num_labels)), axis=1)[:, :num_mined]
    mined[np.take_along_axis(is_right, mined, 1)] = -1
    return features.astype(np.float32), is_right, mined.astype(np.int32)


def fitted(features, is_right, mined, **settings):
    return fit_ranker(
        rows_of(features), rows_of(is_right), mined,
        num_features=features.shape[1], num_labels=is_right.shape[1], **{**COSTS, **settings},
    )  # fmt: skip


def dense_weights(ranker):
    """(L, F + 1), the bias last."""
    weights = np.zeros((len(ranker), ranker.num_features + 1))
    for label in range(len(ranker)):
        place = slice(ranker.weights.offsets[label], ranker.weights.offsets[label + 1])
        weights[label, ranker.weights.ids[place]] = ranker.weights.values[place]
    weights[:, -1] = ranker.biases
    return weights


def label_rows(label, features, is_right, mined, *, positive_cost=0.5, negative_cost=0.2):
    """Rows (n, F + 1), signs (n,) and costs (n,) of one label."""
    positives = np.flatnonzero(is_right[:, label])
    negatives = np.flatnonzero((mined == label).any(1))
    rows = np.concatenate([positives, negatives])
    inputs = np.concatenate([features[rows], np.ones((len(rows), 1))], axis=1).astype(np.float64)
    signs = np.repeat([1.0, -1.0], [len(positives), len(negatives)])
    return inputs, signs, np.where(signs > 0, positive_cost, negative_cost)


def objective(weights, inputs, signs, costs):
    """1/2 |w|^2 + sum of C max(0, 1 - y w.x)^2, and its gradient."""
    slack = np.maximum(0, 1 - signs * (inputs @ weights))
    value = 0.5 * weights @ weights + costs @ slack**2
    return value, weights - 2 * (costs * slack * signs) @ inputs


def minimum(*rows):
    """The weights (F + 1,) at which the objective of one label's rows is least."""
    options = {"ftol": 1e-15, "gtol": 1e-10, "maxiter": 10_000}
    start = np.zeros(rows[0].shape[1])
    return scipy.optimize.minimize(
        objective, start, rows, jac=True, method="L-BFGS-B", options=options
    ).x


# Rows that rest: with these, rows that left the work early are needed in the end.
@pytest.mark.parametrize(
    ("seed", "cost", "tolerance", "error"),
    [
        *(pytest.param(seed, None, 1e-6, 2e-4) for seed in range(6)),
        *(pytest.param(seed, 5.0, 1e-4, 2e-3, id=f"rest-{seed}") for seed in (12, 20, 22, 24)),
    ],
)
def test_weights_minimise_the_objective(seed, cost, tolerance, error):
    features, is_right, mined = problem(seed)
    if seed == 0:
        mined[mined == 1] = -1  # a label without negatives
    costs = {name: cost or value for name, value in COSTS.items()}
    settings = {**EXACT, "tolerance": tolerance, **costs}
    weights = dense_weights(fitted(features, is_right, mined, **settings))
    for label in range(is_right.shape[1]):
        expected = minimum(*label_rows(label, features, is_right, mined, **costs))
        np.testing.assert_allclose(weights[label], expected, atol=error)


def test_squared_lengths_are_those_of_summed_values():
    offsets, ids = np.array([0, 3, 3]), np.array([1, 0, 1], np.uint32)
    values = np.array([0.5, 2, 1.5], np.float32)
    squares = linear_svm.squared_lengths((offsets, ids, values), 2)
    assert squares.tolist() == [1 + 2**2 + 2**2, 1]


def test_a_label_without_positives_is_wrong_for_all():
    features, is_right, mined = problem(0)
    is_right[:, 2] = False
    ranker = fitted(features, is_right, mined)
    assert not ranker.weights.lengths()[2]
    scores = ranker.scores(rows_of(features), np.full((len(features), 1), 2))
    assert (scores == -1).all()


def test_empty_rows_teach_the_bias_alone():
    features, is_right, mined = problem(0)
    ranker = fitted(0 * features, is_right, mined, **EXACT)
    assert not len(ranker.weights.ids)
    for label in range(is_right.shape[1]):
        expected = minimum(*label_rows(label, 0 * features, is_right, mined))
        assert ranker.biases[label] == pytest.approx(expected[-1], abs=1e-4)


def test_small_weights_are_dropped_and_the_rest_is_as_it_was():
    features, is_right, mined = problem(3)
    whole = dense_weights(fitted(features, is_right, mined, smallest_weight=0.0))
    found = dense_weights(fitted(features, is_right, mined, smallest_weight=0.2))
    is_kept = np.abs(whole) >= 0.2
    is_kept[:, -1] = True
    assert not is_kept.all()
    assert (whole[:, :-1] < -0.2).any()
    np.testing.assert_array_equal(found, np.where(is_kept, whole, 0))


def same(one, other):
    return all(
        np.array_equal(a, b)
        for a, b in zip((*one.weights, one.biases), (*other.weights, other.biases), strict=True)
    )


def test_threads_tasks_and_ranges_change_nothing(monkeypatch):
    # Few rows share a feature: nothing of one label may be left for the next.
    given = problem(5, num_rows=300, num_labels=20, num_features=400, density=0.02)
    whole, others, done = fitted(*given), [fitted(*given)], []
    monkeypatch.setattr(ranker_module, "PAIRS_OF_TASK", 7)
    others.append(fitted(*given))
    monkeypatch.setattr(ranker_module, "PAIRS_AT_ONCE", 100)
    others.append(fitted(*given, progress_fn=lambda *told: done.append(told)))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3 if num_threads == 1 else 1)
    try:
        others.append(fitted(*given))
    finally:
        torch.set_num_threads(num_threads)
    assert all(same(whole, other) for other in others)
    _, is_right, mined = given
    num_pairs = int(is_right.sum() + (mined >= 0).sum())
    assert done[-1] == (num_pairs, num_pairs)
    assert len(done) > 5
    assert not same(whole, fitted(*given, seed=1))


@pytest.mark.parametrize("num_queries", [1, 3, 700])
def test_scores_are_products_and_biases(num_queries):
    features, is_right, mined = problem(6, num_rows=700, num_labels=9)
    ranker = fitted(features, is_right, mined)
    generator = np.random.default_rng(0)
    ids = generator.integers(-1, 9, (num_queries, 12))
    queries = features[:num_queries]
    weights = dense_weights(ranker)
    every = queries @ weights[:, :-1].T + weights[:, -1]  # (Q, L)
    expected = np.where(ids < 0, 0, np.take_along_axis(every, ids.clip(0), 1))
    np.testing.assert_allclose(ranker.scores(rows_of(queries), ids), expected, atol=1e-5)


def test_mined_labels_are_the_highest_that_are_wrong():
    generator = np.random.default_rng(0)
    vectors = torch.from_numpy(generator.standard_normal((11, 4))).float()
    table = torch.from_numpy(generator.standard_normal((8, 4))).float()
    is_right = generator.random((11, 8)) < 0.3
    done = []
    mined = hardest_labels(
        lambda row_ids: vectors[row_ids], ExactIndex(table), rows_of(is_right), 5,
        batch_size=4, progress_fn=lambda *told: done.append(told),
    )  # fmt: skip
    scores = (vectors @ table.T).numpy()
    order = np.argsort(-scores, axis=1)[:, :5]
    expected = np.where(np.take_along_axis(is_right, order, 1), -1, order)
    assert mined.dtype == np.int32
    assert mined.tolist() == expected.tolist()
    assert done == [(4, 11), (8, 11), (11, 11)]
