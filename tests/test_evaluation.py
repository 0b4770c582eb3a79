import dataclasses
import math

import numpy as np
import pytest
import torch

import metric_oracles as oracles
from evenhand import evaluation
from evenhand.data import Dataset, Groups, Part, Rows
from evenhand.errors import UserError
from evenhand.evaluation import (
    GroupList,
    Outcome,
    check_selector,
    compare_outcomes,
    evaluate,
    load_outcome,
    save_outcome,
    score_table,
    selected_score,
    selected_value,
    worst_members,
)
from evenhand.search import ExactIndex

NUM_LABELS = 40
SCRIPTS = ("LATIN", "THAI", "GREEK")
COUNTRIES = ("Aa", "Bb", "Cc", "Nowhere")


def rows_of(lists):
    offsets = np.cumsum([0, *map(len, lists)])
    return Rows(offsets, np.array([i for row in lists for i in row], dtype=np.int32))


def part_of(lists, groups=None):
    return Part(np.zeros((len(lists), 1), dtype=np.float32), rows_of(lists), groups or {})


@pytest.fixture(scope="module")
def dataset():
    """120 test queries of 0 to 3 positives; label 0 is frequent, the last ten are never seen."""
    generator = np.random.default_rng(0)
    train = [[label] for label in range(NUM_LABELS - 10) for _ in range(NUM_LABELS - label)]
    sizes = generator.choice([0, 1, 1, 2, 3], size=120)
    test = [generator.choice(NUM_LABELS, size=size, replace=False).tolist() for size in sizes]
    scripts = generator.choice([-1, 0, 0, 0, 1, 2], size=120).astype(np.int32)
    countries = generator.choice([-1, 0, 0, 1, 2], size=NUM_LABELS).astype(np.int32)
    return Dataset(
        "toy",
        1,
        NUM_LABELS,
        {"train": part_of(train), "test": part_of(test, {"script": Groups(scripts, SCRIPTS)})},
        label_groups={
            "country": Groups(countries, COUNTRIES),
            "planet": Groups(np.zeros(NUM_LABELS, dtype=np.int32), ("Earth",)),
        },
    )


