"""What answering queries takes from a data set, kept beside the model of a run.

With it a run folder answers without the data set it was trained on. The file is a .safetensors
file: arrays, and a few words of JSON. It holds the names of the labels, and where the settings need
them, one number a label (training pairs) or a feature (its weight). Where training queries vote, it
holds all of their features and labels, and is as large as the training part.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from evenhand.data import FloatArray, IntArray, Rows, Strings
from evenhand.data.checks import MAX_IDS, check_offsets
from evenhand.data.text import featurizer_from
from evenhand.errors import UserError
from evenhand.files import atomic_path, check_is_file, parse_json
from evenhand.search.ranker import check_rows

FORMAT_VERSION = 1
KINDS: dict[str, Any] = {  # of the fields that are written as JSON
    "name": str,
    "fingerprint": str,
    "num_features": int,
    "num_labels": int,
    "is_sparse": bool,
    "featurizer": dict | None,
}
DTYPES = {  # of the last part of an array's name
    "offsets": "int64",
    "ids": "int32",
    "values": "float32",
    "utf8": "uint8",
    "feature_weights": "float32",
    "label_counts": "int64",
}


class QueryData(NamedTuple):
    """L labels, F features, N training queries; None: the settings do without."""

    name: str  # of the data set
    fingerprint: str
    num_features: int
    num_labels: int
    is_sparse: bool
    featurizer: dict[str, Any] | None = None  # how a text becomes features; None: it cannot
    label_names: Strings | None = None  # (L,)
    feature_weights: FloatArray | None = None  # (F,) for `unit_values`; None: values as they come
    label_counts: IntArray | None = None  # (L,) training pairs
    train_features: Rows | None = None  # (N,) weighted
    train_positives: Rows | None = None  # (N,)


def save_query_data(path: Path, data: QueryData) -> None:
    """Writes a .safetensors file, all of it or nothing."""
    about = {"version": FORMAT_VERSION, **{name: getattr(data, name) for name in KINDS}}
    arrays: dict[str, NDArray[Any] | None] = {
        "feature_weights": data.feature_weights,
        "label_counts": data.label_counts,
    }
    if data.label_names is not None:
        arrays["label_names.offsets"] = data.label_names.offsets
        arrays["label_names.utf8"] = data.label_names.utf8
    for name in ("train_features", "train_positives"):
        rows = getattr(data, name)
        if rows is not None:
            arrays |= {f"{name}.{field}": array for field, array in rows._asdict().items()}
    contiguous = {
        name: np.ascontiguousarray(array, dtype=DTYPES[name.rpartition(".")[2]])
        for name, array in arrays.items()
        if array is not None
    }
    with atomic_path(path) as staging:
        staging.write_bytes(
            safetensors.numpy.save(contiguous, metadata={"about": json.dumps(about)})
        )


def load_query_data(path: Path) -> QueryData:
    """Reads what `save_query_data` wrote; a file that compiled code could stumble over is refused.

    Raises:
        UserError: the file is damaged.
    """
    try:
        check_is_file(path)
        with safe_open(path, framework="numpy") as file:
            about = _read_about((file.metadata() or {})["about"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _from_arrays(about, arrays)
    except (  # of types that numpy lacks, the library raises one or the other
        SafetensorError, OSError, AttributeError, KeyError, TypeError, ValueError,
    ) as error:  # fmt: skip
        raise UserError(
            f"{path} is damaged ({type(error).__name__}: {error}); remove it and write it again: "
            f"evenhand train --resume --run {path.parent.parent}"
        ) from error


def _read_about(text: str) -> dict[str, Any]:
    about = parse_json(text)
    if not isinstance(about, dict) or about.get("version") != FORMAT_VERSION:
        raise ValueError(f"its version must be {FORMAT_VERSION}")
    for name, kind in KINDS.items():
        if not isinstance(about.get(name), kind):
            raise ValueError(f"{name} must be {kind}, got {str(about.get(name))[:40]!r}")
    for name in ("num_features", "num_labels"):
        if not 1 <= about[name] <= MAX_IDS:
            raise ValueError(f"{name} must be between 1 and {MAX_IDS}, got {about[name]}")
    return {name: about[name] for name in KINDS}


def _from_arrays(about: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> QueryData:
    """The fields from their arrays; what does not fit together is a `ValueError`."""
    num_features, num_labels = about["num_features"], about["num_labels"]
    for name, array in arrays.items():
        dtype = DTYPES.get(name.rpartition(".")[2])
        if dtype is None or array.dtype != dtype or array.ndim != 1:
            raise ValueError(f"{name} is {array.dtype} of shape {array.shape}, expected {dtype}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"{name} holds a number that is not finite")

    def rows(name: str, limit: int) -> Rows | None:
        if f"{name}.offsets" not in arrays:
            return None
        fields = (arrays.get(f"{name}.{field}") for field in ("offsets", "ids", "values"))
        found = Rows(*fields)  # type: ignore[arg-type]
        check_rows(found, limit, name, needs_values=name == "train_features")
        return found

    data = QueryData(
        **about,
        feature_weights=arrays.get("feature_weights"),
        label_counts=arrays.get("label_counts"),
        train_features=rows("train_features", num_features),
        train_positives=rows("train_positives", num_labels),
    )
    if "label_names.offsets" in arrays:
        names = Strings(arrays["label_names.offsets"], arrays["label_names.utf8"])
        check_offsets("label_names", names.offsets)
        if not len(names.offsets) or (names.offsets[0], names.offsets[-1]) != (0, len(names.utf8)):
            raise ValueError(f"label_names.offsets must go from 0 to {len(names.utf8)}")
        data = data._replace(label_names=names)
    lengths = {
        "label_names": num_labels,
        "label_counts": num_labels,
        "feature_weights": num_features,
        "train_positives": None if data.train_features is None else len(data.train_features),
    }
    for name, length in lengths.items():
        field = getattr(data, name)
        if field is not None and len(field) != length:
            raise ValueError(f"{name} has {len(field)} rows, expected {length}")
    if data.featurizer and featurizer_from(data.featurizer).num_buckets > num_features:
        raise ValueError(f"the featurizer has more buckets than there are features, {num_features}")
    if data.label_counts is not None and data.label_counts.min() < 0:
        raise ValueError(f"label_counts must be at least 0, got {data.label_counts.min()}")
    return data
