"""Slow, obvious re-statements of the paper's definitions. Loops and floats only: no torch.

Written from the paper, whose losses are over *all* the labels they are given: `average_of_top`
is its avg_top(k), and mining is part of the formula, not a step before it. A negative of -inf is
a slot that holds no label. Where fewer labels than k are there, avg_top(k) is the average of
those that are; of none, it is 0.
"""

import math

# Margin losses phi.


def hinge(margin):
    return max(0.0, 1 - margin)


def squared_hinge(margin):
    return max(0.0, 1 - margin) ** 2


def logistic(margin):
    return math.log(1 + math.exp(-margin))


def exponential(margin):
    return math.exp(-margin)


# Averages of the largest.


def average_of_top(values, count):
    """avg_top(k): the average of the k largest, or of all where there are fewer."""
    top = sorted(values, reverse=True)[:count]
    return sum(top) / len(top) if top else 0


def labels_among(negatives):
    return [score for score in negatives if score != -math.inf]


# Losses of one example, with mining inside: (positive score, negative scores, k) -> float.


def bowl(phi):
    """Equations 2 and 7: phi(f_y) + avg_top(k) of phi(-f_y')."""

    def loss(positive, negatives, num_hard_labels):
        costs = [phi(-score) for score in labels_among(negatives)]
        return phi(positive) + average_of_top(costs, num_hard_labels)

    return loss


def crammer_singer(phi):
    """Equation 3: phi(f_y) + max of phi(-f_y')."""

    def loss(positive, negatives, num_hard_labels):
        costs = [phi(-score) for score in labels_among(negatives)]
        return phi(positive) + max(costs, default=0.0)

    return loss


def averaged(phi):
    """Equation 4: phi(f_y) + the sum of phi(-f_y') over the others, divided by their number.

    Equation 4 takes all K - 1 others; given fewer to keep, those of the highest scores.
    """

    def loss(positive, negatives, num_hard_labels):
        kept = sorted(labels_among(negatives), reverse=True)[:num_hard_labels]
        return phi(positive) + sum(phi(-score) for score in kept) / max(1, len(kept))

    return loss


def softmax(positive, negatives, num_hard_labels):
    """-f_y + log of the sum of exp(f_y') over y itself and the k highest others."""
    kept = sorted(labels_among(negatives), reverse=True)[:num_hard_labels]
    return -positive + math.log(sum(math.exp(score) for score in [positive, *kept]))


def contrastive(margin, power):
    """(1 - s_y)^p + avg_top(k) of max(0, s_y' - m)^p, for cosines s."""

    def loss(positive, negatives, num_hard_labels):
        costs = [max(0.0, score - margin) ** power for score in labels_among(negatives)]
        return max(0.0, 1 - positive) ** power + average_of_top(costs, num_hard_labels)

    return loss


# Objectives of a minibatch: (positive scores, rows of negative scores, k ...) -> float.


def sgd(loss, positives, rows):
    """Equation 6 with every label given and kept."""
    losses = [loss(p, row, len(row)) for p, row in zip(positives, rows, strict=True)]
    return sum(losses) / len(losses)


def snm(loss, positives, rows, num_hard_labels):
    """The average over the minibatch of the loss over each example's k hardest labels."""
    losses = [loss(p, row, num_hard_labels) for p, row in zip(positives, rows, strict=True)]
    return sum(losses) / len(losses)


def top_sgd(loss, positives, rows, num_hard_examples):
    """Average top-k' SGD: every label, and the k' largest losses."""
    losses = [loss(p, row, len(row)) for p, row in zip(positives, rows, strict=True)]
    return average_of_top(losses, num_hard_examples)


def s2m(loss, positives, rows, num_hard_labels, num_hard_examples):
    """Algorithm 1: avg_top(k') of the losses over each example's k hardest labels."""
    losses = [loss(p, row, num_hard_labels) for p, row in zip(positives, rows, strict=True)]
    return average_of_top(losses, num_hard_examples)


# Slots.


def is_masked(sampled_id, positive_ids):
    """Whether a slot counts for nothing: it holds no label, or one of the example's positives."""
    return sampled_id == -1 or sampled_id in positive_ids
