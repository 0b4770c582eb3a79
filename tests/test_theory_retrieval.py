"""The retrieval loss against sorting, and the bounds of it: where they hold, where they fail."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles as paper
import theory_oracles as oracles
from evenhand.losses import contrastive_loss, exponential, hinge, logistic, squared_hinge
from evenhand.theory.order_weights import label_weights, shared_label_weights
from evenhand.theory.retrieval import (
    bowl_bound,
    least_contrastive_loss_of_a_miss,
    least_loss_of_a_miss,
    order_weighted_bound,
    order_weighted_losses,
    retrieval_loss,
)

MARGIN_LOSSES = [hinge, squared_hinge, logistic, exponential]
every_margin_loss = pytest.mark.parametrize("margin_loss", MARGIN_LOSSES)
SLACK = 1e-12
# Halves, so that ties are frequent.
some_scores = st.integers(-6, 6).map(lambda number: number / 2)


@st.composite
def problems(draw, smallest=2):
    """Scores (N, K) and labels (N,)."""
    size, num_labels = draw(st.integers(1, 4)), draw(st.integers(smallest, 7))
    rows = [[draw(some_scores) for _ in range(num_labels)] for _ in range(size)]
    labels = [draw(st.integers(0, num_labels - 1)) for _ in rows]
    return np.array(rows), np.array(labels)


def phi(margin_loss):
    """The same margin loss in plain floats."""
    return getattr(paper, margin_loss.__name__)


def top_weights(num_values, count):
    return [1 / count] * count + [0.0] * (num_values - count)


# The retrieval loss.


@given(problems(smallest=1), st.data())
def test_the_retrieval_loss_is_that_of_sorting_with_the_label_last_among_ties(problem, data):
    scores, labels = problem
    num_results = data.draw(st.integers(1, scores.shape[1]))
    expected = [
        float(oracles.is_missed(row.tolist(), label, num_results))
        for row, label in zip(scores, labels, strict=True)
    ]
    assert retrieval_loss(scores, labels, num_results=num_results).tolist() == expected


def test_ties_and_scores_that_are_no_number_count_against_the_label():
    assert retrieval_loss([[1.0, 1.0]], [0], num_results=1).tolist() == [1]
    assert retrieval_loss([[1.0, math.nan]], [0], num_results=1).tolist() == [1]
    assert retrieval_loss([[math.nan, 1.0]], [0], num_results=1).tolist() == [1]
    assert retrieval_loss([[1.0, -math.inf]], [0], num_results=1).tolist() == [0]


# The loss itself.


@every_margin_loss
@given(problem=problems(), data=st.data())
def test_with_the_weights_of_the_top_it_is_bowl(margin_loss, problem, data):
    scores, labels = problem
    kept = data.draw(st.integers(1, scores.shape[1] - 1))
    weights = top_weights(scores.shape[1] - 1, kept)
    actual = order_weighted_losses(scores, labels, weights=weights, margin_loss=margin_loss)
    for value, row, label in zip(actual, scores.tolist(), labels, strict=True):
        own = row.pop(label)
        expected = paper.bowl(phi(margin_loss))(own, row, kept)
        assert value == pytest.approx(expected, rel=1e-12)


# The least loss of a miss.


@pytest.mark.parametrize("share", [1.0, 0.7, 0.25, 1e-3, 1e-9])
@pytest.mark.parametrize(
    ("margin_loss", "least_fn"),
    [
        (hinge, lambda share: 2 * share),
        (squared_hinge, lambda share: 4 * share / (1 + share)),
        (logistic, lambda share: math.log1p(share) + share * math.log1p(1 / share)),
        (exponential, lambda share: 2 * math.sqrt(share)),
    ],
)
def test_the_least_loss_of_a_miss_is_the_one_found_by_hand(margin_loss, least_fn, share):
    actual = least_loss_of_a_miss(margin_loss, share=share)
    assert actual == pytest.approx(least_fn(share), rel=1e-10)


# Bounds over all labels.


@every_margin_loss
@given(problem=problems(), data=st.data())
def test_bowl_bounds_the_retrieval_loss_for_every_number_of_hard_labels(margin_loss, problem, data):
    scores, labels = problem
    how = {"num_results": data.draw(st.integers(1, scores.shape[1]))}
    missed = retrieval_loss(scores, labels, **how)
    for kept in range(1, scores.shape[1]):
        bound = bowl_bound(scores, labels, num_hard_labels=kept, margin_loss=margin_loss, **how)
        assert (bound >= missed - SLACK).all()


def test_more_hard_labels_than_results_over_the_same_constant_bound_nothing():
    # r = 1, k = 2: one rival at the label's score of 0, one at -1, where the hinge is 0.
    scores, labels = [[0.0, 0.0, -1.0]], [0]
    losses = order_weighted_losses(scores, labels, weights=top_weights(2, 2))
    assert retrieval_loss(scores, labels, num_results=1).tolist() == [1]
    assert losses.tolist() == [1 + (1 + 0) / 2]
    assert losses[0] / least_loss_of_a_miss(hinge) == 0.75  # below the retrieval loss of 1
    # Over the smaller constant, 2 r / k, it bounds again.
    assert bowl_bound(scores, labels, num_results=1, num_hard_labels=2).tolist() == [1.5]


# The contrastive loss.


@pytest.mark.parametrize("margin", [-1.0, 0.0, 0.3, 0.9])
@pytest.mark.parametrize("power", [1.0, 2.0, 3.5])
def test_the_least_contrastive_loss_of_a_miss_is_that_of_a_fine_grid(margin, power):
    cosines = np.linspace(-1, 1, 200_001)  # the label's; its rivals score the same
    losses = (1 - cosines) ** power + np.maximum(0, cosines - margin) ** power
    actual = least_contrastive_loss_of_a_miss(margin=margin, power=power)
    assert actual == pytest.approx(losses.min(), rel=1e-6)


@given(st.data(), st.floats(-1, 0.95), st.floats(1, 4))
def test_the_contrastive_loss_bounds_the_retrieval_loss_below_a_margin_of_one(data, margin, power):
    cosines = data.draw(st.lists(st.integers(-10, 10), min_size=2, max_size=7))
    scores = np.array([cosines]) / 10
    num_results = data.draw(st.integers(1, len(cosines) - 1))
    hardest = np.sort(scores[:, 1:])[:, ::-1][:, :num_results].copy()
    losses = contrastive_loss(
        torch.from_numpy(scores[:, 0]), torch.from_numpy(hardest), margin=margin, power=power
    )
    bound = losses.numpy() / least_contrastive_loss_of_a_miss(margin=margin, power=power)
    assert (bound >= retrieval_loss(scores, [0], num_results=num_results) - SLACK).all()


def test_at_a_margin_of_one_a_miss_can_cost_nothing():
    assert least_contrastive_loss_of_a_miss(margin=1.0, power=2.0) == 0
    losses = contrastive_loss(torch.ones(1), torch.ones(1, 2), margin=1.0)
    assert losses.tolist() == [0]
    assert retrieval_loss([[1.0, 1.0, 1.0]], [0], num_results=2).tolist() == [1]


# Samples of labels.


def test_a_sample_without_the_rivals_bounds_nothing_among_all_labels():
    scores = np.array([[1.0, 5.0, -1.0, -1.0]])  # label 0, whose one rival is not in the sample
    bound = bowl_bound(scores[:, [0, 2, 3]], [0], num_results=1, num_hard_labels=1)
    assert bound.tolist() == [0]
    assert retrieval_loss(scores, [0], num_results=1).tolist() == [1]


@every_margin_loss
@given(problem=problems(smallest=3), data=st.data())
def test_the_expected_loss_over_samples_bounds_the_retrieval_loss_among_all_labels(
    margin_loss, problem, data
):
    scores, labels = problem
    num_labels = scores.shape[1]
    drawn = data.draw(st.integers(1, num_labels - 1))
    counts = {"num_sampled_labels": drawn, "num_hard_labels": data.draw(st.integers(1, drawn))}
    how = {"num_results": data.draw(st.integers(1, num_labels))}
    missed = retrieval_loss(scores, labels, **how)
    for weights in (
        label_weights(num_labels - 1, **counts),
        shared_label_weights(num_labels, **counts),
    ):
        how |= {"weights": weights, "margin_loss": margin_loss}
        bound = order_weighted_bound(scores, labels, **how)
        assert (bound >= missed - SLACK).all()
