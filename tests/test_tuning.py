"""Choosing k': the rule, what is searched, the design of the trials and the smallest group."""

import dataclasses
import itertools
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.stats import qmc

import small
from evenhand.errors import UserError
from evenhand.evaluation import Score
from evenhand.tuning.choice import (
    Trial,
    by_criterion,
    chosen_trial,
    feasible_trials,
    pareto_front,
    rivals,
)
from evenhand.tuning.notes import choice_notes
from evenhand.tuning.search import default_criterion, plan_search, without_test
from evenhand.tuning.shares import group_share, guarding, num_hard_examples_for
from evenhand.tuning.space import (
    Choices,
    Span,
    _even_shares,
    default_space,
    parsed_space,
    planned_trials,
    shown_settings,
    with_settings,
)
from evenhand.tuning.trials import judged

NAN = float("nan")
K_PRIME = "mining.num_hard_examples"


def trial_of(number, average, criterion, **changes):
    values = {"role": "", "settings": {"mining.method": "s2m", K_PRIME: 8}}
    return Trial(number=number, average=average, criterion=criterion, **{**values, **changes})


# --- the rule -------------------------------------------------------------------------------------

hundredths = st.one_of(st.none(), st.integers(0, 9))  # None: the trial did not come to an end
tables = st.lists(st.tuples(hundredths, hundredths), min_size=1, max_size=9)


def trials_of(table):
    return [
        trial_of(n, NAN if a is None else a / 100, NAN if c is None else c / 100)
        for n, (a, c) in enumerate(table, start=1)
    ]


def whole(table):
    """Number, average and criterion of the trials that have both, in hundredths."""
    rows = [(n, a, c) for n, (a, c) in enumerate(table, start=1)]
    return [(n, a, c) for n, a, c in rows if a is not None and c is not None]


@given(tables, st.integers(0, 9))
@example([(5, 3), (6, 3), (6, 3)], 9)
@example([(6, 4), (6, 3)], 0)
def test_the_choice_is_that_of_a_slow_reading_of_the_rule(table, max_drop):
    rows = whole(table)
    feasible = [row for row in rows if all(other[1] - row[1] <= max_drop for other in rows)]
    expected = None
    for n, a, c in feasible:
        better = [
            (m, b, d)
            for m, b, d in feasible
            if d > c or (d == c and b > a) or (d == c and b == a and m < n)
        ]
        if not better:
            expected = n
    trials = trials_of(table)
    found = feasible_trials(trials, max_drop=max_drop / 100)
    assert [trial.number for trial in found] == [n for n, _, _ in feasible]
    chosen = chosen_trial(trials, max_drop=max_drop / 100)
    assert (chosen and chosen.number) == expected


@pytest.mark.parametrize("best", [0.30, 0.41, 0.57])
@pytest.mark.parametrize("drop", [0.005, 0.01])
def test_a_trial_that_is_below_by_just_the_drop_is_near_enough_however_it_rounds(best, drop):
    for low in (best - drop, round(best - drop, 3), best - drop - 1e-12):
        trials = [trial_of(1, best, 0.1), trial_of(2, low, 0.2)]
        assert chosen_trial(trials, max_drop=drop).number == 2
    trials = [trial_of(1, best, 0.1), trial_of(2, best - drop - 1e-6, 0.2)]
    assert chosen_trial(trials, max_drop=drop).number == 1


@given(tables)
def test_the_front_is_what_no_other_trial_beats(table):
    rows = whole(table)
    expected = [
        n
        for n, a, c in rows
        if not any(
            (b >= a and d >= c and (b, d) != (a, c)) or ((b, d) == (a, c) and m < n)
            for m, b, d in rows
        )
    ]
    front = pareto_front(trials_of(table))
    assert sorted(trial.number for trial in front) == expected
    averages = [trial.average for trial in front]
    assert averages == sorted(averages)


@given(tables)
def test_the_trials_are_sorted_by_criterion_and_none_is_lost(table):
    trials = trials_of(table)
    order = by_criterion(trials)
    assert sorted(trial.number for trial in order) == [trial.number for trial in trials]
    num_scored = len(whole(table))
    criteria = [trial.criterion for trial in order[:num_scored]]
    assert criteria == sorted(criteria, reverse=True)
    assert not any(trial.is_scored for trial in order[num_scored:])


