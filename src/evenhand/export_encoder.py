"""`evenhand export --format onnx` or `pt2`: the query encoder, to encode queries elsewhere.

encoder.onnx    or encoder.pt2: ids, offsets and, if there are any, values in; vectors out
queries.json    queries of the data set, their features and their vectors: to test others by
featurizer.mjs  texts to ids and values in JavaScript, where the run was trained on texts
manifest.json   what goes in and out, the featuriser's settings, and how the file was checked

Weighting (tf-idf), the cosine and the scale are part of the encoder: the product of its vectors and
the exported label vectors is the score.
"""

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.fx.experimental import _config

from evenhand.data import Dataset, FloatArray, Rows, take_rows
from evenhand.data.text import featurizer_from, script_of
from evenhand.errors import UserError
from evenhand.files import atomic_folder, read_text, write_json, write_text
from evenhand.kernels.rows import SMALLEST_NORM
from evenhand.models import BagEncoder, MlpEncoder, RowRange
from evenhand.run_folder import check_trained_on, load_model, query_data_path, run_config
from evenhand.run_search import query_data_of
from evenhand.search import Searcher, label_index
from evenhand.search.searcher import load_query_data
from evenhand.version import __version__

NUM_QUERIES = 100
LOOKED_AT = 20_000  # queries, for some of every script
TOLERANCE = 1e-5  # of a number in a vector, or of the largest number where that is above 1
OPSET, IR_VERSION = 16, 8  # of ONNX, from 2022
ONNX_BYTES = 2**31 - 2**20  # a file cannot be larger
FORMAT_VERSION = 1
Arrays = dict[str, NDArray[Any]]
ODD_TEXTS = (  # corners of the featuriser
    "",
    " Straße\t\u3000ẞ \u0085 ",
    "İstanbul ISPARTA ı ΣΊΣΥΦΟΣ ŉ ǰ",
    "ᏣᎳᎩ ꮳꮃꭹ",
    "ｶﾞｷﾞ ﷺ ﬃ ①½",
    "soft\u00adhyphen zero\u200bwidth\u200djoiner",
    "東京タワー กรุงเทพฯ ភ្នំពេញ မြန်မာ",
    "👍🏽 😀😀 a_b-c 3.14",
    "Z̴̡̻̭a\u0345\u0301l\u0323\u0307go",
    "a" + "\u0301" * 70 + "x" * 1000,
)


def export_encoder(run: Path, out: Path, dataset: Dataset, *, file_format: str) -> dict[str, Any]:
    """Writes the query encoder of a run to a new folder, all of it or nothing; see above.

    Args:
        dataset: of the run, with values as they come: its queries are what the file is checked by.
        file_format: "onnx" or "pt2".

    Returns:
        The manifest.
    """
    if out.exists():
        raise UserError(f"{out} exists already; choose another --out folder, or remove it first")
    check_trained_on(run, dataset)
    config, path = run_config(run), query_data_path(run)
    if config.model.input == "texts":
        raise UserError(
            f"--format {file_format} is for encoders of features, and that of {run} reads texts: "
            f"export its vectors (--format npy), and encode queries with evenhand serve"
        )
    data = load_query_data(path) if path.exists() else query_data_of(dataset, config)
    cpu, no_labels = torch.device("cpu"), RowRange(0, 0)
    model = load_model(run, data, device=cpu, label_rows=no_labels, config=config)
    searcher = Searcher(model, label_index(model), data)
    texts, features = _sample(dataset)
    inputs, wanted = _inputs(features), searcher.encode(features).numpy()
    encoder = PlainEncoder(searcher).train(False).requires_grad_(False)
    with atomic_folder(out) as staging:
        path = staging / f"encoder.{file_format}"
        if file_format == "onnx":
            checked_by, found = _write_onnx(path, encoder, inputs)
        else:
            checked_by, found = _write_pt2(path, encoder, inputs)
        difference = None
        if found is not None:
            difference = float(np.abs(found - wanted).max() / max(1.0, np.abs(wanted).max()))
            if not difference <= TOLERANCE:
                raise UserError(
                    f"{path.name} encodes queries otherwise than the model, by {difference:.1g}, "
                    f"and was not kept; the model's weights are too large, or too small"
                )
        if texts is not None:
            script = Path(__file__).with_name("data") / "featurizer.mjs"
            write_text(staging / script.name, read_text(script))
        write_json(staging / "queries.json", _as_json(texts, features, wanted))
        manifest = {
            "version": FORMAT_VERSION,
            "evenhand": __version__,
            "run": run.resolve().name,
            "dataset": {"name": data.name, "fingerprint": data.fingerprint},
            "encoder": path.name,
            "inputs": {name: str(array.dtype) for name, array in inputs.items()},
            "num_features": data.num_features,
            "dimension": wanted.shape[1],
            "metric": "cosine" if model.is_cosine else "dot",
            "scale": model.scale,
            "featurizer": data.featurizer if texts is not None else None,
            "num_queries": len(wanted),
            "checked_by": checked_by,
            "largest_difference": difference,
        }
        write_json(staging / "manifest.json", manifest)
    return manifest


