"""Models on disk, written by any number of ranks, read by any other, killed at any moment."""

import copy
import errno
import json
import os
import shutil
import threading

import pytest
import safetensors
import torch
from rich.console import Console

from evenhand.building import build_model
from evenhand.data import Rows, save_dataset
from evenhand.distributed import weights as files
from evenhand.distributed.shards import Shards
from evenhand.errors import UserError
from evenhand.files import read_json, write_json
from evenhand.models.initial import RowRange
from evenhand.runs import begin_run, evaluate_model, evaluate_run, is_trained
from evenhand.saved_models import load_model, load_model_shard, save_model
from experiments.simulated_ranks import run_ranks
from small import config, dense_dataset, text_dataset
from split import TABLES, rank_model

CPU = torch.device("cpu")
DOT = {"model__similarity": "dot", "model__label_bias": True, "loss__name": "softmax"}


@pytest.fixture(params=["bags", "bags with a bias", "dense"])
def begun(request, tmp_path):
    """A run folder without a model, its data, and a function that makes models."""
    dataset = dense_dataset() if request.param == "dense" else text_dataset()
    return begun_run(tmp_path, dataset, **(DOT if "bias" in request.param else {}))


def begun_run(tmp_path, dataset, **changes):
    dataset = save_dataset(dataset, tmp_path / "data")
    settings = config(tmp_path / "data", **changes)
    begin_run(tmp_path / "run", settings, dataset, device=CPU)

    def make(seed):
        is_sparse = isinstance(dataset.parts["train"].features, Rows)
        model = build_model(settings, dataset.num_features, dataset.num_labels, is_sparse=is_sparse)
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


@pytest.mark.parametrize("saved_by", [0, 1, 2, 3, 7])
def test_any_number_of_ranks_reads_what_any_other_wrote(begun, saved_by):
    run, dataset, make = begun
    model = make(1)
    save_by(saved_by, run, model)
    assert_equal(load_model(run, dataset, device=CPU), model)
    for read_by in (1, 2, 3, 7, 31):
        for part in run_ranks(
            read_by,
            lambda ranks: (
                load_model(run, dataset, device=CPU, ranks=ranks),
                rank_model(model, ranks),
            ),
        ):
            assert_equal(*part)


def test_any_range_of_rows_is_read_in_any_type(tmp_path):
    run, dataset, make = begun_run(tmp_path, text_dataset(), **DOT)
    model = make(1)
    save_by(3, run, model)
    part = load_model_shard(
        run,
        dataset,
        device=CPU,
        dtype=torch.bfloat16,
        label_rows=RowRange(17, 45),
        feature_rows=RowRange(500, 500),
    )
    assert torch.equal(part.label_table, model.label_table[17:45].bfloat16())
    assert torch.equal(part.label_bias, model.label_bias[17:45])
    assert part.encoder.weight.shape == (0, 8)


def test_the_files_are_those_the_index_names(tmp_path):
    run, _, make = begun_run(tmp_path, dense_dataset())
    save_by(2, run, make(1))
    index = json.loads((run / "model/weights.index.json").read_text())
    assert index["folder"] == "shards-1"
    names = ["weights-00001-of-00002.safetensors", "weights-00002-of-00002.safetensors"]
    assert [file["name"] for file in index["files"]] == names
    assert index["files"][1]["rows"] == {"label_table": [30, 60]}
    with safetensors.safe_open(run / "model/shards-1" / names[1], framework="pt") as file:
        assert file.metadata() == {"label_table": "rows 30 to 60"}
        assert list(file.keys()) == ["label_table"]
    with safetensors.safe_open(run / "model/shards-1" / names[0], framework="pt") as file:
        assert "encoder.layers.0.weight" in file.keys()  # noqa: SIM118


@pytest.mark.parametrize("order", [(2, 2), (2, 3), (3, 2), (0, 2), (2, 0), (0, 0), (7, 1)])
def test_a_new_model_takes_the_place_of_the_old_one(tmp_path, order):
    run, dataset, make = begun_run(tmp_path, text_dataset())
    for seed, num_ranks in enumerate(order):
        save_by(num_ranks, run, make(seed))
    assert_equal(load_model(run, dataset, device=CPU), make(1))
    left = sorted(str(path.relative_to(run / "model")) for path in (run / "model").rglob("*"))
    if order[1] == 0:
        assert left == ["weights.safetensors"]
    else:
        assert len(left) == 2 + order[1]  # index, folder, files
        assert not [name for name in left if "partial" in name]


