"""Exported vectors: searched by brute force they give what the index of the run gives."""

import dataclasses
import hashlib
import importlib.util
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from evenhand import export_vectors
from evenhand.data import Strings
from evenhand.export_vectors import export_run
from evenhand.run_folder import load_model, run_config
from evenhand.run_search import query_data_of, query_data_path
from evenhand.runs import evaluate_model
from evenhand.search.searcher import save_query_data
from small import config, run_main, text_dataset
from test_saved_models import begun_run, save_by

CPU = torch.device("cpu")
BIASED = {"model__similarity": "dot", "model__label_bias": True, "loss__name": "softmax"}
DISCOUNT = {"search__frequency_discount": 0.1}
CASES = {
    "cosine": {},
    "scaled": {"model__scale": 7.5, "loss__name": "softmax"},
    "dot with a bias": BIASED,
    "less for frequent ones": DISCOUNT,
    "both": BIASED | DISCOUNT,
}
FORMATS = ["npy", "parquet"]


def read_back(folder, of):
    """(ids, vectors, biases, names) of all files of labels or queries, in the manifest's order."""
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    found = {"ids": [], "vectors": [], "biases": [], "names": []}
    for file in manifest["files"]:
        path = folder / file["name"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == file["sha256"]
        assert path.stat().st_size == file["num_bytes"]
        if file["of"] != of:
            continue
        if path.suffix == ".npy":
            columns = {file["holds"]: np.load(path, allow_pickle=False)}
        elif path.suffix == ".jsonl":
            lines = path.read_text("utf-8").split("\n")[:-1]
            columns = {"names": [json.loads(line) for line in lines]}
        else:
            import pyarrow.parquet

            table = pyarrow.parquet.read_table(path).to_pydict()
            columns = {"vectors": np.array(table["vector"], np.float32), "ids": table["id"]}
            if "bias" in table:
                columns["biases"] = np.array(table["bias"], np.float32)
            columns["names"] = table.get("name", [])
        for name, rows in columns.items():
            assert len(rows) == file["num_rows"]
            found[name].append(rows)
    joined = [np.concatenate(found[name]) if found[name] else None for name in list(found)[:3]]
    return manifest, *joined, [name for names in found["names"] for name in names]


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_ranks", [0, 2])
def test_brute_force_over_the_files_finds_what_the_index_finds(
    tmp_path, monkeypatch, case, file_format, num_ranks
):
    monkeypatch.setattr(export_vectors, "BLOCK_BYTES", 7 * 8 * 4)  # 7 rows
    names = [f'{n} "a"\n\u2028ウィーン\\n' for n in range(59)] + [""]
    named = dataclasses.replace(text_dataset(), label_names=Strings.pack(names))
    run, dataset, make = begun_run(tmp_path, named, **CASES[case])
    save_by(num_ranks, run, make(1))
    told, out = [], tmp_path / "out"
    what = {"file_format": file_format, "num_shards": 3, "part_name": "test"}
    export_run(run, out, dataset, **what, device=CPU, progress_fn=lambda *done: told.append(done))
    assert told[-1] == (180, 180)
    assert told == sorted(told)
    manifest, ids, vectors, biases, found_names = read_back(out, "labels")
    _, query_ids, queries, _, texts = read_back(out, "queries")
    np.testing.assert_array_equal(ids, np.arange(60))
    np.testing.assert_array_equal(query_ids, np.arange(120))
    assert found_names == names
    assert texts == list(dataset.parts["test"].texts)
    assert (biases is not None) == manifest["has_biases"]
    assert manifest["metric"] == ("dot" if "model__similarity" in CASES[case] else "cosine")
    assert manifest["dimension"] == 8
    if manifest["metric"] == "cosine":
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(queries, axis=1), manifest["scale"], rtol=1e-6)
    scores = queries @ vectors.T + (0 if biases is None else biases)  # (Q, L)
    found = np.argsort(-scores, axis=1, kind="stable")[:, :10]
    model, settings = load_model(run, dataset, device=CPU), config("none", **CASES[case])
    expected = evaluate_model(model, dataset, "test", settings)
    np.testing.assert_array_equal(ids[found], expected.retrieved_ids)
    best = np.take_along_axis(scores, found, axis=1)
    np.testing.assert_allclose(best, expected.retrieved_scores, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["cosine", "both"])
def test_what_the_page_shows_finds_what_the_index_finds(tmp_path, monkeypatch, case):
    page = (Path(__file__).parent.parent / "docs/export.md").read_text("utf-8")
    reading, faiss, *_ = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    run, dataset, make = begun_run(tmp_path, text_dataset(), **CASES[case])
    save_by(2, run, make(1))
    export_run(run, tmp_path / "vectors", dataset, num_shards=3, part_name="test", device=CPU)
    expected = evaluate_model(make(1), dataset, "test", config("none", **CASES[case]))
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(reading, names)
    all_ids, all_vectors = map(np.concatenate, zip(*names["label_shards"](), strict=True))
    order = np.argsort(-(names["queries"] @ all_vectors.T), axis=1, kind="stable")[:, :10]
    np.testing.assert_array_equal(all_ids[order], expected.retrieved_ids)
    if importlib.util.find_spec("faiss") is not None:
        exec(faiss, names)
        np.testing.assert_array_equal(names["label_ids"], expected.retrieved_ids)


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, dataset, make = begun_run(tmp_path, text_dataset(), **DISCOUNT)
    save_by(3, run, make(1))
    answer = run_main(capsys, "export", run, "--out", "out", "--shards", 2, "--queries", "test")
    assert "60 label vectors of 8 dimensions and 120 query vectors" in answer.out
    assert "metric: cosine" in answer.out
    assert len(read_back(tmp_path / "out", "labels")[1]) == dataset.num_labels
    # Labels alone are written from the run folder alone.
    save_query_data(query_data_path(run), query_data_of(dataset, run_config(run)))
    shutil.rmtree(tmp_path / "data")
    assert run_main(capsys, "export", run, "--out", "again", "--shards", 2).code == 0
    for name in ("labels-00002-of-00002.vectors.npy", "labels-00001-of-00002.biases.npy"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    for words, sentence in (
        ([run, "--out", "out"], "exists already"),
        (["nowhere", "--out", "x"], "is not a run folder"),
        ([run, "--out", "x", "--shards", 0], "--shards must be between 1 and 60"),
        ([run, "--out", "x", "--shards", 61], "got 61"),
        ([run, "--out", "x", "--queries", "test"], "no dataset.json in"),
    ):
        assert sentence in run_main(capsys, "export", *words).sentence
    assert not (tmp_path / "x").exists()
