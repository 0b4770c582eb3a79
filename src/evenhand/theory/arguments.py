"""Checks of arguments that the modules of the theory share."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

DoubleArray = NDArray[np.float64]

ROUNDING = 1e-9  # how far from 1 the sum of probabilities may be


def check_count(name: str, value: int, limit: int, of_what: str) -> None:
    if not 1 <= value <= limit:
        raise ValueError(
            f"{name} must be between 1 and {limit} (the number of {of_what}), got {value}"
        )


def check_label_counts(
    num_sampled_labels: int, num_hard_labels: int, limit: int, of_what: str
) -> None:
    """M of the labels are drawn, and k of those kept."""
    check_count("num_sampled_labels", num_sampled_labels, limit, of_what)
    check_count("num_hard_labels", num_hard_labels, num_sampled_labels, "sampled labels")


def check_at_least(name: str, value: float, least: int, why: str = "") -> None:
    if not value >= least:
        raise ValueError(f"{name} must be at least {least}{why}, got {value}")


def check_tail_fraction(tail_fraction: float) -> None:
    if not 0 < tail_fraction <= 1:
        raise ValueError(
            f"tail_fraction must be above 0 and at most 1 (it is a share), got {tail_fraction}"
        )


def check_chance(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name} must be between 0 and 1 (it is a probability), got {value}")


def checked_law(
    losses: ArrayLike, probabilities: ArrayLike | None
) -> tuple[DoubleArray, DoubleArray]:
    """Losses (N,) and their probabilities (N,), even ones where none are given."""
    losses = np.asarray(losses, dtype=np.float64)
    if losses.ndim != 1 or not losses.size or not np.isfinite(losses).all():
        raise ValueError(f"losses must be one row of finite numbers, got {losses}")
    if probabilities is None:
        return losses, np.full(len(losses), 1 / len(losses))
    probabilities = np.asarray(probabilities, dtype=np.float64)
    if probabilities.shape != losses.shape or not (probabilities >= 0).all():
        raise ValueError(
            f"probabilities must be {len(losses)} numbers of at least 0 (one for each loss), "
            f"got {probabilities}"
        )
    if not abs(probabilities.sum() - 1) <= ROUNDING:
        raise ValueError(f"probabilities must sum to 1, got a sum of {probabilities.sum()}")
    return losses, probabilities / probabilities.sum()