# --- kills ----------------------------------------------------------------------------------------


class KilledError(BaseException):
    pass


class Power:
    """Goes off at the n-th thing that is done to the disk, and then nothing more is done to it."""

    def __init__(self, patch, *, last):
        self.count, self.last, self.lock = 0, last, threading.Lock()
        for module, name in [
            (files, "write_weights"),
            (os, "replace"),
            (os, "unlink"),
            (os, "rmdir"),
            (os, "mkdir"),
            (os, "fsync"),
        ]:
            patch.setattr(module, name, self._counted(getattr(module, name), name))

    def _counted(self, function, name):
        def counted(*arguments, **others):
            with self.lock:
                self.count += 1
                if self.count > self.last:
                    if self.count == self.last + 1 and name == "write_weights":
                        function(*arguments, **others)
                        os.truncate(arguments[0], 100)  # half of it is there
                    raise KilledError
            return function(*arguments, **others)

        return counted


SCENES = [(0, 2), (2, 2), (3, 2), (2, 3), (2, 0), (0, 0), (None, 2)]


@pytest.mark.parametrize(("before", "after"), SCENES)
def test_a_kill_at_any_moment_leaves_the_old_model_or_the_new_one(tmp_path, before, after):
    run, dataset, make = begun_run(tmp_path, text_dataset())
    old, new, later = make(0), make(1), make(2)
    if before is not None:
        save_by(before, run, old)
    shutil.copytree(run, tmp_path / "kept")
    seen = set()
    for last in range(200):
        shutil.rmtree(run)
        shutil.copytree(tmp_path / "kept", run)
        with pytest.MonkeyPatch.context() as patch:
            power = Power(patch, last=last)
            try:
                save_by(after, run, new)
                is_killed = power.count > last  # a removal that failed is not an error
            except KilledError:
                is_killed = True
        if not is_killed:
            break
        if before is None and not files.has_weights(run / "model"):
            seen.add("none")
        else:
            found = load_model(run, dataset, device=CPU)
            is_new = torch.equal(found.label_table, new.label_table)
            seen.add("new" if is_new else "old")
            assert_equal(found, new if is_new else old)
        save_by(after, run, later)  # and the next saving goes well, and clears up
        assert_equal(load_model(run, dataset, device=CPU), later)
        assert not list(run.rglob("*.partial"))
        assert len(list((run / "model").iterdir())) == (1 if after == 0 else 2)
    else:
        pytest.fail("there were always more things to do")
    assert last >= 2
    if (before, after) != (0, 0):  # there only the folder is synced after the new one is named
        assert "new" in seen
    assert ("none" if before is None else "old") in seen


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_cannot_write_is_named_by_the_others(tmp_path, monkeypatch, rank):
    run, dataset, make = begun_run(tmp_path, text_dataset())
    save_by(2, run, make(0))
    whole = files.write_weights

    def write(path, tensors, **others):
        if f"{rank + 1:05d}-of" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(path, tensors, **others)

    monkeypatch.setattr(files, "write_weights", write)
    said = {}

    def rank_fn(ranks):
        with pytest.raises(UserError) as caught:
            save_model(run, rank_model(make(1), ranks), ranks=ranks)
        said[ranks.rank] = str(caught.value)

    run_ranks(3, rank_fn)
    assert "No space left" in said.pop(rank)
    assert all(f"rank {rank} could not write its part" in text for text in said.values())
    monkeypatch.undo()
    assert_equal(load_model(run, dataset, device=CPU), make(0))
    save_by(3, run, make(2))
    assert_equal(load_model(run, dataset, device=CPU), make(2))
    assert len(list((run / "model").iterdir())) == 2


# --- bad input ------------------------------------------------------------------------------------


def changed(index, **changes):
    return {**index, **changes}


def with_file(index, number, **changes):
    index = copy.deepcopy(index)
    index["files"][number] |= changes
    return index


