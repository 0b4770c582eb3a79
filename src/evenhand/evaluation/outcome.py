"""Searches all labels for every query of a part, and keeps the rank of every positive."""

import dataclasses
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.data import FloatArray, IntArray, Part, pad_rows, pairs_of
from evenhand.data.csr import MAX_IDS, check_ids
from evenhand.errors import UserError
from evenhand.files import atomic_path, check_npy_header, open_input
from evenhand.metrics import label_propensities, pair_ranks, query_metrics
from evenhand.search.exact import Index, check_scores

CUTOFFS = (1, 5, 10, 25, 50)
NUM_SHOWN = 10  # results kept for each query
OF_PAIRS = ("query_ids", "label_ids", "ranks", "scores")
OF_QUERIES = ("retrieved_ids", "retrieved_scores")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What happened to every query of a part, and to each of its N (query, positive) pairs."""

    query_ids: IntArray  # (N,) int64, in the order of `pairs_of`
    label_ids: IntArray  # (N,) int64
    ranks: IntArray  # (N,) int32, from 1; 0: not among the first num_results
    scores: FloatArray  # (N,) of the positive
    retrieved_ids: IntArray  # (Q, 10) int32, best first; -1 where fewer were found
    retrieved_scores: FloatArray  # (Q, 10), -inf where fewer were found
    query_metrics: dict[str, FloatArray]  # (Q,) each, NaN for a query without positives
    query_weights: dict[str, FloatArray]  # (Q,) each; a metric that is not here weighs all alike
    num_results: int
    cutoffs: tuple[int, ...]


@torch.no_grad()
def evaluate(
    encode_fn: Callable[[IntArray], Any],
    index: Index,
    part: Part,
    label_counts: IntArray,
    *,
    num_results: int = 50,
    cutoffs: Sequence[int] = CUTOFFS,
    batch_size: int = 4096,
    num_train_queries: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Searches for every query of a part and keeps what was found.

    Args:
        encode_fn: row numbers of queries (B,) -> their vectors (B, D), as the index takes them.
        label_counts: (L,) training pairs of each label, for the propensities.
        num_train_queries: N in the propensities; without it there is no 'psp@r'.
        progress: called with the number of queries done and of all.
    """
    if not cutoffs or not 1 <= min(cutoffs) <= max(cutoffs) <= num_results:
        raise ValueError(
            f"cutoffs must lie between 1 and num_results ({num_results}), got {tuple(cutoffs)}"
        )
    cutoffs = tuple(sorted(set(cutoffs)))
    propensities = None
    if num_train_queries is not None:
        counts = torch.from_numpy(np.ascontiguousarray(label_counts))
        propensities = label_propensities(counts, num_train_queries)
    batches = []
    for start in range(0, len(part), batch_size):
        row_ids = np.arange(start, min(start + batch_size, len(part)))
        queries = encode_fn(row_ids)  # (B, D)
        positive_ids = torch.from_numpy(pad_rows(part.positives, row_ids)).to(queries.device)
        found_ids, found_scores = index.search(queries, num_results)  # (B, R)
        check_scores(found_ids, found_scores)
        scores = index.scores_of(queries, positive_ids).float().cpu()  # (B, P)
        found_ids, positive_ids = found_ids.cpu(), positive_ids.cpu()
        ranks = pair_ranks(found_ids, positive_ids)  # (B, P)
        metrics = query_metrics(found_ids, positive_ids, cutoffs=cutoffs, propensities=propensities)
        is_pair = ranks >= 0
        arrays = {
            "ranks": ranks[is_pair].int(),  # (B, P) -> (pairs of the batch,)
            "scores": scores[is_pair],
            "retrieved_ids": _first(found_ids.int(), -1),
            "retrieved_scores": _first(found_scores.float().cpu(), -torch.inf),
            **{f"metric {name}": values for name, values in metrics.values.items()},
            **{f"weight {name}": values for name, values in metrics.weights.items()},
        }
        batches.append({name: array.numpy() for name, array in arrays.items()})
        if progress is not None:
            progress(int(row_ids[-1]) + 1, len(part))
    if not batches:
        raise UserError("the part to evaluate holds no query")
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    pairs = pairs_of(part.positives)._asdict()  # query_ids, label_ids
    return _outcome({**joined, **pairs, "num_results": num_results, "cutoffs": np.array(cutoffs)})