def test_rivals_are_near_the_best_average_and_within_the_interval():
    chosen = trial_of(1, 0.50, 0.40, low=0.35, high=0.45)
    within, outside = trial_of(2, 0.50, 0.35), trial_of(3, 0.50, 0.34)
    too_low = trial_of(4, 0.40, 0.39)
    trials = [chosen, within, outside, too_low]
    assert rivals(trials, max_drop=0.01) == [within]
    without = dataclasses.replace(chosen, low=NAN, high=NAN)
    assert rivals([without, within], max_drop=0.01) == []
    assert rivals([trial_of(1, NAN, NAN)], max_drop=0.01) == []


# --- what is searched -----------------------------------------------------------------------------


def config(**changes):
    return small.config("nowhere", **changes)


def settings_of(trials):
    return [trial.settings for trial in trials]


def test_the_same_seed_gives_the_same_trials_and_more_begin_with_fewer():
    space = default_space(config())
    few, many = (planned_trials(config(), space, num_trials=n, seed=3) for n in (7, 20))
    assert few == planned_trials(config(), space, num_trials=7, seed=3)
    assert many[:7] == few
    assert len(many) == 20
    assert planned_trials(config(), space, num_trials=7, seed=4)[:2] == few[:2]
    assert planned_trials(config(), space, num_trials=7, seed=4) != few


def test_the_first_trials_are_the_baseline_and_the_config_as_given():
    trials = planned_trials(config(), default_space(config()), num_trials=5, seed=0)
    assert [trial.role for trial in trials] == ["SNM", "as given", "", "", ""]
    snm, given_ = (with_settings(config(), trial.settings) for trial in trials[:2])
    assert given_ == config()
    assert snm.mining.method == "snm"
    assert snm == dataclasses.replace(config(), mining=snm.mining)
    without = planned_trials(
        config(mining__method="snm"), {K_PRIME: Choices((1, 2))}, num_trials=2, seed=0
    )
    assert [trial.role for trial in without] == ["SNM"]  # nothing to search: k' has no effect
    all_labels = config(mining__method="topk-sgd")
    trials = planned_trials(all_labels, default_space(all_labels), num_trials=2, seed=0)
    assert [trial.role for trial in trials] == ["SGD", "as given"]


@given(st.integers(2, 24), st.integers(0, 1000), st.sampled_from(["s2m", "s2m-annealed", "snm"]))
def test_no_two_trials_are_alike_and_each_can_be_built(num_trials, seed, method):
    base = config(mining__method=method)
    trials = planned_trials(base, default_space(base), num_trials=num_trials, seed=seed)
    assert len(trials) == num_trials
    for one, other in itertools.combinations(settings_of(trials), 2):
        assert one != other
    for settings in settings_of(trials):
        mining = with_settings(base, settings).mining
        assert (mining.method == "snm") == (settings[K_PRIME] == mining.batch_size)


def test_a_space_that_holds_few_trials_gives_each_of_them_once():
    space = parsed_space([f"{K_PRIME}=4,8,32", "mining.anneal_fraction=0,1"], config())
    trials = planned_trials(config(), space, num_trials=50, seed=0)
    pairs = [(s[K_PRIME], s["mining.anneal_fraction"]) for s in settings_of(trials)]
    # As given: k' = 8, annealed over the whole run. For k' = 32, the batch, it makes no difference.
    assert sorted(pairs) == [(4, 0.0), (4, 1.0), (8, 0.0), (8, 1.0), (32, 1.0)]


@pytest.mark.parametrize("num_dimensions", [1, 2, 3, 5])
@pytest.mark.parametrize("num_points", [16, 50])
def test_points_fill_the_space_more_evenly_than_chance(num_dimensions, num_points):
    generator = np.random.default_rng(0)
    shape = (num_points, num_dimensions)
    chance = [qmc.discrepancy(generator.random(shape), method="CD") for _ in range(200)]
    for seed in range(10):
        points = np.array(list(_even_shares(num_dimensions, seed=seed, num_points=num_points)))
        assert points.shape == shape
        assert 0 <= points.min() <= points.max() < 1
        assert qmc.discrepancy(points, method="CD") < np.mean(chance)


def test_the_step_of_one_dimension_is_the_golden_ratio():
    first, second = (point[0] for point in _even_shares(1, seed=0, num_points=2))
    assert (second - first) % 1 == pytest.approx((math.sqrt(5) - 1) / 2, abs=1e-12)