DAMAGED = {
    "another version": (lambda index: changed(index, version=2), "format version 2"),
    "not a dictionary": (lambda index: [], "damaged"),
    "no files": (lambda index: changed(index, files=[]), "it holds , not"),
    "a path outside": (lambda index: changed(index, folder="../../other"), "not one of ours"),
    "a file outside": (lambda index: with_file(index, 0, name="../a.safetensors"), "not one of"),
    "rows missing": (lambda index: changed(index, files=index["files"][1:]), "missing or doubled"),
    "rows of another kind": (lambda index: with_file(index, 0, rows=[1, 2]), "damaged"),
    "rows doubled": (lambda index: changed(index, files=[index["files"][0]] * 2), "doubled"),
    "wrong rows": (
        lambda index: with_file(
            index, 1, rows=index["files"][1]["rows"] | {"label_table": [30, 61]}
        ),
        "61 rows there, not 60",
    ),
    "a number as a folder": (lambda index: changed(index, folder=3), "damaged"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_index_is_one_sentence(tmp_path, case):
    run, dataset, make = begun_run(tmp_path, text_dataset())
    save_by(2, run, make(0))
    path = run / "model/weights.index.json"
    change_fn, words = DAMAGED[case]
    path.write_text(json.dumps(change_fn(json.loads(path.read_text()))))
    with pytest.raises(UserError, match=words) as caught:
        load_model(run, dataset, device=CPU)
    assert str(path) in str(caught.value)
    save_by(2, run, make(1))  # and does not stand in the way of a new one
    assert_equal(load_model(run, dataset, device=CPU), make(1))


def test_missing_and_damaged_files_are_one_sentence(tmp_path):
    run, dataset, make = begun_run(tmp_path, text_dataset())
    with pytest.raises(UserError, match="holds no trained model yet"):
        load_model(run, dataset, device=CPU)
    save_by(2, run, make(0))
    path = run / "model/shards-1/weights-00002-of-00002.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(UserError, match=r"does not fit.*weights-00002-of-00002.safetensors"):
        load_model(run, dataset, device=CPU)
    path.unlink()
    with pytest.raises(UserError, match=r"weights-00002-of-00002.safetensors cannot be read"):
        load_model(run, dataset, device=CPU)
    rows = Shards(60, 2).rows_of(0)
    load_model_shard(  # the other file is not looked at
        run, dataset, device=CPU, label_rows=rows, feature_rows=Shards(512, 2).rows_of(0)
    )


def test_tables_of_another_width_are_one_sentence(tmp_path):
    run, dataset, _ = begun_run(tmp_path, text_dataset())
    other = build_model(config("none", model__embedding_dim=9), 512, 60, is_sparse=True)
    for num_ranks in (0, 2):
        save_by(num_ranks, run, other)
        with pytest.raises(UserError, match="does not fit this run's settings"):
            load_model(run, dataset, device=CPU)


def test_more_ranks_than_rows_evaluate_what_two_saved(tmp_path):
    run, dataset, make = begun_run(tmp_path, text_dataset(), **DOT)
    settings = config("none", **DOT)
    save_by(2, run, make(1))
    expected = evaluate_model(make(1), dataset, "test", settings)
    for outcome in run_ranks(
        32,  # the last two have no label
        lambda ranks: evaluate_model(
            load_model(run, dataset, device=CPU, ranks=ranks),
            dataset,
            "test",
            settings,
            ranks=ranks,
        ),
    ):
        assert (outcome.retrieved_ids == expected.retrieved_ids).all()
        assert (outcome.ranks == expected.ranks).all()


def test_a_run_is_evaluated_by_ranks_and_written_once(tmp_path):
    run, dataset, make = begun_run(tmp_path, text_dataset())
    how = {"device": CPU, "console": Console(quiet=True)}
    save_by(2, run, make(1))
    expected = evaluate_run(run, dataset, "test", **how)
    one = (run / "evaluation/test/scores.json").read_bytes()
    shutil.rmtree(run / "evaluation")
    for scores in run_ranks(
        3, lambda ranks: evaluate_run(run, dataset, "test", **how, ranks=ranks)
    ):
        assert scores == expected
    assert (run / "evaluation/test/scores.json").read_bytes() == one


def test_a_run_with_shards_counts_as_trained(tmp_path):
    run, _, make = begun_run(tmp_path, text_dataset())
    write_json(run / "run.json", read_json(run / "run.json") | {"best_step": 3})
    assert not is_trained(run)
    save_by(2, run, make(1))
    assert is_trained(run)
    assert set(TABLES) >= set(files.split_names(make(1)))
