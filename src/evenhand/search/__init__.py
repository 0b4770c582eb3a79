"""Indexes: query vectors in, label ids and scores out, best first."""

from evenhand.search.exact import ExactIndex, SearchResult
from evenhand.search.neighbours import NeighbourIndex, VotedQueries
from evenhand.search.ranked import RankedIndex, RankedQueries
from evenhand.search.ranker import LinearRanker

__all__ = [
    "ExactIndex",
    "LinearRanker",
    "NeighbourIndex",
    "RankedIndex",
    "RankedQueries",
    "SearchResult",
    "VotedQueries",
]
