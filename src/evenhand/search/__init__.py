"""Indexes: query vectors in, label ids and scores out, best first."""

from evenhand.search.exact import ExactIndex, SearchResult
from evenhand.search.neighbours import NeighbourIndex, VotedQueries

__all__ = ["ExactIndex", "NeighbourIndex", "SearchResult", "VotedQueries"]
