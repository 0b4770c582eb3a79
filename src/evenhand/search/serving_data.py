"""What a run keeps of its data set so that it answers queries without it.

With it a run folder answers without the data set it was trained on. The file holds the names of the
labels, and where the settings need them, one number a label (training pairs) or a feature (its
weight). Where training queries vote, it holds all of their features and labels, and is as large as
the training part.
"""

from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from evenhand.data import FloatArray, IntArray, Rows, Strings
from evenhand.data.checks import MAX_IDS, check_offsets, check_shape, check_spans
from evenhand.data.text import featurizer_from
from evenhand.search.arrays import check_rows, open_arrays, save_arrays

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
    arrays: dict[str, NDArray[Any] | None] = {}
    for name, field in data._asdict().items():
        if isinstance(field, Rows):
            arrays |= {f"{name}.{key}": array for key, array in field._asdict().items()}
        elif isinstance(field, Strings):
            arrays |= {f"{name}.{key}": array for key, array in vars(field).items()}
        elif name not in KINDS:
            arrays[name] = field
    typed = {
        name: array.astype(DTYPES[name.rpartition(".")[2]], copy=False)
        for name, array in arrays.items()
        if array is not None
    }
    about = {name: getattr(data, name) for name in KINDS}
    save_arrays(path, typed, version=FORMAT_VERSION, **about)


def load_query_data(path: Path) -> QueryData:
    """Reads what `save_query_data` wrote; a file that compiled code could stumble over is refused.

    Raises:
        UserError: the file is damaged.
    """
    with open_arrays(path, DTYPES) as (arrays, about):
        if not isinstance(about, dict) or about.get("version") != FORMAT_VERSION:
            raise ValueError(f"its version must be {FORMAT_VERSION}")
        for name, kind in KINDS.items():
            if not isinstance(about.get(name), kind):
                raise ValueError(f"{name} must be {kind}, got {str(about.get(name))[:40]!r}")
        num_features, num_labels = about["num_features"], about["num_labels"]
        if not 1 <= min(num_features, num_labels) <= max(num_features, num_labels) <= MAX_IDS:
            raise ValueError(f"there must be 1 to {MAX_IDS} features, and as many labels")
        data = QueryData(
            **{name: about[name] for name in KINDS},
            feature_weights=arrays.get("feature_weights"),
            label_counts=arrays.get("label_counts"),
        )
        if "label_names.offsets" in arrays:
            names = Strings(arrays["label_names.offsets"], arrays["label_names.utf8"])
            check_spans("label_names", num_labels, names.offsets, names.utf8)
            check_offsets("label_names", names.offsets)
            data = data._replace(label_names=names)
        if "train_features.offsets" in arrays:
            features = _rows(arrays, "train_features", num_features, needs_values=True)
            positives = _rows(arrays, "train_positives", num_labels, num_rows=len(features))
            data = data._replace(train_features=features, train_positives=positives)
        for name, length in (("label_counts", num_labels), ("feature_weights", num_features)):
            if name in arrays:
                check_shape(name, arrays[name], (length,))
        if data.featurizer and featurizer_from(data.featurizer).num_buckets > num_features:
            raise ValueError(f"the featurizer has more buckets than features, {num_features}")
        if data.label_counts is not None and data.label_counts.min() < 0:
            raise ValueError(f"label_counts must be at least 0, got {data.label_counts.min()}")
        return data


def _rows(arrays: dict[str, NDArray[Any]], name: str, limit: int, **wanted: Any) -> Rows:
    """Rows of ids below `limit`, by the names of their arrays."""
    values = arrays.get(f"{name}.values")
    rows = Rows(arrays[f"{name}.offsets"], arrays[f"{name}.ids"], values)
    check_rows(rows, limit, name, **wanted)
    return rows
