"""Exported encoders give the model's vectors, and the JavaScript featuriser gives our features."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch

from evenhand import export_encoder
from evenhand.data import Dataset, Part, Rows, Strings, WordFeaturizer, take_rows
from evenhand.data.text import NgramFeaturizer
from evenhand.export_encoder import ODD_TEXTS, PlainEncoder
from evenhand.run_search import load_searcher
from small import dense_dataset, run_main, text_dataset, with_parts
from test_saved_models import begun_run, save_by

CPU = torch.device("cpu")
MANY_SCRIPTS = ["Wien", "ウィーン", "Вена", "فيينا", "Βιέννη", "וינה", "비엔나", "เวียนนา", "维也纳"]
DOT = {"model__similarity": "dot", "loss__name": "softmax"}
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed: apt install nodejs")


def words():
    """`text_dataset` by words, with queries in many scripts."""
    return text_dataset(featurizer=WordFeaturizer(num_buckets=512, max_length=3))


def sparse():
    """Features with values and no texts; one row is empty, and no id stands twice in a row."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(0, 6, size=60)
    lengths[0] = 0
    ids = [np.sort(generator.permutation(40)[:n]) for n in lengths]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    values = generator.uniform(0.5, 2, size=offsets[-1]).astype(np.float32)
    features = Rows(offsets, np.concatenate(ids).astype(np.int32), values)
    labels = Rows(np.arange(61), np.arange(60, dtype=np.int32))
    parts = {name: Part(features, labels) for name in ("train", "test")}
    return Dataset(name="sparse", num_features=40, num_labels=60, parts=parts)


CASES = {
    "n-grams": (text_dataset, {}),
    "n-grams, scaled": (text_dataset, {"model__scale": 7.5, "loss__name": "softmax"}),
    "words, weighted": (words, {"data__weighting": "tf-idf"}),
    "words, weighted, dot": (words, {"data__weighting": "tf-idf", **DOT}),
    "sparse, unit, dot": (sparse, {"data__weighting": "unit", **DOT}),
    "sparse": (sparse, {}),
    "dense": (dense_dataset, {}),
    "perceptron": (dense_dataset, {"model__hidden_widths": [16, 8], **DOT}),
}


def trained(tmp_path, case):
    make_dataset, changes = CASES[case]
    changes = {"training__evaluate_every": 0, **changes}
    run, dataset, make = begun_run(tmp_path, make_dataset(), **changes)
    save_by(0, run, make(1))
    return run, dataset


def runner(folder):
    """The exported encoder as a function of arrays by name."""
    if (path := folder / "encoder.pt2").exists():
        module = torch.export.load(path).module()
        return lambda inputs: module(*map(torch.from_numpy, inputs.values())).numpy()
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(folder / "encoder.onnx")
    return lambda inputs: session.run(None, inputs)[0]


def export(run, out, dataset, file_format="pt2"):
    export_encoder.export_encoder(run, out, dataset, file_format=file_format)
    return json.loads((out / "queries.json").read_text("utf-8"))


@pytest.mark.parametrize("file_format", ["onnx", "pt2"])
@pytest.mark.parametrize("case", CASES)
def test_an_exported_encoder_gives_the_models_vectors(tmp_path, capsys, case, file_format):
    if file_format == "onnx":
        pytest.importorskip("onnx")
    run, dataset = trained(tmp_path, case)
    out = tmp_path / "out"
    answer = run_main(capsys, "export", run, "--out", out, "--format", file_format)
    assert "checked by" in answer.output
    searcher = load_searcher(run, device=CPU, dataset=dataset)
    features = dataset.parts["test"].features
    is_dense = isinstance(features, np.ndarray)
    encode = runner(out)
    for rows in (slice(0, 60), slice(0, 1), slice(1, 2), slice(20, 22)):
        chosen = np.array(features[rows]) if is_dense else take_rows(features, np.arange(60)[rows])
        wanted = searcher.encode(chosen).numpy()
        found = encode(export_encoder._inputs(chosen))
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    manifest = json.loads((out / "manifest.json").read_text("utf-8"))
    assert manifest["largest_difference"] < 1e-5
    assert (out / "featurizer.mjs").exists() == (case.partition(",")[0] in ("n-grams", "words"))


