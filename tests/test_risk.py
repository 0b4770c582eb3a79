"""Every risk against its definition, and what they share: safe, without gradient, never silent."""

import math
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import oracles
import risk_oracles
from evenhand.risk import (
    DualCvar,
    EvenMining,
    GroupRisk,
    even_weights,
    mean_weights,
    ranked_range_weights,
    tail_weights,
    top_weights,
)

losses_of_a_batch = st.lists(st.floats(0, 100), min_size=1, max_size=8)
# Few different values, so that ties are frequent.
tied_losses = st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=1, max_size=8)
tail_fractions = st.floats(0.01, 1)


def as_losses(values):
    return torch.tensor(values, dtype=torch.float64)


def risk(weights, losses):
    return (weights * losses).sum().item()


def every_risk(batch_size):
    """name -> risk of a batch, those with memory as they are at first."""
    ids = torch.arange(batch_size)
    half = max(1, batch_size // 2)
    return {
        "mean": mean_weights,
        "top": partial(top_weights, num_hard_examples=half),
        "max": partial(top_weights, num_hard_examples=1),
        "tail": partial(tail_weights, tail_fraction=0.3),
        "even": lambda losses: even_weights(
            losses, torch.zeros_like(losses), num_hard_examples=half
        ),
        "even mining": lambda losses: EvenMining(torch.ones(2))(
            losses, torch.where(ids == batch_size - 1, 1, 2 * (ids % 2)), num_hard_examples=half
        ),
        "ranked range": partial(
            ranked_range_weights, num_dropped=batch_size - half, num_hard_examples=half
        ),
        "dual cvar": partial(DualCvar(), tail_fraction=0.3),
        "groups": lambda losses: GroupRisk(3)(losses, ids % 3),
        "several groups": lambda losses: GroupRisk(3)(
            losses, torch.stack([ids % 3, torch.where(ids % 2 == 1, (ids + 1) % 3, -1)], dim=1)
        ),
        "mixtures": lambda losses: GroupRisk(3, mixtures=torch.full((2, 3), 1 / 3))(
            losses, ids % 3
        ),
    }


each_risk = pytest.mark.parametrize("name", list(every_risk(4)))

# --- what all share -------------------------------------------------------------------------------

EXTREMES = {
    "huge": [1e38, 0.0, 1.0, 3e38],
    "tiny": [1e-40, 2e-40, 0.0, 0.0],
    "equal": [5.0, 5.0, 5.0, 5.0],
    "zero": [0.0, 0.0, 0.0, 0.0],
    "nearly equal": [1.0, 1.0 + 1e-7, 1.0, 1.0],
    "one": [7.0],
    "one zero": [0.0],
    "negative": [-1.0, -3.0, -2.0, -1.0],
}


@each_risk
@pytest.mark.parametrize("extreme", EXTREMES.values(), ids=EXTREMES)
def test_weights_are_sound_at_extreme_losses_and_never_all_zero(name, extreme):
    weights = every_risk(len(extreme))[name](torch.tensor(extreme))
    assert weights.isfinite().all()
    assert (weights >= 0).all()
    assert weights.sum() > 0
    if name != "dual cvar":
        assert weights.sum().item() == pytest.approx(1, rel=1e-6)


@each_risk
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_weights_are_like_the_losses_and_without_gradient(name, dtype):
    losses = torch.tensor([3.0, 1.0, 2.0, 0.5], dtype=dtype, requires_grad=True)
    before = losses.detach().clone()
    weights = every_risk(4)[name](losses)
    assert weights.dtype == dtype
    assert weights.shape == (4,)
    assert not weights.requires_grad
    assert torch.equal(losses, before)


@each_risk
def test_a_loss_that_is_not_a_number_is_not_hidden(name):
    losses = torch.tensor([1.0, math.nan, 2.0, 0.5])
    weights = every_risk(4)[name](losses)
    counted = weights != 0  # a step looks at no other
    assert math.isnan(risk(weights[counted], losses[counted]))


BY_PLACE = ("even", "even mining", "groups", "several groups", "mixtures")


@pytest.mark.parametrize("name", [name for name in every_risk(4) if name not in BY_PLACE])
@given(st.permutations(range(6)))
def test_the_order_of_the_examples_does_not_matter(name, order):
    losses = torch.tensor([3.0, 1.0, 2.0, 0.5, 7.0, 0.0])
    weights = every_risk(6)[name](losses)
    assert torch.allclose(every_risk(6)[name](losses[order]), weights[order])


# --- mean, top ------------------------------------------------------------------------------------


@given(losses_of_a_batch)
def test_the_mean_weights_give_the_mean(values):
    losses = as_losses(values)
    expected = sum(values) / len(values)
    assert risk(mean_weights(losses), losses) == pytest.approx(expected, rel=1e-12)


@given(losses_of_a_batch, st.data())
def test_the_top_weights_give_the_average_of_the_largest(values, data):
    count = data.draw(st.integers(1, len(values)))
    losses = as_losses(values)
    weights = top_weights(losses, num_hard_examples=count)
    assert risk(weights, losses) == pytest.approx(oracles.average_of_top(values, count), rel=1e-12)
    assert sorted(weights.tolist()) == [0] * (len(values) - count) + [1 / count] * count


# --- tail -----------------------------------------------------------------------------------------


@given(losses_of_a_batch | tied_losses, tail_fractions)
def test_the_tail_weights_give_the_cvar_also_where_the_tail_is_not_whole(values, tail_fraction):
    losses = as_losses(values)
    weights = tail_weights(losses, tail_fraction=tail_fraction)
    expected = risk_oracles.cvar(values, tail_fraction)
    assert risk(weights, losses) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert weights.sum().item() == pytest.approx(1, rel=1e-9)
    assert weights.max().item() <= 1 / (tail_fraction * len(values)) * (1 + 1e-9)


def test_a_whole_tail_that_is_a_little_more_in_floating_point_holds_no_further_example():
    assert 0.07 * 100 > 7
    weights = tail_weights(torch.arange(100.0), tail_fraction=0.07)
    assert weights.nonzero().squeeze(1).tolist() == list(range(93, 100))


def test_equal_losses_at_the_threshold_share():
    weights = tail_weights(torch.tensor([2.0, 1.0, 1.0, 0.0]), tail_fraction=0.5)
    assert weights.tolist() == [0.5, 0.25, 0.25, 0]


# --- even-handed mining ---------------------------------------------------------------------------


@st.composite
def even_problems(draw):
    """Losses, gaps, k', the mined share, who is held out (not all), and how many are dropped."""
    size = draw(st.integers(1, 12))
    losses = [float(loss) for loss in draw(st.permutations(range(size)))]
    gaps = [float(size * draw(st.integers(0, 3))) for _ in losses]  # no two keys are equal
    is_held_out = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    is_held_out[draw(st.integers(0, size - 1))] = False
    share = draw(st.sampled_from([0, 1, 0.5, 0.25, 0.3, 0.9]))
    return losses, gaps, draw(st.integers(1, size)), share, is_held_out, draw(st.integers(0, size))


LARGE = (
    [float(b * 37 % 64) for b in range(64)],
    [0.0] * 64,
    16,
    0.5,
    [b % 9 == 8 for b in range(64)],
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(even_problems())
@example((*LARGE, 0))
@example((*LARGE, 5))
def test_the_even_weights_are_those_of_the_definition(dtype, problem):
    losses, gaps, count, share, is_held_out, num_dropped = problem
    expected = risk_oracles.even_weights(*problem)
    weights = even_weights(
        torch.tensor(losses, dtype=dtype),
        torch.tensor(gaps, dtype=dtype),
        num_hard_examples=count,
        mined_share=share,
        num_dropped=num_dropped,
        is_held_out=torch.tensor(is_held_out),
    )
    assert weights.dtype == dtype
    assert weights.tolist() == pytest.approx(
        expected, rel=1e-7 if dtype == torch.float32 else 1e-15
    )


def test_equal_keys_share_no_more_than_there_is():
    """Whichever of equal ones is taken: k' count for being hard, and all that count are equal."""
    losses, gaps = torch.tensor([1.0, 3, 1, 1, 2, 1]), torch.tensor([1.0, 0, 1, 1, 0, 1])
    for count in range(1, 7):
        weights = even_weights(losses, gaps, num_hard_examples=count, mined_share=1.0)
        assert weights.unique().tolist() == pytest.approx([0, 1 / count] if count < 6 else [1 / 6])
        assert weights[1] > 0  # the one above them
        assert (weights > 0).sum() == count


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_loss_that_is_not_a_number_is_seen_though_it_is_held_out_or_dropped(share):
    losses, is_held_out = torch.tensor([1.0, 2.0, math.nan, 0.5]), torch.tensor([0, 0, 1, 0])
    even = EvenMining(torch.ones(1), mined_share=share)
    assert even(losses, is_held_out, num_hard_examples=1).isnan().tolist() == [0, 0, 1, 0]
    how = {"num_hard_examples": 1, "mined_share": share, "num_dropped": 1}
    assert even_weights(losses, torch.zeros(4), **how)[2].isnan()


SHAPE = [1.0, 0.7, 0.5]
records = st.tuples(st.floats(0, 4), st.integers(0, 2), st.booleans())  # loss, bin, is held out


@given(st.lists(st.lists(records, min_size=1, max_size=6), max_size=5))
def test_the_gap_of_a_bin_is_measured_over_a_window_and_leans_on_the_curve(batches):
    shape = torch.tensor(SHAPE, dtype=torch.float64)
    even = EvenMining(shape, scale=0.3, gap_weight=0.6, mined_share=0.5)
    for step, batch in enumerate(batches):
        losses, bins, is_held_out = (list(column) for column in zip(*batch, strict=True))
        gaps = even.gaps()[torch.tensor(bins)]
        before = risk_oracles.measured_gaps(batches[:step], SHAPE, 0.3)
        assert gaps.tolist() == pytest.approx([before[own] for own in bins], rel=1e-9, abs=1e-9)
        ids = 2 * torch.tensor(bins) + torch.tensor(is_held_out)
        counts = {"num_hard_examples": 1, "num_dropped": min(step, len(batch))}
        weights = even(as_losses(losses), ids, **counts)
        is_held_out = torch.tensor(is_held_out) & ~torch.tensor(is_held_out).all()
        expected = even_weights(as_losses(losses), 0.6 * gaps, is_held_out=is_held_out, **counts)
        assert torch.equal(weights, expected)
    after = risk_oracles.measured_gaps(batches, SHAPE, 0.3)
    assert even.gaps().tolist() == pytest.approx(after, rel=1e-9, abs=1e-9)


def test_where_nothing_is_held_out_the_gaps_are_the_curve_and_rare_labels_are_mined():
    even = EvenMining(torch.tensor([1.0, 0.5]), scale=0.4, gap_weight=1.0, mined_share=1.0)
    losses, ids = torch.tensor([0.1, 0.25, 0.2]), torch.tensor([0, 2, 2])
    for _ in range(3):
        weights = even(losses, ids, num_hard_examples=1)  # keys .5, .45, .4
        assert weights.tolist() == [1, 0, 0]
        assert even.gaps().tolist() == pytest.approx([0.4, 0.2], rel=1e-12)


# --- ranked range ---------------------------------------------------------------------------------


@given(losses_of_a_batch, st.data())
def test_the_ranked_range_is_the_average_of_the_largest_after_those_dropped(values, data):
    count = data.draw(st.integers(1, len(values)))
    dropped = data.draw(st.integers(0, len(values) - count))
    losses = as_losses(values)
    weights = ranked_range_weights(losses, num_dropped=dropped, num_hard_examples=count)
    expected = risk_oracles.ranked_range(values, dropped, count)
    assert risk(weights, losses) == pytest.approx(expected, rel=1e-12)
    assert (weights > 0).sum() == count


# --- dual CVaR ------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 10), min_size=4, max_size=20), losses_of_a_batch, tail_fractions)
def test_a_batch_is_weighed_by_the_threshold_of_the_whole_window(before, values, tail_fraction):
    dual = DualCvar(window=10**6)
    dual.load({"recent": as_losses(before)})
    weights = dual(as_losses(values), tail_fraction=tail_fraction).tolist()
    everyone = sorted(before + values, reverse=True)
    threshold = everyone[math.ceil(tail_fraction * len(everyone) - 1e-9) - 1]
    if max(values) < threshold:
        assert sum(weights) == pytest.approx(1 / len(values))
        return
    for weight, value in zip(weights, values, strict=True):
        full = 1 / (tail_fraction * len(values))
        low, high = (full, full) if value > threshold else (0, full * (value == threshold))
        assert low * (1 - 1e-9) <= weight <= high * (1 + 1e-9)


def test_a_batch_with_more_hard_examples_counts_more():
    dual = DualCvar(window=2)
    easy, hard = torch.tensor([0.1, 0.2, 0.3, 4.0]), torch.tensor([3.0, 5.0, 6.0, 7.0])
    dual(easy, tail_fraction=0.5)
    weights_of_hard = dual(hard, tail_fraction=0.5)  # the half above: 4, 5, 6, 7
    weights_of_easy = dual(easy, tail_fraction=0.5)
    assert weights_of_hard.tolist() == [0, 0.5, 0.5, 0.5]
    assert weights_of_easy.tolist() == [0, 0, 0, 0.5]


def test_on_average_over_batches_the_dual_cvar_is_that_of_the_data_and_the_top_is_not():
    generator = torch.Generator().manual_seed(0)
    data = torch.rand(4000, generator=generator, dtype=torch.float64) ** 4
    dual = DualCvar(window=32)
    dual_risks, top_risks = [], []
    for _ in range(400):
        batch = data[torch.randint(4000, (8,), generator=generator)]
        weights = dual(batch, tail_fraction=0.25)
        assert dual.recent is not None
        threshold = dual.recent.topk(math.ceil(0.25 * len(dual.recent))).values[-1]
        excess = (batch - threshold).clamp(min=0).mean() / 0.25
        dual_risks.append((threshold + excess).item())
        top_risks.append(risk(top_weights(batch, num_hard_examples=2), batch))
        assert risk(weights, batch) >= 0
    truth = data.topk(1000).values.mean().item()
    assert abs(sum(dual_risks[50:]) / 350 - truth) < 0.01
    assert truth - sum(top_risks) / 400 > 0.02  # the top of small batches is biased downwards


def test_a_threshold_that_lags_leaves_the_hardest_example_a_weight():
    dual = DualCvar(window=4)
    dual(torch.full((4,), 100.0), tail_fraction=0.25)
    weights = dual(torch.tensor([1.0, 3.0, 2.0, 0.0]), tail_fraction=0.25)
    assert weights.tolist() == [0, 1 / 4, 0, 0]


def test_the_window_forgets():
    dual = DualCvar(window=1)
    dual(torch.full((4,), 100.0), tail_fraction=0.25)
    dual(torch.tensor([1.0, 3.0, 2.0, 0.0]), tail_fraction=0.25)
    assert dual.state()["recent"].tolist() == [1, 3, 2, 0]


# --- known groups ---------------------------------------------------------------------------------


def test_group_weights_are_those_of_multiplicative_weights_over_group_means():
    groups = GroupRisk(3, step_size=0.5)
    losses, ids = (
        torch.tensor([1.0, 3.0, 2.0, 6.0], dtype=torch.float64),
        torch.tensor([0, 0, 1, 2]),
    )
    means = [2.0, 2.0, 6.0]
    shares = risk_oracles.multiplicative_weights([0, 0, 0], means, 0.5)
    expected = [shares[0] / 2, shares[0] / 2, shares[1], shares[2]]
    assert groups(losses, ids).tolist() == pytest.approx(expected)
    again = risk_oracles.multiplicative_weights([math.log(s) for s in shares], means, 0.5)
    assert groups(losses, ids).tolist() == pytest.approx(
        [again[0] / 2, again[0] / 2, again[1], again[2]]
    )


def test_an_example_in_several_groups_counts_in_each_and_weighs_their_sum():
    groups = GroupRisk(3, step_size=0.5)
    losses = torch.tensor([1.0, 3.0, 2.0, 7.0], dtype=torch.float64)
    ids = torch.tensor([[0, 1], [0, -1], [1, 2], [2, -1]])
    means = [(1 + 3) / 2, (1 + 2) / 2, (2 + 7) / 2]
    shares = [s / 2 for s in risk_oracles.multiplicative_weights([0, 0, 0], means, 0.5)]
    expected = [shares[0] + shares[1], shares[0], shares[1] + shares[2], shares[2]]
    assert groups(losses, ids).tolist() == pytest.approx(expected)


def test_a_group_that_is_not_there_keeps_its_mass_and_leaves_no_gap():
    groups = GroupRisk(3, step_size=1.0)
    weights = groups(torch.tensor([1.0, 1.0]), torch.tensor([0, 1]))
    assert weights.tolist() == pytest.approx([0.5, 0.5])
    mass = groups.state()["log_weights"].exp().tolist()
    assert mass == pytest.approx(risk_oracles.multiplicative_weights([0, 0, 0], [1, 1, 0], 1.0))


def test_a_group_whose_mass_is_too_small_for_a_number_is_not_lost_where_it_is_alone():
    groups = GroupRisk(2)
    groups.load({"log_weights": torch.tensor([0.0, -2000.0], dtype=torch.float64)})
    assert groups(torch.tensor([1.0, 2.0]), torch.tensor([1, 1])).tolist() == [0.5, 0.5]


def test_in_the_end_the_worst_group_alone_counts():
    groups = GroupRisk(3, step_size=0.1)
    losses, ids = torch.tensor([1.0, 2.0, 5.0, 3.0]), torch.tensor([0, 1, 2, 2])
    for _ in range(300):
        weights = groups(losses, ids)
    assert weights.tolist() == pytest.approx([0, 0, 0.5, 0.5], abs=1e-6)


def test_the_risk_of_a_set_of_mixtures_becomes_the_largest_of_them():
    """Equation 14: max over the set of sum_p nu_p * mean loss of group p."""
    mixtures = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.2, 0.6], [0.8, 0.1, 0.1]])
    means = [1.0, 2.0, 4.0]
    losses, ids = torch.tensor([1.0, 2.0, 5.0, 3.0]), torch.tensor([0, 1, 2, 2])
    agnostic = GroupRisk(3, step_size=0.2, mixtures=mixtures)
    for _ in range(500):
        weights = agnostic(losses, ids)
    expected = max(risk_oracles.risk(row, means) for row in mixtures.tolist())
    assert risk(weights, losses) == pytest.approx(expected, rel=1e-5)


