import dataclasses
import math

import numpy as np
import pytest
import torch

import metric_oracles as oracles
from evenhand import evaluation
from evenhand.data import Dataset, Groups
from evenhand.data.csr import rows_from_lists
from evenhand.errors import UserError
from evenhand.evaluation import (
    GroupList,
    Outcome,
    compare_outcomes,
    evaluate,
    score_table,
    worst_members,
)
from evenhand.search import ExactIndex
from small import part_of

NUM_LABELS = 40
SCRIPTS = ("LATIN", "THAI", "GREEK")
COUNTRIES = ("Aa", "Bb", "Cc", "Nowhere")


@pytest.fixture(scope="module")
def dataset():
    """120 test queries of 0 to 3 positives; label 0 is frequent, the last ten are never seen.

    Every pair has up to two tags; even labels are of a kind of their own beside that of all.
    """
    generator = np.random.default_rng(0)
    train = [[label] for label in range(NUM_LABELS - 10) for _ in range(NUM_LABELS - label)]
    sizes = generator.choice([0, 1, 1, 2, 3], size=120)
    test = [generator.choice(NUM_LABELS, size=size, replace=False).tolist() for size in sizes]
    scripts = generator.choice([-1, 0, 0, 0, 1, 2], size=120).astype(np.int32)
    countries = generator.choice([-1, 0, 0, 1, 2], size=NUM_LABELS).astype(np.int32)
    tags = generator.choice([-1, 0, 1, 2], size=sizes.sum()).astype(np.int32)
    queries = {
        "script": Groups(scripts, SCRIPTS),
        "tag": Groups(tags, ("new", "old"), rows_from_lists([[0], [0, 1], [1]])),
    }
    kinds = Groups(np.arange(NUM_LABELS) % 2, ("all", "even"), rows_from_lists([[0, 1], [0]]))
    return Dataset(
        "toy",
        1,
        NUM_LABELS,
        {"train": part_of(train), "test": part_of(test, groups=queries)},
        label_groups={"country": Groups(countries, COUNTRIES), "kind": kinds},
    )


