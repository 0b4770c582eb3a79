"""Steps of several ranks against those of one process."""

import pytest
import torch

from ranks import run_ranks
from small import config, dense_dataset, tagged_dataset, text_dataset
from split_training import joined, tables_of, take_steps, whole_training

CASES = {
    "s2m": {},
    "s2m, the paper's mask": {"mining__masks_all_positives": False},
    "snm": {"mining__method": "snm"},
    "sgd": {"mining__method": "sgd"},
    "topk-sgd": {"mining__method": "topk-sgd"},
    "annealed": {"mining__method": "s2m-annealed"},
    "cvar": {"mining__method": "cvar"},
    "group-dro": {"mining__method": "group-dro", "risk__group": "style"},
    "even": {"mining__method": "s2m-even", "risk__held_out_share": 0.3},
    "even, by group": {
        "mining__method": "s2m-even",
        "risk__held_out_share": 0.3,
        "risk__group": "style",
        "mining__anneal_fraction": 0.0,
    },
    "one hard example": {"mining__num_hard_examples": 1},
    "a sample each": {"mining__for_each_example": True},
    "in-batch": {"mining__sampler": "in-batch"},
    "mixed": {"mining__sampler": "mixed", "mining__in_batch_share": 0.9},
    "frequency": {"mining__sampler": "frequency"},
    "softmax, log q, bias": {
        "loss__name": "softmax",
        "loss__log_q": True,
        "model__similarity": "dot",
        "model__label_bias": True,
    },
    "whole queries": {"mining__whole_queries": True},
    "whole queries, sgd": {"mining__whole_queries": True, "mining__method": "sgd"},
    "clipped": {"training__max_gradient_norm": 0.05},
    "adagrad": {"training__optimizer": "row-adagrad"},
}


def trained_alone(settings, dataset, *, num_steps, dtype):
    built = whole_training(settings, dataset, dtype=dtype)
    return take_steps(built, num_steps), tables_of(built.training)


def trained_by_ranks(settings, dataset, num_ranks, *, num_steps, dtype):
    def rank_fn(ranks):
        built = whole_training(settings, dataset, dtype=dtype, ranks=ranks)
        return take_steps(built, num_steps), tables_of(built.training)

    results = run_ranks(num_ranks, rank_fn)
    figures, _ = results[0]
    assert all(torch.equal(figures, others) for others, _ in results)
    return figures, [tables for _, tables in results]


def assert_equal(settings, dataset, num_ranks, *, num_steps, dtype=torch.float64):
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    how = {"num_steps": num_steps, "dtype": dtype}
    figures, tables = trained_alone(settings, dataset, **how)
    split_figures, parts = trained_by_ranks(settings, dataset, num_ranks, **how)
    assert split_figures.dtype == dtype
    torch.testing.assert_close(split_figures, figures, rtol=tolerance, atol=tolerance)
    for name, tensor in joined(parts, tables).items():
        torch.testing.assert_close(tensor, tables[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_ranks_do_what_one_process_does(case):
    assert_equal(config("none", **CASES[case]), text_dataset(), 3, num_steps=8)


@pytest.mark.parametrize(("num_ranks", "dtype"), [(2, torch.float32), (4, torch.float64)])
def test_they_do_so_for_50_steps(num_ranks, dtype):
    assert_equal(config("none"), text_dataset(), num_ranks, num_steps=50, dtype=dtype)


def test_examples_in_several_groups_are_weighed_by_all_ranks_alike():
    settings = config("none", mining__method="group-dro", risk__group="tag", risk__step_size=1.0)
    assert_equal(settings, tagged_dataset(), 3, num_steps=8)


def test_dense_encoders_are_replicated():
    settings = config("none", model__hidden_widths=(8,), training__max_gradient_norm=0.05)
    assert_equal(settings, dense_dataset(), 3, num_steps=8)


def test_ranks_without_a_row_or_a_survivor_take_part():
    settings = config("none", mining__num_hard_examples=1)
    assert_equal(settings, text_dataset(), 7, num_steps=4)
