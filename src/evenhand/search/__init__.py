"""Search: queries in, label ids and scores out, best first (`Index` in `exact` is the contract).

`Searcher` is the whole way, from texts or features to labels; `ExactIndex` searches by the model's
vectors alone, `HybridIndex` adds votes of similar training queries and a linear ranker.
"""

from evenhand.search.exact import ExactIndex, SearchResult
from evenhand.search.hybrid import HybridIndex
from evenhand.search.neighbours import Neighbours
from evenhand.search.reranker import LinearRanker
from evenhand.search.searcher import QueryData, Searcher, label_index

__all__ = [
    "ExactIndex",
    "HybridIndex",
    "LinearRanker",
    "Neighbours",
    "QueryData",
    "SearchResult",
    "Searcher",
    "label_index",
]
