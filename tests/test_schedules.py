import math

import pytest

from evenhand.training.schedules import learning_rate_at, num_hard_examples_at


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("linear", [2 * 1, 2 * 3 / 4, 2 * 2 / 4, 2 * 1 / 4]),
        ("cosine", [2 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]),
        ("constant", [2, 2, 2, 2]),
    ],
)
def test_the_learning_rate_falls_by_its_shape(shape, expected):
    rates = [learning_rate_at(step, num_steps=4, peak=2.0, shape=shape) for step in range(4)]
    assert rates == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("shape", ["linear", "cosine", "constant"])
def test_the_warm_up_rises_in_a_line_and_then_changes_nothing(shape):
    settings = {"num_steps": 10, "peak": 3.0, "shape": shape}
    plain = [learning_rate_at(step, **settings) for step in range(10)]
    warmed = [learning_rate_at(step, warmup_steps=4, **settings) for step in range(10)]
    shares = [1 / 4, 2 / 4, 3 / 4, 1, 1, 1, 1, 1, 1, 1]
    expected = [share * rate for share, rate in zip(shares, plain, strict=True)]
    assert warmed == pytest.approx(expected, rel=1e-12)


def test_an_unknown_shape_is_refused():
    with pytest.raises(ValueError, match=r"shape must be 'linear', .*'constant', got 'square'"):
        learning_rate_at(0, num_steps=4, peak=1.0, shape="square")


@pytest.mark.parametrize(
    ("anneal_fraction", "expected"), [(0.4, [100, 80, 60, 40, 20, 20]), (0, [20] * 6)]
)
def test_hard_examples_fall_in_a_line(anneal_fraction, expected):
    sizes = {"num_steps": 10, "batch_size": 100, "num_hard_examples": 20}
    sizes |= {"anneal_fraction": anneal_fraction}
    assert [num_hard_examples_at(step, **sizes) for step in range(6)] == expected