def evaluated(dataset, *, seed=0, num_results=10, cutoffs=(1, 5, 10), batch_size=32):
    """A retriever that knows a little: noise, and a push towards the positives."""
    part = dataset.parts["test"]
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(len(part), dataset.num_labels, generator=generator)
    for query in range(len(part)):
        vectors[query, torch.from_numpy(np.array(part.positives.row(query))).long()] += 1.0
    index = ExactIndex(torch.eye(dataset.num_labels))
    seen = []
    outcome = evaluate(
        lambda row_ids: vectors[torch.from_numpy(row_ids)],
        index,
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


# --- what happened --------------------------------------------------------------------------------


def test_the_outcome_of_every_pair_matches_a_loop(dataset):
    outcome, vectors = evaluated(dataset)
    positives, pair = dataset.parts["test"].positives, 0
    for query, row_scores in enumerate(vectors.tolist()):
        found = oracles.search(row_scores, 10)
        assert outcome.retrieved_ids[query].tolist() == found
        labels = positives.row(query).tolist()
        for label in labels:
            assert outcome.query_ids[pair] == query
            assert outcome.label_ids[pair] == label
            assert outcome.ranks[pair] == oracles.rank(found, label)
            assert outcome.scores[pair] == pytest.approx(row_scores[label])
            pair += 1
        for cutoff in (1, 5, 10):
            for name, oracle in [
                ("query recall", oracles.recall),
                ("precision", oracles.precision),
                ("ndcg", oracles.ndcg),
            ]:
                actual = outcome.query_metrics[f"{name}@{cutoff}"][query]
                expected = oracle(found, labels, cutoff)
                assert np.isnan(actual) if expected is None else actual == pytest.approx(expected)
    assert pair == len(outcome.ranks)
    assert (outcome.ranks.dtype, outcome.query_ids.dtype) == (np.int32, np.int64)


def test_cutoffs_may_come_in_any_order_and_batches_in_any_size(dataset, outcome):
    other, _ = evaluated(dataset, cutoffs=(10, 1, 5, 10), batch_size=7)
    for field in dataclasses.fields(Outcome):
        np.testing.assert_equal(getattr(other, field.name), getattr(outcome, field.name))
    with pytest.raises(ValueError, match=r"between 1 and num_results \(10\), got \(5, 50\)"):
        evaluated(dataset, cutoffs=(5, 50))


def test_fewer_labels_than_results_leaves_the_rest_empty():
    part = part_of([[0], [2, 1]])
    found = evaluate(
        lambda row_ids: torch.eye(3)[:2][row_ids],
        ExactIndex(torch.eye(3)),
        part,
        np.ones(3, dtype=np.int64),
    )
    assert found.retrieved_ids[:, 3:].tolist() == [[-1] * 7] * 2
    assert np.isneginf(found.retrieved_scores[:, 3:]).all()
    assert found.ranks.tolist() == [1, 3, 1]
    assert not any(name.startswith("psp") for name in found.query_metrics)


def test_an_outcome_comes_back_from_disk_as_it_was(outcome, tmp_path):
    for _ in range(2):  # the second replaces the first
        save_outcome(outcome, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["outcome.npz"]
    loaded = load_outcome(tmp_path / "run")
    for field in dataclasses.fields(Outcome):
        np.testing.assert_equal(getattr(loaded, field.name), getattr(outcome, field.name))
        assert type(getattr(loaded, field.name)) is type(getattr(outcome, field.name))


@pytest.mark.parametrize(
    "damage", ["cut short", "a byte changed", "not a zip", "pickle", "missing"]
)
def test_a_damaged_outcome_is_refused_with_its_path(outcome, tmp_path, damage):
    save_outcome(outcome, tmp_path)
    path = tmp_path / "outcome.npz"
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "cut short":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "not a zip":
        path.write_bytes(b"hello")
    elif damage == "pickle":
        np.savez(path, ranks=np.array([{}], dtype=object))
    else:
        content[len(content) // 3] ^= 255
        path.write_bytes(content)
    with pytest.raises(UserError, match=str(tmp_path)):
        load_outcome(tmp_path)


# --- the table ------------------------------------------------------------------------------------


def member_lists(dataset, outcome):
    """(column, group) -> is each pair in it? By loops over the definition."""
    part, members = dataset.parts["test"], {}
    columns = {column.name: column for column in evaluation.group_columns(dataset, "test")}
    for name in ("frequency", "frequency over pairs"):
        for group_id, group in enumerate(("head", "torso", "tail")):
            members[name, group] = (columns[name].groups.ids == group_id).tolist()
    for name, groups in dataset.label_groups.items():
        for group_id, group in enumerate(groups.names):
            members[name, group] = [groups.ids[label] == group_id for label in outcome.label_ids]
    for name, groups in part.groups.items():
        for group_id, group in enumerate(groups.names):
            members[name, group] = [groups.ids[query] == group_id for query in outcome.query_ids]
    members["all", "all"] = [True] * len(outcome.ranks)
    return members


def test_every_pair_recall_matches_a_loop(scores, dataset, outcome):
    for (column, group), is_member in member_lists(dataset, outcome).items():
        for cutoff in (1, 5, 10):
            expected, count = oracles.pair_recall(outcome.ranks.tolist(), cutoff, is_member)
            score = row(scores, f"recall@{cutoff}", column, group)
            assert score.count == count
            assert score.is_judged == (count >= (50 if column == "script" else 30))
            if expected is None:
                assert math.isnan(score.value)
                assert math.isnan(score.low)
            else:
                assert score.value == pytest.approx(expected, rel=1e-12)
                assert score.low <= score.high


def test_every_query_metric_matches_a_loop(scores, dataset, outcome):
    scripts = dataset.parts["test"].groups["script"].ids.tolist()
    for name, array in outcome.query_metrics.items():
        if name.startswith("psp"):
            continue
        values = [None if math.isnan(value) else value for value in array.tolist()]
        means, counts = oracles.group_means(values, scripts, 3)
        for script, mean, count in zip(SCRIPTS, means, counts, strict=True):
            assert row(scores, name, "script", script).value == pytest.approx(mean, rel=1e-6)
            assert row(scores, name, "script", script).count == count
        (mean,), _ = oracles.group_means(values, [0] * len(values), 1)
        assert row(scores, name).value == pytest.approx(mean, rel=1e-6)
    assert not [s for s in scores if s.metric == "mrr" and s.column == "country"]


def test_propensity_scored_precision_is_the_ratio_of_sums(scores, dataset, outcome):
    counts, num_queries = dataset.label_counts().tolist(), len(dataset.parts["train"])
    propensities = [oracles.propensity(count, num_queries) for count in counts]
    positives = dataset.parts["test"].positives
    gains, bests = zip(
        *(
            oracles.propensity_gain_and_best(found, positives.row(query).tolist(), propensities, 5)
            for query, found in enumerate(outcome.retrieved_ids.tolist())
        ),
        strict=True,
    )
    assert row(scores, "psp@5").value == pytest.approx(sum(gains) / sum(bests), rel=1e-5)


def test_summaries_average_the_lowest_groups_that_can_be_judged(scores):
    for metric in ("recall@5", "recall@10"):
        for column in ("country", "script", "frequency"):
            groups = [s for s in scores if (s.metric, s.column) == (metric, column)]
            summaries = [s for s in groups if s.group.startswith("worst")]
            judged = sorted(
                (s for s in groups if s.is_judged and s not in summaries), key=lambda s: s.value
            )
            for summary, count in zip(summaries, (1, 3, 1), strict=True):
                chosen = judged[:count]
                assert summary.members == tuple(s.group for s in chosen)
                assert summary.count == sum(s.count for s in chosen)
                mean = sum(s.value for s in chosen) / len(chosen)
                assert summary.value == pytest.approx(mean, rel=1e-12)
                assert summary.low <= summary.value <= summary.high
            assert worst_members(scores, column, metric, count=2) == tuple(
                s.group for s in judged[:2]
            )
            assert worst_members(scores, column, metric) == summaries[2].members
    assert any(s.column == "script" and not s.is_judged for s in scores)


def test_a_tenth_of_n_groups_is_n_over_ten_rounded_down_and_at_least_one():
    numbers = [evaluation.Score("m", "c", str(g), g, 0, 1, 30, is_judged=True) for g in range(39)]
    assert worst_members(numbers[::-1], "c", "m") == ("0", "1", "2")
    assert worst_members(numbers[:9], "c", "m") == ("0",)
    with pytest.raises(UserError, match="no metric 'n'"):
        worst_members(numbers, "c", "n")


def test_a_group_is_judged_from_the_very_number_of_pairs_that_is_needed(outcome, dataset):
    counts = {
        name: row(
            score_table(outcome, dataset, "test", num_resamples=0), "recall@5", "script", name
        )
        for name in SCRIPTS
    }
    for name, counted in counts.items():
        for needed, is_judged in ((counted.count, True), (counted.count + 1, False)):
            scores = score_table(
                outcome, dataset, "test", min_pairs={"script": needed}, num_resamples=0
            )
            assert row(scores, "recall@5", "script", name).is_judged == is_judged


def test_nothing_judged_gives_a_summary_without_value(outcome, dataset):
    scores = score_table(outcome, dataset, "test", min_pairs={"script": 10**6}, num_resamples=0)
    summary = row(scores, "recall@10", "script", "worst 3")
    assert math.isnan(summary.value)
    assert (summary.count, summary.members) == (0, ())
    assert not summary.is_judged
    assert math.isnan(row(scores, "recall@10").low)  # no resamples, no interval


def test_columns_and_groups_of_one_name_are_told_apart(dataset, outcome):
    part = dataset.parts["test"]
    groups = {"country": Groups(np.zeros(len(part), dtype=np.int32), ("worst 3", "x"))}
    test = dataclasses.replace(part, groups=groups)
    labels = {"frequency": dataset.label_groups["planet"], **dataset.label_groups}
    twins = dataclasses.replace(dataset, parts={**dataset.parts, "test": test}, label_groups=labels)
    columns = {column.name: column for column in evaluation.group_columns(twins, "test")}
    assert list(columns) == [
        "all", "frequency", "frequency over pairs", "frequency of labels", "country", "planet",
        "country of queries",
    ]  # fmt: skip
    scores = score_table(outcome, twins, "test", num_resamples=0)
    own = row(scores, "recall@5", "country of queries", "worst 3 (group)")
    assert (own.count, own.members) == (len(outcome.ranks), ())
    summary = row(scores, "recall@5", "country of queries", "worst 3")
    assert summary.members == ("worst 3 (group)",)
    assert worst_members(scores, "country of queries", "recall@5") == ("worst 3 (group)",)


def test_an_outcome_of_other_data_is_refused(outcome, dataset):
    with pytest.raises(UserError, match="not of the train part"):
        score_table(outcome, dataset, "train")


# --- intervals ------------------------------------------------------------------------------------


def test_the_interval_is_the_percentiles_of_resampled_queries(dataset, outcome, scores):
    """The same draws, one by one, in loops."""
    generator = np.random.default_rng(0)
    part, members = dataset.parts["test"], member_lists(dataset, outcome)["script", "LATIN"]
    hits, counts = [0] * len(part), [0] * len(part)
    for query, rank, is_member in zip(outcome.query_ids, outcome.ranks, members, strict=True):
        if is_member:
            counts[query] += 1
            hits[query] += 1 <= rank <= 5
    values = []
    for _ in range(100):
        drawn = generator.integers(len(part), size=len(part)).tolist()
        values.append(sum(hits[q] for q in drawn) / sum(counts[q] for q in drawn))
    score = row(scores, "recall@5", "script", "LATIN")
    assert score.low == pytest.approx(oracles.percentile(values, 0.025), rel=1e-12)
    assert score.high == pytest.approx(oracles.percentile(values, 0.975), rel=1e-12)


def test_percentiles_skip_what_is_not_a_number():
    generator = np.random.default_rng(0)
    draws = np.where(generator.random((5, 30)) < 0.3, np.nan, generator.random((5, 30)))
    draws[4] = np.nan
    low, high = evaluation.scores.interval(draws)
    for row_draws, *ends in zip(draws.tolist(), low, high, strict=True):
        values = [None if math.isnan(value) else value for value in row_draws]
        for share, end in zip((0.025, 0.975), ends, strict=True):
            expected = oracles.percentile(values, share)
            assert np.isnan(end) if expected is None else end == pytest.approx(expected)


def test_the_same_seed_gives_the_same_table(outcome, dataset):
    first, again, other = (
        row(score_table(outcome, dataset, "test", num_resamples=60, seed=seed), "recall@5")
        for seed in (3, 3, 4)
    )
    assert first == again
    assert (first.low, first.high) != (other.low, other.high)


# --- choosing by one number -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("recall@10", ("recall@10", "all", "all")),
        ("mrr", ("mrr", "all", "all")),
        ("query recall@5", ("query recall@5", "all", "all")),
        ("recall@10 on tail", ("recall@10", "frequency", "tail")),
        ("recall@10 on frequency over pairs=tail", ("recall@10", "frequency over pairs", "tail")),
        ("recall@5 on worst 3 of script", ("recall@5", "script", "worst 3")),
        ("recall@5 on worst tenth of country", ("recall@5", "country", "worst tenth")),
        ("recall@5 on worst of country", ("recall@5", "country", "worst")),
        ("ndcg@5 on script=THAI", ("ndcg@5", "script", "THAI")),
    ],
)
def test_a_value_is_selected_by_name(scores, dataset, name, place):
    assert selected_score(scores, name) is row(scores, *place)
    assert selected_value(scores, name) == row(scores, *place).value
    check_selector(name, dataset, "test", cutoffs=(1, 5, 10))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("recal@10", "metric of 'recal@10': 'recal@10'; did you mean 'recall@10'?"),
        ("recall@10 on tial", "group of 'recall@10 on tial': 'tial'; did you mean 'tail'?"),
        ("recall@10 on worst 3 of scripts", "'scripts'; did you mean 'script'?"),
        ("recall@10 on worst 5 of script", "'worst 5'; did you mean 'worst 3'?"),
        ("recall@10 on script=THAY", "'THAY'; did you mean 'THAI'?"),
        ("mrr on worst of country", "'country'; known: all, script"),
        ("recall@10 on country=Nowhere", "has no value"),
    ],
)
def test_an_unknown_name_is_refused_before_and_after_training(scores, dataset, name, message):
    with pytest.raises(UserError) as refusal:
        selected_value(scores, name)
    assert message in str(refusal.value)
    with pytest.raises(UserError) as refusal:
        check_selector(name, dataset, "test", cutoffs=(1, 5, 10))
    assert message in str(refusal.value)


