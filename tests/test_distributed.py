"""What ranks say to each other."""

from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from evenhand.distributed.ranks import (
    ProcessRanks,
    Shards,
    num_launched,
    num_restarts,
    share_of,
    share_sizes,
)
from evenhand.distributed.row_exchange import RowExchange
from evenhand.errors import UserError
from evenhand.models import RowGradients
from ranks import run_ranks


@pytest.mark.parametrize("num_rows", [0, 1, 5, 7, 100])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_shards_are_those_of_torch_chunk_and_shares_cover_a_batch(num_rows, num_ranks):
    shards = Shards(num_rows, num_ranks)
    ranges = [shards.rows_of(rank) for rank in range(num_ranks)]
    chunks = torch.arange(num_rows).chunk(num_ranks) if num_rows else []
    found = [list(range(*rows)) for rows in ranges if rows.size]
    assert found == [chunk.tolist() for chunk in chunks]
    assert sum(share_sizes(num_rows, num_ranks)) == num_rows
    shares = [share_of(num_rows, rank, num_ranks) for rank in range(num_ranks)]
    assert [i for share in shares for i in range(*share)] == list(range(num_rows))
    ids = torch.arange(num_rows)
    assert shards.counts_of(ids) == [rows.size for rows in ranges]


def test_gradients_find_their_rows_in_whatever_order_they_come():
    ids = [torch.tensor([6, 0, 3, 5]), torch.tensor([4, 3, 1])]
    values = [10.0 * own[:, None] + rank for rank, own in enumerate(ids)]  # (n, 1)

    def rank_fn(ranks):
        exchange = RowExchange("rows", 7, ranks)
        summed = exchange.sum_gradients(RowGradients(ids[ranks.rank], values[ranks.rank]))
        first, _ = exchange.shards.rows_of(ranks.rank)
        return dict(zip((summed.ids + first).tolist(), summed.values[:, 0].tolist(), strict=True))

    found = {row: value for own in run_ranks(2, rank_fn) for row, value in own.items()}
    assert found == {0: 0, 1: 11, 3: 30 + 31, 4: 41, 5: 50, 6: 60}


def test_what_torchrun_tells(monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert (num_launched(), num_restarts()) == (1, 0)
    monkeypatch.setenv("WORLD_SIZE", "8")  # some cluster's own variable, and no torchrun
    assert num_launched() == 1
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert (num_launched(), num_restarts()) == (8, 3)


@pytest.mark.parametrize("words", ["Application timeout caused pair closure", "x\ny"])
def test_a_rank_that_is_gone_is_one_sentence_whatever_the_library_says(monkeypatch, words):
    """And a call that is wrong, which fails before anybody is waited for, is not called a loss."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    ranks, rows, sizes = ProcessRanks(), torch.zeros(2, 1), {"sent": [1, 1], "received": [1, 1]}
    calls = {
        "all_reduce": lambda: ranks.sum_(rows, what=""),
        "all_gather": lambda: ranks.gather(rows, counts=[2, 2], what=""),
        "all_to_all_single": lambda: ranks.start_exchange(rows, **sizes, what="")(),
    }
    for name, call in calls.items():
        lost = Mock(wait=Mock(side_effect=RuntimeError(words)))
        monkeypatch.setattr(dist, name, Mock(return_value=lost))
        with pytest.raises(UserError, match=rf"rank 0 lost the others \({words[:1]}.*--resume$"):
            call()
        monkeypatch.setattr(dist, name, Mock(side_effect=RuntimeError(words)))
        with pytest.raises(RuntimeError):
            call()
