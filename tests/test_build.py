"""From settings to the parts of a run: built as told, and checked against the data."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch

import risk_oracles
import small
from evenhand.build import build_training, check_against_data
from evenhand.data import pairs_of
from evenhand.data.csr import rows_from_lists
from evenhand.errors import UserError
from evenhand.sampling import (
    Distinct,
    InBatchSampler,
    MixedSampler,
    UniformSampler,
)
from evenhand.training.step import gradients_of, mine
from split_training import take_steps, whole_training

CPU = torch.device("cpu")
IN_BATCH = {"mining__num_sampled_labels": 50, "mining__in_batch_share": 0.7}


@pytest.fixture(scope="module")
def dataset():
    return small.text_dataset()


def built(dataset, **changes):
    return build_training(small.config("unused", **changes), dataset, CPU)


# --- building -------------------------------------------------------------------------------------


SAMPLERS = {
    "uniform": UniformSampler,
    "frequency": Distinct,
    "in-batch": InBatchSampler,
    "mixed": MixedSampler,
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_no_run_draws_a_label_twice(dataset, sampler):
    """Every sampler is built for the methods that draw; the others see all labels."""
    parts = built(dataset, mining__sampler=sampler, **IN_BATCH)
    assert isinstance(parts.plan.sampler, SAMPLERS[sampler])
    batch, generator = parts.training.feed.next_batch(), torch.Generator().manual_seed(0)
    for draw in (parts.plan.sampler.sample, parts.plan.sampler.sample_for_each):
        found = draw(batch.positive_ids, parts.plan.num_sampled_labels, generator=generator).ids
        for row in torch.atleast_2d(found):
            drawn = row[row >= 0]
            assert 0 < len(drawn) == len(drawn.unique())
    all_labels = built(dataset, mining__sampler=sampler, mining__method="sgd", **IN_BATCH)
    assert isinstance(all_labels.plan.sampler, UniformSampler)


def test_the_precision_of_tables_and_steps_on_a_cpu(dataset):
    for precision in ("mixed", "float32"):
        parts = built(dataset, training__precision=precision)
        chosen = parts.choose_step()
        assert (chosen.kind, chosen.reason) == ("eager", None)
        assert chosen.describe() == "training step: eager"
        assert parts.training.model.label_table.dtype == torch.float32
    parts = built(dataset, training__precision="bfloat16")
    assert parts.training.model.label_table.dtype == torch.bfloat16
    with pytest.raises(UserError, match=r"training\.precision 'bfloat16' needs .* GPU.*'mixed'"):
        parts.choose_step()


def test_a_seed_fixes_weights_order_and_samples_and_each_differs(dataset):
    first, again, other = (built(dataset, training__seed=seed).training for seed in (0, 0, 1))
    assert first.model.label_table.equal(again.model.label_table)
    assert first.feed.place.key.equal(again.feed.place.key)
    assert first.generator.get_state().equal(again.generator.get_state())
    assert not first.model.label_table.equal(other.model.label_table)
    assert not first.feed.place.key.equal(other.feed.place.key)
    assert not first.generator.get_state().equal(other.generator.get_state())
    assert first.feed.generator.initial_seed() != first.generator.initial_seed()


# --- even-handed mining ---------------------------------------------------------------------------

EVEN = {"mining__method": "s2m-even", "risk__held_out_share": 0.3}


def with_own_features(dataset):
    """Each training query has one more feature, which no other has."""
    train, num_features = dataset.parts["train"], dataset.num_features
    rows = [[*train.features.row(q), num_features + q] for q in range(len(train))]
    part = dataclasses.replace(train, features=rows_from_lists(rows))
    wider = dataclasses.replace(dataset, num_features=num_features + len(train))
    return small.with_parts(wider, train=part, validation=None, test=None)


@pytest.mark.parametrize("whole_queries", [False, True])
def test_what_is_held_out_teaches_nothing(dataset, whole_queries):
    parts = built(
        with_own_features(dataset),
        mining__whole_queries=whole_queries,
        risk__mined_share=0.0,  # all others count
        training__evaluate_every=0,
        **EVEN,
    )
    feed, table = parts.training.feed, parts.training.model.encoder.weight
    is_held_out = np.zeros(len(feed.part), dtype=bool)
    is_held_out[pairs_of(feed.part.positives).query_ids[feed.pair_groups % 2 == 1]] = True
    assert 60 < is_held_out.sum() < 160
    before = table.detach().clone()
    take_steps(parts, 20)  # an epoch and a little more
    is_changed = (table != before).any(dim=1)[dataset.num_features :].numpy()
    assert not (is_changed & is_held_out).any()
    assert is_changed[~is_held_out].mean() > 0.9  # an epoch drops its last, partial batch


def test_a_step_is_the_gradient_of_the_weighted_losses_of_those_that_are_left_in(dataset):
    """Every label, full scores and autograd; the weights are those of the slow twin."""
    config = small.config(
        "unused", mining__num_sampled_labels=60, mining__num_hard_labels=60, **EVEN
    )
    parts = whole_training(config, dataset, dtype=torch.float64)
    model, batch = parts.training.model, parts.training.feed.next_batch()
    labels = model.label_table.detach().clone().requires_grad_()
    features = model.encoder.weight.detach().clone().requires_grad_()
    ends = batch.features.offsets.tolist()
    bags = [batch.features.ids[first:last] for first, last in pairwise(ends)]
    queries = torch.nn.functional.normalize(torch.stack([features[bag].mean(0) for bag in bags]))
    scores = queries @ torch.nn.functional.normalize(labels).T  # (B, L)
    is_positive = (batch.positive_ids.unsqueeze(2) == torch.arange(60)).any(dim=1)  # (B, L)
    own = scores.gather(1, batch.label_ids.unsqueeze(1)).squeeze(1)
    losses = parts.plan.loss_fn(own, scores.masked_fill(is_positive, -torch.inf))
    bins, is_held_out = batch.group_ids // 2, batch.group_ids % 2 == 1
    gaps = 0.2 * parts.training.risk.memory.shape[bins]
    weights = risk_oracles.even_weights(
        losses.tolist(), gaps.tolist(), 8, 0.5, is_held_out.tolist()
    )
    assert 0 < is_held_out.sum() < 20
    assert not any(weight for weight, is_out in zip(weights, is_held_out, strict=True) if is_out)
    (torch.tensor(weights, dtype=torch.float64) * losses).sum().backward()

    with torch.no_grad():
        sample = parts.plan.sampler.sample(
            batch.positive_ids, 60, generator=torch.Generator().manual_seed(0)
        )
        vectors = model.as_queries(model.encoder(batch.features))
        mined = mine(
            vectors,
            batch,
            model,
            sample,
            num_hard_labels=60,
            loss_fn=parts.plan.loss_fn,
            risk_fn=lambda losses: parts.training.risk.weights(losses, batch, 8),
        )
        found = gradients_of(mined, vectors, batch, model)
    for name, expected in (("labels", labels.grad), ("features", features.grad)):
        actual = torch.zeros_like(expected).index_add(0, *found[name])
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_bins_are_of_rarity_or_by_the_groups_of_a_column(dataset):
    by_rarity = built(dataset, **EVEN).training
    assert torch.equal(
        by_rarity.risk.memory.shape, by_rarity.risk.memory.shape.sort().values.flip(0)
    )
    by_style = built(dataset, risk__group="style", **EVEN).training
    queries = pairs_of(by_style.feed.part.positives).query_ids
    styles = by_style.feed.part.groups["style"].ids[queries]
    assert (by_style.feed.pair_groups // 2 == styles).all()
    assert (by_style.feed.pair_groups % 2 == by_rarity.feed.pair_groups % 2).all()
    assert by_style.risk.memory.shape.tolist() == [1, 1, 1]
    by_tags = built(small.tagged_dataset(), risk__group="tag", **EVEN).training
    assert sorted(set(by_tags.feed.pair_groups // 2)) == [0, 1, 2, 3]  # sets, and of none
    again = built(dataset, training__seed=1, **EVEN).training
    assert (again.feed.pair_groups % 2 != by_rarity.feed.pair_groups % 2).any()


# --- checks ---------------------------------------------------------------------------------------


def test_settings_the_data_cannot_meet_are_refused(dataset):
    for changes, words in (
        ({"mining__batch_size": 526}, r"mining\.batch_size must be at most 525"),
        ({"mining__num_sampled_labels": 61}, "must be at most 60 .*, got 61"),
        (
            {"mining__num_sampled_labels": 60, "mining__for_each_example": True},
            "must be at most 59 .*, got 60",
        ),
        ({"risk__group": "stile", **EVEN}, "did you mean 'style'"),
        ({"training__select_by": "recall@7"}, "did you mean 'recall@"),
        ({"training__select_by": "recall@10 on worst of stile"}, "did you mean 'style'"),
    ):
        with pytest.raises(UserError, match=words):
            check_against_data(small.config("unused", **changes), dataset)
    for changes in (  # at the limit
        {"mining__batch_size": 525},
        {"mining__num_sampled_labels": 60},
        {"mining__num_sampled_labels": 59, "mining__for_each_example": True},
        {"mining__num_sampled_labels": 61, "mining__method": "sgd"},
        {"training__select_by": "recall@5 on style=rare"},
    ):
        check_against_data(small.config("unused", **changes), dataset)