def test_the_default_space_is_around_the_config():
    space = default_space(config())
    assert space == {
        K_PRIME: Choices((2, 4, 8, 16, 32)),
        "mining.num_hard_labels": Choices((1, 5, 20)),
        "training.learning_rate": Span(0.025, 0.1),
        "training.num_steps": Choices((30, 60)),
        "mining.anneal_fraction": Choices((0.0, 0.5, 1.0)),
    }
    # Half of 4, then from 4 to the batch of 32 in three equal ratios, of 2.
    assert default_space(config(), advised=4)[K_PRIME] == Choices((2, 4, 8, 16, 32))
    assert default_space(config(), advised=1)[K_PRIME] == Choices((1, 3, 10, 32))
    assert default_space(config(), advised=32)[K_PRIME] == Choices((16, 32))
    many = default_space(config(mining__num_hard_labels=20))  # of 40 that are sampled
    assert many["mining.num_hard_labels"] == Choices((5, 20, 40))
    dropping = config(mining__method="ranked-range", risk__num_dropped=10)
    assert default_space(dropping)[K_PRIME] == Choices((2, 4, 8, 16, 22))  # room for no more
    assert "mining.anneal_fraction" not in default_space(config(mining__method="s2m"))
    assert K_PRIME not in default_space(config(mining__method="snm"))
    assert "mining.num_hard_labels" not in default_space(config(mining__method="sgd"))


@given(st.floats(0, 1, exclude_max=True))
def test_a_span_is_searched_in_ratios_or_where_0_is_among_it_in_differences(share):
    rate = Span(0.01, 0.04).at(share)
    assert rate == pytest.approx(0.01 * 4**share, rel=6e-3)  # three digits
    assert 0.01 <= rate <= 0.04
    assert 0.012345 <= Span(0.012345, 0.012355).at(share) <= 0.012355  # though rounded
    assert Span(0.0, 1.0).at(share) == pytest.approx(share, rel=6e-3)
    size = Span(2, 33).at(share)
    assert isinstance(size, int)
    assert abs(size - 2 * 16.5**share) <= 0.5


def test_words_become_a_space_and_a_space_words():
    words = [
        f"{K_PRIME}=4, 8,16",
        "training.learning_rate=1e-2..0.05",
        "training.num_steps=10..20",
        "training.learning_rate_shape=linear,cosine",
        "mining.anneal_fraction=0..1",
    ]
    space = parsed_space(words, config())
    assert space == {
        K_PRIME: Choices((4, 8, 16)),
        "training.learning_rate": Span(0.01, 0.05),
        "training.num_steps": Span(10, 20),
        "training.learning_rate_shape": Choices(("linear", "cosine")),
        "mining.anneal_fraction": Span(0.0, 1.0),
    }
    assert isinstance(space["mining.anneal_fraction"].high, float)
    assert parsed_space([f"{name}={axis}" for name, axis in space.items()], config()) == space


def test_people_are_shown_what_differs_and_k_prime_always():
    space = parsed_space(
        ["training.learning_rate=0.01,0.02", "mining.anneal_fraction=0,1"], config()
    )
    trials = planned_trials(config(), space, num_trials=4, seed=0)
    shown = shown_settings(settings_of(trials))
    assert list(shown[0]) == ["k'", "rate", "anneal"]
    assert shown[0] == {"k'": "all", "rate": "0.05", "anneal": "–"}
    assert shown[1] == {"k'": "8", "rate": "0.05", "anneal": "1.0"}
    methods = parsed_space(["mining.method=s2m,cvar"], config())
    trials = planned_trials(config(), methods, num_trials=4, seed=0)
    assert list(shown_settings(settings_of(trials))[0]) == ["k'", "method"]
    assert shown_settings([{"mining.method": "s2m", K_PRIME: 4}]) == [{"k'": "4"}]


def test_a_k_prime_that_is_a_share_of_the_batch_is_searched_as_a_number():
    base, dataset = config(mining__tail_fraction=0.5), without_test(small.text_dataset())
    search = plan_search(base, dataset, num_trials=3, words=[f"{K_PRIME}=4"])
    configs = [with_settings(search.config, trial.settings) for trial in search.planned]
    assert [trial.settings[K_PRIME] for trial in search.planned] == [32, 16, 4]
    assert [trial_config.mining.num_counting for trial_config in configs] == [32, 16, 4]


# --- the criterion --------------------------------------------------------------------------------