def evaluated(
    dataset, part_name="test", *, seed=0, num_results=10, cutoffs=(1, 5, 10), batch_size=32
):
    """A retriever that knows a little: noise, and a push towards the positives."""
    part = dataset.parts[part_name]
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(len(part), dataset.num_labels, generator=generator)
    for query in range(len(part)):
        vectors[query, torch.from_numpy(np.array(part.positives.row(query))).long()] += 1.0
    seen = []
    outcome = evaluate(
        lambda row_ids: vectors[torch.from_numpy(row_ids)],
        ExactIndex(torch.eye(dataset.num_labels)),
        part,
        dataset.label_counts(),
        num_results=num_results,
        cutoffs=cutoffs,
        batch_size=batch_size,
        num_train_queries=len(dataset.parts["train"]),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (len(part), len(part))
    assert len(seen) == math.ceil(len(part) / batch_size)
    return outcome, vectors


@pytest.fixture(scope="module")
def outcome(dataset):
    return evaluated(dataset)[0]


@pytest.fixture(scope="module")
def scores(outcome, dataset):
    return score_table(outcome, dataset, "test", min_pairs={"script": 50}, num_resamples=100)


def row(scores, metric, column="all", group="all"):
    (found,) = [s for s in scores if (s.metric, s.column, s.group) == (metric, column, group)]
    return found


def assert_same(found, expected):
    for field in dataclasses.fields(Outcome):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        np.testing.assert_equal(one, other)
        assert type(one) is type(other)


# --- what happened --------------------------------------------------------------------------------


def test_the_outcome_of_every_pair_matches_a_loop(dataset):
    outcome, vectors = evaluated(dataset)
    positives, pair = dataset.parts["test"].positives, 0
    metrics = {
        "query recall": oracles.recall, "precision": oracles.precision, "ndcg": oracles.ndcg,
    }  # fmt: skip
    for query, row_scores in enumerate(vectors.tolist()):
        found = oracles.search(row_scores, 10)
        assert outcome.retrieved_ids[query].tolist() == found
        labels = positives.row(query).tolist()
        for label in labels:
            assert (outcome.query_ids[pair], outcome.label_ids[pair]) == (query, label)
            assert outcome.ranks[pair] == oracles.rank(found, label)
            assert outcome.scores[pair] == pytest.approx(row_scores[label])
            pair += 1
        for name, oracle in metrics.items():
            for cutoff in (1, 5, 10):
                expected = oracle(found, labels, cutoff)
                expected = math.nan if expected is None else expected
                actual = outcome.query_metrics[f"{name}@{cutoff}"][query]
                assert actual == pytest.approx(expected, nan_ok=True)
    assert pair == len(outcome.ranks)
    assert (outcome.ranks.dtype, outcome.query_ids.dtype) == (np.int32, np.int64)


def test_cutoffs_may_come_in_any_order_and_batches_in_any_size(dataset, outcome):
    assert_same(evaluated(dataset, cutoffs=(10, 1, 5, 10), batch_size=7)[0], outcome)
    with pytest.raises(ValueError, match=r"between 1 and num_results \(10\), got \(5, 50\)"):
        evaluated(dataset, cutoffs=(5, 50))


# --- the table ------------------------------------------------------------------------------------


def member_lists(dataset, outcome):
    """(column, group) -> is each pair in it? By loops over the definition."""
    members = {("all", "all"): [True] * len(outcome.ranks)}
    for column in evaluation.group_columns(dataset, "test"):
        if column.name.startswith("frequency"):
            for group_id, group in enumerate(("head", "torso", "tail")):
                members[column.name, group] = (column.groups.ids == group_id).tolist()
    places = {"country": outcome.label_ids, "kind": outcome.label_ids, "script": outcome.query_ids}
    for name, groups in (dataset.label_groups | dataset.parts["test"].groups).items():
        of_pair = groups.ids[places[name]] if name in places else groups.ids
        for group_id, group in enumerate(groups.names):
            sets = [{one} if groups.sets is None else groups.sets.row(one) for one in of_pair]
            members[name, group] = [
                one >= 0 and group_id in ids for one, ids in zip(of_pair, sets, strict=True)
            ]
    return members


def test_every_pair_recall_matches_a_loop(scores, dataset, outcome):
    for (column, group), is_member in member_lists(dataset, outcome).items():
        for cutoff in (1, 5, 10):
            expected, count = oracles.pair_recall(outcome.ranks.tolist(), cutoff, is_member)
            score = row(scores, f"recall@{cutoff}", column, group)
            assert score.count == count
            assert score.is_judged == (count >= (50 if column == "script" else 30))
            expected = math.nan if expected is None else expected
            assert score.value == pytest.approx(expected, rel=1e-12, nan_ok=True)
            assert score.low <= score.high or (math.isnan(expected) and math.isnan(score.low))


def test_propensity_scored_precision_is_the_ratio_of_sums(scores, dataset, outcome):
    counts, num_queries = dataset.label_counts().tolist(), len(dataset.parts["train"])
    propensities = [oracles.propensity(count, num_queries) for count in counts]
    positives = dataset.parts["test"].positives
    sums = np.zeros(2)  # of the gains, and of the best possible
    for query, found in enumerate(outcome.retrieved_ids.tolist()):
        labels = positives.row(query).tolist()
        sums += oracles.propensity_gain_and_best(found, labels, propensities, 5)
    assert row(scores, "psp@5").value == pytest.approx(sums[0] / sums[1], rel=1e-5)


@pytest.mark.parametrize("metric", ["recall@5", "recall@10"])
@pytest.mark.parametrize("column", ["country", "script", "frequency"])
def test_summaries_average_the_lowest_groups_that_can_be_judged(scores, metric, column):
    groups = [s for s in scores if (s.metric, s.column) == (metric, column)]
    summaries = [s for s in groups if s.group.startswith("worst")]
    judged = [s for s in groups if s.is_judged and s not in summaries]
    judged.sort(key=lambda s: s.value)
    for summary, count in zip(summaries, (1, 3, 1), strict=True):
        chosen = judged[:count]
        assert summary.members == tuple(s.group for s in chosen)
        assert summary.count == sum(s.count for s in chosen)
        mean = sum(s.value for s in chosen) / len(chosen)
        assert summary.value == pytest.approx(mean, rel=1e-12)
        assert summary.low <= summary.value <= summary.high
    expected = tuple(s.group for s in judged[:2])
    assert worst_members(scores, column, metric, count=2) == expected
    assert worst_members(scores, column, metric) == summaries[2].members
    assert column != "script" or not all(s.is_judged for s in groups)


def test_a_tenth_of_n_groups_is_n_over_ten_rounded_down_and_at_least_one():
    numbers = [evaluation.Score("m", "c", str(g), g, 0, 1, 30, is_judged=True) for g in range(39)]
    assert worst_members(numbers[::-1], "c", "m") == ("0", "1", "2")
    assert worst_members(numbers[:9], "c", "m") == ("0",)
    with pytest.raises(UserError, match="no metric 'n'"):
        worst_members(numbers, "c", "n")


def test_a_group_is_judged_from_the_very_number_of_pairs_that_is_needed(outcome, dataset, scores):
    count = row(scores, "recall@5", "script", "THAI").count
    for needed, is_judged in ((count, True), (count + 1, False), (10**6, False)):
        least = {"script": needed}
        table = score_table(outcome, dataset, "test", min_pairs=least, num_resamples=0)
        assert row(table, "recall@5", "script", "THAI").is_judged == is_judged
    summary = row(table, "recall@10", "script", "worst 3")  # of which none is judged
    assert math.isnan(summary.value)
    assert (summary.count, summary.members, summary.is_judged) == (0, (), False)
    assert math.isnan(row(table, "recall@10").low)  # no resamples, no interval


def test_columns_and_groups_of_one_name_are_told_apart(dataset, outcome):
    part = dataset.parts["test"]
    groups = {"country": Groups(np.zeros(len(part), dtype=np.int32), ("worst 3", "x"))}
    test = dataclasses.replace(part, groups=groups)
    labels = {"frequency": dataset.label_groups["kind"], **dataset.label_groups}
    twins = dataclasses.replace(dataset, parts={**dataset.parts, "test": test}, label_groups=labels)
    columns = {column.name: column for column in evaluation.group_columns(twins, "test")}
    assert list(columns) == [
        "all", "frequency", "frequency over pairs", "frequency of labels", "country", "kind",
        "country of queries",
    ]  # fmt: skip
    scores = score_table(outcome, twins, "test", num_resamples=0)
    own = row(scores, "recall@5", "country of queries", "worst 3 (group)")
    assert (own.count, own.members) == (len(outcome.ranks), ())
    summary = row(scores, "recall@5", "country of queries", "worst 3")
    assert summary.members == ("worst 3 (group)",)
    assert worst_members(scores, "country of queries", "recall@5") == ("worst 3 (group)",)


# --- intervals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("column", "group"), [("script", "LATIN"), ("tag", "old")])
def test_the_interval_is_the_percentiles_of_resampled_queries(
    dataset, outcome, scores, column, group
):
    """The same draws, one by one, in loops."""
    generator, num_queries = np.random.default_rng(0), len(dataset.parts["test"])
    members = member_lists(dataset, outcome)[column, group]
    hits, counts = [0] * num_queries, [0] * num_queries
    for query, rank, is_member in zip(outcome.query_ids, outcome.ranks, members, strict=True):
        counts[query] += is_member
        hits[query] += is_member and 1 <= rank <= 5
    values = []
    for _ in range(100):
        drawn = generator.integers(num_queries, size=num_queries).tolist()
        values.append(sum(hits[q] for q in drawn) / sum(counts[q] for q in drawn))
    score = row(scores, "recall@5", column, group)
    expected = [oracles.percentile(values, share) for share in (0.025, 0.975)]
    assert [score.low, score.high] == pytest.approx(expected, rel=1e-12)


# --- two methods ----------------------------------------------------------------------------------


def test_differences_match_a_loop_over_runs_and_groups(dataset):
    baseline = [evaluated(dataset, seed=seed)[0] for seed in (0, 1, 2)]
    contender = [evaluated(dataset, seed=seed)[0] for seed in (3, 4, 5)]
    lists = {
        "some scripts": GroupList("script", ("THAI", "LATIN")),
        "both tags": GroupList("tag", ("new", "old")),
    }
    found = compare_outcomes(baseline, contender, dataset, "test", lists, num_resamples=50)
    assert [d.group for d in found[:6]] == ["all", "head", "torso", "tail", *lists]
    members = member_lists(dataset, baseline[0])
    of_list = {name: [(of.column, group) for group in of.names] for name, of in lists.items()}
    of_list["all"] = [("all", "all")]
    for difference in found:
        groups = of_list.get(difference.group, [("frequency", difference.group)])
        cutoff = int(difference.metric.removeprefix("recall@"))
        recalls = [
            [oracles.pair_recall(one.ranks.tolist(), cutoff, members[g])[0] for g in groups]
            for one in (*baseline, *contender)
        ]
        recalls = np.mean(recalls, axis=1).reshape(2, 3)
        gaps = recalls[1] - recalls[0]
        # Student's t with 2 degrees of freedom has quantiles in closed form.
        quantile = (2 * 0.975 - 1) * math.sqrt(2 / (4 * 0.975 * (1 - 0.975)))
        mean, margin = gaps.mean(), quantile * gaps.std(ddof=1) / math.sqrt(3)
        expected = [*recalls.mean(axis=1), mean, mean - margin, mean + margin]
        assert [
            difference.baseline, difference.contender, difference.difference,
            difference.seed_low, difference.seed_high,
        ] == pytest.approx(expected, abs=1e-12)  # fmt: skip
        assert difference.low <= difference.high
        assert difference.count == sum(map(any, zip(*(members[g] for g in groups), strict=True)))


def test_the_interval_of_several_runs_is_that_of_their_mean_difference(dataset):
    """The recall of all pairs, resampled in loops by the bootstrap's own draws of queries."""
    outcomes = [evaluated(dataset, seed=seed)[0] for seed in range(4)]
    num_queries, draws = len(dataset.parts["test"]), []
    generator = np.random.default_rng(7)
    for _ in range(40):
        drawn = generator.integers(num_queries, size=num_queries)
        times = np.bincount(drawn, minlength=num_queries)
        recalls = []
        for outcome in outcomes:
            is_found = (outcome.ranks >= 1) & (outcome.ranks <= 5)
            recalls.append(np.average(is_found, weights=times[outcome.query_ids]))
        draws.append((recalls[2] - recalls[0] + recalls[3] - recalls[1]) / 2)
    found = compare_outcomes(outcomes[:2], outcomes[2:], dataset, "test", num_resamples=40, seed=7)
    (difference,) = [d for d in found if (d.metric, d.group) == ("recall@5", "all")]
    expected = np.quantile(draws, [0.025, 0.975])
    np.testing.assert_allclose([difference.low, difference.high], expected, rtol=1e-12)


def test_runs_that_cannot_be_compared_are_refused(outcome, dataset):
    other = dataclasses.replace(outcome, cutoffs=(5, 7, 10))
    found = compare_outcomes([outcome], [other], dataset, "test", num_resamples=0)
    assert [d.metric for d in found if d.group == "all"] == ["recall@5", "recall@10"]
    with pytest.raises(ValueError, match="got 1 and 2"):
        compare_outcomes([outcome], [outcome, outcome], dataset, "test")
    none = dataclasses.replace(outcome, cutoffs=(2,))
    for contender, part_name, chosen, message in [
        (outcome, "train", {}, "not of the train part"),
        (none, "test", {}, "no cutoff in common"),
        (outcome, "test", {"some": GroupList("scripts", ("THAI",))}, "did you mean 'script'"),
        (outcome, "test", {"some": GroupList("script", ("THAY",))}, "did you mean 'THAI'"),
        (outcome, "test", {"some": GroupList("script", ())}, "is empty"),
    ]:
        with pytest.raises(UserError, match=message):
            compare_outcomes([outcome], [contender], dataset, part_name, chosen)
