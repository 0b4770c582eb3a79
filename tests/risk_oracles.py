"""Slow, obvious risks: what the weights of a batch must be. Loops and floats only: no torch."""

import math


def risk(weights, losses):
    return sum(weight * loss for weight, loss in zip(weights, losses, strict=True))


def mean_of_nonzero(losses):
    kept = [loss for loss in losses if loss > 0]
    return sum(kept) / len(kept) if kept else 0.0


def cvar(losses, tail_fraction):
    """min over t of t + mean of max(0, loss - t) / alpha: it is attained at one of the losses."""

    def value(threshold):
        excess = [max(0.0, loss - threshold) for loss in losses]
        return threshold + sum(excess) / len(losses) / tail_fraction

    return min(value(threshold) for threshold in losses)


def ranked_range(losses, num_dropped, num_hard_examples):
    kept = sorted(losses, reverse=True)[num_dropped : num_dropped + num_hard_examples]
    return sum(kept) / num_hard_examples


def chi_square_distance(weights):
    """mean of (B w - 1)^2"""
    count = len(weights)
    return sum((count * weight - 1) ** 2 for weight in weights) / count


def kl_distance(weights):
    """sum of w log(B w)"""
    count = len(weights)
    return sum(weight * math.log(count * weight) for weight in weights if weight > 0)


def worst_chi_square(losses, radius):
    """By the Lagrangian: w_b = max(0, loss_b - t) / s, with s so that the distance is the radius.

    Two bisections, one within the other. For losses that are not all equal.
    """

    def weights_at(log_scale):
        scale = math.exp(log_scale)
        low, high = min(losses) - scale, max(losses)  # of t
        for _ in range(200):
            middle = (low + high) / 2
            total = sum(max(0.0, loss - middle) for loss in losses) / scale
            low, high = (middle, high) if total > 1 else (low, middle)
        weights = [max(0.0, loss - low) / scale for loss in losses]
        return [weight / sum(weights) for weight in weights]

    return risk(_bisected(weights_at, chi_square_distance, radius), losses)


def worst_kl(losses, radius):
    """By the Lagrangian: w_b is proportional to exp(loss_b / s)."""

    def weights_at(log_scale):
        scale, top = math.exp(log_scale), max(losses)
        powers = [math.exp((loss - top) / scale) for loss in losses]
        return [power / sum(powers) for power in powers]

    return risk(_bisected(weights_at, kl_distance, radius), losses)


def _bisected(weights_at, distance, radius):
    """The weights at the edge: the larger the scale, the nearer they are to equal ones."""
    low, high = -12.0, 40.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if distance(weights_at(middle)) > radius else (low, middle)
    return weights_at(high)


def multiplicative_weights(log_weights, losses, step_size):
    """One step of the adversary: mass is multiplied by exp(step * loss), then sums to 1 again."""
    powers = [math.exp(w + step_size * loss) for w, loss in zip(log_weights, losses, strict=True)]
    return [power / sum(powers) for power in powers]
