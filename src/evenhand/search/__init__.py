"""Search: queries in, label ids and scores out, best first (the contracts are in `exact`).

`Searcher` is the whole way, from texts or features to labels. `ExactIndex` and every other
`VectorIndex` search by the model's vectors alone, `HybridIndex` adds votes of similar training
queries and a linear ranker to what one of them found.
"""

from evenhand.search.exact import ExactIndex, SearchResult, VectorIndex
from evenhand.search.faiss_index import FaissIndex
from evenhand.search.hybrid import HybridIndex
from evenhand.search.neighbours import Neighbours
from evenhand.search.reranker import LinearRanker
from evenhand.search.searcher import QueryData, Searcher, label_index

__all__ = [
    "ExactIndex",
    "FaissIndex",
    "HybridIndex",
    "LinearRanker",
    "Neighbours",
    "QueryData",
    "SearchResult",
    "Searcher",
    "VectorIndex",
    "label_index",
]