def test_the_default_criterion_is_of_the_column_with_the_most_judged_groups():
    dataset = without_test(small.text_dataset())
    # Four regions of some 38 validation pairs each, three styles of some 50.
    assert default_criterion(config(), dataset) == "recall@10 on worst tenth of region"
    least = {"region": 1000, "style": 20}
    assert (
        default_criterion(config(evaluation__min_pairs=least), dataset)
        == "recall@10 on worst tenth of style"
    )
    least = {"region": 1000, "style": 1000}
    assert default_criterion(config(evaluation__min_pairs=least), dataset) == "recall@10 on tail"
    assert default_criterion(config(), without_test(small.dense_dataset())) == "recall@10 on tail"
    assert (
        default_criterion(config(evaluation__cutoffs=[1, 7]), dataset)
        == "recall@7 on worst tenth of region"
    )


def test_a_criterion_that_finds_nothing_is_said_to_have_decided_nothing():
    search = plan_search(config(), without_test(small.dense_dataset()), num_trials=2)
    found = [trial_of(1, 0.5, 0.25, low=0.2, high=0.3), trial_of(2, 0.5, 0.21)]
    nothing = [trial_of(1, 0.5, 0.0, low=0.0, high=0.0), trial_of(2, 0.5, 0.0)]
    told = [" ".join(choice_notes(Path("x"), search, trials)) for trials in (found, nothing)]
    assert ["finds nothing by that criterion" in text for text in told] == [False, True]
    assert ["hardly to be told from it: trial 2" in text for text in told] == [True, False]


def test_the_interval_of_a_trial_is_that_of_its_criterion():
    scores = [
        Score("recall@10", "all", "all", 0.5, 0.4, 0.6, 100, is_judged=True),
        Score("recall@10", "frequency", "tail", 0.25, 0.125, 0.375, 30, is_judged=True),
    ]
    search = plan_search(
        config(), without_test(small.dense_dataset()), num_trials=2, criterion="recall@10 on tail"
    )
    trial = judged(trial_of(1, NAN, NAN), scores, search, seconds=2.0)
    assert (trial.average, trial.criterion, trial.low, trial.high) == (0.5, 0.25, 0.125, 0.375)


def test_without_intervals_a_trial_has_none():
    scores = [
        Score("recall@10", "all", "all", 0.5, NAN, NAN, 100, is_judged=True),
        Score("recall@10", "frequency", "tail", 0.25, NAN, NAN, 30, is_judged=True),
        Score("recall@10", "frequency", "head", NAN, NAN, NAN, 0, is_judged=False),
    ]
    base = config(evaluation__num_resamples=0)
    search = plan_search(base, without_test(small.dense_dataset()), num_trials=2)
    trial = judged(trial_of(1, NAN, NAN), scores, search, seconds=2.0)
    assert (trial.average, trial.criterion, trial.seconds) == (0.5, 0.25, 2.0)
    assert math.isnan(trial.low)
    assert trial.figures == {"all": 0.5, "tail": 0.25}  # a group without a pair has no figure


# --- the smallest group ---------------------------------------------------------------------------


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 4096))
def test_k_prime_is_what_a_group_fills_of_a_batch_rounded_up(num_members, num_others, batch_size):
    num_pairs = num_members + num_others
    expected = math.ceil(Fraction(num_members * batch_size, num_pairs))
    share = num_members / num_pairs
    assert num_hard_examples_for(share, batch_size=batch_size) == max(1, expected)


def test_a_share_that_fills_a_whole_number_is_not_rounded_up_past_it():
    assert 0.07 * 100 > 7
    assert num_hard_examples_for(0.07, batch_size=100) == 7
    assert num_hard_examples_for(1.0, batch_size=100) == 100
    assert num_hard_examples_for(1e-9, batch_size=100) == 1


def test_the_share_of_a_group_is_counted_over_training_pairs():
    dataset = small.text_dataset()
    part = dataset.parts["train"]
    counts = {"odd": 0, "W": 0}
    for query in range(len(part)):
        for label in part.positives.row(query):
            counts["odd"] += part.groups["style"].ids[query] == 1
            counts["W"] += dataset.label_groups["region"].ids[label] == 3
    num_pairs = len(part.positives.ids)
    assert group_share(dataset, "style=odd") == (counts["odd"], num_pairs)
    assert group_share(dataset, " region = W") == (counts["W"], num_pairs)
    share = group_share(dataset, "region=W").share
    assert share == counts["W"] / num_pairs
    assert guarding(config(), share).mining.num_hard_examples == math.ceil(share * 32)


def test_a_group_without_a_training_pair_has_no_share():
    dataset = small.text_dataset()
    groups = dataset.label_groups["region"]._replace(names=(*"NESW", "nobody"))
    dataset = dataclasses.replace(dataset, label_groups={"region": groups})
    with pytest.raises(UserError, match="no training pair"):
        group_share(dataset, "region=nobody")
