"""The contract of every index, exact search, and a running top-k for it.

Exact: every label is scored, a block at a time, in memory that does not grow with L.

On a CPU each thread takes its queries all the way, product and selection by turns, so that scores
are selected from while they are in its cache. Other devices and precisions use torch alone.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.errors import UserError
from evenhand.kernels.jit import jit

# 64 MiB of float32, measured on two cores: with less the many small steps cost more than they
# should, with more the first touch of fresh memory does.
SCORES_AT_ONCE = 2**24
GATHER_FLOATS = 2**24  # label vectors copied at once by `scores_of`
SCORES_OF_THREAD = 2**20  # 4 MiB, a thread's share of a usual third-level cache
ROWS_OF_THREAD = 1024  # queries that share a block of labels: with fewer the product is slower
FEWEST_ROWS = 128  # of a thread; with fewer queries the product alone uses all threads


class SearchResult(NamedTuple):
    label_ids: Tensor  # (Q, R) int64, best first; of equal scores the lower id first
    scores: Tensor  # (Q, R)


class VectorIndex(Protocol):
    """Answers queries that are vectors: exactly, or from FAISS, PostgreSQL or Milvus."""

    @property
    def name(self) -> str:
        """For a person: what answers, and how."""

    def __len__(self) -> int:
        """L, the labels it holds."""

    def search(self, queries: Tensor, num_results: int) -> SearchResult:
        """The labels of the highest score: (Q, D) -> (Q, R), R = min(num_results, L).

        The scores are the model's, label bias included; where fewer are found, -1 and -inf.
        """


class Index(Protocol):
    """Queries are vectors (Q, D), or what the index makes of them (`HybridIndex.prepare`)."""

    def search(self, queries: Any, num_results: int) -> tuple[Tensor, Tensor]:
        """Label ids (Q, R), best first, -1 where fewer were found, and their scores (Q, R)."""

    def scores_of(self, queries: Any, label_ids: Tensor) -> Tensor:
        """Scores of chosen labels: (Q, P) -> (Q, P), -inf where the id is -1."""


def check_scores(label_ids: Tensor, scores: Tensor) -> None:
    """Refuses scores that are no numbers, by which nothing can be ordered: (Q, R), (Q, R)."""
    if not bool((scores.isfinite() | (label_ids < 0)).all()):
        raise UserError(
            "a score is infinite or no number: the model's weights, or the feature values of a "
            "query, are too large to be multiplied; train anew with a lower "
            "training.learning_rate or with smaller feature values, and see that no weight in "
            "[search] or [ranker] is huge"
        )


def check_queries(queries: Tensor, dim: int, num_results: int) -> None:
    """Refuses query vectors of another width, and those that nothing can be compared with."""
    if num_results < 1:
        raise ValueError(f"num_results must be at least 1, got {num_results}")
    if queries.ndim != 2 or queries.shape[1] != dim:
        raise ValueError(f"queries must be (Q, {dim}), got {tuple(queries.shape)}")
    if not bool(queries.isfinite().all()):
        raise UserError(
            "a query vector is infinite or no number: the model's weights, or the feature values "
            "of the query, are too large; train anew with a lower training.learning_rate or with "
            "smaller feature values"
        )


class ExactIndex:
    """Finds the labels of the highest score, query . label (+ bias), by scoring them all.

    At most SCORES_AT_ONCE scores (or block_size, if more) exist at any time, on a CPU at most
    SCORES_OF_THREAD a thread. Vectors stay on the device and in the precision they come in.

    Example:
        >>> index = ExactIndex(torch.eye(3), label_bias=torch.tensor([0.0, 0.0, 0.5]))
        >>> index.search(torch.tensor([[1.0, 0.0, 0.0]]), 2)
        SearchResult(label_ids=tensor([[0, 2]]), scores=tensor([[1.0000, 0.5000]]))
    """

    name = "exact search"

    def __init__(
        self,
        label_vectors: Tensor,
        *,
        label_bias: Tensor | None = None,
        block_size: int = 65_536,
        vectors_fn: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Args:
        label_vectors: (L, D).
        label_bias: (L,), added to each label's score.
        block_size: most labels scored at once.
        vectors_fn: makes vectors (n, D) of rows (n, D) of `label_vectors` whenever they are
            searched, where a table is too large for a copy of it as vectors.
        """
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        if label_bias is not None and label_bias.shape != label_vectors.shape[:1]:
            raise ValueError(
                f"label_bias must have shape ({len(label_vectors)},), one value a label, "
                f"got {tuple(label_bias.shape)}"
            )
        self.label_vectors = label_vectors
        self.label_bias = label_bias
        self.vectors_fn = vectors_fn or (lambda rows: rows)
        num_blocks = max(1, math.ceil(len(label_vectors) / block_size))
        self.block_size = math.ceil(len(label_vectors) / num_blocks)  # no short block at the end

    def __len__(self) -> int:
        return len(self.label_vectors)

    @torch.no_grad()
    def search(self, queries: Tensor, num_results: int) -> SearchResult:
        """The labels of the highest score: (Q, D) -> (Q, R), where R = min(num_results, L)."""
        check_queries(queries, self.label_vectors.shape[1], num_results)
        num_results = min(num_results, len(self))
        label_ids = queries.new_empty(len(queries), num_results, dtype=torch.long)
        scores = queries.new_empty(len(queries), num_results)
        found = SearchResult(label_ids, scores)
        if queries.device.type == "cpu" and queries.dtype == torch.float32:
            self._search_in_threads(queries.detach(), found)
        else:
            self._search_in_blocks(queries, found)
        return found

    @torch.no_grad()
    def scores_of(self, queries: Tensor, label_ids: Tensor) -> Tensor:
        """Scores of chosen labels: (Q, D), (Q, P) -> (Q, P), -inf where the id is -1."""
        num_columns = max(label_ids.shape[1], 1)
        num_rows = max(1, GATHER_FLOATS // (num_columns * queries.shape[1]))
        scores = queries.new_empty(label_ids.shape)  # (Q, P)
        for start in range(0, len(queries), num_rows):
            rows = slice(start, start + num_rows)
            ids = label_ids[rows].clamp(min=0)  # (q, P)
            vectors = self.vectors_fn(self.label_vectors.index_select(0, ids.flatten()))
            vectors = vectors.view(*ids.shape, queries.shape[1])  # (q * P, D) -> (q, P, D)
            scores[rows] = (vectors @ queries[rows].unsqueeze(-1)).squeeze(-1)  # (q, P)
            if self.label_bias is not None:
                scores[rows] += self.label_bias[ids]
        return scores.masked_fill(label_ids < 0, -torch.inf)

    def _search_in_threads(self, queries: Tensor, found: SearchResult) -> None:
        """Fills `found`; each thread takes some of the queries, product and all."""
        all_threads = torch.get_num_threads()
        num_threads = max(1, min(all_threads, len(queries) // FEWEST_ROWS))
        most_rows = max(1, min(ROWS_OF_THREAD, SCORES_OF_THREAD // found.scores.shape[1]))
        num_tasks = num_threads * math.ceil(len(queries) / (num_threads * most_rows))
        num_rows = math.ceil(len(queries) / max(1, num_tasks))
        tasks = [slice(start, start + num_rows) for start in range(0, len(queries), num_rows or 1)]
        if num_threads == 1:
            for rows in tasks:
                self._search_rows(queries, rows, found)
            return
        # One thread for each product: the idle threads of a shared one would wait in a busy loop
        # and slow the selection down.
        try:
            with ThreadPoolExecutor(num_threads, "", torch.set_num_threads, (1,)) as pool:
                list(pool.map(lambda rows: self._search_rows(queries, rows, found), tasks))
        finally:
            torch.set_num_threads(all_threads)  # what threads yet to come start with

    def _search_rows(self, queries: Tensor, rows: slice, found: SearchResult) -> None:
        queries = queries[rows]
        num_columns = min(self.block_size, max(1, SCORES_OF_THREAD // len(queries)))
        buffer = queries.new_empty(len(queries) * num_columns)
        best = BestSoFar(len(queries), found.scores.shape[1])
        for start in range(0, len(self), num_columns):
            columns = slice(start, start + num_columns)
            vectors = self.vectors_fn(self.label_vectors[columns].detach())  # (b, D)
            scores = buffer[: len(queries) * len(vectors)].view(len(queries), len(vectors))
            if self.label_bias is None:
                torch.mm(queries, vectors.T, out=scores)
            else:
                torch.addmm(self.label_bias[columns].detach(), queries, vectors.T, out=scores)
            best.add(scores.numpy(), first_label=start)
        label_ids, best_scores = best.ranked()
        found.label_ids[rows] = torch.from_numpy(label_ids)
        found.scores[rows] = torch.from_numpy(best_scores)

    def _search_in_blocks(self, queries: Tensor, found: SearchResult) -> None:
        """Fills `found` with torch alone: for every device and precision, and the tests' oracle."""
        num_rows = max(1, SCORES_AT_ONCE // max(1, self.block_size))
        buffer = queries.new_empty(min(num_rows, len(queries)) * self.block_size)
        num_results = found.scores.shape[1]
        for start in range(0, len(queries), num_rows):
            asked = queries[start : start + num_rows]
            best_ids = asked.new_empty(len(asked), 0, dtype=torch.long)
            best_scores = asked.new_empty(len(asked), 0)
            for first in range(0, len(self), self.block_size):
                columns = slice(first, first + self.block_size)
                vectors = self.vectors_fn(self.label_vectors[columns])  # (b, D)
                scores = buffer[: len(asked) * len(vectors)].view(len(asked), -1)  # (q, b)
                torch.mm(asked, vectors.T, out=scores)
                if self.label_bias is not None:
                    scores += self.label_bias[columns]
                positions = _best_columns(scores, num_results)  # (q, r), ascending
                # What is held has the lower ids and stands first: a stable sort keeps ties by id.
                best_ids = torch.cat([best_ids, positions + first], dim=1)
                best_scores = torch.cat([best_scores, scores.gather(1, positions)], dim=1)
                best_scores, order = best_scores.sort(dim=1, descending=True, stable=True)
                best_scores = best_scores[:, :num_results]
                best_ids = best_ids.gather(1, order[:, :num_results])
            found.label_ids[start : start + num_rows] = best_ids
            found.scores[start : start + num_rows] = best_scores


def _best_columns(scores: Tensor, num_results: int) -> Tensor:
    """Columns of each row's largest scores, ascending; of equals the first: (q, b) -> (q, r)."""
    if num_results >= scores.shape[1]:
        return torch.arange(scores.shape[1], device=scores.device).expand(len(scores), -1)
    largest, positions = scores.topk(num_results + 1, dim=1)  # one more, to see a tie at the end
    chosen = positions[:, :-1].sort(dim=1).values  # (q, r)
    last = largest[:, -2:-1]  # (q, 1)
    (tied,) = (largest[:, -1:] == last).any(1).nonzero(as_tuple=True)
    if len(tied):
        rows, last = scores[tied], last[tied]  # (t, b), (t, 1)
        is_above = ~(rows <= last)  # not `>`: a score that is NaN is kept, as by torch.topk
        is_equal = rows == last
        num_free = num_results - is_above.sum(1, keepdim=True)  # (t, 1)
        is_kept = is_above | (is_equal & (is_equal.cumsum(1, dtype=torch.int32) <= num_free))
        chosen[tied] = is_kept.nonzero()[:, 1].view(len(tied), num_results)
    return chosen


# --- the best so far, on a CPU --------------------------------------------------------------------
# A running top-k over blocks of scores: one pass, while the scores are in the cache.
#
# A row holds its best r so far and the score of the last of them. Of a later block only what is
# above that score matters, which is little, and a vector instruction compares many scores with it.
#
# A score and its label are held as one integer, a key: keys are in the order of the scores, and of
# equal scores in that of the labels, lowest first. So no two are equal and ties need no care.
#
# It is not `kernels.selection.largest` of each block because that ignores what earlier blocks held:
# a whole search of 34,006 labels, the product included, then takes 1.3 to 1.9 times as long.

PIECE = 64  # scores compared together: a loop of this length becomes a few vector instructions
NOT_SIGN = np.int64(0x7FFFFFFF)  # of an int32
LOW_HALF = np.int64(0xFFFFFFFF)
HALF = np.int64(32)

Keys = NDArray[np.int64]
Scores = NDArray[np.float32]


class BestSoFar:
    """The r best scores of each of n rows, from blocks that come one after another.

    NaN counts as the largest, as in `torch.topk`. Labels must be less than 2 ** 32.

    Example:
        >>> best = BestSoFar(1, 2)
        >>> best.add(np.array([[1, 3]], np.float32), first_label=0)
        >>> best.add(np.array([[3, 2]], np.float32), first_label=2)
        >>> best.ranked()
        (array([[1, 2]]), array([[3., 3.]], dtype=float32))
    """

    def __init__(self, num_rows: int, num_results: int) -> None:
        self.num_results = num_results
        # Dropping what is not among the best takes a few passes: worth it after many new ones.
        capacity = num_results + max(2 * PIECE, num_results // 2)
        self.keys = np.empty((num_rows, capacity), np.int64)
        self.counts = np.zeros(num_rows, np.int64)  # keys held in each row, in no order
        self.bounds = np.full(num_rows, np.nan, np.float32)  # nothing is at most NaN: all enter

    def add(self, scores: Scores, *, first_label: int) -> None:
        """Takes in a contiguous block (n, b), of the labels `first_label` and following."""
        _add(scores, first_label, self.num_results, self.keys, self.counts, self.bounds)

    def ranked(self) -> tuple[NDArray[np.int64], Scores]:
        """Label ids (n, r), best first, and their scores (n, r)."""
        if (self.counts < self.num_results).any():
            raise ValueError(f"num_results is {self.num_results}, but fewer labels were added")
        _keep_best(self.keys, self.counts, self.num_results)
        keys = np.sort(self.keys[:, : self.num_results], axis=1)[:, ::-1]
        bits = keys >> HALF
        bits = np.where(bits < 0, bits ^ NOT_SIGN, bits).astype(np.int32)
        return LOW_HALF - (keys & LOW_HALF), bits.view(np.float32)


@jit
def _add(
    scores: Scores,
    first_label: int,
    num_results: int,
    keys: Keys,
    counts: NDArray[np.int64],
    bounds: Scores,
) -> None:
    capacity, width = keys.shape[1], scores.shape[1]
    for row in range(len(scores)):
        held, count, bound = keys[row], counts[row], bounds[row]
        for begin in range(0, width, PIECE):
            piece = scores[row, begin : begin + PIECE]
            if len(piece) == PIECE:
                is_any_above = np.int32(0)
                for column in range(PIECE):  # not `>`, which NaN never is
                    is_any_above |= np.int32(not (piece[column] <= bound))
                if not is_any_above:
                    continue
            for column in range(len(piece)):
                if not (piece[column] <= bound):
                    held[count] = _key(piece[column], first_label + begin + column)
                    count += 1
            if count > capacity - PIECE:
                bound = _score(_keep(held, count, num_results))
                count = num_results
        counts[row], bounds[row] = count, bound


@jit
def _keep_best(keys: Keys, counts: NDArray[np.int64], num_results: int) -> None:
    for row in range(len(keys)):
        _keep(keys[row], counts[row], num_results)


@jit
def _keep(keys: Keys, count: int, num_results: int) -> np.int64:
    """Moves the largest of the first `count` keys to the front, and returns the last of them.

    Halves the range of a bound until that many keys are above it: counting those above is quick
    vector work, where sorting and quickselect wait for comparisons that nobody can predict.
    """
    low = high = keys[0]
    for place in range(count):
        low, high = min(low, keys[place]), max(high, keys[place])
    low -= 1
    bound, num_above = low, count  # more than `num_results` are above low, and fewer above high
    for _ in range(64):  # bits of a key, so that this ends whatever the keys are
        if num_above == num_results:
            break
        bound = (low & high) + ((low ^ high) >> 1)  # their mean, which cannot overflow
        num_above = 0
        for place in range(count):
            num_above += keys[place] > bound
        if num_above > num_results:
            low = bound
        else:
            high = bound
    kept = 0
    for place in range(count):
        keys[kept] = keys[place]  # the next one overwrites it if it is not to be kept
        kept += keys[place] > bound
    last: np.int64 = keys[0]
    for place in range(num_results):
        last = min(last, keys[place])
    return last


@jit
def _key(score: np.float32, label: int) -> np.int64:
    """The score's bits as an integer in the order of scores, then the label, counted downwards."""
    bits = np.int64(np.float32(score + np.float32(0)).view(np.int32))  # -0 + 0 is 0: they tie
    if score != score:
        bits = NOT_SIGN  # NaN, whatever its own sign
    elif bits < 0:
        bits ^= NOT_SIGN
    return (bits << HALF) | (LOW_HALF - np.int64(label))


@jit
def _score(key: np.int64) -> np.float32:
    bits = key >> HALF
    if bits < 0:
        bits ^= NOT_SIGN
    return np.int32(bits).view(np.float32)
