"""One linear classifier per label over sparse rows, fitted by dual coordinate descent.

For a label, rows x with signs y (1: the label is right, -1: it is wrong) and costs C (one for each
sign) are given. Sought are the weights w, of which the last is for a constant feature of value 1,

    minimise  1/2 |w|^2 + sum of C_i max(0, 1 - y_i w.x_i)^2

The dual has a number alpha_i >= 0 a row, w = sum of alpha_i y_i x_i, and its coordinates can be
minimised exactly one after the other (Hsieh et al., A Dual Coordinate Descent Method for
Large-scale Linear SVM, 2008; the solver of liblinear). Rows that are by far on the right side rest
for a while. It is by hand because a library fits one matrix at a time: here every label has rows of
its own out of one matrix, and to copy them for each of a hundred thousand labels costs more than
the fit.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.kernels.jit import in_parts, jit, jit_sums
from evenhand.kernels.random import GOLDEN64, jit_mix64

Floats = NDArray[np.float32]
Offsets = NDArray[np.int64]
Ids = NDArray[np.uint32]  # unsigned: with no code for places counted from the end
Places = NDArray[np.int32]
SparseRows = tuple[Offsets, Ids, Floats]
Settings = tuple[float, float, float, int, float]

_32 = np.uint64(32)


# --- fitting --------------------------------------------------------------------------------------


@jit
def fit_labels(
    labels: NDArray[np.int64],
    starts: Offsets,
    counts: Offsets,
    positive_counts: Offsets,
    rows: Places,
    features: SparseRows,
    squares: Floats,
    num_features: int,
    settings: Settings,
    seed: int,
) -> tuple[NDArray[np.int64], Ids, Floats, Floats]:
    """Fits some labels.

    Args:
        labels: (K,) which labels they are; each has an order of rows of its own.
        starts, counts: (K,) where the rows of each label lie in `rows`.
        positive_counts: (K,) how many of them, the first ones, are positive.
        squares: (N,) the squared length of each row, with that of the constant feature.
        settings: costs of positives and negatives, tolerance, most passes, smallest weight kept.

    Returns:
        The number of weights kept of each label (K,), their features and values, label after label,
        and the weights of the constant feature (K,).
    """
    offsets, ids, _ = features
    smallest_weight = settings[4]
    num_kept = np.zeros(len(labels), np.int64)
    biases = np.zeros(len(labels), np.float32)
    kept_ids, kept_values = np.empty(1024, np.uint32), np.empty(1024, np.float32)
    weights = np.zeros(num_features, np.float32)
    alphas, order = np.empty(counts.max(), np.float32), np.empty(counts.max(), np.int32)
    total = 0
    for place in range(len(labels)):
        count = counts[place]
        own_rows = rows[starts[place] : starts[place] + count]
        state = jit_mix64(np.uint64(seed) ^ jit_mix64(np.uint64(labels[place])))
        biases[place] = _fit_label(
            own_rows, positive_counts[place], features, squares, settings, state, weights,
            alphas[:count], order[:count],
        )  # fmt: skip
        # Alphas below 0 are of rows that came and went: what is left of them is rounding.
        own_first = total
        for row_place in range(count):
            if alphas[row_place] == 0:
                continue
            row = own_rows[row_place]
            for entry in range(offsets[row], offsets[row + 1]):
                value = weights[ids[entry]]
                weights[ids[entry]] = 0  # clean for the next label, and listed once
                if value == 0 or abs(value) < smallest_weight:
                    continue
                if total == len(kept_ids):
                    kept_ids, kept_values = _longer(kept_ids), _longer(kept_values)
                kept_ids[total], kept_values[total] = ids[entry], value
                total += 1
        num_kept[place] = total - own_first
    return num_kept, kept_ids[:total].copy(), kept_values[:total].copy(), biases


@jit_sums
def _fit_label(
    rows: Places,
    num_positives: int,
    features: SparseRows,
    squares: Floats,
    settings: Settings,
    state: np.uint64,
    weights: Floats,
    alphas: Floats,
    order: Places,
) -> np.float32:
    """Adds the weights of one label to `weights` (F,), which are 0, and returns its bias.

    Args:
        rows: (n,) positives first.
        state: of the random order.
        alphas: (n,) left as they are in the end, as -1 where they were above 0 and are no more.
        order: (n,) working space.
    """
    offsets, ids, values = features
    positive_cost, negative_cost = np.float32(settings[0]), np.float32(settings[1])
    tolerance, max_passes = settings[2], settings[3]
    count, bias = len(rows), np.float32(0)
    for place in range(count):
        alphas[place] = 0
        order[place] = place
    num_active, last_maximum = count, np.inf
    for _ in range(max_passes):
        for place in range(num_active - 1, 0, -1):
            state += GOLDEN64
            other = ((jit_mix64(state) >> _32) * np.uint64(place + 1)) >> _32
            order[place], order[other] = order[other], order[place]
        maximum, minimum = -np.inf, np.inf  # of the projected gradient
        place = 0
        while place < num_active:
            number = order[place]
            row = rows[number]
            sign, cost = np.float32(1), positive_cost
            if number >= num_positives:
                sign, cost = np.float32(-1), negative_cost
            score = bias
            for entry in range(offsets[row], offsets[row + 1]):
                score += weights[ids[entry]] * values[entry]
            alpha, diagonal = max(alphas[number], np.float32(0)), np.float32(0.5) / cost
            gradient = sign * score - 1 + alpha * diagonal
            projected = gradient
            if alpha == 0:
                if gradient > last_maximum:  # by far on the right side: it may rest
                    num_active -= 1
                    order[place], order[num_active] = order[num_active], order[place]
                    continue
                projected = min(gradient, np.float32(0))
            maximum, minimum = max(maximum, projected), min(minimum, projected)
            place += 1
            if abs(projected) <= 1e-12:
                continue
            new_alpha = max(alpha - gradient / (squares[row] + diagonal), np.float32(0))
            change = sign * (new_alpha - alpha)
            alphas[number] = new_alpha if new_alpha > 0 else np.float32(-1)
            bias += change
            for entry in range(offsets[row], offsets[row + 1]):
                weights[ids[entry]] += change * values[entry]
        last_maximum = maximum if maximum > 0 else np.inf
        if maximum - minimum <= tolerance:
            if num_active == count:
                break
            num_active, last_maximum = count, np.inf  # those that rested are looked at again
    return bias


@jit
def squared_lengths(features: SparseRows, num_features: int) -> Floats:
    """(N,) of each row with a constant feature of value 1; values of one feature add up."""
    offsets, ids, values = features
    squares = np.empty(len(offsets) - 1, np.float32)
    dense = np.zeros(num_features, np.float32)
    for row in range(len(squares)):
        for entry in range(offsets[row], offsets[row + 1]):
            dense[ids[entry]] += values[entry]
        total = 1.0
        for entry in range(offsets[row], offsets[row + 1]):
            total += dense[ids[entry]] * values[entry]
        for entry in range(offsets[row], offsets[row + 1]):
            dense[ids[entry]] = 0
        squares[row] = total
    return squares


@jit
def _longer(array: NDArray[Any]) -> NDArray[Any]:
    longer = np.empty(2 * len(array), array.dtype)
    for place in range(len(array)):  # a slice would take numba seconds more to compile
        longer[place] = array[place]
    return longer


# --- rows by label --------------------------------------------------------------------------------


@jit
def clear_positives(mined: Places, offsets: Offsets, labels: Places, first_row: int) -> None:
    """Writes -1 over those of (B, M) mined labels that are positives of their row."""
    for place in range(len(mined)):
        row = first_row + place
        for entry in range(offsets[row], offsets[row + 1]):
            for column in range(mined.shape[1]):
                if mined[place, column] == labels[entry]:
                    mined[place, column] = -1


@jit
def list_rows(
    offsets: Offsets, labels: Places, mined: Places, first: int, last: int, places: Offsets,
    rows: Places,
) -> None:  # fmt: skip
    """Lists the rows of the labels from `first` on, before `last`: positives, then mined ones.

    Args:
        offsets, labels: (N,) positives of each row.
        mined: (N, M) labels, -1 for none.
        places: (last - first,) where the list of each label starts; at the end, where it ends.
            Below 0 for a label that has none.
    """
    for row in range(len(offsets) - 1):
        for entry in range(offsets[row], offsets[row + 1]):
            label = labels[entry] - first
            if 0 <= label < last - first and places[label] >= 0:
                rows[places[label]] = row
                places[label] += 1
    for row in range(len(mined)):
        for column in range(mined.shape[1]):
            label = mined[row, column] - first
            if mined[row, column] >= 0 and 0 <= label < last - first and places[label] >= 0:
                rows[places[label]] = row
                places[label] += 1


# --- asking ---------------------------------------------------------------------------------------


@jit
def score_labels(
    num_threads: int,
    features: SparseRows,
    weights: SparseRows,
    biases: Floats,
    label_ids: NDArray[np.int64],
    order: Offsets,
    spaces: Floats,
    scores: Floats,
) -> None:
    """scores[q, c] of the row q and the label label_ids[q, c]; untouched where `order` is silent.

    A label has far more weights than a row has features. So the weights of a label are laid out
    once, for all of the rows that ask for it.

    Args:
        weights: (L,) of the features, for each label.
        order: places in the flat label_ids, by label.
        spaces: (P, F) of zeros, which they are again in the end: a part of the places uses one.
    """
    arguments = (features, weights, biases, label_ids, order, spaces, scores)
    in_parts(_score_labels, len(spaces), num_threads, arguments)


@jit_sums
def _score_labels(
    first: int,
    last: int,
    features: SparseRows,
    weights: SparseRows,
    biases: Floats,
    label_ids: NDArray[np.int64],
    order: Offsets,
    spaces: Floats,
    scores: Floats,
) -> None:
    """The places of the parts from `first` on, before `last`."""
    offsets, ids, values = features
    label_offsets, label_features, label_weights = weights
    num_parts, width = len(spaces), scores.shape[1]
    for part in range(first, last):
        dense, current = spaces[part], -1
        begin, end = part * len(order) // num_parts, (part + 1) * len(order) // num_parts
        for place in range(begin, end):
            row, column = order[place] // width, order[place] % width
            label = label_ids[row, column]
            if label != current:
                if current >= 0:
                    for entry in range(label_offsets[current], label_offsets[current + 1]):
                        dense[label_features[entry]] = 0
                for entry in range(label_offsets[label], label_offsets[label + 1]):
                    dense[label_features[entry]] = label_weights[entry]
                current = label
            score = biases[label]
            for entry in range(offsets[row], offsets[row + 1]):
                score += dense[ids[entry]] * values[entry]
            scores[row, column] = score
        if current >= 0:
            for entry in range(label_offsets[current], label_offsets[current + 1]):
                dense[label_features[entry]] = 0