def test_queries_are_real_ones_of_every_script_and_corners(tmp_path, monkeypatch):
    monkeypatch.setattr(export_encoder, "NUM_QUERIES", 12)
    dataset = text_dataset()
    texts = [*dataset.parts["test"].texts][:111] + MANY_SCRIPTS
    test = dataclasses.replace(dataset.parts["test"], texts=Strings.pack(texts))
    run, dataset, make = begun_run(tmp_path, with_parts(dataset, test=test))
    save_by(0, run, make(1))
    queries = export(run, tmp_path / "out", dataset)
    found = [query["text"] for query in queries]
    assert set(MANY_SCRIPTS[1:]) < set(found[:12]) < set(texts)
    assert tuple(found[12:]) == ODD_TEXTS
    searcher = load_searcher(run, device=CPU, dataset=dataset)
    wanted = searcher.encode(found)
    torch.testing.assert_close(torch.tensor([query["vector"] for query in queries]), wanted)


# --- the page -------------------------------------------------------------------------------------


def blocks(kind):
    page = (Path(__file__).parent.parent / "docs/export.md").read_text("utf-8")
    return re.findall(rf"```{kind}\n(.*?)```", page.split("## The query encoder")[1], re.DOTALL)


@pytest.mark.parametrize("case", ["n-grams", "words, weighted, dot"])
def test_the_python_of_the_page_encodes_as_the_model(tmp_path, monkeypatch, case):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    run, dataset = trained(tmp_path, case)
    queries = export(run, tmp_path / "encoder", dataset, "onnx")
    monkeypatch.chdir(tmp_path)
    names = {}
    (code,) = blocks("py")
    exec(code, names)
    texts = [query["text"] for query in queries]
    wanted = load_searcher(run, device=CPU, dataset=dataset).encode(texts)
    np.testing.assert_allclose(names["vectors"], wanted, atol=1e-5)


FAKE_RUNTIME = """
export class Tensor { constructor(type, data) { this.type = type; this.data = data; } }
export const InferenceSession = { create: async (path) => ({ run: async (inputs) => ({
  vectors: { dims: [path, ...Object.keys(inputs)], data: inputs.ids.data.length } }) }) };
"""


@needs_node
def test_the_javascript_of_the_page_asks_the_encoder_for_its_inputs(tmp_path):
    """Of onnxruntime-node, which is a hundred megabytes, there is only what the page calls."""
    run, dataset = trained(tmp_path, "n-grams")
    export(run, tmp_path / "encoder", dataset)
    fake = tmp_path / "node_modules/onnxruntime-node"
    fake.mkdir(parents=True)
    (fake / "index.mjs").write_text(FAKE_RUNTIME, "utf-8")
    (fake / "package.json").write_text('{"exports": "./index.mjs"}', "utf-8")
    (code,) = blocks("js")
    (tmp_path / "page.mjs").write_text(code, "utf-8")
    said = node(tmp_path / "page.mjs")
    count = len(NgramFeaturizer(max_length=3).featurize(["Wien", "ウィーン"]).ids)
    assert said.split() == ["[", "'encoder/encoder.onnx',", "'ids',", "'offsets'", "]", str(count)]


# --- JavaScript -----------------------------------------------------------------------------------

COMPARE = """
import { readFileSync } from "node:fs";
import { featurize } from %s;
const { settings, texts } = JSON.parse(readFileSync(0));
const found = settings.map((one) => featurize(texts, one));
const numbers = (array) => Array.from(array ?? [], Number);
console.log(JSON.stringify(found.map((one) => [one.ids, one.offsets, one.values].map(numbers))));
"""


def node(script, value=None):
    text = None if value is None else json.dumps(value)
    command = [NODE, str(script)]
    where = {"cwd": script.parent, "timeout": 60, "text": True, "encoding": "utf-8"}
    done = subprocess.run(command, input=text, capture_output=True, check=False, **where)
    assert done.returncode == 0, done.stderr
    return done.stdout


