"""Even-handed mining: its gap and its mixture, by enumeration on small laws."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

import theory_oracles as oracles
from evenhand.risk import EvenMining, even_weights, mean_weights, top_weights
from evenhand.theory.cvar import cvar_by_top, cvar_by_worst_density
from evenhand.theory.even import (
    effective_count,
    even_bound,
    expected_even_weights,
    gap_variance,
    mixed_risk,
    num_counting,
    put_back_bias,
    shrinkage_matrix,
)
from evenhand.theory.order_weights import batch_weights, order_weighted_average
from evenhand.theory.rademacher import empirical_rademacher

shares = st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0])
whole_losses = st.lists(st.integers(0, 9), min_size=1, max_size=7)


def near(value):
    return pytest.approx(float(value), rel=1e-12, abs=1e-12)


# --- the gap --------------------------------------------------------------------------------------


def measured_gap(trained, held_out):
    """As `EvenMining` measures it in one bin, by one batch."""
    even = EvenMining(torch.ones(1))
    losses = torch.tensor([*trained, *held_out], dtype=torch.float64)
    ids = torch.tensor([0] * len(trained) + [1] * len(held_out))
    even(losses, ids, num_hard_examples=1)
    return even.gaps().item()


@pytest.mark.parametrize(("num_held_out", "num_trained"), [(1, 1), (2, 3), (3, 4)])
def test_the_measured_gap_is_right_on_average_and_has_this_variance(num_held_out, num_trained):
    test, trained = [0.0, 1.0, 5.0], [0.0, 0.5, 2.0, 0.25]
    gaps = [
        measured_gap(seen, held_out)
        for held_out in itertools.product(test, repeat=num_held_out)
        for seen in itertools.combinations(trained, num_trained)
    ]
    assert np.mean(gaps) == near(sum(test) / 3 - sum(trained) / 4)
    counts = {"num_held_out": num_held_out, "num_trained": num_trained}
    assert gap_variance(test, trained, **counts) == near(np.var(gaps))


@st.composite
def measured_bins(draw):
    """Held-out counts, not all 0, the shape of the curve, and losses of (trained, held-out)."""
    size = draw(st.integers(1, 4))
    counts = draw(st.lists(st.integers(0, 99), min_size=size, max_size=size).filter(any))
    shape = [draw(st.integers(1, 9)) / 4 for _ in counts]
    losses = [(draw(st.integers(0, 9)) / 4, draw(st.integers(0, 9)) / 4) for _ in counts]
    return counts, shape, losses


@given(measured_bins())
def test_the_gaps_are_a_matrix_times_those_measured(problem):
    counts, shape, losses = problem
    trained, held_out = np.array(losses).T
    even = EvenMining(torch.tensor(shape))
    rows = [[np.full(len(counts), 7.0), 7 * trained], [counts, np.array(counts) * held_out]]
    even.load({"sums": torch.from_numpy(np.array(rows, dtype=np.float64))})
    matrix = shrinkage_matrix(counts, shape)
    assert even.gaps().tolist() == pytest.approx(matrix @ (held_out - trained), rel=1e-9, abs=1e-9)
    assert matrix @ shape == pytest.approx(shape, rel=1e-9)  # on the curve there is no bias


def test_the_best_prior_count_is_the_noise_over_how_far_gaps_stray_from_the_curve():
    noise, stray, counts, shape = 0.36, 0.02, np.full(6, 10), np.ones(6)

    def squared_error(prior_count):
        """Over measurements, and over gaps that stray from the curve by this variance."""
        matrix = shrinkage_matrix(counts, shape, prior_count=prior_count)
        variance = np.trace(matrix @ np.diag(noise / counts) @ matrix.T)
        return variance + stray * ((matrix - np.eye(6)) ** 2).sum()

    errors = {prior: squared_error(prior) for prior in range(1, 100)}
    assert min(errors, key=errors.get) == noise / stray == 18
    assert errors[18] < squared_error(0) / 2


def test_the_window_counts_as_twice_its_steps_less_one():
    """The sums of 100 steps, each weighing 1 % less than the next, vary as the mean of 199."""
    weights = [even_sum_of_a_step(ago) for ago in (0, 1, 2)]
    assert weights == pytest.approx([1, 0.99, 0.99**2], rel=1e-12)
    decay = 0.99 ** np.arange(10_000)
    assert decay.sum() == pytest.approx(100)
    assert effective_count(decay) == pytest.approx(199)


def even_sum_of_a_step(ago):
    even = EvenMining(torch.ones(1))
    for step in range(ago + 1):
        losses = torch.tensor([1.0 if step == 0 else 0.0])
        even(losses, torch.tensor([0]), num_hard_examples=1)
    return even.state()["sums"][0, 1, 0].item()


def test_held_out_pairs_are_fresh_draws_but_for_labels_that_are_put_back():
    """Whatever the loss depends on: the label, and all that was trained on.

    Labels with one pair left had two, and are as likely as at test time.
    """
    probabilities = [Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)]
    num_put_back = 0
    for (_, trained, seen), outcomes in oracles.held_out_laws(probabilities, 4).items():
        counts = [trained.count(label) for label in range(3)]
        losses = [(7 * label + 3 * counts[0] + counts[1] * label) % 5 for label in range(3)]
        for size in (1, 2):
            of_bin = [label for label in range(3) if counts[label] == size]
            means = [
                (chance, np.mean([losses[label] for label in labels if label in of_bin]))
                for chance, labels in outcomes
                if any(label in of_bin for label in labels)
            ]
            if not means:
                continue
            total = float(sum(chance for chance, _ in means))
            measured = sum(float(chance) * mean for chance, mean in means) / total
            law = np.array([float(probabilities[label]) for label in of_bin])
            law /= law.sum()
            of_test = np.array([losses[label] for label in of_bin])
            is_put_back = [label not in seen for label in of_bin]
            bias = put_back_bias(of_test, is_put_back, probabilities=law)
            assert measured == near(law @ of_test + bias)
            if not any(is_put_back):
                assert bias == near(0)
            assert abs(bias) <= law[is_put_back].sum() * np.ptp(of_test) + 1e-12
            num_put_back += any(is_put_back)
    assert num_put_back > 100


# --- the bound ------------------------------------------------------------------------------------


@st.composite
def populations(draw):
    """Training losses, test losses and bins of some examples, and the gap taken for each bin."""
    size = draw(st.integers(1, 7))
    column = st.lists(st.integers(0, 9), min_size=size, max_size=size)
    bins = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    gaps = draw(st.lists(st.integers(-2, 5), min_size=3, max_size=3))
    return np.array(draw(column)), np.array(draw(column)), np.array(bins), np.array(gaps)


def subsets(size, least):
    for count in range(least, size + 1):
        yield from (list(rows) for rows in itertools.combinations(range(size), count))


@given(populations(), st.data())
def test_a_subpopulation_is_bounded_by_the_cvar_of_the_keys_and_what_its_gap_is_off_by(
    population, data
):
    trained, test, bins, gaps = population
    least = data.draw(st.integers(1, len(bins)))
    keys, share = trained + gaps[bins], least / len(bins)
    errors = test - keys
    for rows in subsets(len(bins), least):
        bound = cvar_by_top(keys, share)
        assert test[rows].mean() <= bound + errors[rows].mean() + 1e-9
        assert errors[rows].mean() <= cvar_by_top(errors, share) + 1e-9


@given(populations(), st.data())
def test_with_the_gaps_of_the_bins_whole_bins_need_no_more(population, data):
    trained, test, bins, _ = population
    present = np.unique(bins)
    gaps = {g: (test - trained)[bins == g].mean() for g in present}
    least = data.draw(st.integers(1, len(bins)))
    keys = trained + np.array([gaps[g] for g in bins])
    bound = cvar_by_top(keys, least / len(bins))
    # Of all mixtures of bins that are subpopulations of that share, the worst.
    means, parts = [test[bins == g].mean() for g in present], [(bins == g).mean() for g in present]
    worst = cvar_by_worst_density(means, least / len(bins), probabilities=parts)
    assert worst.value <= bound + 1e-9


def test_a_part_of_a_bin_with_a_gap_of_its_own_can_be_worse_by_what_the_gap_is_off_by():
    trained, test = np.zeros(4), np.array([2.0, 2.0, 0.0, 0.0])
    keys = trained + (test - trained).mean()
    assert cvar_by_top(keys, 0.5) == near(1)  # and half of the bin has a test loss of 2
    assert cvar_by_top(keys, 0.5) + cvar_by_top(test - keys, 0.5) == near(2)


@given(whole_losses, st.sampled_from([1.0, 1.5, 3.0]), st.data())
def test_bins_more_frequent_at_test_time_lower_the_level(keys, ratio, data):
    """No example at most `ratio` times as likely: a share of 1/2 is one of 1/2 over the ratio."""
    raised = data.draw(st.lists(st.floats(0, 1), min_size=len(keys), max_size=len(keys)))
    even = np.full(len(keys), 1 / len(keys))
    law = cvar_by_worst_density(raised, 1 / ratio).weights  # at most ratio / N each
    assert law.max() <= ratio * even[0] + 1e-12
    worst = cvar_by_top(keys, 0.5, probabilities=law)
    assert worst <= cvar_by_top(keys, 0.5 / ratio) + 1e-9


def test_the_measured_bound_fails_as_rarely_as_it_says():
    """All held-out draws of two bins, whose test losses are 0 or 1."""
    bins, trained = np.array([0, 0, 0, 1]), np.array([0.0, 0.0, 0.5, 0.25])
    chances, counts = (0.6, 0.9), (5, 8)
    settings = {"tail_fraction": 0.5, "loss_bound": 1.0}
    truth = cvar_by_top(chances, 0.5, probabilities=[0.75, 0.25])
    held_out_bins, failing, wide = [0] * 5 + [1] * 8, {0.2: 0.0, 0.8: 0.0}, 0.0
    for sums in itertools.product(*(range(count + 1) for count in counts)):
        held_out = [
            loss for s, n in zip(sums, counts, strict=True) for loss in [1] * s + [0] * (n - s)
        ]
        chance = math.prod(
            math.comb(n, s) * p**s * (1 - p) ** (n - s)
            for n, s, p in zip(counts, sums, chances, strict=True)
        )
        for delta in failing:
            bound = even_bound(
                trained, bins, held_out, held_out_bins, failure_probability=delta, **settings
            )
            failing[delta] += chance * (bound < truth)
            wide += chance * (bound > truth + 1)
    assert 0 < failing[0.8] <= 0.8
    assert failing[0.2] <= 0.2
    assert wide < 0.5


def test_the_measured_bound_term_by_term():
    settings = {"tail_fraction": 0.5, "loss_bound": 3.0, "failure_probability": 0.1}
    bound = even_bound([0.0, 1.0, 2.0, 0.5], [0, 0, 1, 1], [3, 2, 1], [0, 1, 1], **settings)
    # Gaps 3 - 1/2 and 3/2 - 5/4; of two bins, each has half of delta.
    deviations = [3 * math.sqrt(math.log(2 / 0.1) / (2 * count)) for count in (1, 2)]
    keys = [2.5 + deviations[0], 3.5 + deviations[0], 2.25 + deviations[1], 0.75 + deviations[1]]
    assert bound == near(sum(sorted(keys)[2:]) / 2)
    with pytest.raises(ValueError, match="at least 1"):
        even_bound([0.0, 1.0], [0, 1], [1.0], [0], **settings)


def test_gaps_fixed_beforehand_leave_the_complexity_of_a_class_as_it_is():
    losses = np.random.default_rng(0).random((5, 6))  # of five scorers
    gaps = np.array([0.9, 0.9, 0.4, 0.4, 0.1, 0.0])
    assert empirical_rademacher(losses + gaps) == near(empirical_rademacher(losses))


# --- the weights ----------------------------------------------------------------------------------

SIZES = [(size, count) for size in (1, 2, 3, 5, 8, 9) for count in range(1, size + 1)]


@given(st.lists(st.integers(0, 99), min_size=1, max_size=8, unique=True), st.data())
def test_the_corners_of_even_handed_mining_are_s2m_and_snm(values, data):
    losses = torch.tensor(values, dtype=torch.float64)
    count = data.draw(st.integers(1, len(values)))
    equal, other = torch.full_like(losses, 0.3), losses.flip(0)
    s2m = even_weights(losses, equal, num_hard_examples=count, mined_share=1.0)
    assert torch.equal(s2m, top_weights(losses, num_hard_examples=count))
    mean = mean_weights(losses)
    assert torch.equal(even_weights(losses, other, num_hard_examples=count, mined_share=0.0), mean)
    assert torch.equal(even_weights(losses, other, num_hard_examples=len(values)), mean)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_the_expected_weights_are_the_average_over_all_orders(share):
    for size, count in SIZES:
        how = {"num_hard_examples": count, "mined_share": share}
        orders = list(itertools.combinations(range(size), count))  # where the hardest stand
        hard, easy, num_with_weight = 0.0, 0.0, 0
        for places in orders:
            losses = torch.zeros(size, dtype=torch.float64)
            losses[list(places)] = 1.0
            weights = even_weights(losses, torch.zeros(size), **how)
            hard += weights[losses == 1].mean().item()
            easy += weights[losses == 0].sum().item() / max(1, size - count)
            num_with_weight += (weights > 0).sum().item()
        actual = expected_even_weights(size, **how)
        assert actual.hard == near(hard / len(orders))
        assert actual.easy == near(easy / len(orders))
        assert abs(num_with_weight / len(orders) - num_counting(size, **how)) < 1.25


@given(st.integers(1, 10**6), st.floats(0.01, 0.99), st.data())
def test_the_number_that_counts_is_bounded_by_either_part(size, share, data):
    count = data.draw(st.integers(1, size))
    planned = num_counting(size, num_hard_examples=count, mined_share=share)
    assert planned == near(1 / (share / count + (1 - share) / size))
    assert count * (1 - 1e-9) <= planned <= min(count / share, size / (1 - share)) * (1 + 1e-9)


@pytest.mark.parametrize("size", [16, 256, 1024, 2048, 3025, 4096])
def test_in_a_large_batch_the_mixture_is_off_by_three_examples_at_most(size):
    """And by a quarter of one, because the number that counts varies with the order."""
    places = np.sort(np.arange(1, size + 1) * 2654435769 % 2**32) / 2**32
    ranks = np.arange(size)
    off = max((ranks + 1 - places * size).max(), (places * size - ranks).max())
    assert off < 3.1
    for count, share in ((size // 4, 0.5), (size // 8, 0.9), (size // 2, 0.25)):
        how = {"num_hard_examples": count, "mined_share": share}
        planned, actual = num_counting(size, **how), expected_even_weights(size, **how)
        low, high = max(count, planned - off), planned + off
        assert 1 / high <= actual.hard <= (1 + 1 / (4 * low)) / low
        assert count * actual.hard + (size - count) * actual.easy == near(1)


# --- the mixture ----------------------------------------------------------------------------------


@given(whole_losses, shares, st.fractions(Fraction(1, 20), 1, max_denominator=20), st.data())
def test_the_mixture_is_the_worst_of_densities_between_two_bounds(losses, share, alpha, data):
    parts = data.draw(st.lists(st.integers(1, 5), min_size=len(losses), max_size=len(losses)))
    law, alpha = np.array(parts) / sum(parts), float(alpha)
    how = {"tail_fraction": alpha, "mined_share": share, "probabilities": law}
    value, weights = mixed_risk(losses, **how)
    limits = [((1 - share) * p, (1 - share + share / alpha) * p) for p in law]
    solved = linprog(-np.array(losses), A_eq=[[1] * len(losses)], b_eq=[1], bounds=limits)
    assert value == pytest.approx(-solved.fun, rel=1e-9, abs=1e-9)
    assert np.dot(weights, losses) == near(value)
    assert all(
        low - 1e-12 <= w <= high + 1e-12 for w, (low, high) in zip(weights, limits, strict=True)
    )


@given(whole_losses, shares, st.data())
def test_over_random_batches_it_is_an_order_weighted_average(losses, share, data):
    """With weights that never rise with the rank: a spectral, hence coherent, risk."""
    size = data.draw(st.integers(1, len(losses)))
    count = data.draw(st.integers(1, size))
    theta = batch_weights(len(losses), batch_size=size, num_hard_examples=count)
    weights = share * theta + (1 - share) / len(losses)
    assert (np.diff(weights) <= 1e-15).all()
    expected = oracles.mean_of_mixed_batches(losses, size, count, share)
    assert float(order_weighted_average(losses, weights)) == near(expected)
    if size == len(losses):  # the batch is all there is
        how = {"tail_fraction": count / size, "mined_share": share}
        assert mixed_risk(losses, **how).value == near(expected)


@given(whole_losses, shares, st.sampled_from([0.1, 0.25, 0.5, 1.0]))
def test_the_mixture_bounds_the_mean_and_every_large_subpopulation(losses, share, alpha):
    value = mixed_risk(losses, tail_fraction=alpha, mined_share=share).value
    mean, cvar = np.mean(losses), cvar_by_top(losses, alpha)
    assert mean <= value + 1e-9
    assert value <= (1 - share + share / alpha) * mean + 1e-9
    assert cvar <= value / (share + (1 - share) * alpha) + 1e-9


def test_its_bounds_are_reached():
    value = mixed_risk([4.0, 0.0, 0.0, 0.0], tail_fraction=0.25, mined_share=0.5).value
    assert value == near((1 - 0.5 + 0.5 / 0.25) * 1)  # 5/2 of the mean
    assert value / (0.5 + 0.5 * 0.25) == near(4)  # the CVaR


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1, max_size=6),
    st.sampled_from([0.25, 0.5, 0.75]),
    st.sampled_from([0.25, 0.5]),
)
def test_the_best_of_the_mixture_is_not_far_from_the_best_of_the_mean_and_of_the_cvar(
    scorers, share, alpha
):
    """Rows are the losses of scorers. What a minimiser of one pays in terms of the other."""
    means = np.mean(scorers, axis=1)
    cvars = np.array([cvar_by_top(losses, alpha) for losses in scorers])
    values = [mixed_risk(row, tail_fraction=alpha, mined_share=share).value for row in scorers]
    best, of_mean, of_cvar = np.argmin(values), np.argmin(means), np.argmin(cvars)
    assert means[best] <= (1 - share + share / alpha) * means[of_mean] + 1e-9
    odds = share / (1 - share)
    assert means[best] - means[of_mean] <= odds * (cvars[of_mean] - cvars[of_cvar]) + 1e-9
    assert cvars[best] - cvars[of_cvar] <= (means[of_cvar] - means[of_mean]) / odds + 1e-9


@pytest.mark.parametrize("share", [0.0, 0.5, 0.75, 1.0])
def test_the_mixture_learns_from_more_examples_than_the_top_alone(share):
    size, count = 1000, 250
    weights = mixed_risk(np.arange(size), tail_fraction=0.25, mined_share=share).weights
    expected = 1 / (share**2 / count + (1 - share**2) / size)
    assert effective_count(weights) == near(expected)
    equal = num_counting(size, num_hard_examples=count, mined_share=share)
    assert count <= equal <= expected + 1e-9 <= size + 1e-6
    # Its variance: over all draws of independent values.
    weights, values = [0.5, 0.3, 0.2], [0.0, 1.0, 4.0]
    means = [np.dot(weights, draws) for draws in itertools.product(values, repeat=3)]
    assert np.var(means) == near(np.var(values) / effective_count(weights))
