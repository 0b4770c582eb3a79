"""Choosing settings: the rule, what is searched, and the table."""

import dataclasses
import functools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import small
from evenhand.tuning.search import Results, Rule, default_group, plan_search, without_test
from evenhand.tuning.space import (
    Trial,
    default_space,
    plan_trials,
    with_settings,
)

NAN = float("nan")
K_PRIME = "mining.num_hard_examples"
RULE = Rule("recall@10 on worst 3 of script", "recall@10", 0.02)


def trial_of(number, average, criterion, *, k_prime=8, role="", **changes):
    method = "snm" if role == "SNM" else "s2m"
    rate = {"training.learning_rate": number / 100}
    values = {
        "settings": {"mining.method": method, K_PRIME: k_prime, **rate},
        "low": criterion - 0.02,
        "high": criterion + 0.03,
        "figures": {"all": average, "tail": average / 2},
        "seconds": 12.3,
    }
    return Trial(number=number, role=role, average=average, criterion=criterion, **values | changes)


# --- the rule -------------------------------------------------------------------------------------

hundredths = st.one_of(st.none(), st.integers(0, 9))  # None: the trial did not come to an end
tables = st.lists(st.tuples(hundredths, hundredths), min_size=1, max_size=9)


@given(tables, st.integers(0, 9))
@example([(5, 3), (6, 3), (6, 3)], 9)
@example([(6, 4), (6, 3)], 0)
def test_the_choice_is_that_of_a_slow_reading_of_the_rule(table, max_drop):
    rows = [(n, a, c) for n, (a, c) in enumerate(table, start=1) if None not in (a, c)]
    order = [n for n, a, c in sorted(rows, key=lambda row: (-row[2], -row[1], row[0]))]
    trials = [
        trial_of(n, *(NAN if figure is None else figure / 100 for figure in row))
        for n, row in enumerate(table, start=1)
    ]
    results = Results(trials, Rule("c", "a", max_drop / 100))
    near = [n for n in order if all(a - table[n - 1][0] <= max_drop for _, a, _ in rows)]
    assert [trial.number for trial in results.feasible] == near
    ranked = [trial.number for trial in results.ranked]
    assert ranked[: len(rows)] == order
    assert sorted(ranked) == [trial.number for trial in trials]  # none is lost


@pytest.mark.parametrize("best", [0.30, 0.41, 0.57])
@pytest.mark.parametrize("drop", [0.005, 0.01])
def test_a_trial_that_is_below_by_just_the_drop_is_near_enough_however_it_rounds(best, drop):
    lows = [best - drop, round(best - drop, 3), best - drop - 1e-12, best - drop - 1e-6]
    chosen = [
        Results([trial_of(1, best, 0.1), trial_of(2, low, 0.2)], Rule("c", "a", drop)).feasible[0]
        for low in lows
    ]
    assert [trial.number for trial in chosen] == [2, 2, 2, 1]


# --- what is searched -----------------------------------------------------------------------------


config = functools.partial(small.config, "nowhere")


def settings_of(trials):
    return [trial.settings for trial in trials]


@given(st.integers(2, 24), st.integers(0, 1000), st.sampled_from(["s2m", "s2m-annealed", "snm"]))
def test_trials_follow_from_the_seed_none_is_twice_and_more_begin_with_fewer(count, seed, method):
    base = config(mining__method=method)
    space = default_space(base)
    trials = plan_trials(base, space, num_trials=count, seed=seed)
    assert len(trials) == count
    assert plan_trials(base, space, num_trials=24, seed=seed)[:count] == trials
    others = plan_trials(base, space, num_trials=count, seed=seed + 1)
    assert others[:1] == trials[:1]
    assert (others != trials) == any(not trial.role for trial in trials)
    for settings in settings_of(trials):
        assert settings_of(trials).count(settings) == 1
        mining = with_settings(base, settings).mining
        assert (mining.method == "snm") == (settings[K_PRIME] == mining.batch_size)


def test_the_default_space_is_around_the_config():
    assert default_space(config()) == {
        K_PRIME: (2, 4, 8, 16, 32),
        "mining.num_hard_labels": (1, 5, 20),
        "training.learning_rate": (0.025, 0.035, 0.05, 0.07, 0.1),
        "training.num_steps": (30, 60),
        "mining.anneal_fraction": (0.0, 0.5, 1.0),
    }
    many = default_space(config(mining__num_hard_labels=20))  # of 40 that are sampled
    assert many["mining.num_hard_labels"] == (5, 20, 40)
    dropping = config(mining__method="ranked-range", risk__num_dropped=10)
    assert default_space(dropping)[K_PRIME] == (2, 4, 8, 16, 22)  # room for no more
    assert "mining.anneal_fraction" not in default_space(config(mining__method="s2m"))
    assert K_PRIME not in default_space(config(mining__method="snm"))
    assert "mining.num_hard_labels" not in default_space(config(mining__method="sgd"))


