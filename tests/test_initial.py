"""Initial rows: the numbers of one draw, whatever range, chunk, type or number of threads."""

import math

import pytest
import torch

from evenhand.models import initial
from evenhand.models.initial import checked_range, fill_random_rows, random_rows


def generator(seed=3):
    return torch.Generator().manual_seed(seed)


def one_draw(num_rows, width, generator):
    return torch.randn(num_rows, width, generator=generator) / math.sqrt(width)


@pytest.mark.parametrize("width", [*range(1, 20), 31, 32, 33, 48, 100, 128, 500])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 15, 16, 17, 64, 1000, 5003])
def test_small_tables_are_one_draw_to_the_bit(width, num_rows, monkeypatch):
    ours, theirs = generator(), generator()
    for chunk in (initial._CHUNK, 16, 1000):
        monkeypatch.setattr(initial, "_CHUNK", chunk)
        assert torch.equal(random_rows(num_rows, width, ours), one_draw(num_rows, width, theirs))
        assert torch.equal(ours.get_state(), theirs.get_state())


def test_a_table_wider_than_a_chunk_is_one_draw_to_the_bit():
    ours = random_rows(40, 2**15 + 3, generator())
    assert torch.equal(ours, one_draw(40, 2**15 + 3, generator()))


def test_without_a_generator_the_numbers_are_those_of_torch_itself():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        ours = random_rows(70, 9)
        torch.manual_seed(5)
        assert torch.equal(ours, one_draw(70, 9, None))


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(initial, "FIRST_BLOCK", 100)
    monkeypatch.setattr(initial, "LATER_BLOCK", 30)
    monkeypatch.setattr(initial, "_CHUNK", 64)


@pytest.mark.parametrize("width", [1, 3, 16, 20])
def test_every_range_is_that_of_the_whole_table(width, small_blocks):
    num_rows, whole_draws = 237, generator()
    whole = random_rows(num_rows, width, whole_draws)
    assert torch.equal(whole[:100], one_draw(100, width, generator()))
    for first in range(0, num_rows + 1, 7):
        for last in {first, first + 1, first + 30, 100, 130, num_rows}:
            if first <= last <= num_rows:
                draws = generator()
                part = random_rows(num_rows, width, draws, rows=(first, last))
                assert torch.equal(part, whole[first:last])
                assert torch.equal(draws.get_state(), whole_draws.get_state())


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 64])
def test_the_parts_of_all_ranks_are_the_table(num_ranks, small_blocks):
    whole = random_rows(61 + 100, 6, generator())
    each = math.ceil(len(whole) / num_ranks)
    parts = [
        random_rows(161, 6, generator(), rows=(min(161, rank * each), min(161, (rank + 1) * each)))
        for rank in range(num_ranks)
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_the_number_of_threads_changes_nothing(small_blocks):
    threads = torch.get_num_threads()
    whole = random_rows(400, 8, generator())
    try:
        torch.set_num_threads(1 if threads > 1 else 3)
        assert torch.equal(random_rows(400, 8, generator()), whole)
    finally:
        torch.set_num_threads(threads)


def test_blocks_and_tables_differ(small_blocks):
    draws = generator()
    first, second = random_rows(400, 8, draws), random_rows(400, 8, draws)
    rows = torch.cat([first, second])
    assert len(rows.unique(dim=0)) == len(rows)


def test_the_lengths_of_later_rows_are_about_one():
    table = random_rows(2**20 + 2**17, 16, generator(), rows=(2**20, 2**20 + 2**17))
    lengths = table.norm(dim=1)
    assert abs(float(lengths.mean()) - 1) < 0.02
    assert abs(float(table.mean())) < 0.001
    for block in table.split(2**16):
        assert 0.99 < float(block.std()) * 4 < 1.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_are_the_float32_numbers_converted(dtype, small_blocks):
    ours = random_rows(300, 12, generator(), rows=(50, 250), dtype=dtype)
    assert torch.equal(ours, random_rows(300, 12, generator())[50:250].to(dtype))


def test_an_existing_tensor_is_filled_a_view_too():
    table = torch.zeros(10, 8)
    fill_random_rows(table[2:5].T.T, first_row=4, num_rows=9, generator=generator())
    assert torch.equal(table[2:5], random_rows(9, 8, generator())[4:7])
    assert not table[:2].any()
    assert not table[5:].any()


def test_on_the_meta_device_nothing_is_drawn():
    draws = generator()
    assert random_rows(10**9, 128, draws, device="meta").shape == (10**9, 128)
    assert torch.equal(draws.get_state(), generator().get_state())


@pytest.mark.parametrize("rows", [(-1, 3), (0, 11), (5, 4), (11, 11)])
def test_a_range_outside_the_table_is_refused(rows):
    with pytest.raises(ValueError, match="rows must be a range within 0 to 10, got"):
        checked_range(rows, 10)
