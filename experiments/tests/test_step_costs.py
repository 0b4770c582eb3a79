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
    touched,
)
from small import config
from split import take_steps, whole_training


def shape_of(**changes):
    values = {
        "num_ranks": 4, "num_labels": 1000, "batch_size": 64, "num_sampled_labels": 100,
        "num_hard_labels": 10, "num_hard_examples": 16, "dim": 8, "num_features": 500,
        "positives": uniform_law(1000), "features": in_bags(zipf_law(500), 6),
    }  # fmt: skip
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


@pytest.mark.parametrize(("num_ids", "exponent"), [(1, 1.0), (7, 0.5), (300_000, 1.4)])
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


# Touched rows.


@pytest.mark.parametrize(("num_ranks", "draws_for_each"), [(1, False), (4, True)])
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
    work = [flops(shape_of(num_labels=count, positives=law)) for count in (10**6, 10**12)]
    assert work[0] == pytest.approx(work[1], rel=1e-3)


# Whole steps.


def made_dataset(num_labels, *, size=3000, num_features=400, exponent=1.0, pairs_a_query=1):
    """Queries of six features under a Zipf law, their positives under another."""
    generator = np.random.default_rng(num_labels)
    weights = np.arange(1, num_labels + 1.0) ** -exponent
    labels = generator.choice(num_labels, p=weights / weights.sum(), size=size).astype(np.int32)
    feature_law = zipf_law(num_features)
    bags = generator.choice(num_features, p=feature_law.probabilities, size=(size, 6))
    features = Rows(np.arange(size + 1) * 6, bags.ravel().astype(np.int32))
    labels = np.concatenate([(labels + 7 * step) % num_labels for step in range(pairs_a_query)])
    labels = np.sort(labels.reshape(pairs_a_query, size), axis=0).T.ravel()
    part = Part(features, Rows(np.arange(size + 1) * pairs_a_query, labels.astype(np.int32)))
    return Dataset("made", num_features, num_labels, {"train": part, "validation": part})


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


@pytest.mark.parametrize(
    ("method", "num_ranks", "batch_size", "sampled"), [("s2m", 2, 64, 100), ("snm", 4, 256, 50)]
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


def test_pairs_of_one_query_share_its_features_and_its_mined_labels():
    settings = config(
        "none",
        mining__whole_queries=True,
        mining__batch_size=256,
        mining__num_sampled_labels=100,
        mining__num_hard_examples=64,
        **SOFTMAX,
    )
    dataset = made_dataset(1000, exponent=0.5, pairs_a_query=4)
    assert_near(settings, dataset, 2, pairs_a_query=4)


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
