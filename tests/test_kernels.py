import numba
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import oracles
from evenhand.kernels import rows as row_kernels
from evenhand.kernels import selection
from evenhand.kernels.jit import jit
from evenhand.kernels.random import num_bits, permute, permute_in_torch
from evenhand.kernels.rows import scores_of_each
from evenhand.kernels.selection import fold_of, largest, largest_of_blocks, mask_shared_
from evenhand.kernels.sparse import (
    Lists,
    distinct_ids,
    entries_of,
    matrix_of,
    product,
    transposed_product,
)

# float32 runs in compiled loops, float64 in torch: each is the other's twin.
DTYPES = {"compiled": torch.float32, "torch": torch.float64}
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


# largest


def assert_largest(scores, count):
    positions, values = largest(scores, count)
    assert positions.shape == values.shape == (*scores.shape[:-1], count)
    assert positions.dtype == torch.int64
    assert values.dtype == scores.dtype
    assert torch.equal(values, scores.gather(-1, positions))
    for row, chosen in zip(scores.tolist(), positions.tolist(), strict=True):
        assert len(set(chosen)) == count
        found = sorted((row[position] for position in chosen), reverse=True)
        assert found == sorted(row, reverse=True)[:count]


@every_dtype
@pytest.mark.parametrize("distinct_values", [10**6, 3, 1], ids=["distinct", "ties", "all equal"])
@given(st.integers(0, 4), st.integers(1, 150), st.integers(0, 2**31), st.data())
def test_the_largest_have_the_values_of_a_full_sort(
    dtype, distinct_values, rows, width, seed, data
):
    scores = torch.randint(-distinct_values, distinct_values, (rows, width), generator=seeded(seed))
    scores = scores.to(dtype)
    scores[torch.rand(rows, width, generator=seeded(seed)) < 0.3] = -torch.inf
    # Rows are folded less where more is sought: near those borders as well as anywhere.
    border = max(1, width // data.draw(st.sampled_from([16, 64])))
    near = st.integers(max(1, border - 1), min(width, border + 1))
    assert_largest(scores, data.draw(st.one_of(near, st.integers(1, width))))


@every_dtype
@pytest.mark.parametrize("fold", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2])
def test_no_column_is_overlooked_when_the_width_is_odd(dtype, fold, count):
    fewest = 4 * count * fold**2  # the least that is folded as much
    for width in range(fewest, fewest + fold**2):
        assert fold_of(width, count) == fold
        scores = torch.rand(width, width).to(dtype).fill_diagonal_(2)
        assert (largest(scores, count).positions == torch.arange(width).unsqueeze(1)).any(1).all()


@every_dtype
@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_no_number_is_the_largest(dtype, sign):
    scores = torch.rand(3, 200).to(dtype)
    scores[:, 7] = torch.copysign(torch.tensor(torch.nan, dtype=dtype), torch.tensor(sign))
    scores[1, 9] = torch.inf
    scores[2] = torch.nan
    positions, values = largest(scores, 3)
    assert all(7 in row for row in positions[:2].tolist())
    assert 9 in positions[1].tolist()
    assert values.isnan().sum(dim=1).tolist() == [1, 1, 3]
    assert len(set(positions[2].tolist())) == 3


def test_the_largest_do_not_depend_on_threads_and_fake_tensors_are_left_to_torch(monkeypatch):
    scores = torch.randint(9, (5, 333)).float()  # ties, so that another choice would show
    alone = largest(scores, 4)
    for num_threads in (2, 3, 8):
        monkeypatch.setattr(selection, "num_threads_for", lambda work, n=num_threads: n)
        assert torch.equal(largest(scores, 4).positions, alone.positions)
    with FakeTensorMode():
        assert largest(torch.randn(2, 50), 3).positions.shape == (2, 3)
        ids = torch.zeros(2, 4, dtype=int)
        found = scores_of_each(torch.randn(2, 3), torch.randn(50, 3), ids, is_cosine=True)
        assert found.shape == (2, 4)


@every_dtype
@pytest.mark.parametrize("at_once", [1, 29, 10**6], ids=["a row", "two rows", "all rows"])
def test_the_largest_of_blocks_are_those_of_the_whole(monkeypatch, dtype, at_once):
    monkeypatch.setattr(selection, "SCORES_AT_ONCE", at_once)
    scores, asked = torch.randn(7, 12).to(dtype), []

    def scores_fn(first, last):
        asked.append((first, last))
        return scores[first:last]

    found = largest_of_blocks(scores_fn, (7, 12), 3, like=scores)
    assert torch.equal(found.positions, largest(scores, 3).positions)
    assert torch.equal(found.values, largest(scores, 3).values)
    assert [row for first, last in asked for row in range(first, last)] == list(range(7))
    if dtype == torch.float32:
        assert len(asked) == {1: 7, 29: 4}.get(at_once, 1)


# mask_shared_


