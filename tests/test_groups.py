"""Group columns; head, torso and tail against loops written from the paper's sentence."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenhand.data import frequency_groups
from evenhand.data.groups import make_shared_groups

counts_lists = st.lists(st.integers(0, 12), max_size=40)


def names_of(groups):
    return [groups.names[group_id] for group_id in groups.ids]


def oracle(counts, population):
    """Head above the 66 % quantile of the population, torso above the 33 % one, tail otherwise."""
    population = sorted(population)

    def quantile(per_cent):
        for place, count in enumerate(population, start=1):
            if 100 * place >= per_cent * len(population):
                return count
        return 0

    names = []
    for count in counts:
        if count > quantile(66):
            names.append("head")
        elif count > quantile(33):
            names.append("torso")
        else:
            names.append("tail")
    return names


@given(counts_lists)
def test_over_labels_each_label_is_one_of_the_population(counts):
    groups = frequency_groups(np.array(counts, dtype=np.int64), over="labels")
    assert groups.names == ("head", "torso", "tail")
    assert groups.ids.dtype == np.int32
    assert names_of(groups) == oracle(counts, counts)


@given(counts_lists)
def test_over_pairs_each_label_counts_as_often_as_it_occurs(counts):
    population = [count for count in counts for _ in range(count)]
    groups = frequency_groups(np.array(counts, dtype=np.int64), over="pairs")
    assert names_of(groups) == oracle(counts, population)


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="at least 0, got -3"):
        frequency_groups(np.array([1, -3]), over="labels")


def test_groups_share_names_and_a_column_only_one_part_has_stays_with_it():
    groups = make_shared_groups({"train": {"a": ["x", None]}, "test": {}, "more": {"a": ["b"]}})
    assert groups["train"]["a"].ids.tolist() == [1, -1]
    assert groups["train"]["a"].names == groups["more"]["a"].names == ("b", "x")
    assert groups["test"] == {}
