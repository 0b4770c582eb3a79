"""Slow twins of the theory: every draw enumerated, fractions and whole numbers, no numpy.

Written from the paper. A draw is a set, all sets of a size are equally likely, and an expectation
is a sum over all of them divided by their number.
"""

import functools
import itertools
import math
from fractions import Fraction

from oracles import average_of_top

# Averages of the largest.


def order_weighted_average(values, weights):
    return sum(
        weight * value for weight, value in zip(weights, sorted(values, reverse=True), strict=True)
    )


# Random draws.


def weight_of_rank(rank, ranks, num_drawn, num_kept):
    """How much of the average of the largest has the value of this rank, over all draws.

    Rank 1 is the largest value; a positive, which is masked where it is drawn, has rank 0.
    """
    draws = list(itertools.combinations(ranks, num_drawn))
    kept = [sorted(filter(None, draw))[:num_kept] for draw in draws]
    return sum(Fraction(rank in kept_of, len(kept_of)) for kept_of in kept if kept_of) / len(draws)


def inclusion_probability(rank, population, num_drawn, num_kept):
    """P[H <= k' - 1] in whole numbers, divided once at the end; for populations of any size."""
    larger, others, drawn = rank - 1, population - 1, num_drawn - 1
    fewest, most = max(0, drawn - (others - larger)), min(drawn, larger)
    ways, total = math.comb(larger, fewest) * math.comb(others - larger, drawn - fewest), 0
    for count in range(fewest, min(most, num_kept - 1) + 1):
        total += ways
        ways = ways * (larger - count) * (drawn - count)
        ways //= (count + 1) * (others - larger - drawn + count + 1)
    return total / number_of_draws(others, drawn)


# The same number is asked for at every rank, and takes as long as all the rest.
number_of_draws = functools.lru_cache(math.comb)


# Lemma 1, by every batch and every draw of labels.


def snm_losses_of_example(positive, negatives, num_sampled, num_kept):
    """The loss of one example for each of its draws, all equally likely."""
    return [
        positive + average_of_top(drawn, num_kept)
        for drawn in itertools.combinations(negatives, num_sampled)
    ]


def expected_s2m_loss(positives, negatives, counts):
    """Labels for each example: all combinations of all examples' draws, times all batches.

    counts: batch size, hard examples, sampled labels, hard labels.
    """
    batch_size, num_hard_examples, num_sampled, num_kept = counts
    losses_of_examples = [
        snm_losses_of_example(positive, row, num_sampled, num_kept)
        for positive, row in zip(positives, negatives, strict=True)
    ]
    risks = [
        average_of_top(batch, num_hard_examples)
        for losses in itertools.product(*losses_of_examples)
        for batch in itertools.combinations(losses, batch_size)
    ]
    return sum(risks) / Fraction(len(risks))


def shared_losses(positives, label_losses, labels, drawn, num_kept):
    """The losses of all examples when these labels are drawn for the batch."""
    return [
        positive + average_of_top([row[other] for other in drawn if other != label], num_kept)
        for positive, row, label in zip(positives, label_losses, labels, strict=True)
    ]


def expected_shared_s2m_loss(positives, label_losses, labels, counts):
    batch_size, num_hard_examples, num_sampled, num_kept = counts
    risks = [
        average_of_top(batch, num_hard_examples)
        for drawn in itertools.combinations(range(len(label_losses[0])), num_sampled)
        for batch in itertools.combinations(
            shared_losses(positives, label_losses, labels, drawn, num_kept), batch_size
        )
    ]
    return sum(risks) / Fraction(len(risks))


def expected_order_weighted_average(laws, weights):
    """Over all combinations of the values of independent laws [(value, probability), ...]."""
    total = 0
    for outcomes in itertools.product(*laws):
        chance = math.prod(probability for _, probability in outcomes)
        total += chance * order_weighted_average([value for value, _ in outcomes], weights)
    return total


# Retrieval.


def is_missed(scores, label, num_results):
    """1[y not in top_r(f)], where ties are sorted so that the label comes last."""
    order = sorted(range(len(scores)), key=lambda other: (-scores[other], other == label))
    return label not in order[:num_results]


# CVaR.


def cvar_by_quantiles(losses, probabilities, tail_fraction):
    """The mean of the worst share: losses served from the largest until the share is full."""
    left, total = tail_fraction, 0
    for loss, probability in sorted(zip(losses, probabilities, strict=True), reverse=True):
        taken = min(left, probability)
        total += taken * loss
        left -= taken
    return total / tail_fraction


def cvar_of_sample(losses, tail_fraction):
    """The same for equally likely losses: the hardest share, the last of them in part."""
    return cvar_by_quantiles(losses, [1 / len(losses)] * len(losses), tail_fraction)


def agnostic_top(losses, group_ids, num_hard_examples):
    """Lemma 3's right side: the maximum over all mixtures, and the mixtures that reach it."""
    groups = range(max(group_ids) + 1)
    members = [
        [loss for loss, group in zip(losses, group_ids, strict=True) if group == wanted]
        for wanted in groups
    ]
    values = {}
    for counts in itertools.product(*(range(len(losses_of) + 1) for losses_of in members)):
        if sum(counts) == num_hard_examples:
            values[counts] = sum(
                Fraction(count, num_hard_examples) * average_of_top(losses_of, count)
                for count, losses_of in zip(counts, members, strict=True)
            )
    best = max(values.values())
    return best, [counts for counts, value in values.items() if value == best]


# Rademacher complexity.


def rademacher(functions):
    """The definition as loops: all sign vectors, all functions (M, N)."""
    num_examples = len(functions[0])
    suprema = [
        max(sum(s * v for s, v in zip(signs, row, strict=True)) for row in functions)
        for signs in itertools.product([-1, 1], repeat=num_examples)
    ]
    return sum(suprema) / len(suprema) / num_examples


# Even-handed mining.


def held_out_laws(probabilities, num_pairs):
    """Every way to draw pairs, of these labels, and to hold some out, by what is trained on.

    A pair that is chosen is put back where no other of its label is left. Returns a dictionary:
    (which are chosen, the label of each pair that is trained on, the labels of pairs not chosen)
    -> [(chance, the labels of the pairs that stay held out), ...].
    """
    outcomes = {}
    for labels in itertools.product(range(len(probabilities)), repeat=num_pairs):
        chance = math.prod(probabilities[label] for label in labels)
        for is_chosen in itertools.product([False, True], repeat=num_pairs):
            pairs = list(zip(labels, is_chosen, strict=True))
            seen = frozenset(label for label, is_out in pairs if not is_out)
            held_out = [label for label, is_out in pairs if is_out and label in seen]
            trained = tuple(None if is_out and label in seen else label for label, is_out in pairs)
            outcomes.setdefault((is_chosen, trained, seen), []).append((chance, held_out))
    return outcomes


def mean_of_mixed_batches(losses, batch_size, num_hard_examples, mined_share):
    """lambda times the average of the top k' plus 1 - lambda times the mean, over all batches."""
    risks = [
        mined_share * average_of_top(batch, num_hard_examples)
        + (1 - mined_share) * average_of_top(batch, batch_size)
        for batch in itertools.combinations(losses, batch_size)
    ]
    return sum(risks) / len(risks)
