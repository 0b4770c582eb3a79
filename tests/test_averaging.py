"""The mean of several models' scores, as one model and as one run."""

from pathlib import Path

import pytest
import torch

from evenhand.cli import main
from evenhand.data import save_dataset
from evenhand.ensemble import average_models, average_runs
from evenhand.errors import UserError
from evenhand.files import write_json
from evenhand.models import BagEncoder, Bags, Retriever
from evenhand.run_folder import read_about
from experiments.table3 import fixture
from small import dense_dataset

BAGS = Bags(torch.tensor([0, 2, 1]), torch.tensor([0, 2, 3]), torch.tensor([1.0, 0.5, 2.0]))


def model(seed, *, width=4):
    generator = torch.Generator().manual_seed(seed)
    encoder = BagEncoder(3, width, generator=generator)
    made = Retriever(
        encoder, 5, width, scale=2.0, is_cosine=False, has_label_bias=True, generator=generator
    )
    made.label_bias.data = torch.randn(5, 1, generator=generator)
    return made


def scores(retriever):
    return retriever.query_vectors(BAGS) @ retriever.label_vectors().T + retriever.biases()


def test_scores_are_the_mean_of_the_scores():
    models = [model(1), model(2, width=3), model(3)]
    expected = sum(scores(one) for one in models) / 3
    torch.testing.assert_close(scores(average_models(models)), expected)


def test_runs_on_dense_features_are_refused(tmp_path):
    with pytest.raises(UserError, match="only runs on sparse features"):
        average_runs([tmp_path] * 2, tmp_path / "out", dense_dataset(), console=None)


def trained(tmp_path, name, *more):
    settings = [
        "model.similarity=dot", "model.label_bias=true", "model.embedding_dim=8",
        "loss.name=softmax",
        "mining.batch_size=64", "mining.num_sampled_labels=32", "mining.num_hard_labels=8",
        "mining.num_hard_examples=32", "search.num_neighbours=5", "data.weighting=tf-idf", *more,
    ]  # fmt: skip
    folder = tmp_path / name
    flags = [word for setting in settings for word in ("--set", setting)]
    command = ["train", "--data", str(tmp_path / "data"), "--run", str(folder), "--steps", "3"]
    assert main([*command, *flags]) == 0
    return str(folder)


def test_runs_become_a_run_that_can_be_evaluated_and_compared(tmp_path, capsys):
    save_dataset(fixture(), tmp_path / "data")
    runs = [trained(tmp_path, f"run{seed}", f"training.seed={seed}") for seed in (1, 2)]
    for run, seconds in zip(runs, (2.5, 4.0), strict=True):
        write_json(Path(run, "run.json"), read_about(Path(run)) | {"training_seconds": seconds})
    out = str(tmp_path / "both")
    assert main(["average", *runs, "--run", out]) == 0
    assert read_about(Path(out))["training_seconds"] == 2.5 + 4.0
    assert main(["evaluate", out, "--part", "validation"]) == 0
    assert main(["compare", runs[0], out]) == 0
    capsys.readouterr()
    assert main(["average", *runs, "--run", out]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["average", runs[0], "--run", str(tmp_path / "one")]) == 2
    assert "two runs or more" in capsys.readouterr().err
    other = trained(tmp_path, "other", "model.scale=3.0")
    assert main(["average", runs[0], other, "--run", str(tmp_path / "third")]) == 2
    assert "model.scale" in capsys.readouterr().err