@st.composite
def samples(draw):
    """sampled ids (M,) and positive ids (B, P), -1 in both, repeats in both."""
    num_sampled, batch_size, num_positives = (draw(st.integers(1, 7)) for _ in range(3))
    ids = st.integers(-1, draw(st.integers(0, 6)))
    sampled_ids = draw(st.lists(ids, min_size=num_sampled, max_size=num_sampled))
    rows = st.lists(ids, min_size=num_positives, max_size=num_positives)
    return sampled_ids, draw(st.lists(rows, min_size=batch_size, max_size=batch_size))


@every_dtype
@given(samples())
@example(([-1, -1], [[-1]]))
@example(([5, 2, 5, 5], [[5, 5], [2, -1], [6, 0]]))
@example(([n * 2**33 for n in range(99)], [[n * 2**33] for n in range(99)]))  # the same last bits
def test_the_mask_of_a_shared_sample_matches_the_loops(dtype, sample):
    sampled_ids, positive_ids = sample
    scores = torch.randn(len(positive_ids), len(sampled_ids), dtype=dtype)
    expected = [
        [
            -torch.inf if oracles.is_masked(label, positives) else score
            for label, score in zip(sampled_ids, row, strict=True)
        ]
        for row, positives in zip(scores.tolist(), positive_ids, strict=True)
    ]
    positives = torch.tensor(positive_ids).T.contiguous().T  # not contiguous, where P > 1
    masked = mask_shared_(scores, torch.tensor(sampled_ids), positives)
    assert masked is scores
    assert masked.tolist() == expected


# scores_of_each


@every_dtype
@pytest.mark.parametrize("is_cosine", [True, False])
@pytest.mark.parametrize("at_once", [1, 40, 2**24], ids=["a row", "some rows", "all rows"])
@pytest.mark.parametrize("num_labels", [5, 16, 17, 60], ids=["few", "limit", "beyond", "many"])
def test_scores_of_each_match_the_loops(monkeypatch, dtype, is_cosine, at_once, num_labels):
    monkeypatch.setattr(row_kernels, "GATHERED_NUMBERS", at_once)
    monkeypatch.setattr(row_kernels, "num_threads_for", lambda work: at_once % 7)
    queries = torch.randn(7, 3, dtype=dtype)
    table = torch.randn(num_labels, 3, dtype=dtype)
    table[2] = 0
    ids = torch.randint(num_labels, (7, 2))
    ids[3, 1] = 2
    actual = scores_of_each(queries, table, ids, is_cosine=is_cosine)
    vectors = (F.normalize(table.double(), dim=-1) if is_cosine else table).tolist()
    precision = 1e-12 if dtype == torch.float64 else 1e-6
    for b, query in enumerate(queries.tolist()):
        for m, label in enumerate(ids[b].tolist()):
            expected = sum(q * v for q, v in zip(query, vectors[label], strict=True))
            assert actual[b, m].item() == pytest.approx(expected, rel=precision, abs=precision)


def test_a_label_beyond_the_table_is_refused():
    for label in (-1, 100):
        queries, table, ids = torch.randn(1, 3), torch.randn(100, 3), torch.tensor([[label]])
        with pytest.raises(IndexError, match="from 0 to 99"):
            scores_of_each(queries, table, ids, is_cosine=True)
    for row in (-1, 2):  # a list that is not there
        with pytest.raises(IndexError):
            entries_of(torch.tensor([0, 2, 5]), torch.tensor([row]))
    for values in ([4.0], [4.0, 5.0]):  # a column too many
        starts, count = torch.tensor([0, len(values)]), len(values)
        lists = Lists(starts, torch.arange(count), torch.tensor(values))
        with pytest.raises(IndexError):
            transposed_product(lists, torch.ones(1, 2), num_columns=count - 1)


# Sparse matrices


def random_lists(num_rows, num_columns, num_entries, seed, dtype):
    """Lists, and the same as a dense matrix of float64."""
    rows = torch.randint(num_rows, (num_entries,), generator=seeded(seed)).sort().values
    columns = torch.randint(num_columns, (num_entries,), generator=seeded(seed + 1))
    values = torch.randn(num_entries, dtype=dtype, generator=seeded(seed + 2))
    starts = F.pad(torch.bincount(rows, minlength=num_rows).cumsum(0), (1, 0))
    dense = [[0.0] * num_columns for _ in range(num_rows)]
    for row, column, value in zip(rows.tolist(), columns.tolist(), values.tolist(), strict=True):
        dense[row][column] += value  # entries at one place add up
    return Lists(starts, columns, values), torch.tensor(dense, dtype=torch.float64)


