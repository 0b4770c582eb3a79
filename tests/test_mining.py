import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from evenhand.mining import hardest_examples, hardest_labels, mask_positives


def random_ids(draw, shape, num_labels=8):
    """Ids from -1 (no label) to num_labels - 1, with repeats."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return torch.randint(-1, num_labels, shape, generator=generator)


@st.composite
def slots(draw):
    """scores (B, M), sampled ids (M,) or (B, M), positive ids (B, P)."""
    batch_size, num_sampled, num_positives = (draw(st.integers(1, 6)) for _ in range(3))
    shape = (num_sampled,) if draw(st.booleans()) else (batch_size, num_sampled)
    scores = torch.randn(batch_size, num_sampled, dtype=torch.float64)
    return scores, random_ids(draw, shape), random_ids(draw, (batch_size, num_positives))


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**31), st.data())
def test_the_hardest_labels_have_the_highest_scores(batch_size, num_sampled, seed, data):
    scores = torch.randn(
        batch_size, num_sampled, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    scores[scores < -1] = -torch.inf
    count = data.draw(st.integers(1, num_sampled))
    kept = hardest_labels(scores, count)
    assert kept.shape == (batch_size, count)
    assert kept.dtype == torch.int64
    for row, positions in zip(scores.tolist(), kept.tolist(), strict=True):
        assert len(set(positions)) == count
        found = sorted((row[position] for position in positions), reverse=True)
        assert found == sorted(row, reverse=True)[:count]


@given(st.lists(st.floats(0, 10), min_size=1, max_size=9), st.data())
def test_the_hardest_examples_have_the_largest_losses(losses, data):
    count = data.draw(st.integers(1, len(losses)))
    positions = hardest_examples(torch.tensor(losses, dtype=torch.float64), count).tolist()
    assert len(set(positions)) == count
    found = [losses[position] for position in positions]
    assert sorted(found) == sorted(losses)[-count:]


@given(slots())
def test_the_mask_matches_its_oracle(slots):
    scores, sampled_ids, positive_ids = slots
    masked = mask_positives(scores, sampled_ids, positive_ids)
    rows = sampled_ids.expand_as(scores).tolist()
    for b, (row, positives) in enumerate(zip(rows, positive_ids.tolist(), strict=True)):
        for m, label in enumerate(row):
            expected = -torch.inf if oracles.is_masked(label, positives) else scores[b, m].item()
            assert masked[b, m].item() == expected


def test_arguments_are_not_changed():
    scores, sampled_ids = torch.randn(2, 20), torch.tensor([3, -1] * 10)
    losses, positive_ids = torch.randn(4), torch.tensor([[3], [-1]])
    arguments = [scores, sampled_ids, losses, positive_ids]
    before = [argument.clone() for argument in arguments]
    hardest_labels(scores, 1)
    hardest_examples(losses, 2)
    mask_positives(scores, sampled_ids, positive_ids)
    assert all(torch.equal(*pair) for pair in zip(arguments, before, strict=True))


def test_counts_out_of_range_are_refused():
    labels, examples = torch.randn(2, 3), torch.randn(2)
    for select, scores, limit, message in (
        (hardest_labels, labels, 3, r"num_hard_labels .* 3 \(the number of sampled labels\)"),
        (hardest_examples, examples, 2, r"num_hard_examples .* 2 \(the number of examples in the"),
    ):
        for count in (-1, 0, limit + 1):
            with pytest.raises(ValueError, match=f"{message}.*, got {count}"):
                select(scores, count)
        assert select(scores, 1).shape[-1] == 1
        assert select(scores, limit).sort().values.unique().tolist() == list(range(limit))
