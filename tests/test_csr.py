"""CSR rows: taken, padded, joined, as pairs, and refused where compiled code would go astray."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenhand.data import Rows, pad_rows, pairs_of, take_rows
from evenhand.data.csr import collect_rows, count_ids, rows_from_lists
from evenhand.errors import UserError

lists_of_ids = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6)


def with_values(lists):
    rows = rows_from_lists(lists)
    return rows.with_values(rows.ids.astype(np.float32) / 2)


def as_lists(rows):
    return [rows.row(index).tolist() for index in range(len(rows))]


@given(lists_of_ids, st.data())
def test_rows_are_taken_in_their_order_padded_with_minus_one_and_joined(lists, data):
    chosen = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=5))
    width = data.draw(st.one_of(st.none(), st.integers(1, 6)))
    rows, row_ids = with_values(lists), np.array(chosen, dtype=np.int64)
    assert as_lists(rows) == lists
    taken = take_rows(rows, row_ids)
    assert as_lists(taken) == [lists[i] for i in chosen]
    assert taken.values.tolist() == [item / 2 for i in chosen for item in lists[i]]
    padded = pad_rows(rows, row_ids, width=width)
    longest = width or max([1, *(len(lists[i]) for i in chosen)])
    assert padded.shape == (len(chosen), longest)
    assert padded.tolist() == [(lists[i] + [-1] * longest)[:longest] for i in chosen]
    joined = collect_rows([rows, taken, rows])
    assert as_lists(joined) == [*lists, *as_lists(taken), *lists]
    assert joined.values.tolist() == [*rows.values, *taken.values, *rows.values]
    assert collect_rows([rows_from_lists(lists)]).values is None


@pytest.mark.parametrize(
    ("offsets", "num_values"), [([0, 3, 2], 3), ([0, 2, 9], 3), ([-1, 2, 3], 3), ([0, 1, 3], 2)]
)
def test_rows_that_reach_beyond_their_ids_are_refused(offsets, num_values):
    values = np.ones(num_values, dtype=np.float32)
    rows = Rows(np.array(offsets), np.arange(3, dtype=np.int32), values)
    for function in (take_rows, pad_rows):
        with pytest.raises(UserError, match=r"row \d is said to go from .* damaged; make it again"):
            function(rows, np.array([0, 1]))


@given(lists_of_ids)
def test_pairs_are_each_query_with_each_of_its_positives(lists):
    query_ids, label_ids = pairs_of(rows_from_lists(lists))
    expected = [(query, label) for query, labels in enumerate(lists) for label in labels]
    assert list(zip(query_ids.tolist(), label_ids.tolist(), strict=True)) == expected


def test_ids_beyond_the_last_are_not_counted_but_refused():
    assert count_ids(np.array([0, 2, 2]), 4).tolist() == [1, 0, 2, 0]
    with pytest.raises(UserError, match=r"ids go from 0 to 4 where there are 4: .* make it again"):
        count_ids(np.array([0, 4]), 4)
