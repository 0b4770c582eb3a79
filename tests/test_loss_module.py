"""`S2MLoss` against the core's functions, called one by one."""

import io
import math

import pytest
import torch
from torch import nn

from evenhand import (
    Distinct,
    FrequencySampler,
    InBatchSampler,
    S2MLoss,
    bowl_loss,
    even_weights,
    hardest_labels,
    log_q_corrected,
    mask_positives,
    s2m_loss,
    softmax_loss,
    top_weights,
)

BATCH, LABELS, DIM = 12, 30, 6
EXACT = {"mined_share": 1.0, "anneal_steps": 0, "loss_ceiling": math.inf}
COUNTS = torch.arange(1, LABELS + 1)


def draw(*, seed=0):
    """Queries (B, D), label vectors (L, D), and ids (B,) with repeats."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(BATCH, DIM, generator=generator, dtype=torch.float64)
    table = torch.randn(LABELS, DIM, generator=generator, dtype=torch.float64)
    ids = torch.randint(LABELS // 3, (BATCH,), generator=generator)
    return queries.requires_grad_(), table.requires_grad_(), ids


def assert_same(loss, expected, *inputs):
    """The same value and the same gradients."""
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    gradients = [torch.autograd.grad(one, inputs) for one in (loss, expected)]
    assert gradients[1][0].abs().sum() > 0
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("loss_fn", [softmax_loss, bowl_loss])
@pytest.mark.parametrize("tail_fraction", [0.01, 0.25, 1.0])
def test_it_is_the_objective_of_the_core(loss_fn, tail_fraction):
    queries, table, ids = draw()
    own = S2MLoss(LABELS, num_hard_labels=7, tail_fraction=tail_fraction, loss_fn=loss_fn, **EXACT)
    scores = mask_positives(queries @ table.T, torch.arange(LABELS), ids.unsqueeze(1))
    expected = s2m_loss(
        (queries * table[ids]).sum(1),
        scores,
        num_hard_labels=7,
        num_hard_examples=max(1, round(tail_fraction * BATCH)),
        loss_fn=loss_fn,
    )
    assert_same(own(queries, table, ids), expected, queries, table)


def test_labels_are_drawn_and_their_frequency_is_corrected_after_mining():
    queries, table, ids = draw()
    sampler = Distinct(FrequencySampler(COUNTS))
    own = S2MLoss(
        LABELS,
        num_sampled_labels=9,
        num_hard_labels=4,
        tail_fraction=0.5,
        sampler=sampler,
        log_q=True,
        generator=torch.Generator().manual_seed(3),
        **EXACT,
    )
    others = torch.full((BATCH, 2), -1)
    others[:, 0] = (ids + 1) % LABELS
    loss = own(queries, table, ids, positive_ids=others)

    generator = torch.Generator().manual_seed(3)
    sample = sampler.sample(ids.unsqueeze(1), 9, generator=generator)
    right = torch.cat([ids.unsqueeze(1), others], dim=1)
    scores = mask_positives(queries @ table[sample.ids].T, sample.ids, right)
    kept = hardest_labels(scores, 4)
    scores = log_q_corrected(scores.gather(1, kept), sample.log_counts[kept])
    losses = softmax_loss((queries * table[ids]).sum(1), scores)
    expected = (top_weights(losses, num_hard_examples=6) * losses).sum()
    assert_same(loss, expected, queries, table)


@pytest.mark.parametrize("is_corrected", [False, True])
def test_in_a_batch_the_labels_of_the_others_are_negatives_each_once(is_corrected):
    queries, table, ids = draw()
    labels = table[ids].detach().requires_grad_()  # (B, D), equal rows for equal ids
    options = {"label_counts": COUNTS, "gap_scale": 0.0, "log_q": True} if is_corrected else {}
    loss = S2MLoss(num_hard_labels=3, tail_fraction=0.5, **EXACT, **options)(queries, labels, ids)

    positives = ids.unsqueeze(1)
    sample = InBatchSampler(COUNTS).sample(positives, BATCH, generator=torch.Generator())
    assert (sample.ids < 0).any(), "there are no repeats"
    scores = mask_positives(queries @ labels.T, sample.ids, positives)
    kept = hardest_labels(scores, 3)
    scores = scores.gather(1, kept)
    if is_corrected:
        scores = log_q_corrected(scores, sample.log_counts[kept])
    losses = softmax_loss((queries * labels).sum(1), scores)
    expected = (top_weights(losses, num_hard_examples=6) * losses).sum()
    assert_same(loss, expected, queries, labels)


def test_examples_are_mined_by_the_loss_expected_at_test_time():
    queries, table, ids = draw()
    own = S2MLoss(
        LABELS, num_hard_labels=5, tail_fraction=0.25, mined_share=0.5, anneal_steps=0,
        label_counts=COUNTS, gap_scale=4.0, loss_ceiling=math.inf,
    )  # fmt: skip
    is_held_out = torch.arange(BATCH) % 4 == 0
    scores = mask_positives(queries @ table.T, torch.arange(LABELS), ids.unsqueeze(1))
    kept = hardest_labels(scores, 5)
    losses = softmax_loss((queries * table[ids]).sum(1), scores.gather(1, kept))

    bins = COUNTS.double().log2().ceil().long()
    shape = torch.stack(
        [COUNTS[bins == b].double().sqrt().sum() / COUNTS[bins == b].sum() for b in range(6)]
    )
    gaps = 0.75 * 4.0 * shape[bins[ids]]
    weights = even_weights(losses, gaps, num_hard_examples=3, is_held_out=is_held_out)
    assert (weights[is_held_out] == 0).all()
    loss = own(queries, table, ids, is_held_out=is_held_out)
    assert_same(loss, (weights * losses).sum(), queries, table)
    assert own.risk.sums.sum() > 0
    assert not torch.equal(own.risk.gaps(), 4.0 * shape), "nothing was measured"


def counting(gradient):
    return int((gradient != 0).any(dim=1).sum())


def test_fewer_examples_count_from_step_to_step_also_after_a_checkpoint():
    queries, table, ids = draw()

    def make():
        return S2MLoss(LABELS, tail_fraction=0.25, **EXACT | {"anneal_steps": 3})

    def take(loss_fn):
        return counting(torch.autograd.grad(loss_fn(queries, table, ids), queries)[0])

    own = make()
    assert [take(own), take(own)] == [12, 9]
    file = io.BytesIO()
    torch.save(own.state_dict(), file)
    file.seek(0)
    resumed = make()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert [take(resumed), take(resumed), take(resumed)] == [6, 3, 3]
    own.eval()
    assert take(own) == 12  # a validation loss is the mean over all
    assert take(own.train()) == 6


def test_a_sparse_embedding_has_the_same_gradient_in_the_rows_that_were_drawn():
    queries, table, ids = draw()
    embedding = nn.Embedding(LABELS, DIM, sparse=True, _weight=table.detach().clone())
    losses = [
        S2MLoss(LABELS, num_sampled_labels=8, generator=torch.Generator().manual_seed(1), **EXACT)(
            queries, labels, ids
        )
        for labels in (embedding, table)
    ]
    dense = torch.autograd.grad(losses[1], table)[0]
    sparse = torch.autograd.grad(losses[0], embedding.weight)[0]
    torch.testing.assert_close(sparse.to_dense(), dense, rtol=1e-10, atol=1e-10)
    assert sparse.coalesce().indices().shape[1] < LABELS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tail_fraction": 0.0}, "tail_fraction must be above 0"),
        ({"mined_share": 1.5}, "mined_share must be between 0 and 1, got 1.5"),
        ({"sampler": InBatchSampler(COUNTS)}, "a sampler needs num_labels"),
        ({"log_q": True}, "log_q needs label_counts"),
        ({"num_labels": 7, "label_counts": COUNTS}, "must have 7 values, got 30"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        S2MLoss(**options)


def test_a_table_in_place_of_a_batch_is_refused():
    queries, table, ids = draw()
    with pytest.raises(ValueError, match="at least for each of the 12 queries, got 30 and 12"):
        S2MLoss()(queries, table, ids)
