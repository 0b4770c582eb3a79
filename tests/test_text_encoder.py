"""Encoders that read texts: a module of one's own, and transformers from a folder."""

import contextlib
import shutil

import numpy as np
import pytest
import torch
from torch import nn

import evenhand
import small
from evenhand import UserError
from letters import Letters, answers, command

NUM_STEPS = 60


def table(num_rows=240):
    """Names with a letter more, as a table in memory."""
    part = small.text_dataset().parts["train"]
    labels = [
        f"town {ids[0]}" for ids in np.split(part.positives.ids, part.positives.offsets[1:-1])
    ]
    return {"query": list(part.texts)[:num_rows], "label": labels[:num_rows]}


SETTINGS = {
    "training.num_steps": NUM_STEPS,
    "training.checkpoint_every": 20,
    "training.log_every": 20,
    "mining.batch_size": 32,
    "evaluation.num_resamples": 0,
}


def train(encoder, folder="runs/run", **changes):
    settings = {**SETTINGS, **changes}
    return evenhand.train(table(), run=folder, encoder=encoder, settings=settings, progress=False)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def transformer(tmp_path_factory):
    """A folder of sentence-transformers."""
    pytest.importorskip("sentence_transformers")
    from tiny_text import make_transformer

    folder = tmp_path_factory.mktemp("transformer")
    (folder / "bare").mkdir()
    make_transformer(folder / "bare", width=16, num_layers=1, dropout=0.1).save(str(folder / "st"))
    return folder


def test_a_module_of_ones_own_reads_texts_and_gets_its_weights_back():
    run = train(Letters())
    assert run.config.model.encoder == "own"
    assert run.config.model.input == "texts"
    assert (run.config.model.embedding_dim, run.config.training.encoder_learning_rate) == (12, 5e-4)
    again = evenhand.load(run.folder, encoder=Letters(), progress=False)
    assert answers(again) == answers(run)
    assert again.encode(["badoki"]).shape == (1, 12)
    with pytest.raises(UserError, match=r"evenhand.load\('runs/run', encoder=module\)"):
        evenhand.load(run.folder, progress=False).search(["badoki"])
    with pytest.raises(UserError, match="does not fit this run's settings and data: encoder"):
        evenhand.load(run.folder, encoder=nn.Linear(2, 2), progress=False).search(["badoki"])


def test_it_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(monkeypatch):
    whole = train(Letters())
    stop_at, seen = 35, []

    def is_stopped():
        seen.append(0)
        return len(seen) == stop_at

    from evenhand import api

    with monkeypatch.context() as patch:
        patch.setattr(api, "stop_requested", lambda: contextlib.nullcontext(is_stopped))
        with pytest.raises(KeyboardInterrupt, match=r"load\('runs/cut', encoder=module\).resume"):
            train(Letters(), "runs/cut")
    cut = evenhand.load("runs/cut", encoder=Letters(), progress=False).resume()
    assert answers(cut) == answers(whole)
    lines = [(folder / "metrics.jsonl").read_text() for folder in (whole.folder, cut.folder)]
    assert lines[0] == lines[1]


@pytest.mark.parametrize("kind", ["bare", "st"])
def test_a_transformer_of_a_folder_is_tuned_and_travels_with_the_run(
    transformer, tmp_path, capsys, kind
):
    folder = tmp_path / "encoder"
    shutil.copytree(transformer / kind, folder)
    run = train(folder, **{"training.num_steps": 40})
    expected = answers(run)
    shutil.rmtree(folder)
    assert answers(evenhand.load(run.folder, progress=False)) == expected
    command(capsys, "evaluate", "runs/run", "--part", "test")
    command(capsys, "export", "runs/run", "--out", "vectors", "--queries", "test")
    answer = small.run_main(capsys, "export", "runs/run", "--out", "onnx", "--format", "onnx")
    assert (answer.code, "reads texts" in answer.err) == (2, True), answer


def test_a_frozen_transformer_is_asked_once(transformer, monkeypatch):
    from evenhand.text_encoder import TextEncoder

    asked, encode = [], TextEncoder.forward
    monkeypatch.setattr(
        TextEncoder, "forward", lambda self, texts: asked.append(len(texts)) or encode(self, texts)
    )
    changes = {"model.freeze_encoder": True, "model.embedding_dim": 8}
    run = train(transformer / "st", **changes)
    first = sum(asked)
    assert 0 < first <= 240 + 10  # every text, and those by which widths are found
    assert run.encode(["badoki"]).shape == (1, 8)
    asked.clear()
    other = train(transformer / "st", "runs/other", **changes)
    assert sum(asked) < first / 2  # the test part alone
    assert answers(other) == answers(run)


def test_the_command_trains_with_an_encoder(transformer, tmp_path, capsys):
    import pyarrow as pa
    import pyarrow.parquet

    pa.parquet.write_table(pa.table(table()), tmp_path / "data.parquet")
    words = ["train", "data.parquet", "--encoder", str(transformer / "st"), "--freeze-encoder"]
    command(capsys, *words, "--steps", "20", "--run", "runs/frozen")
    command(capsys, "search", "runs/frozen", "badoki")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({}, "is no encoder"),
        ({"config.json": "{}", "pytorch_model.bin": ""}, "is pickled"),
        ({"config.json": "{}", "modeling.py": ""}, "code of its own"),
        ({"modules.json": '[{"type": "own.Module"}]'}, "not of sentence-transformers"),
        ({"config.json": "{}"}, "could not be read"),
    ],
)
def test_folders_that_are_no_encoder_or_could_run_code_are_refused(tmp_path, names, words):
    pytest.importorskip("sentence_transformers")
    for name, text in names.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=words):
        train(tmp_path)


def test_settings_that_do_not_go_together_are_refused(transformer):
    with pytest.raises(UserError, match=r"model.embedding_dim must be 12"):
        train(Letters(), **{"model.embedding_dim": 8})
    with pytest.raises(UserError, match=r"vectors \(queries, numbers\)"):
        train(Shapeless())
    config = small.config("unused", model__encoder="own", model__input="texts")
    from evenhand.build import encoder_inputs

    with pytest.raises(UserError, match="needs the texts"):
        encoder_inputs(config, small.dense_dataset())


class Shapeless(Letters):
    def forward(self, texts):
        return super().forward(texts)[0]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_module_takes_vectors_where_there_are_no_texts_compiled_or_not(is_compiled):
    def encoder():
        torch.manual_seed(0)
        layer = nn.Linear(12, 8)
        return torch.compile(layer, backend="eager") if is_compiled else layer

    part = small.dense_dataset().parts["train"]
    rows = {"vector": part.features.tolist(), "label": [f"t{ids}" for ids in part.positives.ids]}
    how = {"settings": SETTINGS, "vectors": "vector", "progress": False, "run": "runs/run"}
    run = evenhand.train(rows, encoder=encoder(), **how)
    assert run.config.model.input == "features"
    again = evenhand.load(run.folder, encoder=encoder(), progress=False)
    found = [own.search(part.features[:5], 3)["score"].tolist() for own in (run, again)]
    assert found[0] == found[1]


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_transformer_reads_the_labels_too(transformer, is_frozen):
    changes = {"model.labels": "both", "model.freeze_encoder": is_frozen, "training.num_steps": 20}
    run = train(transformer / "st", **changes)
    assert run.add_labels({"id": ["badoki", "another"], "text": ["badoki1", ""]}) == 2
    found = run.search(["badoki badoki1"], 1)  # the text of a label, read by the same encoder
    assert found["label"].tolist() == ["badoki"]
    assert found["score"].tolist() == pytest.approx([run.config.model.scale], rel=1e-4)