def pair_losses(outcome: Outcome, cutoff: int | None = None) -> NDArray[np.float64]:
    """1 - 1 / rank of every pair, or 1 beyond a cutoff and 0 within; 1 if not found: (N,)."""
    ranks = np.asarray(outcome.ranks, dtype=np.int64)
    if cutoff is None:
        return np.where(ranks > 0, 1 - 1 / np.maximum(ranks, 1), 1.0)
    return np.where((ranks == 0) | (ranks > cutoff), 1.0, 0.0)


def _first(values: Tensor, absent: float) -> Tensor:
    """The first NUM_SHOWN columns, filled up where there are fewer: (B, R) -> (B, 10)."""
    shown = values[:, :NUM_SHOWN]
    return torch.nn.functional.pad(shown, (0, NUM_SHOWN - shown.shape[1]), value=absent)


# --- on disk --------------------------------------------------------------------------------------


def _arrays(outcome: Outcome) -> dict[str, Any]:
    return {
        **{name: getattr(outcome, name) for name in (*OF_PAIRS, *OF_QUERIES)},
        "num_results": np.array(outcome.num_results),
        "cutoffs": np.array(outcome.cutoffs),
        **{f"metric {name}": values for name, values in outcome.query_metrics.items()},
        **{f"weight {name}": values for name, values in outcome.query_weights.items()},
    }


def _outcome(arrays: Mapping[str, Any]) -> Outcome:
    """The inverse of `_arrays`."""

    def of_kind(kind: str) -> dict[str, FloatArray]:
        names = [name for name in arrays if name.startswith(kind)]
        return {name.removeprefix(kind): arrays[name].astype(np.float32) for name in names}

    return Outcome(
        **{name: arrays[name] for name in (*OF_PAIRS, *OF_QUERIES)},
        query_metrics=of_kind("metric "),
        query_weights=of_kind("weight "),
        num_results=int(arrays["num_results"]),
        cutoffs=tuple(arrays["cutoffs"].tolist()),
    )


def _check(outcome: Outcome) -> None:
    """Refuses arrays that are not of the same queries and pairs, by a `ValueError`."""
    num_pairs, num_queries = len(outcome.query_ids), len(outcome.retrieved_ids)
    shapes = {
        **dict.fromkeys(OF_PAIRS, (num_pairs,)),
        **dict.fromkeys(OF_QUERIES, (num_queries, NUM_SHOWN)),
    }
    for name, shape in shapes.items():
        array = getattr(outcome, name)
        if array.shape != shape or array.dtype.kind != ("f" if "scores" in name else "i"):
            raise ValueError(f"{name} are {array.dtype} of shape {array.shape}, expected {shape}")
    for name, values in (outcome.query_metrics | outcome.query_weights).items():
        if values.shape != (num_queries,):
            raise ValueError(f"{name} is of shape {values.shape}, expected {(num_queries,)}")
    check_ids("query_ids", outcome.query_ids, num_queries)
    check_ids("ranks", outcome.ranks, outcome.num_results + 1)
    check_ids("retrieved_ids", outcome.retrieved_ids, MAX_IDS + 1, first=-1)
    if not all(type(cutoff) is int and cutoff > 0 for cutoff in outcome.cutoffs):
        raise ValueError(f"cutoffs must be above 0, got {outcome.cutoffs}")


def save_outcome(outcome: Outcome, folder: Path) -> None:
    """Writes folder/outcome.npz, all of it or nothing; an older one is replaced."""
    with atomic_path(folder / "outcome.npz") as staging, open(staging, "wb") as file:
        np.savez(file, **_arrays(outcome))  # numbers only: nothing pickled


def load_outcome(folder: Path) -> Outcome:
    """Reads what `save_outcome` wrote."""
    path = folder / "outcome.npz"
    if not path.exists():
        raise UserError(f"{folder} holds no outcome.npz; evaluate the run first")
    try:  # reading a member to its end checks its sum; zipfile raises RuntimeError for odd flags
        with open_input(path) as opened, np.load(opened, allow_pickle=False) as file:
            members = file.zip.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise ValueError("a compressed member could be of any size, and we write none")
            if sum(member.file_size for member in members) > path.stat().st_size:
                raise ValueError("its members claim to be larger than the file")
            for member in members:
                with file.zip.open(member) as array:
                    check_npy_header(array)
            outcome = _outcome({name: file[name] for name in file.files})
        _check(outcome)
    except UserError:
        raise
    except Exception as error:  # the readers of zip, deflate and .npy raise a dozen kinds
        raise UserError(
            f"{path} is damaged ({type(error).__name__}: {error}); evaluate the run again"
        ) from error
    return outcome
