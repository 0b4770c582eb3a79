"""From settings to the parts of a run: built as told, and checked against the data."""

import numpy as np
import pytest
import torch

import small
from evenhand.build import build_model, build_training, check_against_data
from evenhand.errors import UserError
from evenhand.mining import hardest_labels, mask_positives
from evenhand.models.encoders import BagEncoder, MlpEncoder
from evenhand.sampling import (
    Distinct,
    FrequencySampler,
    InBatchSampler,
    LogUniformSampler,
    MixedSampler,
    UniformSampler,
)
from evenhand.training.optimizers import RowAdagrad, RowAdam

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
    "log-uniform": Distinct,
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


@pytest.mark.parametrize(("sampler", "kind"), [
    ("frequency", FrequencySampler), ("log-uniform", LogUniformSampler),
])  # fmt: skip
def test_the_hardest_labels_of_a_run_are_different_labels(dataset, sampler, kind):
    """Counted by the inclusion probability, a label drawn many times is one label of the sample."""
    parts = built(dataset, mining__sampler=sampler)
    assert isinstance(parts.plan.sampler.source, kind)
    batch = parts.training.feed.next_batch()
    num_drawn = 4 * dataset.num_labels  # so many that repeats are certain
    sample = parts.plan.sampler.sample(
        batch.positive_ids, num_drawn, generator=torch.Generator().manual_seed(0)
    )
    scores = torch.randn(dataset.num_labels)[sample.ids.clamp(min=0)]
    scores = mask_positives(scores.expand(len(batch.label_ids), -1), sample.ids, batch.positive_ids)
    kept = sample.ids[hardest_labels(scores, 4)]  # (B, 4)
    assert all(len(row.unique()) == 4 for row in kept)
    assert (sample.log_counts <= 0).all()  # a label is in a set at most once


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


def test_the_most_frequent_label_is_the_first_of_the_log_uniform_sampler(dataset):
    sampler = built(dataset, mining__sampler="log-uniform").plan.sampler
    counts = dataset.label_counts()
    assert (np.diff(counts[sampler.source.label_order.numpy()]) <= 0).all()


@pytest.mark.parametrize(
    ("method", "num_sampled", "num_labels", "num_examples", "fraction"),
    [
        ("sgd", 60, 60, 32, 0.0),
        ("snm", 40, 5, 32, 0.0),
        ("topk-sgd", 60, 60, 8, 0.0),
        ("s2m", 40, 5, 8, 0.0),
        ("s2m-annealed", 40, 5, 8, 0.4),
    ],
)
def test_a_method_is_four_numbers_of_the_plan(
    dataset, method, num_sampled, num_labels, num_examples, fraction
):
    plan = built(dataset, mining__method=method, mining__anneal_fraction=0.4).plan
    assert (plan.num_sampled_labels, plan.num_hard_labels) == (num_sampled, num_labels)
    assert (plan.num_hard_examples, plan.anneal_fraction) == (num_examples, fraction)


def test_settings_of_training_reach_the_plan(dataset):
    changes = {
        "num_steps": 7, "learning_rate": 0.25, "learning_rate_shape": "cosine", "warmup_steps": 3,
        "max_gradient_norm": 1.5, "log_every": 2, "evaluate_every": 4, "checkpoint_every": 6,
        "patience": 8,
    }  # fmt: skip
    plan = built(dataset, **{f"training__{name}": value for name, value in changes.items()}).plan
    assert {name: getattr(plan, name) for name in changes} == changes


def test_log_q_and_samples_for_each_are_for_methods_that_draw(dataset):
    changes = {"loss__name": "softmax", "loss__log_q": True, "mining__for_each_example": True}
    plan = built(dataset, **changes).plan
    assert plan.is_log_q_corrected
    assert plan.draws_for_each
    plan = built(dataset, **changes, mining__method="topk-sgd").plan
    assert not plan.is_log_q_corrected
    assert not plan.draws_for_each


