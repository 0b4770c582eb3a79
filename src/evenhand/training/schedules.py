"""Numbers that change while training: the learning rate and, when annealed, k'."""

import math


def learning_rate_at(
    step: int, *, num_steps: int, peak: float, warmup_steps: int = 0, shape: str = "linear"
) -> float:
    """Rises over the warm-up, then falls to 0 at the end (or stays): step 0 is the first.

    Example:
        >>> [learning_rate_at(step, num_steps=4, peak=1.0) for step in range(4)]
        [1.0, 0.75, 0.5, 0.25]
    """
    warmup = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    done = step / num_steps
    if shape == "linear":
        return peak * warmup * (1 - done)
    if shape == "cosine":
        return peak * warmup * 0.5 * (1 + math.cos(math.pi * done))
    if shape == "constant":
        return peak * warmup
    raise ValueError(f"shape must be 'linear', 'cosine' or 'constant', got {shape!r}")


def num_hard_examples_at(
    step: int, *, num_steps: int, batch_size: int, num_hard_examples: int, anneal_fraction: float
) -> int:
    """k' of a step: shrinks in a line from the whole batch over the first part of the run.

    Too few examples too early teach little. An `anneal_fraction` of 0 is k' from the first step.

    Example:
        >>> [
        ...     num_hard_examples_at(
        ...         step, num_steps=8, batch_size=10, num_hard_examples=2, anneal_fraction=0.5
        ...     )
        ...     for step in range(6)
        ... ]
        [10, 8, 6, 4, 2, 2]
    """
    if anneal_fraction == 0:
        return num_hard_examples
    done = min(1.0, step / (anneal_fraction * num_steps))
    return round(batch_size + done * (num_hard_examples - batch_size))
