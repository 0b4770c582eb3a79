"""The model of a run folder, written by any number of ranks, read by any other."""

import shutil
import types

import pytest
import safetensors.torch
import torch
from rich.console import Console

from evenhand import saved_models
from evenhand.build import build_model
from evenhand.data import save_dataset
from evenhand.distributed.shards import Shards
from evenhand.errors import UserError
from evenhand.files import read_json, write_json
from evenhand.models.encoders import RowRange
from evenhand.runs import begin_run, evaluate_run, is_trained
from evenhand.saved_models import load_model, save_model, split_names, weights_folder
from experiments.simulated_ranks import run_ranks
from small import config, dense_dataset, text_dataset
from split import TABLES, rank_model

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
        assert_equal(
            load_model(run, dataset, device=CPU, ranks=ranks),
            rank_model(model, ranks),
        )

    run_ranks(num_ranks, load)


def test_some_rows_are_read_in_any_type_and_the_sizes_are_enough(tmp_path):
    run, dataset, make = begun_run(tmp_path, text_dataset(), **DOT)
    model = make(1)
    save_by(3, run, model)
    sizes = types.SimpleNamespace(num_features=512, num_labels=60, is_sparse=True)
    assert all(getattr(dataset, name) == size for name, size in vars(sizes).items())
    part = load_model(
        run,
        sizes,
        device=CPU,
        dtype=torch.bfloat16,
        label_rows=RowRange(17, 45),
        feature_rows=RowRange(500, 500),
    )
    assert torch.equal(part.label_table, model.label_table[17:45].bfloat16())
    assert torch.equal(part.label_bias, model.label_bias[17:45])
    assert part.encoder.weight.shape == (0, 8)


# --- weights as version 0.1.0 wrote them ----------------------------------------------------------


def save_as_before(folder, model, num_ranks):
    """One file; or files of ranks, and an index that names their folder."""
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if num_ranks == 0:
        folder.mkdir()
        safetensors.torch.save_file(state, folder / "weights.safetensors")
        return
    (folder / "shards-3").mkdir(parents=True)
    split = set(split_names(model))
    for rank in range(num_ranks):
        own = {
            name: tensor[slice(*Shards(len(tensor), num_ranks).rows_of(rank))].clone()
            if name in split
            else tensor
            for name, tensor in state.items()
            if name in split or rank == 0
        }
        name = f"weights-{rank + 1:05d}-of-{num_ranks:05d}.safetensors"
        safetensors.torch.save_file(own, folder / "shards-3" / name)
    (folder / "weights.index.json").write_text('{"version": 1, "folder": "shards-3"}')


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saved_by", [0, 2, 7])
def test_weights_of_the_version_before_are_loaded_and_make_way_for_new_ones(
    tmp_path, kind, saved_by
):
    make_dataset, changes = KINDS[kind]
    run, dataset, make = begun_run(tmp_path, make_dataset(), **changes)
    save_as_before(run / "model", make(1), saved_by)
    assert_equal(load_model(run, dataset, device=CPU), make(1))
    assert_ranks_load(3, run, dataset, make(1))
    save_model(run, make(2))
    assert_equal(load_model(run, dataset, device=CPU), make(2))


OLD_DAMAGES = [
    ("weights.index.json", "[]", "does not name a folder"),
    ("weights.index.json", '{"folder": "../other"}', "does not name a folder"),
    ("weights.index.json", "{", "weights.index.json is damaged"),
    ("shards-3/weights-00002-of-00002.safetensors", "short", "weights-00002.* is damaged"),
    ("shards-3/weights-00002-of-00002.safetensors", None, r"does not fit .*\(30, 8\).*\(60, 8\)"),
]


@pytest.mark.parametrize(("name", "text", "words"), OLD_DAMAGES)
def test_damaged_weights_of_the_version_before_are_one_sentence(tmp_path, name, text, words):
    run, dataset, make = begun_run(tmp_path, dense_dataset())
    save_as_before(run / "model", make(1), 2)
    (run / "model" / name).unlink()
    if text is not None:
        (run / "model" / name).write_text(text)
    with pytest.raises(UserError, match=words):
        load_model(run, dataset, device=CPU)


# --- bad input ------------------------------------------------------------------------------------


def test_a_damaged_file_is_named_with_what_to_do(tmp_path):
    run, dataset, make = begun_run(tmp_path, text_dataset())
    save_by(2, run, make(0))
    path = weights_folder(run) / "rank-1-file-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"model/weights is damaged \(rank-1-file-0.* restore it"):
        load_model(run, dataset, device=CPU)
    rows = {"label_rows": RowRange(0, 30), "feature_rows": RowRange(0, 256)}
    load_model(run, dataset, device=CPU, **rows)  # the other file is not looked at
    path.with_name("manifest.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"model/weights is damaged.* \(manifest\.json.* restore it"
    ):
        load_model(run, dataset, device=CPU)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model__embedding_dim": 9}, r"label_table is \(60, 9\), and must be \(60, 8\)|encoder"),
        (DOT, r"label_bias is \(60, 1\), and must be not there"),
    ],
)
def test_a_model_of_other_settings_is_one_sentence(tmp_path, change, words):
    run, dataset, _ = begun_run(tmp_path, text_dataset())
    save_model(run, build_model(config("none", **change), 512, 60, is_sparse=True))
    with pytest.raises(UserError, match=f"does not fit this run's settings.*({words})"):
        load_model(run, dataset, device=CPU)


def test_weights_that_are_no_numbers_are_refused(tmp_path):
    run, dataset, make = begun_run(tmp_path, text_dataset())
    model = make(1)
    model.label_table.data[-1, -1] = float("nan")
    save_model(run, model)
    with pytest.raises(UserError, match="label_table holds a number that is not finite"):
        load_model(run, dataset, device=CPU)


def test_a_model_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    run, dataset, make = begun_run(tmp_path, text_dataset())
    save_model(run, make(1))
    fill = saved_models.fill_model

    def fill_late(*arguments, **options):
        monkeypatch.undo()
        save_model(run, make(2))
        fill(*arguments, **options)

    monkeypatch.setattr(saved_models, "fill_model", fill_late)
    assert_equal(load_model(run, dataset, device=CPU), make(2))


# --- runs -----------------------------------------------------------------------------------------


def test_a_run_is_evaluated_by_more_ranks_than_rows_and_written_once(tmp_path):
    run, dataset, make = begun_run(tmp_path, text_dataset(), **DOT)
    how = {"device": CPU, "console": Console(quiet=True)}
    save_by(2, run, make(1))
    expected = evaluate_run(run, dataset, "test", **how)
    assert expected
    one = (run / "evaluation/test/scores.json").read_bytes()
    for num_ranks in (3, 32):  # the last two of 32 have no label
        shutil.rmtree(run / "evaluation")
        for scores in run_ranks(
            num_ranks, lambda ranks: evaluate_run(run, dataset, "test", **how, ranks=ranks)
        ):
            assert scores == expected
        assert (run / "evaluation/test/scores.json").read_bytes() == one


def test_a_run_with_a_model_counts_as_trained(tmp_path):
    run, _, make = begun_run(tmp_path, text_dataset())
    write_json(run / "run.json", read_json(run / "run.json") | {"best_step": 3})
    assert not is_trained(run)
    save_by(2, run, make(1))
    assert is_trained(run)
    assert set(TABLES) >= set(split_names(make(1)))
