"""Feature values of length 1, and by how rare a feature is: against a slow oracle."""

import math

import numpy as np
import pytest

from evenhand.data import Dataset, Part, Rows, csr
from evenhand.data.weighting import feature_weights, weight_features
from evenhand.errors import UserError

POSITIVES = Rows(np.array([0, 1, 2, 3]), np.array([0, 0, 1], np.int32))
TRAIN = Rows(
    np.array([0, 2, 3, 3]), np.array([0, 2, 2], np.int32), np.array([3.0, 4.0, -2.0], np.float32)
)
TEST = Rows(np.array([0, 0, 1, 3]), np.array([1, 0, 2], np.int32), np.array([5, 1, 1], np.float32))


def dataset(train=TRAIN):
    return Dataset("few", 3, 2, {"train": Part(train, POSITIVES), "test": Part(TEST, POSITIVES)})


def values_of(data, name):
    return data.parts[name].features.values.tolist()


def test_rows_have_length_one_and_an_empty_row_stays_empty():
    found = weight_features(dataset(), "unit")
    assert values_of(found, "train") == pytest.approx([0.6, 0.8, -1.0])
    half = 1 / math.sqrt(2)
    assert values_of(found, "test") == pytest.approx([1.0, half, half])
    assert np.array_equal(found.parts["train"].features.offsets, TRAIN.offsets)


@pytest.mark.parametrize("kind", ["unit", "tf-idf"])
def test_huge_and_tiny_values_have_a_direction_too(kind):
    values = np.array([3e38, 3e38, 1e-20], np.float32)
    found = weight_features(dataset(TRAIN.with_values(values)), kind)
    first, second, third = values_of(found, "train")
    assert math.hypot(first, second) == pytest.approx(1)
    assert third == pytest.approx(1)  # beside a row that is 10^58 times as long


def test_rare_features_weigh_more_by_the_training_part_alone():
    rare, absent, common = (1 + math.log(4 / (1 + count)) for count in (1, 0, 2))
    found = weight_features(dataset(), "tf-idf")
    length = math.hypot(3 * rare, 4 * common)
    assert values_of(found, "train") == pytest.approx([3 * rare / length, 4 * common / length, -1])
    length = math.hypot(rare, common)
    assert values_of(found, "test") == pytest.approx([1.0, rare / length, common / length])
    assert absent > rare > common


def test_an_id_twice_in_a_row_counts_as_one_feature_whose_values_add(monkeypatch):
    monkeypatch.setattr(csr, "BLOCK_ROWS", 2)
    ids = np.array([2, 0, 2, 1, 1, 1], np.int32)
    twice = Rows(np.array([0, 3, 5, 6]), ids, np.array([1, 4, 2, 1, -1, 5], np.float32))
    found = weight_features(dataset(twice), "unit")
    assert values_of(found, "train") == pytest.approx([1 / 5, 4 / 5, 2 / 5, 0, 0, 1])
    weights = feature_weights(twice, 3, "tf-idf")
    assert weights.tolist() == pytest.approx([1 + math.log(4 / (1 + n)) for n in (1, 2, 1)])
    assert twice.ids.tolist() == ids.tolist()


@pytest.mark.parametrize("train", [TRAIN.with_values(None), np.ones((3, 3), np.float32)])
def test_features_without_values_are_refused(train):
    with pytest.raises(UserError, match=r"data\.weighting = \"unit\" is for sparse features"):
        weight_features(dataset(train), "unit")
