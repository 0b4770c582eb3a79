"""Steps of several ranks against those of one process."""

import pytest
import torch
from small import config, dense_dataset, text_dataset
from split import joined, split_training, tables_of, trained, whole_training

from evenhand.distributed.simulated import run_ranks
from evenhand.training.loop import pace_at, train_step

NUM_STEPS = 50
CASES = {
    "s2m": {},
    "s2m, the paper's mask": {"mining__masks_all_positives": False},
    "snm": {"mining__method": "snm"},
    "sgd": {"mining__method": "sgd"},
    "topk-sgd": {"mining__method": "topk-sgd"},
    "annealed": {"mining__method": "s2m-annealed"},
    "cvar": {"mining__method": "cvar"},
    "chi-square": {"mining__method": "chi-square"},
    "stochastic-max": {"mining__method": "stochastic-max"},
    "group-dro": {"mining__method": "group-dro", "risk__group": "style"},
    "one hard example": {"mining__num_hard_examples": 1},
    "a sample each": {"mining__for_each_example": True},
    "in-batch": {"mining__sampler": "in-batch"},
    "mixed": {"mining__sampler": "mixed"},
    "frequency": {"mining__sampler": "frequency"},
    "softmax, log q, bias": {
        "loss__name": "softmax",
        "loss__log_q": True,
        "model__similarity": "dot",
        "model__label_bias": True,
    },
    "clipped": {"training__max_gradient_norm": 0.05},
    "adagrad": {"training__optimizer": "row-adagrad"},
}


def trained_alone(settings, dataset, *, dtype):
    built = whole_training(settings, dataset, dtype=dtype)
    training = built.training

    def step():
        learning_rate, num_hard_examples = pace_at(training, built.plan)
        return train_step(
            training,
            built.plan,
            sampler=built.sampler,
            loss_fn=built.loss_fn,
            learning_rate=learning_rate,
            num_hard_examples=num_hard_examples,
        )

    return trained(training, step, NUM_STEPS), tables_of(training)


def trained_by_ranks(settings, dataset, num_ranks, *, dtype):
    def rank_fn(ranks):
        training, step = split_training(settings, dataset, ranks, dtype=dtype)
        figures = trained(training, step, NUM_STEPS)
        return figures, tables_of(training)

    results = run_ranks(num_ranks, rank_fn)
    figures, _ = results[0]
    assert all(torch.equal(figures, others) for others, _ in results)
    return figures, [tables for _, tables in results]


def assert_equal(settings, dataset, num_ranks, *, dtype, tolerance):
    figures, tables = trained_alone(settings, dataset, dtype=dtype)
    split_figures, parts = trained_by_ranks(settings, dataset, num_ranks, dtype=dtype)
    assert split_figures.dtype == dtype
    torch.testing.assert_close(split_figures, figures, rtol=tolerance, atol=tolerance)
    for name, tensor in joined(parts, tables).items():
        torch.testing.assert_close(tensor, tables[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_ranks_do_what_one_process_does(case, num_ranks):
    settings = config("none", **CASES[case])
    assert_equal(settings, text_dataset(), num_ranks, dtype=torch.float64, tolerance=1e-10)
