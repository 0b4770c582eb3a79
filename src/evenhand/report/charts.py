"""Charts as inline SVG, without a library.

Colours are CSS classes (`run-1`, `run-2`, ...), so that one drawing serves light, dark and paper.
Every run also has a shape and a dash pattern of its own: colour is never the only difference.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from evenhand.evaluation import Score
from evenhand.report.markup import Attributes, Html, element, fragment, interval, percent

MARKS = (  # drawn around 0, 0
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
    "M0-5.5L5.5 0L0 5.5L-5.5 0z",
    "M-4-4H4V4H-4z",
    "M0-5L5 4H-5z",
    "M0 5L5-4H-5z",
    "M-5-1.7H-1.7V-5H1.7V-1.7H5V1.7H1.7V5H-1.7V1.7H-5z",
)
DASHES = (None, "7 3", "2 3", "9 3 2 3", "4 2", "1 2")
TICKS = (0, 25, 50, 75, 100)  # per cent


def run_class(run: int) -> str:
    return f"run-{run % len(MARKS) + 1}"


def mark(run: int, x: float | str, y: float) -> Html:
    """The shape of a run; `x` may be a share of the width, such as '41%'."""
    shape = element("path", {"d": MARKS[run % len(MARKS)], "class": f"mark {run_class(run)}"})
    return element("svg", {"x": x, "y": y, "overflow": "visible"}, shape)


def legend(run_names: Sequence[str]) -> Html:
    """Which shape and colour is which run."""
    items = []
    for run, name in enumerate(run_names):
        line = {"x1": 0, "x2": 34, "y1": 8, "y2": 8, "stroke-dasharray": DASHES[run % len(DASHES)]}
        drawing = element(
            "svg",
            {"width": 34, "height": 16, "aria-hidden": "true"},
            element("line", {**line, "class": f"line {run_class(run)}"}),
            mark(run, 17, 8),
        )
        items.append(element("li", {}, drawing, element("bdi", {}, name)))
    return element("ul", {"class": "legend", "aria-label": "Runs"}, *items)


# --- one group, one line: a mark and an interval for each run -------------------------------------


def interval_axis() -> Html:
    """The numbers over the column that `interval_row` fills."""
    labels = [
        element("text", {"x": f"{tick}%", "y": 12, "text-anchor": "middle"}, f"{tick}")
        for tick in TICKS
    ]
    return element("svg", {"class": "track", "height": 16, "aria-hidden": "true"}, *labels)


def interval_row(run_names: Sequence[str], scores: Sequence[Score]) -> Html:
    """Values and 95 % intervals on a scale from 0 to 100 per cent."""
    height = 10 + 11 * len(scores)
    parts = [
        element(
            "line", {"x1": f"{tick}%", "x2": f"{tick}%", "y1": 0, "y2": "100%", "class": "grid"}
        )
        for tick in TICKS
    ]
    for run, score in enumerate(scores):
        if math.isnan(score.value):
            continue
        y = 10.5 + 11 * run
        if interval(score.low, score.high):
            ends: Attributes = {"x1": _share(score.low), "x2": _share(score.high), "y1": y, "y2": y}
            parts.append(element("line", {**ends, "class": f"interval {run_class(run)}"}))
        parts.append(mark(run, _share(score.value), y))
    said = "; ".join(
        f"{name} {percent(score.value)} % ({interval(score.low, score.high)})"
        for name, score in zip(run_names, scores, strict=True)
    )
    attributes: Attributes = {"class": "track", "height": height, "role": "img"}
    return element("svg", attributes, element("title", {}, said), *parts)


def _share(value: float) -> str:
    return f"{100 * value:.2f}%"


# --- lines ----------------------------------------------------------------------------------------


class Line(NamedTuple):
    run: int
    xs: Sequence[float]
    ys: Sequence[float]


class Axis(NamedTuple):
    """From values to positions, with the ticks to draw."""

    ticks: list[float]
    place: Callable[[float], float]


WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 10, 38  # margins
MAX_MARKS = 12  # a line of more points is drawn without marks


def line_chart(
    title: str, lines: Sequence[Line], *, x_title: str, is_log: bool = False, is_share: bool = False
) -> Html:
    """A small chart with a title; shares are shown in per cent, from 0."""
    xs = [x for line in lines for x in line.xs]
    ys = [y for line in lines for y in line.ys]
    make_x = _log_axis if is_log else linear_axis
    x_axis = make_x(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y_axis = linear_axis(min(0.0, *ys), max(ys), HEIGHT - BOTTOM, TOP)
    drawing = element(
        "svg",
        {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "class": "lines", "role": "img"},
        element("title", {}, title),
        *_grid(x_axis, y_axis, is_share),
        element(
            "text",
            {"x": (LEFT + WIDTH - RIGHT) / 2, "y": HEIGHT - 4, "text-anchor": "middle"},
            x_title,
        ),
        *(_drawn(line, x_axis, y_axis) for line in lines),
    )
    return element("figure", {"class": "panel"}, element("figcaption", {}, title), drawing)


def _drawn(line: Line, x_axis: Axis, y_axis: Axis) -> Html:
    points = [(x_axis.place(x), y_axis.place(y)) for x, y in zip(line.xs, line.ys, strict=True)]
    path = element(
        "path",
        {
            "d": "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points),
            "class": f"line {run_class(line.run)}",
            "stroke-dasharray": DASHES[line.run % len(DASHES)],
        },
    )
    if len(points) > MAX_MARKS:
        return fragment(path, mark(line.run, *points[-1]))
    return fragment(path, *(mark(line.run, x, y) for x, y in points))


def _grid(x_axis: Axis, y_axis: Axis, is_share: bool) -> list[Html]:
    parts = []
    for tick in y_axis.ticks:
        y = y_axis.place(tick)
        ends = {"x1": LEFT, "x2": WIDTH - RIGHT, "y1": y, "y2": y}
        shown = f"{100 * tick:g} %" if is_share else _short(tick)
        parts.append(element("line", {**ends, "class": "grid"}))
        parts.append(element("text", {"x": LEFT - 6, "y": y + 4, "text-anchor": "end"}, shown))
    for tick in x_axis.ticks:
        x = x_axis.place(tick)
        ends = {"x1": x, "x2": x, "y1": HEIGHT - BOTTOM, "y2": HEIGHT - BOTTOM + 4}
        parts.append(element("line", {**ends, "class": "tick"}))
        place: Attributes = {"x": x, "y": HEIGHT - BOTTOM + 16, "text-anchor": "middle"}
        parts.append(element("text", place, _short(tick)))
    return parts


def linear_axis(low: float, high: float, start: float, stop: float) -> Axis:
    """From the values `low` to `high` to the positions `start` to `stop`, ending on round ticks."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    step = _nice_step((high - low) / 4)
    low, high = step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)
    ticks = [low + step * n for n in range(round((high - low) / step) + 1)]
    return Axis(ticks, lambda value: start + (value - low) / (high - low) * (stop - start))


def _log_axis(low: float, high: float, start: float, stop: float) -> Axis:
    """For ranks: 1, 2, 5, 10, ..."""
    width = math.log(high / low) or 1.0
    nice = (digit * 10.0**power for power in range(7) for digit in (1, 2, 5))
    ticks = [tick for tick in nice if low <= tick <= high]
    return Axis(ticks, lambda value: start + math.log(value / low) / width * (stop - start))


def _nice_step(step: float) -> float:
    """The next of 1, 2, 2.5, 5, 10 times a power of ten."""
    unit = 10.0 ** math.floor(math.log10(step))
    return unit * next(n for n in (1, 2, 2.5, 5, 10) if n * unit >= step * (1 - 1e-9))


def _short(value: float) -> str:
    """'25k' for 25000; few digits otherwise."""
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.4g}" if value else "0"
