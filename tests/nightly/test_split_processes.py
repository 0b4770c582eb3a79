"""Two processes, joined by gloo, save a model and evaluate it. Run as a script: one of them."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from evenhand.build import build_model
from evenhand.data import open_dataset, save_dataset
from evenhand.evaluation import load_outcome, save_outcome
from evenhand.runs import begin_run, evaluate_model
from evenhand.saved_models import load_model, run_config, save_model
from small import ENVIRONMENT, config, text_dataset
from split import rank_model

CPU = torch.device("cpu")
NUM_RANKS = 2


def some_model(settings):
    model = build_model(settings, 512, 60, is_sparse=True)
    model.label_bias.data.normal_(generator=torch.Generator().manual_seed(4))
    return model


def be_a_rank(rank, folder):
    """Saves its rows of the model, loads them again, evaluates them with the others."""
    import torch.distributed as dist

    from evenhand.distributed.ranks import ProcessRanks

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=NUM_RANKS
    )
    ranks, run = ProcessRanks(), folder / "run"
    settings, dataset = run_config(run), open_dataset(folder / "data")
    save_model(run, rank_model(some_model(settings), ranks), ranks=ranks)
    model = load_model(run, dataset, device=CPU, ranks=ranks)
    outcome = evaluate_model(model, dataset, "test", settings, ranks=ranks)
    save_outcome(outcome, folder / f"outcome-{rank}")
    dist.barrier()
    dist.destroy_process_group()


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
    words = [sys.executable, __file__]
    children = [
        subprocess.Popen(
            [*words, str(rank), str(tmp_path)], env={**ENVIRONMENT, "PYTHONWARNINGS": "default"}
        )
        for rank in range(NUM_RANKS)
    ]
    try:
        assert [child.wait(timeout=100) for child in children] == [0] * NUM_RANKS
    finally:
        for child in children:
            child.kill()
            child.wait()
    expected = evaluate_model(some_model(settings), dataset, "test", settings)
    for rank in range(NUM_RANKS):
        outcome = load_outcome(tmp_path / f"outcome-{rank}")
        np.testing.assert_array_equal(outcome.retrieved_ids, expected.retrieved_ids)
        np.testing.assert_array_equal(outcome.ranks, expected.ranks)
        np.testing.assert_allclose(outcome.scores, expected.scores, rtol=1e-5)
    whole = load_model(tmp_path / "run", dataset, device=CPU).state_dict()
    for name, tensor in some_model(settings).state_dict().items():
        assert torch.equal(whole[name], tensor)


if __name__ == "__main__":
    be_a_rank(int(sys.argv[1]), Path(sys.argv[2]))
