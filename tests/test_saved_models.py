"""The model of a run folder, written by any number of ranks, read by any other."""

import pytest
import torch

from evenhand.build import build_model
from evenhand.data import save_dataset
from evenhand.errors import UserError
from evenhand.run_folder import load_model, save_model, split_names
from evenhand.runs import begin_run
from ranks import run_ranks
from small import config, dense_dataset, text_dataset
from split_training import TABLES, rank_model

CPU = torch.device("cpu")
DOT = {"model__similarity": "dot", "model__label_bias": True, "loss__name": "softmax"}
KINDS = {
    "bags": (text_dataset, {}),
    "bags with a bias": (text_dataset, DOT),
    "dense": (dense_dataset, {}),
}


def begun_run(tmp_path, dataset, **changes):
    """A run folder without a model, its data, and a function that makes models."""
    dataset = save_dataset(dataset, tmp_path / "data")
    settings = config(tmp_path / "data", **changes)
    begin_run(tmp_path / "run", settings, dataset, device=CPU)

    def make(seed):
        sizes = dataset.num_features, dataset.num_labels
        model = build_model(settings, *sizes, is_sparse=dataset.is_sparse)
        for index, weights in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * seed + index)
            weights.data = torch.randn(weights.shape, generator=generator)
        return model

    return tmp_path / "run", dataset, make


def save_by(num_ranks, run, model):
    """Saved by so many ranks; 0: by one process without ranks."""
    if num_ranks == 0:
        save_model(run, model)
    else:
        run_ranks(num_ranks, lambda ranks: save_model(run, rank_model(model, ranks), ranks=ranks))


def assert_equal(found, expected):
    ours, theirs = found.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_ranks_reads_what_any_other_wrote(tmp_path, kind):
    make_dataset, changes = KINDS[kind]
    run, dataset, make = begun_run(tmp_path, make_dataset(), **changes)
    assert set(split_names(make(0))) <= set(TABLES)
    with pytest.raises(UserError, match="holds no trained model yet"):
        load_model(run, dataset, device=CPU)
    for seed, saved_by in enumerate((0, 2, 3, 7, 0)):
        model = make(seed)
        save_by(saved_by, run, model)
        assert [path.name for path in (run / "model").iterdir()] == ["weights"]
        assert_equal(load_model(run, dataset, device=CPU), model)
        for read_by in (1, 2, 31):
            assert_ranks_load(read_by, run, dataset, model)


def assert_ranks_load(num_ranks, run, dataset, model):
    def load(ranks):
        assert_equal(load_model(run, dataset, device=CPU, ranks=ranks), rank_model(model, ranks))

    run_ranks(num_ranks, load)


def test_weights_of_version_0_1_are_refused_and_make_way_for_new_ones(tmp_path):
    run, dataset, make = begun_run(tmp_path, text_dataset(), **DOT)
    old = run / "model/weights.safetensors"
    old.parent.mkdir()
    old.touch()
    with pytest.raises(UserError, match=r"trained by version 0\.1\.0, whose weights are no longer"):
        load_model(run, dataset, device=CPU)
    save_model(run, make(2))
    assert_equal(load_model(run, dataset, device=CPU), make(2))


def test_weights_of_other_settings_or_that_are_no_numbers_are_refused(tmp_path):
    run, dataset, make = begun_run(tmp_path, text_dataset())
    wide, biased = (
        build_model(config("none", **changes), 512, 60, is_sparse=True)
        for changes in ({"model__embedding_dim": 9}, DOT)
    )
    spoilt = make(1)
    spoilt.label_table.data[-1, -1] = float("nan")
    for model, message in (
        (
            wide,
            r"not fit this run's settings.*encoder.weight is \(512, 9\), and must be \(512, 8\)",
        ),
        (biased, r"not fit this run's settings.*label_bias is \(60, 1\), and must be not there"),
        (spoilt, "label_table holds a number that is not finite"),
    ):
        save_model(run, model)
        with pytest.raises(UserError, match=message):
            load_model(run, dataset, device=CPU)
