"""A linear re-ranker: one sparse classifier per label, fitted on mined negatives.

The retriever finds candidates among all labels; what tells them apart may be a single word, which
vectors of some hundred dimensions blur. So each label gets weights of the sparse features, fitted
on its positive training queries and on those for which the trained retriever ranks it high although
it is wrong. These are the hardest labels of each query, the idea of S2M once more.

The objective and how it is minimised are in `linear_svm`. A label without a positive
query has nothing to be told from: no weights, and the score of a wrong label, -1, for all queries.

Memory: the mined labels, 4 N M bytes (N queries, M mined each: 1.4 GB for 1.2 million and 300),
lists of PAIRS_AT_ONCE pairs, a row of weights a thread, and the weights that are kept.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from torch import Tensor

from evenhand.data import IntArray, Rows, take_rows
from evenhand.data.csr import PIECE, check_ids, check_rows, check_shape, iterate_pieces
from evenhand.files import open_arrays, save_arrays
from evenhand.kernels.jit import num_threads_for
from evenhand.search import linear_svm
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
        check_ids("label_ids", label_ids.ravel(), len(self), first=-1)
        scores = np.zeros(label_ids.shape, dtype=np.float32)
        wanted = np.ascontiguousarray(label_ids, dtype=np.int64)
        # The places of the ids by label, -1 last: a conversion to columns is a sort by counting.
        columns = np.where(wanted < 0, len(self), wanted).ravel()
        places = csr_matrix(
            (np.arange(wanted.size), columns, [0, wanted.size]), shape=(1, len(self) + 1)
        ).tocsc()
        order = places.data[: places.indptr[-2]]
        num_entries = 1 + len(features.ids) // max(1, len(features))
        num_threads = num_threads_for(label_ids.size * num_entries)
        linear_svm.score_labels(
            num_threads,
            _arrays(features),
            _arrays(self.weights),
            np.ascontiguousarray(self.biases),
            wanted,
            order,
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
        linear_svm.clear_positives(block, *_lists(positives), start)
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
    check_ids("mined labels", mined.ravel(), num_labels, first=-1)
    if not (positive_cost > 0 and negative_cost > 0):
        raise ValueError(f"costs must be above 0, got {positive_cost} and {negative_cost}")
    mined = np.ascontiguousarray(mined, dtype=np.int32)
    arrays = _arrays(features)
    squares = linear_svm.squared_lengths(arrays, num_features)
    limits = (
        float(positive_cost), float(negative_cost), float(tolerance), int(max_passes),
        float(smallest_weight),
    )  # fmt: skip
    positive_counts = np.bincount(positives.ids, minlength=num_labels).astype(np.int64)
    counts = positive_counts.copy()
    for _, piece in iterate_pieces(mined.ravel(), max(PIECE, num_labels)):
        counts += np.bincount(piece[piece >= 0], minlength=num_labels)
    counts[positive_counts == 0] = 0
    num_pairs, num_done = int(counts.sum()), 0

    def fit(task: Any, rows: Mined) -> tuple[Any, ...]:
        labels: Any = task[0]
        return labels, *linear_svm.fit_labels(
            labels, task[1], counts[labels], positive_counts[labels], rows, arrays, squares,
            num_features, limits, seed,
        )  # fmt: skip

    nothing = np.zeros(0, np.uint32), np.zeros(0, np.float32), np.array([WRONG], np.float32)
    fitted = [(np.array([num_labels]), np.array([0]), *nothing)]  # for labels that have no rows
    for listed, tasks in _tasks(positives, mined, counts):
        pool = ThreadPoolExecutor(max(1, torch.get_num_threads()))
        try:
            for result in pool.map(partial(fit, rows=listed), tasks):
                fitted.append(result)
                num_done += int(counts[result[0]].sum())
                if progress_fn is not None:
                    progress_fn(num_done, num_pairs)
        finally:
            pool.shutdown(cancel_futures=True)
    columns = zip(*fitted, strict=True)
    labels, num_kept, ids, values, biases = [np.concatenate(column) for column in columns]
    fitted.clear()  # at no time are there more than two copies of the weights
    rows = Rows(np.concatenate([[0], np.cumsum(num_kept)]), ids.view(np.int32), values)
    row_of = np.zeros(num_labels + 1, dtype=np.int64)  # that of no label, if not fitted
    row_of[labels] = np.arange(len(labels))
    return LinearRanker(take_rows(rows, row_of[:-1]), biases[row_of[:-1]], num_features)


def _tasks(
    positives: Rows, mined: Mined, counts: NDArray[np.int64]
) -> Iterator[tuple[Mined, list[tuple[IntArray, IntArray]]]]:
    """All labels that have rows, a range of labels at a time: the longest lists first.

    Yields:
        The rows of the labels of a range, and tasks: labels (K,) that a thread fits together, and
        where the rows of each begin (K,).
    """
    ends = np.cumsum(counts)
    first = 0
    while first < len(counts):
        done = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, done + PAIRS_AT_ONCE, side="right")))
        own = counts[first:last]
        starts = np.cumsum(own) - own
        rows = np.empty(own.sum(), dtype=np.int32)
        places = np.where(own > 0, starts, -1)
        linear_svm.list_rows(*_lists(positives), mined, first, last, places, rows)
        order = np.argsort(-own, kind="stable")[: np.count_nonzero(own)]
        cuts = np.flatnonzero(np.diff(np.cumsum(own[order]) // PAIRS_OF_TASK)) + 1
        parts = [part for part in np.split(order, cuts) if len(part)]
        yield rows, [(first + part, starts[part]) for part in parts]
        first = last


# --- on disk --------------------------------------------------------------------------------------


def save_ranker(path: Path, ranker: LinearRanker) -> None:
    """Writes a .safetensors file, all of it or nothing."""
    offsets, features, values = ranker.weights
    arrays: Any = {"offsets": offsets, "features": features, "values": values}
    save_arrays(path, {**arrays, "biases": ranker.biases})


def load_ranker(path: Path, *, num_features: int, num_labels: int) -> LinearRanker:
    """Reads what `save_ranker` wrote, for a model of as many features and labels."""
    with open_arrays(path, DTYPES) as (arrays, _):
        weights = Rows(arrays["offsets"], arrays["features"], arrays["values"])
        check_rows(weights, num_features, "weights", needs_values=True, num_rows=num_labels)
        check_shape("biases", arrays["biases"], (num_labels,))
        return LinearRanker(weights, arrays["biases"], num_features)


# --- arrays for compiled code ---------------------------------------------------------------------


def _arrays(rows: Rows) -> linear_svm.SparseRows:
    """Rows with values, as the kernels take them."""
    offsets, ids = _lists(rows)
    return offsets, ids.view(np.uint32), _plain(rows.values, np.float32)


def _lists(rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Offsets and ids, as the kernels take them."""
    return _plain(rows.offsets, np.int64), _plain(rows.ids, np.int32)


def _plain(array: Any, dtype: Any) -> NDArray[Any]:
    """A view that cannot be written to: arrays in memory and on disk are compiled for once."""
    view = np.asarray(np.ascontiguousarray(array, dtype=dtype)).view()
    view.flags.writeable = False
    return view
