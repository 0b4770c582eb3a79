"""Where on earth the model works: every label with coordinates a dot, coloured by its recall.

A dot is a zero-length stroke with round ends (`m3 4h0`), and all dots of a colour are one path:
34,000 of them cost about 300 kB. Each map is drawn in layers of mixed dots, so that no colour
lies over all the others.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evenhand.data.dataset import FloatArray, IntArray
from evenhand.report.markup import Html, element, note, number, paragraph, section
from evenhand.report.study import Study, is_found

SOUTH, NORTH = -60, 80  # degrees of latitude shown
UNITS = 5  # of the drawing, to a degree
NUM_LAYERS = 4
RECALL_CLASSES = ("none found", "up to a third", "up to two thirds", "more, not all", "all found")
CHANGE_CLASSES = ("worse by half or more", "worse", "as before", "better", "better by half or more")
MUCH = 0.5  # of recall

DoubleArray = NDArray[np.float64]


def map_section(study: Study) -> Html:
    """A map a run, and for two runs what changed; nothing for a data set without coordinates."""
    coordinates = study.dataset.label_coordinates
    if coordinates is None:
        return Html("")
    recalls = [_label_recalls(study, run) for run in range(len(study.results))]
    figures = [
        _figure(coordinates, _recall_classes(values), RECALL_CLASSES, "recall", name)
        for name, values in zip(study.run_names, recalls, strict=True)
    ]
    if len(recalls) == 2:
        first, last = study.run_names
        classes = _change_classes(recalls[1] - recalls[0])
        title = f"Change from {first} to {last}"
        figures.append(_figure(coordinates, classes, CHANGE_CLASSES, "change", title))
    counts = np.bincount(study.results[0].outcome.label_ids, minlength=len(coordinates))  # (L,)
    num_pairs = np.sort(counts[counts > 0])
    median = int(num_pairs[len(num_pairs) // 2]) if len(num_pairs) else 0
    explained = paragraph(
        f"Every label is a dot where it lies. Colour: the share of its own {study.part_name} pairs "
        f"found among the first {study.cutoff} results. {number(len(num_pairs))} of "
        f"{number(study.dataset.num_labels)} labels have such pairs, half of those at most "
        f"{median}: read regions, not single dots."
    )
    attribution = [note(study.dataset.attribution)] if study.dataset.attribution else []
    return section("map", "Where it works", explained, *figures, *attribution)


def _label_recalls(study: Study, run: int) -> DoubleArray:
    """Share of each label's pairs that are found, NaN for a label without pairs: (L,)."""
    outcome, num_labels = study.results[run].outcome, study.dataset.num_labels
    found = is_found(outcome.ranks, study.cutoff)  # (N,)
    counts = np.bincount(outcome.label_ids, minlength=num_labels)  # (L,)
    hits = np.bincount(outcome.label_ids, weights=found, minlength=num_labels)
    with np.errstate(invalid="ignore"):  # 0 / 0: no pair
        return np.asarray(hits / counts)


def _recall_classes(recalls: DoubleArray) -> IntArray:
    """Positions in RECALL_CLASSES, -1 without pairs: (L,) -> (L,)."""
    classes = np.select(
        [recalls == 0, recalls <= 1 / 3, recalls <= 2 / 3, recalls < 1, recalls == 1],
        [0, 1, 2, 3, 4],
        default=-1,
    )
    return np.asarray(classes)


def _change_classes(changes: DoubleArray) -> IntArray:
    """Positions in CHANGE_CLASSES, -1 without pairs: (L,) -> (L,)."""
    classes = np.select(
        [changes <= -MUCH, changes < 0, changes == 0, changes < MUCH, changes >= MUCH],
        [0, 1, 2, 3, 4],
        default=-1,
    )
    return np.asarray(classes)


def _figure(
    coordinates: FloatArray, classes: IntArray, names: Sequence[str], palette: str, title: str
) -> Html:
    width, height = 360 * UNITS, (NORTH - SOUTH) * UNITS
    counts = [int(np.count_nonzero(classes == position)) for position in range(len(names))]
    said = f"{title}: " + ", ".join(
        f"{name} {number(count)}" for name, count in zip(names, counts, strict=True)
    )
    drawing = element(
        "svg",
        {"viewBox": f"0 0 {width} {height}", "class": "map", "role": "img"},
        element("title", {}, f"{said} labels"),
        _graticule(width, height),
        *_paths(coordinates, classes, len(names), palette),
    )
    items = [
        _key(f"dot {palette}-{position}", f"{name} ({number(count)})")
        for position, (name, count) in enumerate(zip(names, counts, strict=True))
    ]
    items.append(_key("dot none", f"no pair ({number(int(np.count_nonzero(classes < 0)))})"))
    caption = element("figcaption", {}, element("h3", {}, title))
    key = element("ul", {"class": "legend", "aria-label": "Colours"}, *items)
    return element("figure", {}, caption, drawing, key)


def _key(css_class: str, text: str) -> Html:
    dot = element("path", {"d": "M8 8h0", "class": f"{css_class} key"})
    return element(
        "li", {}, element("svg", {"width": 16, "height": 16, "aria-hidden": "true"}, dot), text
    )


def _graticule(width: int, height: int) -> Html:
    """Meridians and parallels, every 30 degrees."""
    across = "".join(f"M0 {y}H{width}" for y in range((NORTH % 30) * UNITS, height, 30 * UNITS))
    down = "".join(f"M{x} 0V{height}" for x in range(0, width + 1, 30 * UNITS))
    return element("path", {"d": across + down, "class": "grid"})


def _paths(
    coordinates: FloatArray, classes: IntArray, num_classes: int, palette: str
) -> list[Html]:
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
    return [
        element("path", {"d": _dots(xs[chosen], ys[chosen]), "class": f"dot {css_class}"})
        for css_class, chosen in drawn
        if chosen.any()
    ]


def _dots(xs: IntArray, ys: IntArray) -> str:
    """A path of dots, each relative to the one before; those on one spot are drawn once."""
    points = np.unique(np.stack([xs, ys], axis=1), axis=0)  # (dots, 2), from west to east
    steps = np.diff(points, axis=0, prepend=[[0, 0]])
    return "".join(f"m{x}{'' if y < 0 else ' '}{y}h0" for x, y in steps.tolist())
