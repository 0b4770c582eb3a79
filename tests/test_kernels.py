import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

from evenhand.kernels import scoring
from evenhand.kernels.scoring import scores_of_each
from evenhand.kernels.selection import FOLD, largest, positive_slots
from evenhand.kernels.sparse import Entries, product, transposed_product


def seeded(seed):
    return torch.Generator().manual_seed(seed)


# largest


def assert_largest(scores, count):
    positions = largest(scores, count)
    assert positions.shape == (*scores.shape[:-1], count)
    assert positions.dtype == torch.int64
    for row, chosen in zip(scores.tolist(), positions.tolist(), strict=True):
        assert len(set(chosen)) == count
        found = sorted((row[position] for position in chosen), reverse=True)
        assert found == sorted(row, reverse=True)[:count]


@pytest.mark.parametrize("distinct_values", [10**6, 3, 1], ids=["distinct", "ties", "all equal"])
@given(st.integers(0, 4), st.integers(1, 150), st.integers(0, 2**31), st.data())
def test_the_largest_have_the_values_of_a_full_sort(distinct_values, rows, width, seed, data):
    scores = torch.randint(distinct_values, (rows, width), generator=seeded(seed)).double()
    scores[torch.rand(rows, width, generator=seeded(seed)) < 0.3] = -torch.inf
    # Near the border between the two ways as well as anywhere.
    border = max(1, width // FOLD // 2)
    near = st.integers(max(1, border - 1), min(width, border + 1))
    assert_largest(scores, data.draw(st.one_of(near, st.integers(1, width))))


@pytest.mark.parametrize("rest", range(FOLD))
@pytest.mark.parametrize("count", [1, 2])
def test_no_column_is_overlooked_when_the_width_is_odd(rest, count):
    width = 2 * count * FOLD + rest  # the least that is folded, and columns left over
    for place in range(width):
        scores = torch.rand(1, width)
        scores[0, place] = 2
        assert place in largest(scores, count)[0].tolist()


def test_the_largest_may_all_lie_in_one_folded_column_or_all_left_over():
    width = 4 * FOLD + 7
    one_column = torch.zeros(1, width)
    one_column[0, torch.tensor([1, 5])] = torch.tensor([3.0, 2.0])  # 4 wide: both fold to column 1
    assert set(largest(one_column, 2)[0].tolist()) == {1, 5}
    left_over = torch.zeros(1, width)
    left_over[0, -2:] = torch.tensor([3.0, 2.0])
    assert set(largest(left_over, 2)[0].tolist()) == {width - 2, width - 1}


def test_wide_rows_take_the_short_way_and_narrow_ones_do_not(monkeypatch):
    widths = []
    topk = torch.Tensor.topk

    def watched(scores, *arguments, **settings):
        widths.append(scores.shape[-1])
        return topk(scores, *arguments, **settings)

    monkeypatch.setattr(torch.Tensor, "topk", watched)
    largest(torch.rand(2, 16 * FOLD + 3), 8)
    assert widths == [16, 8 * FOLD + 3]
    widths.clear()
    largest(torch.rand(2, 16 * FOLD + 3), 9)
    assert widths == [16 * FOLD + 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_largest_of_every_number_format(dtype):
    assert_largest(torch.randn(3, 100).to(dtype), 5)


def test_the_largest_of_a_transposed_and_of_a_sliced_matrix():
    assert_largest(torch.randn(100, 3).T, 4)
    assert_largest(torch.randn(6, 130)[::2, 5:111], 4)


# positive_slots


@st.composite
def samples(draw):
    """sampled ids (M,) and positive ids (B, P), -1 in both, repeats in both."""
    num_sampled, batch_size, num_positives = (draw(st.integers(1, 7)) for _ in range(3))
    ids = st.integers(-1, draw(st.integers(0, 6)))
    sampled_ids = draw(st.lists(ids, min_size=num_sampled, max_size=num_sampled))
    rows = st.lists(ids, min_size=num_positives, max_size=num_positives)
    return sampled_ids, draw(st.lists(rows, min_size=batch_size, max_size=batch_size))


@given(samples())
@example(([-1, -1], [[-1]]))
@example(([5, 2, 5, 5], [[5, 5], [2, -1], [6, 0]]))
def test_positive_slots_match_the_loops(sample):
    sampled_ids, positive_ids = sample
    slots = positive_slots(torch.tensor(sampled_ids), torch.tensor(positive_ids))
    expected = {
        (b, m)
        for b, positives in enumerate(positive_ids)
        for m, label in enumerate(sampled_ids)
        if label != -1 and label in positives
    }
    assert set(zip(slots.rows.tolist(), slots.columns.tolist(), strict=True)) == expected
    assert slots.rows.dtype == slots.columns.dtype == torch.int64


def test_positive_slots_of_a_view_that_is_not_contiguous():
    positive_ids = torch.tensor([[1, 2], [3, 4]]).T
    slots = positive_slots(torch.tensor([2, 3]), positive_ids)
    assert set(zip(slots.rows.tolist(), slots.columns.tolist(), strict=True)) == {(1, 0), (0, 1)}


# scores_of_each


def doubled(vectors):
    return 2 * vectors


def unit(vectors):
    return F.normalize(vectors, dim=-1)


@pytest.mark.parametrize("unit_fn", [doubled, unit])
@pytest.mark.parametrize("at_once", [1, 40, 2**24], ids=["a row", "some rows", "all rows"])
@pytest.mark.parametrize("num_labels", [5, 16, 17, 60], ids=["few", "limit", "beyond", "many"])
def test_scores_of_each_match_the_loops(monkeypatch, unit_fn, at_once, num_labels):
    monkeypatch.setattr(scoring, "GATHERED_NUMBERS", at_once)
    queries = torch.randn(7, 3, dtype=torch.float64)
    table = torch.randn(num_labels, 3, dtype=torch.float64)
    ids = torch.randint(num_labels, (7, 2))
    actual = scores_of_each(queries, table, ids, unit_fn=unit_fn)
    vectors = unit_fn(table).tolist()
    for b, query in enumerate(queries.tolist()):
        for m, label in enumerate(ids[b].tolist()):
            expected = sum(q * v for q, v in zip(query, vectors[label], strict=True))
            assert actual[b, m].item() == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_a_large_table_is_read_only_where_it_is_sampled():
    rows_read = []

    def watched(vectors):
        rows_read.append(len(vectors))
        return vectors

    queries, ids = torch.randn(3, 4), torch.randint(1000, (3, 5))
    scores_of_each(queries, torch.randn(1000, 4), ids, unit_fn=watched)
    assert sum(rows_read) == 3 * 5


@given(
    num_rows=st.integers(1, 6),
    num_columns=st.integers(1, 7),
    num_entries=st.integers(0, 30),
    seed=st.integers(0, 2**31),
)
def test_sparse_products_are_those_of_the_dense_matrix(num_rows, num_columns, num_entries, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(num_rows, (num_entries,), generator=generator).sort().values
    columns = torch.randint(num_columns, (num_entries,), generator=generator)
    values = torch.randn(num_entries, dtype=torch.float64, generator=generator)
    dense = [[0.0] * num_columns for _ in range(num_rows)]
    for row, column, value in zip(rows.tolist(), columns.tolist(), values.tolist(), strict=True):
        dense[row][column] += value  # entries at one place add up
    matrix, entries = torch.tensor(dense, dtype=torch.float64), Entries(rows, columns, values)
    right = torch.randn(num_columns, 3, dtype=torch.float64, generator=generator)
    left = torch.randn(num_rows, 3, dtype=torch.float64, generator=generator)
    for given_as in (entries, matrix):
        found = product(given_as, right, num_rows=num_rows)
        torch.testing.assert_close(found, matrix @ right)
        found = transposed_product(given_as, left, num_columns=num_columns)
        torch.testing.assert_close(found, matrix.T @ left)
