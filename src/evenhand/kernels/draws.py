"""Random draws of labels for the samplers, with repeats, from spans of a line.

Every function here works row by row: R rows, each with its own excluded ids, padded with -1.
"""

from typing import Protocol

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

BEYOND = 2**62  # sorts after every label; also the range of the random integers


class SpanDistribution(Protocol):
    """Labels, by rank, as adjacent spans of a line from 0 to `total`, as wide as likely."""

    total: Tensor

    def spans(self, ranks: Tensor) -> tuple[Tensor, Tensor]: ...  # starts and widths, like ranks
    def ranks_at(self, points: Tensor) -> Tensor: ...


def draw_ranks(
    distribution: SpanDistribution, excluded_ranks: Tensor, num_draws: int, generator: Generator
) -> Tensor:
    """Ranks (R, M) drawn with repeats, none of the row's excluded ones (R, P)."""
    excluded = sorted_distinct(excluded_ranks)
    starts, widths = _excluded_spans(distribution, excluded)
    # Cut the excluded spans out of the line, draw a point on what is left, then put back the
    # spans before it: no draw is rejected, however likely the excluded labels are.
    removed = pad(widths.cumsum(1), (1, 0))  # (R, 1 + P)
    lengths = (distribution.total - removed[:, -1:]).clamp(min=0)  # (R, 1)
    units = torch.rand(
        len(excluded), num_draws, generator=generator, device=generator.device, dtype=torch.float64
    )
    points = units.to(excluded.device) * lengths  # (R, M)
    num_passed = torch.searchsorted(starts - removed[:, :-1], points, right=True)
    ranks = distribution.ranks_at(points + removed.gather(1, num_passed))
    return ranks.masked_fill(is_among(ranks, excluded), -1)


def log_draw_counts(
    distribution: SpanDistribution, ranks: Tensor, excluded_ranks: Tensor, num_draws: int
) -> Tensor:
    """log(M * p), p the probability of a rank (R, N), renormalised without the excluded ones."""
    _, widths = distribution.spans(ranks.clamp(min=0))
    _, removed = _excluded_spans(distribution, sorted_distinct(excluded_ranks))
    lengths = distribution.total - removed.sum(1, keepdim=True)  # (R, P) -> (R, 1)
    return (num_draws * widths / lengths).log()


def _excluded_spans(distribution: SpanDistribution, excluded: Tensor) -> tuple[Tensor, Tensor]:
    is_absent = excluded == BEYOND
    starts, widths = distribution.spans(excluded.masked_fill(is_absent, 0))
    return starts.masked_fill(is_absent, torch.inf), widths.masked_fill(is_absent, 0)


def random_integers(num_rows: int, num_columns: int, generator: Generator) -> Tensor:
    # Not randint(num_labels): below 2**28 it takes 32 random bits modulo the range, and so prefers
    # small ids by up to 6 %.
    shape = (num_rows, num_columns)
    return torch.randint(BEYOND, shape, generator=generator, device=generator.device)


def inclusion(probabilities: Tensor, num_draws: int) -> Tensor:
    """1 - (1 - p) ** n, exact for small p."""
    return -torch.expm1(num_draws * torch.log1p(-probabilities.clamp(max=1)))


def is_first_occurrence(ids: Tensor) -> Tensor:
    """False where the same id stands further left in its row: (..., N) -> (..., N)."""
    values, order = ids.sort(dim=-1, stable=True)
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[..., 1:] = values[..., 1:] != values[..., :-1]
    return torch.zeros_like(is_first).scatter(-1, order, is_first)


def without_repeats(ids: Tensor) -> Tensor:
    return ids.masked_fill(~is_first_occurrence(ids), -1)


def sorted_distinct(ids: Tensor) -> Tensor:
    """(R, P) -> (R, P + 1): each row's ids ascending and once each, filled with BEYOND."""
    is_absent = (ids < 0) | ~is_first_occurrence(ids)
    return pad(ids.masked_fill(is_absent, BEYOND).sort(dim=1).values, (0, 1), value=BEYOND)


def is_among(ids: Tensor, sorted_ids: Tensor) -> Tensor:
    """(R, M) True where the id is in its row of sorted_ids (R, P), whose last column is BEYOND."""
    return sorted_ids.gather(1, torch.searchsorted(sorted_ids, ids)) == ids


def lookup(table: Tensor | None, ids: Tensor) -> Tensor:
    """table[ids], -1 staying -1; the ids themselves without a table."""
    return ids if table is None else table[ids.clamp(min=0)].masked_fill(ids < 0, -1)