def test_a_k_prime_that_is_a_share_of_the_batch_is_searched_as_a_number():
    base, dataset = config(mining__tail_fraction=0.5), without_test(small.text_dataset())
    search = plan_search(base, dataset, num_trials=3, words=[f"{K_PRIME}=4"])
    configs = [with_settings(search.config, trial.settings) for trial in search.trials]
    assert [trial.settings[K_PRIME] for trial in search.trials] == [32, 16, 4]
    assert [trial_config.mining.num_counting for trial_config in configs] == [32, 16, 4]


# --- the criterion --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "group", "metric"),
    [
        # Four regions of some 38 validation pairs each, three styles of some 50.
        ({}, "worst tenth of region", "recall@10"),
        ({"min_pairs": {"region": 1000, "style": 20}}, "worst tenth of style", "recall@10"),
        ({"min_pairs": {"region": 1000, "style": 1000}}, "tail", "recall@10"),
        ({"cutoffs": [1, 7]}, "worst tenth of region", "recall@7"),
    ],
)
def test_by_default_the_column_with_the_most_judged_groups_decides(changes, group, metric):
    changes = {f"evaluation__{name}": value for name, value in changes.items()}
    base = config(training__select_by=metric, **changes)
    dataset = without_test(small.text_dataset())
    assert plan_search(base, dataset, num_trials=2).rule[:2] == (f"{metric} on {group}", metric)
    assert default_group(config(), without_test(small.dense_dataset())) == "tail"


# --- the table ------------------------------------------------------------------------------------

TRIALS = [
    trial_of(1, 0.50, 0.20, k_prime=64, role="SNM"),
    trial_of(2, 0.49, 0.30, k_prime=16, role="as given"),
    trial_of(3, 0.485, 0.35, k_prime=8),
    trial_of(4, 0.47, 0.40, k_prime=4),  # better, but 3 points below the best average
    trial_of(5, NAN, NAN, k_prime=2, figures={}, failure="the loss of step 3 is nan"),
]


def test_the_sentences_say_what_was_chosen_and_how_far_to_trust_it():
    first, *rest = Results(TRIALS, RULE).describe()
    assert first == (
        f"chosen: trial 3, the highest {RULE.criterion} of the trials near the best average (3 of "
        "5: recall@10 at most 0.02 below 0.5000)"
    )
    assert rest == []
    chosen = trial_of(1, 0.50, 0.40, low=0.35, high=0.45)
    others = [trial_of(2, 0.50, 0.35), trial_of(3, 0.50, 0.34), trial_of(4, 0.40, 0.39)]
    for low, trials, sentence in (
        (0.35, others, "too close to call, by its 95 % interval: trial 2"),
        (0.34, others, "too close to call, by its 95 % interval: trials 2, 3"),
        (NAN, others, None),
    ):
        found = Results([dataclasses.replace(chosen, low=low), *trials], RULE).describe()
        assert found[1:] == ([] if sentence is None else [sentence])
    nothing = Results([trial_of(1, 0.5, 0.0), trial_of(2, 0.5, 0.0)], RULE).describe()
    assert "it finds nothing by that criterion" in nothing[1]


def test_every_trial_has_a_row_the_best_first_and_the_failed_last():
    table = Results(TRIALS, RULE).table()
    columns = {str(column.header): [str(cell) for cell in column.cells] for column in table.columns}
    assert list(columns) == [
        "trial", "method", "num_hard_examples", "learning_rate", "recall@10", "criterion", "95 %",
        "tail", "seconds", "",
    ]  # fmt: skip
    assert columns["trial"] == ["4", "3", "2", "1", "5"]
    assert columns[""] == [
        "", "chosen", "near the best, as given", "near the best, SNM", "the loss of step 3 is nan",
    ]  # fmt: skip
    row = [cells[1] for cells in columns.values()]
    assert row[1:9] == ["s2m", "8", "0.03", "0.4850", "0.3500", "0.330–0.380", "0.2425", "12"]
    assert [cells[4] for cells in columns.values()][4:8] == ["–"] * 4
