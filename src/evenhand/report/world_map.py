"""A world map with a dot for every label that has coordinates, coloured by recall or its change.

A dot is a zero-length stroke with round ends (`m3 4h0`), and all dots of a colour are one path:
34,000 of them cost about 300 kB. It is drawn in layers of mixed dots, so that no colour
lies over all the others.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.data import FloatArray, IntArray
from evenhand.report.run_set import RunSet, is_found

SOUTH, NORTH = -60, 80  # degrees of latitude shown
UNITS = 5  # of the drawing, to a degree
WIDTH, HEIGHT = 360 * UNITS, (NORTH - SOUTH) * UNITS
GRATICULE = "".join(  # parallels and meridians, every 30 degrees
    [f"M0 {y}H{WIDTH}" for y in range((NORTH % 30) * UNITS, HEIGHT, 30 * UNITS)]
    + [f"M{x} 0V{HEIGHT}" for x in range(0, WIDTH + 1, 30 * UNITS)]
)
NUM_LAYERS = 4
RECALL_CLASSES = ("none found", "up to a third", "up to two thirds", "more, not all", "all found")
CHANGE_CLASSES = ("worse by half or more", "worse", "as before", "better", "better by half or more")
MUCH = 0.5  # of recall

DoubleArray = NDArray[np.float64]


def make_map(runs: RunSet) -> dict[str, Any] | None:
    """What changed from the first run to the last, or where the one run finds; None: no places."""
    coordinates = runs.dataset.label_coordinates
    if coordinates is None:
        return None
    label_ids, num_labels = runs.results[0].outcome.label_ids, runs.dataset.num_labels
    counts = np.bincount(label_ids, minlength=num_labels)  # (L,), the same for every run
    recalls = []
    for result in runs.results:
        found = is_found(result.outcome.ranks, runs.cutoff)  # (N,)
        hits = np.bincount(label_ids, weights=found, minlength=num_labels)
        with np.errstate(invalid="ignore"):  # 0 / 0: a label without pairs is NaN
            recalls.append(hits / counts)
    if len(recalls) == 1:
        title, palette, meanings = f"Recall of {runs.run_names[0]}", "recall", RECALL_CLASSES
        classes = recall_classes(recalls[0])
    else:
        title = f"Change from {runs.run_names[0]} to {runs.run_names[-1]}"
        palette, meanings = "change", CHANGE_CLASSES
        classes = change_classes(recalls[-1] - recalls[0])
    key = [(f"{palette}-{n}", words, int((classes == n).sum())) for n, words in enumerate(meanings)]
    tested = np.sort(counts[counts > 0])
    return {
        "title": title,
        "dots": draw_dots(coordinates, classes, len(meanings), palette),  # CSS class and path
        "key": [*key, ("none", "no pair", int((classes < 0).sum()))],  # class, meaning, labels
        "width": WIDTH,
        "height": HEIGHT,
        "graticule": GRATICULE,
        "num_tested": len(tested),
        "median_pairs": int(tested[len(tested) // 2]) if len(tested) else 0,
    }


def recall_classes(recalls: DoubleArray) -> IntArray:
    """Positions in RECALL_CLASSES, -1 without pairs: (L,) -> (L,)."""
    bounds = [recalls == 0, recalls <= 1 / 3, recalls <= 2 / 3, recalls < 1, recalls == 1]
    return np.asarray(np.select(bounds, range(5), default=-1))


def change_classes(changes: DoubleArray) -> IntArray:
    """Positions in CHANGE_CLASSES, -1 without pairs: (L,) -> (L,)."""
    bounds = [changes <= -MUCH, changes < 0, changes == 0, changes < MUCH, changes >= MUCH]
    return np.asarray(np.select(bounds, range(5), default=-1))


def draw_dots(
    coordinates: FloatArray, classes: IntArray, num_classes: int, palette: str
) -> list[tuple[str, str]]:
    """Paths of dots with their CSS class: those without pairs first, then layers of all classes."""
    latitudes, longitudes = np.asarray(coordinates, dtype=np.float64).T
    with np.errstate(invalid="ignore"):  # a label without a place is NaN: not shown
        is_shown = (latitudes >= SOUTH) & (latitudes <= NORTH) & (np.abs(longitudes) <= 180)
    xs = np.rint(np.where(is_shown, longitudes + 180, 0) * UNITS).astype(np.int64)
    ys = np.rint(np.where(is_shown, NORTH - latitudes, 0) * UNITS).astype(np.int64)
    layers = np.random.default_rng(0).integers(NUM_LAYERS, size=len(classes))
    drawn = [("none", is_shown & (classes < 0))]
    drawn += [
        (f"{palette}-{position}", is_shown & (classes == position) & (layers == layer))
        for layer in range(NUM_LAYERS)
        for position in range(num_classes)
    ]
    return [(css, dot_path(xs[chosen], ys[chosen])) for css, chosen in drawn if chosen.any()]


def dot_path(xs: IntArray, ys: IntArray) -> str:
    """A path of dots, each relative to the one before; those on one spot are drawn once."""
    points = np.unique(np.stack([xs, ys], axis=1), axis=0)  # (dots, 2), from west to east
    steps = np.diff(points, axis=0, prepend=[[0, 0]])
    return "".join(f"m{x}{'' if y < 0 else ' '}{y}h0" for x, y in steps.tolist())