def test_a_column_without_a_group_large_enough_is_refused_before_training(dataset):
    with pytest.raises(UserError, match="no group is large enough"):
        check_selector("recall@5 on worst of script", dataset, "test", min_pairs={"script": 10**6})


# --- two methods ----------------------------------------------------------------------------------


def test_differences_match_a_loop_over_runs_and_groups(dataset):
    baseline = [evaluated(dataset, seed=seed)[0] for seed in (0, 1, 2)]
    contender = [evaluated(dataset, seed=seed)[0] for seed in (3, 4, 5)]
    lists = {"some scripts": GroupList("script", ("THAI", "LATIN"))}
    found = compare_outcomes(baseline, contender, dataset, "test", lists, num_resamples=50)
    assert [d.group for d in found[:5]] == ["all", "head", "torso", "tail", "some scripts"]
    members = member_lists(dataset, baseline[0])
    for difference in found:
        groups = {
            "all": [("all", "all")],
            "some scripts": [("script", "THAI"), ("script", "LATIN")],
        }.get(difference.group, [("frequency", difference.group)])
        cutoff = int(difference.metric.removeprefix("recall@"))

        def value(outcome, groups=groups, cutoff=cutoff):
            ranks = outcome.ranks.tolist()
            recalls = [oracles.pair_recall(ranks, cutoff, members[group])[0] for group in groups]
            return sum(recalls) / len(recalls)

        sides = [value(b) for b in baseline], [value(c) for c in contender]
        gaps = [c - b for b, c in zip(*sides, strict=True)]
        mean = sum(gaps) / 3
        spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / 2)
        # Student's t with 2 degrees of freedom has quantiles in closed form.
        quantile = (2 * 0.975 - 1) * math.sqrt(2 / (4 * 0.975 * (1 - 0.975)))
        margin = quantile * spread / math.sqrt(3)
        assert difference.baseline == pytest.approx(sum(sides[0]) / 3, rel=1e-12)
        assert difference.contender == pytest.approx(sum(sides[1]) / 3, rel=1e-12)
        assert difference.difference == pytest.approx(mean, abs=1e-12)
        assert difference.seed_low == pytest.approx(mean - margin, abs=1e-12)
        assert difference.seed_high == pytest.approx(mean + margin, abs=1e-12)
        assert difference.low <= difference.high
        assert difference.num_runs == 3
        assert difference.count == sum(sum(members[group]) for group in groups)


