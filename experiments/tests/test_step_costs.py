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


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_touched_labels_are_those_that_are_counted(num_ranks):
    """Samples, survivors and what they keep, drawn as the model says, and sets counted."""
    shape = shape_of(num_ranks=num_ranks, num_labels=300, positives=zipf_law(300))
    generator, counts = np.random.default_rng(1), []
    for _ in range(100 * num_ranks):
        sample = generator.choice(300, 100, replace=False)
        wanted, kept = set(sample), set()
        for _ in range(64 // num_ranks):
            positive = generator.choice(300, p=shape.positives.probabilities)
            wanted.add(positive)
            if generator.random() < shape.survival:
                kept |= {positive, *generator.choice(sample, 10, replace=False)}
        counts.append((len(wanted), len(kept)))
    found, means = touched(shape), np.mean(counts, axis=0)
    errors = 4 * np.std(counts, axis=0) / math.sqrt(len(counts)) + 0.01 * means
    assert (np.abs([found.labels, found.label_gradients] - means) < errors).all()


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


def made_dataset(num_labels=1000, *, size=3000, num_features=400):
    """Queries of six features and a positive, each under a Zipf law."""
    generator = np.random.default_rng(num_labels)
    label_law, feature_law = zipf_law(num_labels), zipf_law(num_features)
    labels = generator.choice(num_labels, p=label_law.probabilities, size=size)
    bags = generator.choice(num_features, p=feature_law.probabilities, size=(size, 6))
    features = Rows(np.arange(size + 1) * 6, bags.ravel().astype(np.int32))
    part = Part(features, Rows(np.arange(size + 1), labels.astype(np.int32)))
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


@pytest.mark.parametrize(
    ("method", "num_ranks", "batch_size", "sampled"), [("s2m", 2, 64, 100), ("snm", 4, 256, 50)]
)
def test_split_steps_send_what_the_model_says(method, num_ranks, batch_size, sampled):
    settings = config(
        "none",
        mining__method=method,
        mining__batch_size=batch_size,
        mining__num_sampled_labels=sampled,
        mining__num_hard_examples=batch_size // 4,
        loss__name="softmax",  # every kept label has a gradient
        training__optimizer="row-adagrad",
    )
    dataset, mining = made_dataset(), settings.mining
    counts = dataset.label_counts()
    shape = shape_of(
        num_ranks=num_ranks,
        batch_size=batch_size,
        num_sampled_labels=sampled,
        num_hard_labels=mining.num_hard_labels,
        num_hard_examples=mining.num_counting,
        dim=settings.model.embedding_dim,
        positives=law_of_counts(counts, num_draws=counts.sum()),
        features=in_bags(zipf_law(dataset.num_features), 6),
    )
    expected, seen = bytes_sent(shape), measured(settings, dataset, num_ranks)
    assert seen.keys() == expected.keys()
    assert sum(seen.values()) == pytest.approx(sum(expected.values()), rel=0.1)
    for what in ("labels: ids", "labels: rows", "losses", "counts"):
        assert seen[what] == pytest.approx(expected[what], rel=0.1), what


def test_memory_is_that_of_the_tables_and_their_optimisers():
    dataset, settings = made_dataset(), config("none", training__optimizer="row-adagrad")

    def held(ranks):
        rows = whole_training(settings, dataset, ranks=ranks).training.optimizers.rows.values()
        return sum(own.table.nbytes for own in rows), sum(own.sums.nbytes for own in rows)

    expected = memory_held(shape_of(num_features=400, features=in_bags(zipf_law(400), 6)))
    for tables, states in run_ranks(4, held):
        assert (expected["tables"], expected["optimiser"]) == (tables, states)
