"""Two processes, joined by gloo, save a model and evaluate it as one process does."""

import numpy as np
import pytest
import torch

from evenhand.build import build_model
from evenhand.data import open_dataset, save_dataset
from evenhand.evaluation import load_outcome, save_outcome
from evenhand.run_folder import load_model, run_config, save_model
from evenhand.runs import begin_run, evaluate_model
from ranks import exit_codes
from small import config, text_dataset
from split_training import rank_model

CPU = torch.device("cpu")


def some_model(settings):
    model = build_model(settings, 512, 60, is_sparse=True)
    model.label_bias.data.normal_(generator=torch.Generator().manual_seed(4))
    return model


def save_load_and_evaluate(ranks, folder):
    run, dataset = folder / "run", open_dataset(folder / "data")
    settings = run_config(run)
    save_model(run, rank_model(some_model(settings), ranks), ranks=ranks)
    model = load_model(run, dataset, device=CPU, ranks=ranks)
    outcome = evaluate_model(model, dataset, "test", settings, ranks=ranks)
    save_outcome(outcome, folder / f"outcome-{ranks.rank}")


@pytest.mark.timeout(120)
def test_processes_save_and_evaluate_as_one_process_does(tmp_path):
    dataset = save_dataset(text_dataset(), tmp_path / "data")
    settings = config(
        tmp_path / "data",
        model__similarity="dot",
        model__label_bias=True,
        loss__name="softmax",
        search__frequency_discount=0.1,
    )
    begin_run(tmp_path / "run", settings, dataset, device=CPU)
    assert exit_codes(2, tmp_path, save_load_and_evaluate, tmp_path) == [0, 0]
    expected = evaluate_model(some_model(settings), dataset, "test", settings)
    for rank in range(2):
        outcome = load_outcome(tmp_path / f"outcome-{rank}")
        np.testing.assert_array_equal(outcome.retrieved_ids, expected.retrieved_ids)
        np.testing.assert_array_equal(outcome.ranks, expected.ranks)
        np.testing.assert_allclose(outcome.scores, expected.scores, rtol=1e-5)
    whole = load_model(tmp_path / "run", dataset, device=CPU).state_dict()
    for name, tensor in some_model(settings).state_dict().items():
        assert torch.equal(whole[name], tensor)