def _sample(dataset: Dataset) -> tuple[list[str] | None, Rows | FloatArray]:
    """Queries and their features; None: they are no texts. Scripts take turns."""
    names = [name for name in ("test", "validation", "train") if name in dataset.parts]
    part = dataset.parts[names[0]]
    if part.texts is None or dataset.featurizer is None:
        first = np.arange(min(NUM_QUERIES, len(part)))
        features = part.features
        return None, take_rows(features, first) if isinstance(features, Rows) else features[first]
    seen: Counter[str] = Counter()
    turns = []
    for query, text in enumerate(islice(part.texts, LOOKED_AT)):
        script = script_of(text)
        turns.append((seen[script], query))
        seen[script] += 1
    texts = [part.texts[query] for _, query in sorted(turns)[:NUM_QUERIES]] + list(ODD_TEXTS)
    return texts, featurizer_from(dataset.featurizer).featurize(texts)


def _inputs(features: Rows | FloatArray) -> Arrays:
    """The arguments of the encoder, by name."""
    if not isinstance(features, Rows):
        return {"features": features}
    ids, offsets = features.ids.astype(np.int64), features.offsets.astype(np.int64)
    inputs: Arrays = {"ids": ids, "offsets": offsets}
    return inputs if features.values is None else inputs | {"values": features.values}


def _as_json(
    texts: list[str] | None, features: Rows | FloatArray, vectors: FloatArray
) -> list[dict[str, Any]]:
    queries = []
    for query, vector in enumerate(vectors.tolist()):
        about: dict[str, Any] = {} if texts is None else {"text": texts[query]}
        if isinstance(features, Rows):
            row = take_rows(features, np.array([query]))
            about["ids"] = row.ids.tolist()
            if row.values is not None:
                about["values"] = row.values.tolist()
        else:
            about["features"] = features[query].tolist()
        queries.append({**about, "vector": vector})
    return queries


# --- torch.export ---------------------------------------------------------------------------------