def test_sparse_features_have_a_table_and_dense_ones_a_perceptron(dataset):
    sparse = built(dataset).training
    assert isinstance(sparse.model.encoder, BagEncoder)
    assert sparse.optimizers.dense is None
    assert set(sparse.optimizers.rows) == {"labels", "features"}
    dense = built(small.dense_dataset(), model__hidden_widths=[7]).training
    assert isinstance(dense.model.encoder, MlpEncoder)
    assert isinstance(dense.optimizers.dense, torch.optim.Adam)
    assert set(dense.optimizers.rows) == {"labels"}


def test_the_model_and_its_optimizer_are_those_of_the_settings(dataset):
    training = built(
        dataset,
        loss__name="softmax",
        model__similarity="dot",
        model__label_bias=True,
        model__scale=3,
        training__optimizer="row-adagrad",
    ).training
    assert (training.model.scale, training.model.is_cosine) == (3, False)
    assert training.model.label_table.shape == (60, 8)
    optimizers = training.optimizers.rows
    assert set(optimizers) == {"labels", "biases", "features"}
    assert all(isinstance(optimizer, RowAdagrad) for optimizer in optimizers.values())
    assert optimizers["labels"].table is training.model.label_table
    assert isinstance(built(dataset).training.optimizers.rows["labels"], RowAdam)


def test_a_seed_fixes_weights_order_and_samples_and_each_differs(dataset):
    first, again, other = (built(dataset, training__seed=seed).training for seed in (0, 0, 1))
    assert first.model.label_table.equal(again.model.label_table)
    assert first.feed.place.key.equal(again.feed.place.key)
    assert first.generator.get_state().equal(again.generator.get_state())
    assert not first.model.label_table.equal(other.model.label_table)
    assert not first.feed.place.key.equal(other.feed.place.key)
    assert not first.generator.get_state().equal(other.generator.get_state())
    assert first.feed.generator.initial_seed() != first.generator.initial_seed()


# --- checks ---------------------------------------------------------------------------------------


def test_settings_the_data_cannot_meet_are_refused(dataset):
    for changes, words in (
        ({"mining__batch_size": 526}, r"mining\.batch_size must be at most 525"),
        ({"mining__num_sampled_labels": 61}, "must be at most 60 .*, got 61"),
        (
            {"mining__num_sampled_labels": 60, "mining__for_each_example": True},
            "must be at most 59 .*, got 60",
        ),
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


def test_without_validation_what_to_select_by_does_not_matter(dataset):
    config = small.config("unused", training__select_by="nonsense")
    with pytest.raises(UserError, match="nonsense"):
        check_against_data(config, dataset)
    with pytest.raises(UserError, match="needs a validation part"):
        check_against_data(config, small.with_parts(dataset, validation=None))
    never = {"training__select_by": "nonsense", "training__evaluate_every": 0}
    check_against_data(small.config("unused", **never), dataset)


def test_a_model_of_a_range_of_rows_is_that_part_of_the_whole():
    config = small.config("unused", training__seed=5)
    whole = build_model(config, 20, 11, is_sparse=True)
    part = build_model(config, 20, 11, is_sparse=True, label_rows=(4, 9), feature_rows=(15, 20))
    assert torch.equal(part.label_table, whole.label_table[4:9])
    assert torch.equal(part.encoder.weight, whole.encoder.weight[15:])
    halved = build_model(config, 20, 11, is_sparse=True, dtype=torch.bfloat16)
    assert torch.equal(halved.label_table, whole.label_table.bfloat16())
    assert torch.equal(halved.encoder.weight, whole.encoder.weight.bfloat16())


def test_a_model_on_the_meta_device_holds_nothing():
    config = small.config(
        "unused", loss__name="softmax", model__similarity="dot", model__label_bias=True
    )
    for is_sparse in (True, False):
        model = build_model(config, 20, 10**9, is_sparse=is_sparse, device="meta")
        assert all(weight.is_meta for weight in model.parameters())
