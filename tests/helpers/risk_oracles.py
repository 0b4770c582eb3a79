"""Slow, obvious risks: what the weights of a batch must be. Loops and floats only: no torch."""

import math
from fractions import Fraction


def risk(weights, losses):
    return sum(weight * loss for weight, loss in zip(weights, losses, strict=True))


def cvar(losses, tail_fraction):
    """min over t of t + mean of max(0, loss - t) / alpha: it is attained at one of the losses."""

    def value(threshold):
        excess = [max(0.0, loss - threshold) for loss in losses]
        return threshold + sum(excess) / len(losses) / tail_fraction

    return min(value(threshold) for threshold in losses)


def ranked_range(losses, num_dropped, num_hard_examples):
    kept = sorted(losses, reverse=True)[num_dropped : num_dropped + num_hard_examples]
    return sum(kept) / num_hard_examples


def multiplicative_weights(log_weights, losses, step_size):
    """One step of the adversary: mass is multiplied by exp(step * loss), then sums to 1 again."""
    powers = [math.exp(w + step_size * loss) for w, loss in zip(log_weights, losses, strict=True)]
    return [power / sum(powers) for power in powers]


def even_weights(losses, gaps, count, mined_share, is_held_out, num_dropped=0):
    """Equal weights for the hardest and an even share of the others; losses and keys differ."""
    left = [b for b, is_out in enumerate(is_held_out) if not is_out]
    dropped = sorted(left, key=lambda b: losses[b], reverse=True)[:num_dropped]
    left = [b for b in left if b not in dropped] or left
    count, share = min(count, len(left)), Fraction(mined_share)
    hardest = sorted(left, key=lambda b: losses[b] + gaps[b], reverse=True)[:count]
    # In the mixture of the two means: what an example weighs that is hard, and one that is not.
    easy = (1 - share) / len(left)
    hard = easy + share / count
    golden = Fraction(2654435769, 2**32)
    counting = [b for b in left if b in hardest or (b + 1) * golden % 1 < easy / hard]
    return [(b in counting) / len(counting) for b in range(len(losses))]


def measured_gaps(batches, shape, scale):
    """By the records of all batches, [(loss, bin, is held out), ...] each, the last one first-hand.

    A bin's difference of means counts as often as it has held-out examples, the curve 32 times.
    """
    records = [
        (0.99 ** (len(batches) - 1 - step), *record)
        for step, batch in enumerate(batches)
        for record in batch
    ]

    def total(wanted, is_held_out, value_fn):
        kept = [r for r in records if r[2] == wanted and r[3] == is_held_out]
        return sum(weight * value_fn(loss) for weight, loss, _, _ in kept)

    counts, differences = [], []
    for wanted in range(len(shape)):
        trained, held_out = (total(wanted, is_out, lambda loss: 1) for is_out in (False, True))
        is_known = trained > 0 and held_out > 0
        counts.append(held_out if is_known else 0)
        differences.append(
            total(wanted, True, float) / held_out - total(wanted, False, float) / trained
            if is_known
            else 0
        )
    rows = list(zip(counts, differences, shape, strict=True))
    squares = sum(count * s * s for count, _, s in rows)
    if squares:
        scale = sum(count * difference * s for count, difference, s in rows) / squares
    return [(count * gap + 32 * scale * s) / (count + 32) for count, gap, s in rows]
