"""The cost model against counting, and against what split steps really send."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from evenhand.data import Dataset, Part, Rows
from experiments.scaling_laws import (
    expected_distinct,
    in_bags,
    law_of_counts,
    thin,
    uniform_law,
    zipf_law,
)
from experiments.simulated_ranks import run_ranks
from experiments.step_costs import (
    StepShape,
    bytes_sent,
    flops,
    kept_label_bounds,
    kept_labels,
    memory_held,
    memory_traffic,
    touched,
)
from small import config
from split import take_steps, whole_training


def shape_of(**changes):
    values = {
        "num_ranks": 4,
        "num_labels": 1000,
        "batch_size": 64,
        "num_sampled_labels": 100,
        "num_hard_labels": 10,
        "num_hard_examples": 16,
        "dim": 8,
        "positives": uniform_law(1000),
        "features": in_bags(zipf_law(500), 6),
        "num_features": 500,
    }
    return StepShape(**(values | changes))


# Laws.


def test_distinct_ids_are_those_of_all_cases_together():
    weights = np.array([0.5, 0.3, 0.2])
    expected = sum(
        len(set(draws)) * math.prod(weights[id_] for id_ in draws)
        for draws in itertools.product(range(3), repeat=4)
    )
    law = law_of_counts(np.array([5, 3, 2]), num_draws=10)
    assert expected_distinct(law, 4) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.4])
@pytest.mark.parametrize("num_ids", [1, 7, 2**16, 300_000])
def test_a_zipf_law_is_its_sum_also_where_it_is_an_integral(num_ids, exponent):
    weights = np.arange(1, num_ids + 1.0) ** -exponent
    weights /= weights.sum()
    law = zipf_law(num_ids, exponent=exponent)
    assert law.num_ids == pytest.approx(num_ids, rel=1e-9)
    assert law.ids_a_draw == pytest.approx(1, rel=1e-9)
    for num_draws in (1, 50, 10**5):
        expected = (1 - (1 - weights) ** num_draws).sum()
        assert expected_distinct(law, num_draws) == pytest.approx(expected, rel=1e-9)
    cut = num_ids // 3
    parts = [zipf_law(num_ids, exponent=exponent, rows=rows) for rows in ((0, cut), (cut, num_ids))]
    for part, own in zip(parts, (weights[:cut], weights[cut:]), strict=True):
        assert part.num_ids == pytest.approx(len(own), rel=1e-9)
        assert part.ids_a_draw == pytest.approx(own.sum(), rel=1e-9)


def test_bags_and_survivors_of_them_are_those_that_are_counted():
    generator = np.random.default_rng(0)
    law = zipf_law(40)
    bags = generator.choice(40, p=law.probabilities, size=(20_000, 5))
    counts = Counter(id_ for bag in bags for id_ in set(bag))
    seen = law_of_counts(np.array([counts[id_] for id_ in range(40)]), num_draws=len(bags))
    expected = in_bags(law, 5)
    assert seen.ids_a_draw == pytest.approx(expected.ids_a_draw, rel=0.02)
    survives = generator.random(20_000) < 0.25
    sizes = [
        len(set(group[alive].ravel()))
        for group, alive in zip(bags.reshape(-1, 8, 5), survives.reshape(-1, 8), strict=True)
    ]
    assert expected_distinct(thin(expected, 0.25), 8) == pytest.approx(np.mean(sizes), rel=0.02)


# Touched rows.


@pytest.mark.parametrize("draws_for_each", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 4, 32])
def test_touched_labels_are_those_that_are_counted(num_ranks, draws_for_each):
    """Samples, survivors and what they keep, drawn as the model says, and sets counted."""
    shape = shape_of(
        num_ranks=num_ranks,
        num_labels=300,
        positives=zipf_law(300),
        draws_for_each=draws_for_each,
    )
    generator, counts = np.random.default_rng(1), []
    for _ in range(100 * num_ranks):
        shared = generator.choice(300, 100, replace=False)
        wanted, kept = set() if draws_for_each else set(shared), set()
        for _ in range(64 // num_ranks):
            own = generator.choice(300, 100, replace=False) if draws_for_each else shared
            positive = generator.choice(300, p=shape.positives.probabilities)
            wanted |= {positive, *own}
            if generator.random() < shape.survival:
                kept |= {positive, *generator.choice(own, 10, replace=False)}
        counts.append((len(wanted), len(kept)))
    found, means = touched(shape), np.mean(counts, axis=0)
    errors = 4 * np.std(counts, axis=0) / math.sqrt(len(counts)) + 0.01 * means
    assert (np.abs([found.labels, found.label_gradients] - means) < errors).all()
    least, most = kept_label_bounds(shape, num_examples=shape.share)
    assert least <= kept_labels(shape, num_examples=shape.share) <= most


def test_the_number_of_labels_enters_by_the_law_alone():
    """Positives of ten thousand labels, in tables of more and more: the bytes have a limit."""
    law = uniform_law(10_000)
    sent = {
        num_labels: sum(bytes_sent(shape_of(num_labels=num_labels, positives=law)).values())
        for num_labels in (10**5, 10**6, 10**7, 10**9, 10**12)
    }
    for total in sent.values():
        assert total == pytest.approx(sent[10**12], rel=1e-3)
    work = [
        [*flops(shape).values(), *memory_traffic(shape).values()]
        for shape in (shape_of(num_labels=count, positives=law) for count in (10**6, 10**12))
    ]
    assert work[0] == pytest.approx(work[1], rel=1e-3)


# Whole steps.


def made_dataset(
    num_labels, *, size=3000, num_features=400, exponent=1.0, is_dense=False, pairs_a_query=1
):
    """Queries of six features under a Zipf law, their positives under another."""
    generator = np.random.default_rng(num_labels)
    weights = np.arange(1, num_labels + 1.0) ** -exponent
    labels = generator.choice(num_labels, p=weights / weights.sum(), size=size).astype(np.int32)
    feature_law = zipf_law(num_features)
    bags = generator.choice(num_features, p=feature_law.probabilities, size=(size, 6))
    features = Rows(np.arange(size + 1) * 6, bags.ravel().astype(np.int32))
    if is_dense:
        features = generator.normal(size=(size, 12)).astype(np.float32)
    labels = np.concatenate([(labels + 7 * step) % num_labels for step in range(pairs_a_query)])
    labels = np.sort(labels.reshape(pairs_a_query, size), axis=0).T.ravel()
    part = Part(features, Rows(np.arange(size + 1) * pairs_a_query, labels.astype(np.int32)))
    return Dataset(
        name="made",
        num_features=12 if is_dense else num_features,
        num_labels=num_labels,
        parts={"train": part, "validation": part},
    )


def measured(settings, dataset, num_ranks, *, num_steps=12):
    """Mean bytes that a rank sends in a step, by what they were."""

    def rank_fn(ranks):
        built = whole_training(settings, dataset, ranks=ranks)
        take_steps(built, num_steps)
        built.training.feed.close()
        return ranks.sent

    total = sum(run_ranks(num_ranks, rank_fn), Counter())
    return {what: count / num_ranks / num_steps for what, count in total.items()}


def assert_near(settings, dataset, num_ranks, **changes):
    """Every purpose is known, and the sum is within a tenth."""
    mining = settings.mining
    shape = shape_of(
        num_ranks=num_ranks,
        num_labels=dataset.num_labels,
        batch_size=mining.batch_size,
        num_sampled_labels=mining.num_sampled_labels,
        num_hard_labels=mining.num_hard_labels,
        num_hard_examples=mining.num_counting,
        dim=settings.model.embedding_dim,
        positives=law_of_counts(dataset.label_counts(), num_draws=dataset.label_counts().sum()),
        features=in_bags(zipf_law(dataset.num_features), 6),
        num_features=dataset.num_features,
        **changes,
    )
    expected, seen = bytes_sent(shape), measured(settings, dataset, num_ranks)
    assert seen.keys() == expected.keys()
    assert sum(seen.values()) == pytest.approx(sum(expected.values()), rel=0.1)
    for what in ("labels: ids", "labels: rows", "losses", "counts"):
        assert seen[what] == pytest.approx(expected[what], rel=0.1), what


SOFTMAX = {
    "loss__name": "softmax",  # every kept label has a gradient
    "mining__method": "s2m",
    "training__optimizer": "row-adagrad",
}


@pytest.mark.parametrize("method", ["s2m", "snm"])
@pytest.mark.parametrize(
    ("num_ranks", "batch_size", "sampled"), [(2, 64, 100), (4, 256, 50), (8, 128, 300)]
)
def test_split_steps_send_what_the_model_says(method, num_ranks, batch_size, sampled):
    settings = config(
        "none",
        mining__batch_size=batch_size,
        mining__num_sampled_labels=sampled,
        mining__num_hard_examples=batch_size // 4,
        **(SOFTMAX | {"mining__method": method}),
    )
    assert_near(settings, made_dataset(1000), num_ranks)


def test_the_other_parts_of_a_step_are_counted_too():
    dataset = made_dataset(1000)
    each = config("none", mining__for_each_example=True, **SOFTMAX)
    assert_near(each, dataset, 3, draws_for_each=True)
    biased = config(
        "none",
        model__similarity="dot",
        model__label_bias=True,
        training__max_gradient_norm=1.0,
        **SOFTMAX,
    )
    assert_near(biased, dataset, 3, has_label_bias=True, is_clipped=True)


@pytest.mark.parametrize(("num_ranks", "pairs_a_query"), [(2, 4), (4, 8)])
@pytest.mark.parametrize("method", ["s2m", "snm"])
def test_pairs_of_one_query_share_its_features_and_its_mined_labels(
    method, num_ranks, pairs_a_query
):
    settings = config(
        "none",
        mining__whole_queries=True,
        mining__batch_size=256,
        mining__num_sampled_labels=100,
        mining__num_hard_examples=64,
        **(SOFTMAX | {"mining__method": method}),
    )
    dataset = made_dataset(1000, exponent=0.5, pairs_a_query=pairs_a_query)
    assert_near(settings, dataset, num_ranks, pairs_a_query=pairs_a_query)


@pytest.mark.parametrize(("num_ranks", "batch_size"), [(3, 8), (4, 10)])
def test_shares_of_different_sizes_are_sent_as_long_as_the_longest(num_ranks, batch_size):
    settings = config("none", mining__batch_size=batch_size, mining__num_hard_examples=4, **SOFTMAX)
    shape = shape_of(num_ranks=num_ranks, batch_size=batch_size, num_hard_examples=4)
    seen = measured(settings, made_dataset(1000), num_ranks, num_steps=2)
    assert bytes_sent(shape)["losses"] == seen["losses"]


def test_a_dense_encoder_is_summed_over_the_ranks():
    settings = config("none", **SOFTMAX)
    dataset = made_dataset(1000, is_dense=True)
    shape = shape_of(
        batch_size=32,
        num_sampled_labels=40,
        num_hard_labels=5,
        num_hard_examples=8,
        features=None,
        positives=zipf_law(1000),
        dense_weights=12 * 8 + 8,
    )
    expected, seen = bytes_sent(shape), measured(settings, dataset, 4)
    assert seen.keys() == expected.keys()
    assert seen["dense gradients"] == pytest.approx(expected["dense gradients"], rel=0.01)
    assert sum(seen.values()) == pytest.approx(sum(expected.values()), rel=0.1)


# What is held and computed.


def test_memory_is_that_of_the_tables_and_their_optimisers():
    dataset, settings = made_dataset(1000), config("none", training__optimizer="row-adam")

    def held(ranks):
        training = whole_training(settings, dataset, ranks=ranks).training
        rows = training.optimizers.rows.values()
        tables = sum(own.table.nbytes for own in rows)
        states = sum(own.momentum.nbytes + own.second_moments.nbytes for own in rows)
        return tables, states

    expected = memory_held(
        shape_of(num_features=400, features=in_bags(zipf_law(400), 6), optimizer="row-adam")
    )
    for tables, states in run_ranks(4, held):
        assert (expected["tables"], expected["optimiser"]) == (tables, states)
    assert expected["checkpoint staging"] == tables + states


@pytest.mark.parametrize(
    "changes",
    [
        {"num_ranks": 0},
        {"num_sampled_labels": 1001},
        {"num_sampled_labels": 9},
        {"num_hard_examples": 65},
        {"pairs_a_query": 0.5},
        {"optimizer": "sgd"},
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=f"{name} must be"):
        shape_of(**changes)