class PlainEncoder(nn.Module):
    """The query encoder of a run by operations of torch alone, weighting and scale included."""

    table: Tensor | None  # (F, D)
    squares: Tensor | None  # (F, 1) of the weights of features, where they have any

    def __init__(self, searcher: Searcher) -> None:
        super().__init__()
        encoder, weights = searcher.encoder, searcher.data.feature_weights
        self.is_cosine, self.scale = searcher.model.is_cosine, searcher.model.scale
        self.perceptron = encoder if isinstance(encoder, MlpEncoder) else None
        table = squares = None
        if isinstance(encoder, BagEncoder):
            table = encoder.weight.detach()
            if weights is not None:
                column = torch.from_numpy(np.array(weights)).unsqueeze(1)  # (F,) -> (F, 1)
                table, squares = table * column, column.square()
        self.register_buffer("table", table)
        self.register_buffer("squares", squares)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Inputs in the order of the manifest -> (B, D)."""
        if self.perceptron is not None:
            vectors: Tensor = self.perceptron(*inputs)
        else:
            assert self.table is not None
            vectors = _bags(self.table, *inputs)
            if self.squares is not None:
                ids, offsets, values = inputs
                lengths = _bags(self.squares, ids, offsets, values.square()).sqrt()
                vectors = vectors / lengths.masked_fill(lengths == 0, torch.inf)
        if self.is_cosine:
            norms = vectors.norm(dim=1, keepdim=True)
            vectors = vectors / norms.masked_fill(norms <= SMALLEST_NORM, torch.inf)
        return self.scale * vectors


def _bags(table: Tensor, ids: Tensor, offsets: Tensor, values: Tensor | None = None) -> Tensor:
    """Sums of rows times values, or means of rows: (B, D)."""
    mode = "mean" if values is None else "sum"
    return F.embedding_bag(
        ids, table, offsets, mode=mode, per_sample_weights=values, include_last_offset=True
    )


def _write_pt2(path: Path, encoder: PlainEncoder, inputs: Arrays) -> tuple[str, FloatArray]:
    """Writes the file; what checked it, and the vectors that it gave."""
    tensors = tuple(torch.from_numpy(array) for array in inputs.values())
    sizes = tuple({0: torch.export.Dim.DYNAMIC} for _ in tensors)
    # backed_size_oblivious: else the program would refuse a batch of one query.
    with torch.no_grad(), _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        program = torch.export.export(encoder, tensors, dynamic_shapes={"inputs": sizes})
        torch.export.save(program, path)
        found = torch.export.load(path).module()(*tensors)
    return f"torch {torch.__version__}", found.numpy()


# --- ONNX -----------------------------------------------------------------------------------------
# The graph is written as text, which onnx parses. A feature adds its row at the place of its query:
# by ScatterElements, since ScatterND loses additions where onnxruntime has several threads.

PLACES = """
    starts = Slice (offsets, zero, minus_one)
    stops = Slice (offsets, one, last)
    num_queries = Shape (stops)
    num_ids = Shape (ids)
    num_marks = Add (num_ids, one)
    no_marks = ConstantOfShape <value = int64[1] {0}> (num_marks)
    ones = ConstantOfShape <value = int64[1] {1}> (num_queries)
    marks = ScatterElements <axis = 0, reduction = "add"> (no_marks, stops, ones)
    marks_before = CumSum (marks, first_axis)
    queries = Slice (marks_before, zero, num_ids)
    places = Unsqueeze (queries, one)
"""
SUMS = """
    {rows}_shape = Shape ({rows})
    {rows}_places = Expand (places, {rows}_shape)
    {rows}_width = Slice ({rows}_shape, one, last)
    {rows}_size = Concat <axis = 0> (num_queries, {rows}_width)
    {rows}_none = ConstantOfShape ({rows}_size)
    {rows}_sums = ScatterElements <axis = 0, reduction = "add"> ({rows}_none, {rows}_places, {rows})
"""
MEANS = """
    lengths = Sub (stops, starts)
    divisors = Max (lengths, one)
    divisors_float = Cast <to = 1> (divisors)
    divisor_column = Unsqueeze (divisors_float, one)
    means = Div (entries_sums, divisor_column)
"""
VALUES = """
    value_column = Unsqueeze (values, one)
    rows = Mul (entries, value_column)
"""
WEIGHTED = """
    value_squares = Mul (value_column, value_column)
    weight_squares = Gather <axis = 0> (squares, ids)
    parts = Mul (value_squares, weight_squares)
"""
DIVIDE = """
    {out}_lengths = Sqrt ({squares})
    {out}_is_short = LessOrEqual ({out}_lengths, {least})
    {out}_divisors = Where ({out}_is_short, infinite, {out}_lengths)
    {out} = Div ({vectors}, {out}_divisors)
