"""Slow, obvious re-statements of what the metrics mean. Loops and floats only: no torch, no numpy.

`retrieved` and `positives` are lists of ids; -1 is no id. None stands for "nothing to score".
"""

import math


def labels_of(positives):
    return [label for label in positives if label != -1]


def rank(retrieved, label):
    for place, found in enumerate(retrieved, 1):
        if found == label:
            return place
    return 0


def recall(retrieved, positives, cutoff):
    labels = labels_of(positives)
    if not labels:
        return None
    return sum(label in retrieved[:cutoff] for label in labels) / len(labels)


def precision(retrieved, positives, cutoff):
    labels = labels_of(positives)
    if not labels:
        return None
    return sum(found in labels for found in retrieved[:cutoff]) / cutoff


def ndcg(retrieved, positives, cutoff):
    labels = labels_of(positives)
    if not labels:
        return None
    gained = 0.0
    for place, found in enumerate(retrieved[:cutoff], 1):
        if found in labels:
            gained += 1 / math.log2(place + 1)
    best = sum(1 / math.log2(place + 1) for place in range(1, min(len(labels), cutoff) + 1))
    return gained / best


def reciprocal_rank(retrieved, positives):
    labels = labels_of(positives)
    if not labels:
        return None
    for place, found in enumerate(retrieved, 1):
        if found in labels:
            return 1 / place
    return 0.0


def propensity(count, num_examples, a=0.55, b=1.5):
    c = (math.log(num_examples) - 1) * (b + 1) ** a
    return 1 / (1 + c * math.exp(-a * math.log(count + b)))


def propensity_gain_and_best(retrieved, positives, propensities, cutoff):
    """What was gained and what could have been, both over the cutoff."""
    labels = labels_of(positives)
    gain = sum(1 / propensities[found] for found in retrieved[:cutoff] if found in labels)
    best = sorted((1 / propensities[label] for label in labels), reverse=True)[:cutoff]
    return gain / cutoff, sum(best) / cutoff


def search(scores, num_results):
    """Ids of the highest of one row of scores, the lower id first among equals."""
    return sorted(range(len(scores)), key=lambda label: (-scores[label], label))[:num_results]


def pair_recall(ranks, cutoff, is_member):
    """Share of the chosen pairs with a rank within the cutoff, and how many they are."""
    hits = count = 0
    for value, chosen in zip(ranks, is_member, strict=True):
        if chosen:
            count += 1
            hits += 1 <= value <= cutoff
    return (hits / count if count else None), count


def percentile(values, share):
    """Linear interpolation between the ordered values, None left out."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