# --- memory ---------------------------------------------------------------------------------------

WITH_MEMORY = {
    "even mining": (
        lambda: EvenMining(torch.tensor([1.0, 0.3])),
        lambda r, x: r(x, torch.tensor([0, 2, 1, 3]), num_hard_examples=1),
    ),
    "dual cvar": (lambda: DualCvar(window=2), lambda r, x: r(x, tail_fraction=0.4)),
    "groups": (lambda: GroupRisk(4, step_size=0.5), lambda r, x: r(x, torch.arange(4) % 3)),
}  # fmt: skip


@pytest.mark.parametrize("kind", WITH_MEMORY.values(), ids=WITH_MEMORY)
def test_a_risk_that_is_saved_and_loaded_goes_on_as_if_nothing_had_been(kind):
    make, call = kind
    first, batches = make(), torch.rand(6, 4, generator=torch.Generator().manual_seed(0))
    for batch in batches[:3]:
        call(first, batch)
    second = make()
    second.load({name: value.clone() for name, value in first.state().items()})
    for batch in batches[3:]:
        assert torch.equal(call(first, batch), call(second, batch))
    assert all(torch.equal(first.state()[name], value) for name, value in second.state().items())


# --- refusals -------------------------------------------------------------------------------------

REFUSALS = [
    *((lambda x, k=k: top_weights(x, num_hard_examples=k), "num_hard_examples") for k in (0, 5)),
    *(
        (lambda x, k=k: even_weights(x, x, num_hard_examples=k), "num_hard_examples")
        for k in (0, 5)
    ),
    *(
        (lambda x, a=a: tail_weights(x, tail_fraction=a), "tail_fraction")
        for a in (0, 1.1, math.nan)
    ),
    *(
        (lambda x, d=d, k=k: ranked_range_weights(x, num_dropped=d, num_hard_examples=k), name)
        for d, k, name in (
            (0, 0, "num_hard_examples"), (0, 5, "num_hard_examples"),
            (-1, 2, "num_dropped"), (3, 2, "num_dropped"),
        )
    ),
    (lambda x: DualCvar(window=0), "window"),
    (lambda x: GroupRisk(3, mixtures=torch.ones(2, 4)), "mixtures"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "name"), REFUSALS, ids=[name for _, name in REFUSALS])
def test_what_cannot_be_is_refused(call, name):
    with pytest.raises(ValueError, match=f"{name} must be .*got"):
        call(torch.ones(4))
