"""Approximate search by FAISS, on a CPU, in memory or in a file that is mapped into it.

flat      every label is compared: exact
hnsw      a graph of neighbours, walked towards the query; effort: labels kept in view (efSearch)
ivf       clusters of labels, of which the nearest are searched; effort: clusters (nprobe)
ivf-pq    the same over codes of a few bytes, and the best of these by their whole vectors

More effort finds more of what exact search finds, and takes longer: `index_quality` chooses it.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from evenhand.errors import UserError
from evenhand.files import atomic_path, check_is_file
from evenhand.search.exact import ExactIndex, SearchResult
from evenhand.search.stored import ranked, stored_blocks, stored_dim, stored_queries

FLAT_LABELS = 20_000  # with fewer, comparing all of them takes less than a millisecond
HNSW_LABELS = 2_000_000  # with more, the graph takes too long to build
IVF_LABELS = 20_000_000  # with more, whole vectors are too many to read at each search
PQ_TRAINING = 39 * 256  # vectors to learn the codes from: FAISS asks for 39 for each of 256
REFINED = 16.0  # times num_results: candidates by their codes that are compared as a whole


class Kind(NamedTuple):
    recipe: str  # of `faiss.index_factory`
    parameter: str = ""  # that the effort sets
    first_effort: int = 1  # what a search for the best effort begins with


KINDS = {
    "flat": Kind("Flat"),
    "hnsw": Kind("HNSW32", "efSearch", 16),
    "ivf": Kind("IVF{lists},Flat", "nprobe"),
    "ivf-pq": Kind("Pad{width},IVF{lists},PQ{pieces}np,RFlat", "nprobe"),
}


def choose_kind(num_labels: int) -> str:
    """The kind of index for a number of labels."""
    if num_labels <= FLAT_LABELS:
        return "flat"
    if num_labels <= HNSW_LABELS:
        return "hnsw"
    return "ivf" if num_labels <= IVF_LABELS else "ivf-pq"


class FaissIndex:
    """Answers as an `ExactIndex` over the same labels does, but for the labels it misses."""

    def __init__(self, index: Any, kind: str, *, has_bias: bool, effort: int = 0) -> None:
        """
        Args:
            index: of FAISS, over inner products.
            effort: see above; 0: the first of its kind.
        """
        self.index, self.kind, self.has_bias = index, kind, has_bias
        self.effort = 0
        if KINDS[kind].parameter:
            self.set_effort(effort or KINDS[kind].first_effort)

    def __len__(self) -> int:
        return int(self.index.ntotal)

    @property
    def name(self) -> str:
        parameter = KINDS[self.kind].parameter
        return f"FAISS {self.kind}" + (f", {parameter} {self.effort}" if parameter else "")

    def set_effort(self, effort: int) -> None:
        """More finds more and takes longer; a flat index has none."""
        if effort < 1:
            raise UserError(f"effort must be at least 1, got {effort}")
        import_faiss().ParameterSpace().set_index_parameter(
            self.index, KINDS[self.kind].parameter, effort
        )
        self.effort = effort

    @property
    def most_effort(self) -> int:
        """With which it finds all that it can."""
        if self.kind == "hnsw":
            return len(self)
        return int(import_faiss().extract_index_ivf(self.index).nlist) if self.effort else 0

    def search(self, queries: Tensor, num_results: int) -> SearchResult:
        """The labels of the highest score that it finds: (Q, D) -> (Q, R), R = min(that, L)."""
        dim = int(self.index.d)
        vectors = stored_queries(queries, num_results, dim=dim, has_bias=self.has_bias)
        scores, ids = self.index.search(vectors, min(num_results, len(self)))
        return ranked(ids, scores, queries.device)

    def save(self, path: Path) -> None:
        """Writes all of it or nothing."""
        with atomic_path(path) as staging:
            import_faiss().write_index(self.index, str(staging))


def build_faiss(exact: ExactIndex, kind: str) -> FaissIndex:
    """An index of all labels that exact search knows."""
    faiss, dim = import_faiss(), stored_dim(exact)
    if kind == "ivf-pq" and len(exact) < PQ_TRAINING:
        raise UserError(
            f"ivf-pq needs at least {PQ_TRAINING:,} labels to learn its codes from, got "
            f"{len(exact):,}; with so few flat is fast"
        )
    recipe = KINDS[kind].recipe.format(
        lists=max(1, min(round(4 * math.sqrt(len(exact))), len(exact) // 39)),
        width=4 * math.ceil(dim / 4),
        pieces=math.ceil(dim / 4),  # of 4 dimensions, a byte each
    )
    index = faiss.index_factory(dim, recipe, faiss.METRIC_INNER_PRODUCT)
    if kind == "hnsw":
        index.hnsw.efConstruction = 200
    elif kind == "ivf-pq":
        index.k_factor = REFINED
    vectors = np.concatenate(list(stored_blocks(exact)))
    index.train(vectors)
    index.add(vectors)
    return FaissIndex(index, kind, has_bias=exact.label_bias is not None)


def load_faiss(path: Path, kind: str, *, has_bias: bool, effort: int) -> FaissIndex:
    """Maps what `FaissIndex.save` wrote into memory: what is not asked for is not read.

    FAISS trusts its file, so open only files that you, or somebody you trust, made.
    """
    faiss = import_faiss()
    check_is_file(path)
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
        return FaissIndex(index, kind, has_bias=has_bias, effort=effort)
    except RuntimeError as error:
        raise UserError(f"{path} is damaged; build it again: evenhand index build RUN") from error


def import_faiss() -> Any:
    """The module; a `UserError` says what to install."""
    try:
        import faiss
    except ImportError as error:
        raise UserError("FAISS is not installed: pip install 'evenhand[faiss]'") from error
    return faiss
