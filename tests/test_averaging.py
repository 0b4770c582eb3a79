"""The mean of several models' scores, as one model and as one run."""

import pytest
import torch

from evenhand.ensemble import average_models, average_runs
from evenhand.errors import UserError
from evenhand.files import write_json
from evenhand.models import BagEncoder, Bags, Retriever
from evenhand.run_folder import read_about
from evenhand.runs import load_searcher, ranker_path
from small import dense_dataset, run_main
from test_searcher import RANKER, VOTES, config_of, trained

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


@pytest.mark.parametrize("ranker", [{}, RANKER], ids=["no ranker", "ranker"])
def test_runs_become_a_run_that_can_be_evaluated_and_compared(tmp_path, capsys, ranker):
    """Where the runs have a ranker, the average has one of its own."""
    changes = [{"training__seed": 1}, {"training__seed": 2}, {"model__scale": 3.0},
               {"ranker__weight": 13.0}]  # fmt: skip
    configs = [config_of(tmp_path / "data", **VOTES, **ranker, **of) for of in changes]
    one, two, scaled, reweighted = (
        trained(tmp_path, config=config, name=str(n))[0] for n, config in enumerate(configs)
    )
    for run, seconds in ((one, 2.5), (two, 4.0)):
        write_json(run / "run.json", read_about(run) | {"training_seconds": seconds})
    out = tmp_path / "both"
    for words in (
        ("average", one, two, "--run", out),
        ("evaluate", out),
        ("evaluate", one),
        ("compare", one, out),
    ):
        assert run_main(capsys, *words).output
    assert read_about(out)["training_seconds"] == 2.5 + 4.0
    assert load_searcher(out, device=torch.device("cpu")).model.label_table.shape[1] == 16
    assert ("ranker_seconds" in read_about(out)) == ranker_path(out).exists() == bool(ranker)
    if ranker:
        assert len({ranker_path(run).read_bytes() for run in (one, two, out)}) == 3
    for words, sentence in (
        ((one, two, "--run", out), "exists already"),
        ((one, "--run", tmp_path / "none"), "two runs or more"),
        ((one, scaled, "--run", tmp_path / "none"), "model.scale"),
        ((one, reweighted, "--run", tmp_path / "none"), "differ in their [ranker] settings"),
    ):
        assert sentence in run_main(capsys, "average", *words).sentence