def test_the_interval_of_several_runs_is_that_of_their_mean_difference(dataset):
    """The recall of all pairs, resampled in loops by the bootstrap's own draws of queries."""
    baseline = [evaluated(dataset, seed=seed)[0] for seed in (0, 1)]
    contender = [evaluated(dataset, seed=seed)[0] for seed in (2, 3)]
    num_queries, draws = len(dataset.parts["test"]), []
    generator = np.random.default_rng(7)
    for _ in range(40):
        times = np.bincount(
            generator.integers(num_queries, size=num_queries), minlength=num_queries
        )
        recalls = []
        for outcome in [*baseline, *contender]:
            weights = times[outcome.query_ids]
            is_found = (outcome.ranks >= 1) & (outcome.ranks <= 5)
            recalls.append((weights * is_found).sum() / weights.sum())
        draws.append((recalls[2] - recalls[0] + recalls[3] - recalls[1]) / 2)
    found = compare_outcomes(baseline, contender, dataset, "test", num_resamples=40, seed=7)
    (difference,) = [d for d in found if (d.metric, d.group) == ("recall@5", "all")]
    expected = np.quantile(draws, [0.025, 0.975])
    np.testing.assert_allclose([difference.low, difference.high], expected, rtol=1e-12)


def test_a_run_compared_with_itself_differs_by_nothing(outcome, dataset):
    for difference in compare_outcomes([outcome], [outcome], dataset, "test", num_resamples=20):
        assert (difference.difference, difference.low, difference.high) == (0, 0, 0)
        assert math.isnan(difference.seed_low)
        assert math.isnan(difference.seed_high)


def test_runs_that_cannot_be_compared_are_refused(outcome, dataset):
    with pytest.raises(ValueError, match="got 1 and 2"):
        compare_outcomes([outcome], [outcome, outcome], dataset, "test")
    with pytest.raises(UserError, match="not of the train part"):
        compare_outcomes([outcome], [outcome], dataset, "train")
    other = dataclasses.replace(outcome, cutoffs=(2,))
    with pytest.raises(UserError, match="no cutoff in common"):
        compare_outcomes([outcome], [other], dataset, "test")
    for chosen, message in [
        (GroupList("scripts", ("THAI",)), "did you mean 'script'"),
        (GroupList("script", ("THAY",)), "did you mean 'THAI'"),
        (GroupList("script", ()), "is empty"),
    ]:
        with pytest.raises(UserError, match=message):
            compare_outcomes([outcome], [outcome], dataset, "test", {"some": chosen})


def test_cutoffs_are_those_that_both_sides_have(outcome, dataset):
    other = dataclasses.replace(outcome, cutoffs=(5, 7, 10))
    found = compare_outcomes([outcome], [other], dataset, "test", num_resamples=0)
    assert [d.metric for d in found if d.group == "all"] == ["recall@5", "recall@10"]
