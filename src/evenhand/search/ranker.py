"""A linear ranker over mined labels: one sparse classifier a label, where the retriever errs.

The retriever finds candidates among all labels; what tells them apart may be a single word, which
vectors of some hundred dimensions blur. So each label gets weights of the sparse features, fitted
on its positive training queries and on those for which the trained retriever ranks it high although
it is wrong. These are the hardest labels of each query, the idea of S2M once more.

The objective and how it is minimised are in `classifiers`. A label without a positive
query has nothing to be told from: no weights, and the score of a wrong label, -1, for all queries.

Memory: the mined labels, 4 N M bytes (N queries, M mined each: 1.4 GB for 1.2 million and 300),
lists of PAIRS_AT_ONCE pairs, a row of weights a thread, and the weights that are kept.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from evenhand.data import IntArray, Rows
from evenhand.errors import UserError
from evenhand.files import atomic_path, check_is_file
from evenhand.kernels.jit import num_threads_for
from evenhand.search import classifiers
from evenhand.search.exact import ExactIndex

Mined = NDArray[np.int32]
ProgressFn = Callable[[int, int], None]  # what is done, and how much there is

PAIRS_AT_ONCE = 2**26  # listed by label: 256 MiB
PAIRS_OF_TASK = 2**16  # fitted by a thread before it takes the next ones
DTYPES = {"offsets": "int64", "features": "int32", "values": "float32", "biases": "float32"}
WRONG = -1.0  # where the squared hinge wants the score of a wrong label to be


class LinearRanker(NamedTuple):
    """Weights of features for each of L labels."""

    weights: Rows  # (L,) ids are features, each of a label once
    biases: NDArray[np.float32]  # (L,)
    num_features: int

    def __len__(self) -> int:  # labels, not fields of the tuple
        return len(self.biases)

    def scores(self, features: Rows, label_ids: IntArray) -> NDArray[np.float32]:
        """What is said of chosen labels: (Q,) rows, (Q, C) -> (Q, C), 0 where the id is -1."""
        check_rows(features, self.num_features, "features", needs_values=True)
        if label_ids.ndim != 2 or len(label_ids) != len(features):
            raise ValueError(f"label_ids must be ({len(features)}, C), got {label_ids.shape}")
        if label_ids.max(initial=-1) >= len(self):
            raise ValueError(
                f"label_ids must be below {len(self)} (the labels), got {label_ids.max()}"
            )
        scores = np.zeros(label_ids.shape, dtype=np.float32)
        wanted = np.ascontiguousarray(label_ids, dtype=np.int64)
        order = np.empty(wanted.size, dtype=np.int64)
        starts = np.zeros(len(self) + 1, dtype=np.int64)
        count = classifiers.order_by_label(wanted.ravel(), starts, order)
        num_threads = num_threads_for(
            label_ids.size * (1 + len(features.ids) // max(1, len(features)))
        )
        classifiers.score_labels(
            num_threads,
            *_arrays(features),
            *_arrays(self.weights),
            np.ascontiguousarray(self.biases),
            wanted,
            order[:count],
            np.zeros((num_threads, self.num_features), dtype=np.float32),
            scores,
        )
        return scores


def hardest_labels(
    encode_fn: Callable[[IntArray], Tensor],
    index: ExactIndex,
    positives: Rows,
    count: int,
    *,
    batch_size: int = 4096,
    progress_fn: ProgressFn | None = None,
) -> Mined:
    """The labels that score highest for each query, -1 for its positives among them: (N, count).

    Args:
        encode_fn: row numbers of queries (B,) -> their vectors (B, D).
        positives: (N,) labels of each query.
        progress_fn: called with the number of queries done and of all.
    """
    check_rows(positives, len(index), "positives")
    mined = np.empty((len(positives), min(count, len(index))), dtype=np.int32)
    for start in range(0, len(positives), batch_size):
        row_ids = np.arange(start, min(start + batch_size, len(positives)))
        found = index.search(encode_fn(row_ids), count)
        block = mined[start : start + batch_size]
        block[:] = found.label_ids.cpu().numpy()
        classifiers.clear_positives(block, *_lists(positives), start)
        if progress_fn is not None:
            progress_fn(int(row_ids[-1]) + 1, len(positives))
    return mined


def fit_ranker(
    features: Rows,
    positives: Rows,
    mined: Mined,
    *,
    num_features: int,
    num_labels: int,
    positive_cost: float = 0.5,
    negative_cost: float = 0.2,
    smallest_weight: float = 0.01,
    tolerance: float = 0.5,
    max_passes: int = 20,
    seed: int = 0,
    progress_fn: ProgressFn | None = None,
) -> LinearRanker:
    """Fits one classifier a label. The result does not depend on the number of threads.

    Args:
        features: (N,) of the training queries, with values.
        positives: (N,) their labels.
        mined: (N, M) labels that are wrong for each query and look right; -1 for none.
        positive_cost, negative_cost: of a squared hinge loss beside half the squared weights.
        smallest_weight: weights below it in size are dropped.
        tolerance: how far the projected gradients of the dual may lie apart in the end.
        max_passes: over the rows of a label, converged or not.
        progress_fn: called with the number of (query, label) pairs done and of all.
    """
    check_rows(features, num_features, "features", needs_values=True)
    check_rows(positives, num_labels, "positives")
    if len(positives) != len(features) or mined.ndim != 2 or len(mined) != len(features):
        raise ValueError(
            f"features, positives and mined labels must be of the same queries, got "
            f"{len(features)}, {len(positives)} and {mined.shape}"
        )
    if mined.size and not -1 <= mined.min() <= mined.max() < num_labels:
        raise ValueError(
            f"mined labels must be from -1 to {num_labels - 1}, got {mined.min()} to {mined.max()}"
        )
    if not (positive_cost > 0 and negative_cost > 0):
        raise ValueError(f"costs must be above 0, got {positive_cost} and {negative_cost}")
    mined = np.ascontiguousarray(mined, dtype=np.int32)
    arrays = _arrays(features)
    squares = classifiers.squared_lengths(*arrays, num_features)
    limits: Any = positive_cost, negative_cost, tolerance, max_passes, smallest_weight, seed
    positive_counts = np.bincount(positives.ids, minlength=num_labels).astype(np.int64)
    counts = positive_counts.copy()
    classifiers.count_labels(mined, counts)
    counts[positive_counts == 0] = 0
    num_pairs, num_done = int(counts.sum()), 0

    def fit(task: _Task) -> tuple[_Task, Any]:
        numbers = task.labels, task.starts, counts[task.labels], positive_counts[task.labels]
        numbers = tuple(map(np.ascontiguousarray, numbers))  # type: ignore[assignment]
        return task, classifiers.fit_labels(
            *numbers, task.rows, *arrays, squares, num_features, *limits
        )

    fitted = []
    for tasks in _tasks(positives, mined, counts):
        pool = ThreadPoolExecutor(max(1, torch.get_num_threads()))
        try:
            for task, result in pool.map(fit, tasks):
                fitted.append((task.labels, *result))
                num_done += int(counts[task.labels].sum())
                if progress_fn is not None:
                    progress_fn(num_done, num_pairs)
        finally:
            pool.shutdown(cancel_futures=True)
    return _join_tasks(fitted, num_features=num_features, num_labels=num_labels)


class _Task(NamedTuple):
    """Labels that a thread fits together."""

    labels: NDArray[np.int64]  # (K,)
    starts: NDArray[np.int64]  # (K,) where the rows of each begin
    rows: NDArray[np.int32]  # those of all tasks


def _tasks(positives: Rows, mined: Mined, counts: NDArray[np.int64]) -> Iterator[list[_Task]]:
    """All labels that have rows, a range of labels at a time: the longest lists first."""
    ends = np.cumsum(counts)
    first = 0
    while first < len(counts):
        done = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, done + PAIRS_AT_ONCE, side="right")))
        own = counts[first:last]
        starts = np.cumsum(own) - own
        rows = np.empty(own.sum(), dtype=np.int32)
        places = np.where(own > 0, starts, -1)
        classifiers.list_rows(*_lists(positives), mined, first, last, places, rows)
        order = np.argsort(-own, kind="stable")[: np.count_nonzero(own)]
        cuts = np.flatnonzero(np.diff(np.cumsum(own[order]) // PAIRS_OF_TASK)) + 1
        yield [
            _Task(first + part, starts[part], rows) for part in np.split(order, cuts) if len(part)
        ]
        first = last


def _join_tasks(fitted: list[Any], *, num_features: int, num_labels: int) -> LinearRanker:
    """What the tasks found, in the order of the labels; the list is emptied on the way."""
    lengths = np.zeros(num_labels, dtype=np.int64)
    for labels, num_kept, *_ in fitted:
        lengths[labels] = num_kept
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids, values = np.empty(offsets[-1], np.int32), np.empty(offsets[-1], np.float32)
    biases = np.full(num_labels, WRONG, dtype=np.float32)
    while fitted:
        labels, num_kept, kept_ids, kept_values, kept_biases = fitted.pop()
        biases[labels] = kept_biases
        start = 0
        for label, count in zip(labels.tolist(), num_kept.tolist(), strict=True):
            place = slice(offsets[label], offsets[label + 1])
            ids[place] = kept_ids[start : start + count]
            values[place] = kept_values[start : start + count]
            start += count
    return LinearRanker(Rows(offsets, ids, values), biases, num_features)


# --- on disk --------------------------------------------------------------------------------------


def save_ranker(path: Path, ranker: LinearRanker) -> None:
    """Writes a .safetensors file, all of it or nothing."""
    offsets, features, values = ranker.weights
    arrays = {"offsets": offsets, "features": features, "values": values, "biases": ranker.biases}
    with atomic_path(path) as staging:
        staging.write_bytes(safetensors.numpy.save(arrays))  # type: ignore[arg-type]


def load_ranker(path: Path, *, num_features: int, num_labels: int) -> LinearRanker:
    """Reads what `save_ranker` wrote, for a model of as many features and labels."""
    try:
        check_is_file(path)
        arrays = safetensors.numpy.load_file(path)
        for name, dtype in DTYPES.items():
            if arrays[name].dtype != dtype:  # to convert could make one id of another
                raise ValueError(f"{name} are {arrays[name].dtype}, expected {dtype}")
        weights = Rows(arrays["offsets"], arrays["features"], arrays["values"])
        biases = arrays["biases"]
        check_rows(weights, num_features, "features", needs_values=True)
        if not (np.isfinite(arrays["values"]).all() and np.isfinite(biases).all()):
            raise ValueError("a weight is not finite")
        if len(weights) != num_labels or biases.shape != (num_labels,):
            raise ValueError(f"{len(weights)} labels, the data set has {num_labels}")
    except (SafetensorError, KeyError, ValueError) as error:
        raise UserError(
            f"{path} does not fit this run's data, or is damaged ({error}); remove it and finish "
            f"the run again: evenhand train --resume --run {path.parent.parent}"
        ) from error
    return LinearRanker(weights, biases, num_features)


# --- arrays for compiled code ---------------------------------------------------------------------


def check_rows(rows: Rows, limit: int, name: str, *, needs_values: bool = False) -> None:
    """Refuses rows that compiled code would read, or write, beyond an array with."""
    if needs_values and rows.values is None:
        raise ValueError(f"{name} must have values")
    offsets, num_entries = rows.offsets, rows.ids.size
    if offsets.ndim != 1 or rows.ids.ndim != 1:
        raise ValueError(f"the arrays of {name} must have one dimension")
    is_whole = len(offsets) and offsets[0] >= 0 and offsets[-1] <= num_entries
    if not is_whole or (offsets[1:] < offsets[:-1]).any():  # a difference may overflow
        raise ValueError(f"the offsets of {name} must rise from 0 to {num_entries}")
    if rows.values is not None and rows.values.ndim != 1:
        raise ValueError(f"the values of {name} must have one dimension")
    if rows.values is not None and len(rows.values) != num_entries:
        raise ValueError(f"{name} have {num_entries} ids and {len(rows.values)} values")
    if num_entries and not 0 <= rows.ids.min() <= rows.ids.max() < limit:
        raise ValueError(
            f"ids of {name} must be from 0 to {limit - 1}, got {rows.ids.min()} to {rows.ids.max()}"
        )


def _arrays(rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.float32]]:
    """Rows with values, as the kernels take them."""
    assert rows.values is not None
    offsets, ids = _lists(rows)
    return offsets, ids.view(np.uint32), _plain(rows.values, np.float32)


def _lists(rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    return _plain(rows.offsets, np.int64), _plain(rows.ids, np.int32)


def _plain(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """A view that cannot be written to: arrays in memory and on disk are compiled for once."""
    view = np.asarray(np.ascontiguousarray(array, dtype=dtype)).view()
    view.flags.writeable = False
    return view