@every_dtype
@given(
    num_rows=st.integers(1, 6),
    num_columns=st.integers(1, 7),
    num_entries=st.integers(0, 30),
    seed=st.integers(0, 2**31),
)
def test_sparse_products_are_those_of_the_dense_matrix(
    dtype, num_rows, num_columns, num_entries, seed
):
    lists, matrix = random_lists(num_rows, num_columns, num_entries, seed, dtype)
    right = torch.randn(num_columns, 3, dtype=dtype, generator=seeded(seed))
    left = torch.randn(num_rows, 3, dtype=dtype, generator=seeded(seed))
    for given_as in (lists, matrix.to(dtype)):
        found = product(given_as, right)
        torch.testing.assert_close(found, (matrix @ right.double()).to(dtype))
        found = transposed_product(given_as, left, num_columns=num_columns)
        torch.testing.assert_close(found, (matrix.T @ left.double()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=["compiled", "torch"])
@given(st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 5), max_size=60))
def test_distinct_ids_are_those_of_a_set(dtype, ids):
    ids = torch.tensor(ids, dtype=dtype)
    distinct, places = distinct_ids(ids)
    assert sorted(distinct.tolist()) == sorted(set(ids.tolist()))
    assert torch.equal(distinct[places], ids)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=["compiled", "torch"])
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.data())
def test_entries_of_chosen_lists_stand_one_list_after_another(dtype, lengths, data):
    ends = torch.tensor(lengths).cumsum(0)
    lists = [range(end - length, end) for end, length in zip(ends.tolist(), lengths, strict=True)]
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=6))
    starts = torch.cat([torch.zeros(1, dtype=dtype), ends.to(dtype)])
    entries, new_starts = entries_of(starts, torch.tensor(rows, dtype=dtype))
    assert entries.tolist() == [entry for row in rows for entry in lists[row]]
    assert new_starts.diff().tolist() == [lengths[row] for row in rows]
    assert new_starts[0] == 0


@every_dtype
@given(st.integers(0, 4), st.integers(1, 5), st.integers(0, 2**31))
def test_a_matrix_of_ids_leaves_out_zeros_and_empty_slots(dtype, num_rows, width, seed):
    """But what is no number is an entry."""
    ids = torch.randint(-1, 6, (num_rows, width), generator=seeded(seed))
    coefficients = torch.randn(num_rows, width, generator=seeded(seed), dtype=dtype)
    coefficients[torch.rand(num_rows, width, generator=seeded(seed + 1)) < 0.4] = 0
    coefficients[torch.rand(num_rows, width, generator=seeded(seed + 2)) < 0.1] = torch.nan
    distinct, matrix = matrix_of(ids, coefficients)
    expected, used = torch.zeros(num_rows, 6, dtype=dtype), set()
    for row in range(num_rows):
        for label, value in zip(ids[row].tolist(), coefficients[row].tolist(), strict=True):
            if label >= 0 and value:
                expected[row, label] += value
                used.add(label)
    assert sorted(distinct.tolist()) == sorted(used)
    actual = torch.zeros_like(expected)
    for row in range(num_rows):
        entries = slice(matrix.starts[row], matrix.starts[row + 1])
        actual[row].index_add_(0, distinct[matrix.columns[entries]], matrix.values[entries])
    torch.testing.assert_close(actual, expected, equal_nan=True)


# Permutations


@given(
    st.integers(1, 10**9),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=4, max_size=4),
    st.integers(0, 70),
    st.randoms(),
)
@example(1, [1], [0] * 4, 3, None)
@example(65, [1, 2, 3, 4], [2**62 - 1, 2**32, 2**32 - 1, 0], 64, None)
@example(2**40 + 1, [1, 3], [1, 2, 3, 4], 9, None)
def test_the_numbers_are_those_of_the_torch_form(size, divisors, keys, width, random):
    def below(size):
        return [random.randrange(size) if random else place % size for place in range(width)]

    sizes = [max(1, size // divisor) for divisor in divisors]
    keys = keys[: len(sizes)]
    numbers = torch.tensor([below(size) for size in sizes], dtype=torch.int64)
    columns = [torch.tensor(values).unsqueeze(1) for values in (keys, sizes)]  # (R, 1)
    actual = permute(numbers, columns[0], max(sizes), sizes=columns[1])
    assert torch.equal(actual, permute_in_torch(numbers, *columns, num_bits(max(sizes))))


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 1000])
def test_every_number_stands_at_one_place(size):
    numbers, keys = torch.arange(size).repeat(3, 1), torch.tensor([[0], [1], [2**62 - 1]])
    values = permute(numbers, keys, size)
    assert torch.equal(values.sort(dim=1).values, numbers)
    assert torch.equal(numbers[0], torch.arange(size))  # what was given is not changed


# Compiled code


def function_without_a_file():
    """Numba has nowhere to keep such a function: as with folders that cannot be written."""
    names = {}
    exec("def plus_one(number): return number + 1", names)
    return names["plus_one"]


def test_a_function_that_cannot_be_kept_is_compiled_all_the_same():
    with pytest.raises(RuntimeError, match="cannot cache"):
        numba.njit(cache=True)(function_without_a_file())
    function = jit(function_without_a_file())
    assert function(2) == 3
    assert len(function.signatures) == 1
