"""Indexes: query vectors in, label ids and scores out, best first."""

from evenhand.search.exact import ExactIndex, SearchResult

__all__ = ["ExactIndex", "SearchResult"]