"""
NORMS = """
    vector_squares = Mul ({vectors}, {vectors})
    norm_squares = ReduceSum <keepdims = 1> (vector_squares, one)
"""


def _onnx_graph(encoder: PlainEncoder, has_values: bool) -> tuple[str, Arrays]:
    """The nodes from the inputs to `vectors`, and arrays by the names that they have there."""
    arrays: Arrays = {
        "zero": np.array([0]), "one": np.array([1]), "minus_one": np.array([-1]),
        "last": np.array([2**62]), "first_axis": np.array(0),
        "nothing": np.array(0, np.float32), "infinite": np.array(np.inf, np.float32),
        "smallest": np.array(SMALLEST_NORM, np.float32),
        "scale": np.array(encoder.scale, np.float32),
    }  # fmt: skip
    if encoder.perceptron is not None:
        text, last = "", "features"
        for number, layer in enumerate(encoder.perceptron.layers):
            if number:
                text, last = f"{text} active{number} = Relu ({last})\n", f"active{number}"
            arrays |= {
                f"{name}{number}": p.detach().numpy() for name, p in layer.named_parameters()
            }
            text += f"layer{number} = Gemm <transB = 1> ({last}, weight{number}, bias{number})\n"
            last = f"layer{number}"
    else:
        assert encoder.table is not None
        arrays["table"] = encoder.table.numpy()
        text = PLACES + "entries = Gather <axis = 0> (table, ids)\n"
        if not has_values:
            text, last = text + SUMS.format(rows="entries") + MEANS, "means"
        else:
            text, last = text + VALUES + SUMS.format(rows="rows"), "rows_sums"
        if encoder.squares is not None:
            arrays["squares"] = encoder.squares.numpy()
            text += WEIGHTED + SUMS.format(rows="parts")
            weighted = {"out": "weighted", "squares": "parts_sums", "least": "nothing"}
            text, last = text + DIVIDE.format(vectors=last, **weighted), "weighted"
    if encoder.is_cosine:
        units = {"out": "units", "squares": "norm_squares", "least": "smallest"}
        text += NORMS.format(vectors=last) + DIVIDE.format(vectors=last, **units)
        last = "units"
    return f"{text} vectors = Mul ({last}, scale)\n", arrays


def _write_onnx(
    path: Path, encoder: PlainEncoder, inputs: Arrays
) -> tuple[str | None, FloatArray | None]:
    """Writes the file; what checked it, and the vectors that it gave: None without onnxruntime."""
    try:
        import onnx.checker
        import onnx.numpy_helper
        import onnx.parser
    except ModuleNotFoundError as error:
        raise UserError(
            f"{error.name} is not installed; install what --format onnx needs: "
            f"pip install 'evenhand[onnx]'"
        ) from error
    size = sum(tensor.nbytes for tensor in encoder.state_dict().values())
    if size > ONNX_BYTES:
        raise UserError(
            f"the encoder's weights are {size / 1e9:.2f} GB, and an ONNX file holds at most "
            f"{ONNX_BYTES / 1e9:.2f} GB; use --format pt2"
        )
    text, arrays = _onnx_graph(encoder, "values" in inputs)
    types = {"ids": "int64[entries]", "offsets": "int64[rows]", "values": "float[entries]"}
    if "features" in inputs:
        types["features"] = f"float[queries, {inputs['features'].shape[1]}]"
    arguments = ", ".join(f"{types[name]} {name}" for name in inputs)
    model = onnx.parser.parse_model(
        f'<ir_version: {IR_VERSION}, opset_import: ["": {OPSET}], producer_name: "evenhand">\n'
        f"encoder ({arguments}) => (float[queries, dimension] vectors) {{ {text} }}"
    )
    for name in sorted({name for node in model.graph.node for name in node.input} & arrays.keys()):
        model.graph.initializer.append(onnx.numpy_helper.from_array(arrays[name], name))
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    try:
        import onnxruntime
    except ModuleNotFoundError:
        return None, None
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, inputs)
    return f"onnxruntime {onnxruntime.__version__}", found
