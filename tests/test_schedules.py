import math

import pytest

from evenhand.training.state import Plan

SHARES = [1 / 4, 2 / 4, 3 / 4, 1, 1, 1, 1, 1, 1, 1]  # of the warm-up


def schedule(num_steps, *, batch_size=100, **settings):
    """The learning rates and the k' of the steps of a run."""
    others = {"num_sampled_labels": 5, "num_hard_labels": 2, "num_hard_examples": 20}
    plan = Plan(sampler=None, loss_fn=None, num_steps=num_steps, **others | settings)
    steps = [plan.at_step(step, batch_size=batch_size) for step in range(num_steps)]
    return [list(column) for column in zip(*steps, strict=True)]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("linear", [2 * 1, 2 * 3 / 4, 2 * 2 / 4, 2 * 1 / 4]),
        ("cosine", [2 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]),
        ("constant", [2, 2, 2, 2]),
    ],
)
def test_the_learning_rate_falls_by_its_shape_and_the_warm_up_rises_in_a_line(shape, expected):
    settings = {"learning_rate": 2.0, "learning_rate_shape": shape}
    assert schedule(4, **settings)[0] == pytest.approx(expected, rel=1e-12)
    plain, warmed = schedule(10, **settings)[0], schedule(10, warmup_steps=4, **settings)[0]
    expected = [share * rate for share, rate in zip(SHARES, plain, strict=True)]
    assert warmed == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("anneal_fraction", "expected"), [(0.4, [100, 80, 60, 40, 20, 20]), (0.0, [20] * 6)]
)
def test_hard_examples_fall_in_a_line(anneal_fraction, expected):
    found = schedule(10, learning_rate=1.0, anneal_fraction=anneal_fraction)[1]
    assert found[:6] == expected