FEATURIZERS = [
    NgramFeaturizer(),
    NgramFeaturizer(min_length=2, max_length=3, num_buckets=1000),
    WordFeaturizer(),
    WordFeaturizer(max_words=3, min_length=2, max_length=4, num_buckets=2**31 - 1),
    WordFeaturizer(max_words=0, max_length=2),
]


def random_texts(count):
    """Of characters that every Unicode of our days knows, and those in blocks, but few of Han."""
    known = [
        chr(point)
        for point in range(0x110000)
        if unicodedata.ucd_3_2_0.category(chr(point)) not in ("Cn", "Co", "Cs")
    ]
    generator = np.random.default_rng(0)
    texts = ["".join(generator.choice(known, generator.integers(1, 25))) for _ in range(count)]
    known = [character for character in known if character < "\u3400"] + known[::20]
    return texts + [" ".join(known[start : start + 60]) for start in range(0, len(known), 60)]


@needs_node
def test_the_javascript_featurizer_gives_our_features(tmp_path):
    home = Path(export_encoder.__file__).with_name("data") / "featurizer.mjs"
    script = tmp_path / "compare.mjs"
    script.write_text(COMPARE % json.dumps(home.as_uri()), "utf-8")
    marks = "a\u0345\u0f73" + "\u0301" * 35 + "\u0f71\u0f72" * 20
    texts = [*ODD_TEXTS, "\ud800 half a pair", marks + "x" * 1000, "y" * 1001, *random_texts(300)]
    settings = [featurizer.settings() for featurizer in FEATURIZERS]
    found = json.loads(node(script, {"settings": settings, "texts": texts}))
    for featurizer, (ids, offsets, values) in zip(FEATURIZERS, found, strict=True):
        rows = featurizer.featurize(texts)
        np.testing.assert_array_equal(offsets, rows.offsets)
        np.testing.assert_array_equal(ids, rows.ids)
        if rows.values is not None:
            np.testing.assert_allclose(values, rows.values, rtol=1e-6)


@needs_node
def test_the_exported_featurizer_gives_the_features_of_queries_json(tmp_path):
    run, dataset = trained(tmp_path, "words, weighted")
    out = tmp_path / "out"
    queries = export(run, out, dataset)
    script = out / "compare.mjs"
    script.write_text(COMPARE % '"./featurizer.mjs"', "utf-8")
    settings = json.loads((out / "manifest.json").read_text("utf-8"))["featurizer"]
    texts = [query["text"] for query in queries]
    ((ids, _, values),) = json.loads(node(script, {"settings": [settings], "texts": texts}))
    assert ids == [one for query in queries for one in query["ids"]]
    np.testing.assert_allclose(values, [one for query in queries for one in query["values"]])


# --- refusals -------------------------------------------------------------------------------------


def test_what_cannot_be_exported_is_said_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    run, _ = trained(tmp_path, "n-grams")
    words = ("export", run, "--out", tmp_path / "out", "--format")

    def refuse(sentence, *more):
        assert sentence in run_main(capsys, *words, *more).sentence
        assert not (tmp_path / "out").exists()

    refuse("--shards and --queries are for vectors, not for --format pt2", "pt2", "--shards", 2)
    refuse("no dataset.json", "pt2", "--data", tmp_path / "elsewhere")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnx", None)
        refuse("pip install 'evenhand[onnx]'", "onnx")
    pytest.importorskip("onnx")
    with monkeypatch.context() as patch:
        patch.setattr(export_encoder, "ONNX_BYTES", 10_000)
        refuse("an ONNX file holds at most 0.00 GB; use --format pt2", "onnx")
    forward = PlainEncoder.forward
    with monkeypatch.context() as patch:
        patch.setattr(PlainEncoder, "forward", lambda *inputs: forward(*inputs) + 1e-3)
        refuse("encoder.pt2 encodes queries otherwise than the model, by 0.001", "pt2")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    answer = run_main(capsys, *words, "onnx")
    assert "not checked: onnxruntime is not installed" in answer.output
    refused = run_main(capsys, *words, "onnx").sentence
    assert "exists already" in refused
