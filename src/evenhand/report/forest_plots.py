"""Forest plots as plain data (axes, positions); `templates/pieces.html` turns them into SVG.

A row for each group, with a mark and a 95 % interval on one axis for all rows: in a report of
several runs the differences to the first run, with a line at zero; in one of a single run its own
figures, with a line at that of all pairs.

Colours are CSS classes (`run-1`, `run-2`, ...), so that one drawing serves light, dark and paper.
Every run also has a shape of its own: colour is never the only difference.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from evenhand.evaluation import Difference, Score
from evenhand.report.rendering import interval, percent, signed, span

ROOM = 1.5  # of the spread of the marks: how far intervals may widen the axis

Format = Callable[[float], str]


class Axis(NamedTuple):
    """From values to positions, with the ticks to draw."""

    ticks: list[tuple[float, str]]  # position, label
    place: Callable[[float], float]


def linear_axis(low: float, high: float, start: float, stop: float, label: Format) -> Axis:
    """From the values `low` to `high` to the positions `start` to `stop`, ending on round ticks."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    step = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(step))
    step = unit * next(n for n in (1, 2, 2.5, 5, 10) if n * unit >= step * (1 - 1e-9))
    low, high = step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)

    def place(value: float) -> float:
        return start + (value - low) / (high - low) * (stop - start)

    ticks = [low + step * n for n in range(round((high - low) / step) + 1)]
    return Axis([(place(tick), label(tick)) for tick in ticks], place)


class Estimate(NamedTuple):
    """A value with its interval, and how both are written."""

    run: int
    value: float
    low: float
    high: float
    shown: str
    around: str
    note: str = ""  # such as both runs' own figures

    def kind(self, reference: float = 0.0) -> str:
        """Whether the whole interval lies above, or below, no difference or that of all pairs."""
        above, below = self.low > reference, self.high < reference
        return "gain" if above else "loss" if below else "level"


class ForestRow(NamedTuple):
    """A row of a forest plot: what it is about, and an estimate for each run."""

    title: str
    note: str
    estimates: list[Estimate]  # one for each run that is drawn
    num_pairs: int
    is_judged: bool = True


class Bar(NamedTuple):
    """An estimate as it is drawn, in per cent of the width."""

    estimate: Estimate
    place: float
    start: float
    stop: float
    kind: str


class Forest(NamedTuple):
    """A forest plot, ready to be drawn: an axis, and bars placed on it in per cent."""

    heading: str
    ticks: list[tuple[float, str]]  # place in per cent, label
    reference: float  # place of the line, in per cent
    rows: list[tuple[ForestRow, list[Bar]]]
    is_of_differences: bool
    is_cut: bool  # whether an interval goes on beyond the axis


def of_difference(run: int, row: Difference) -> Estimate:
    """The bar of a paired difference, with `from → to` beside it."""
    note = f"{percent(row.baseline)} → {percent(row.contender)}"
    return Estimate(run, row.difference, row.low, row.high, signed(row.difference), span(row), note)


def of_score(run: int, score: Score) -> Estimate:
    """The bar of a score and its interval."""
    value, low, high = score.value, score.low, score.high
    return Estimate(run, value, low, high, percent(value), interval(low, high))


def make_forest(
    heading: str, rows: Sequence[ForestRow], *, reference: float, is_of_differences: bool
) -> Forest:
    """Places every row on one axis that holds all marks, and intervals as far as there is room."""

    def finite(values: Iterable[float]) -> list[float]:
        return [value for value in values if not math.isnan(value)]

    estimates = [e for row in rows if row.is_judged for e in row.estimates]
    marks = finite([reference, *(e.value for e in estimates)]) or [0.0]
    ends = finite([*marks, *(end for e in estimates for end in (e.low, e.high))])
    room = max(ROOM * (max(marks) - min(marks)), 0.01)
    low, high = max(min(ends), min(marks) - room), min(max(ends), max(marks) + room)
    if low == high and not is_of_differences:
        low, high = 0.0, 1.0

    def label(value: float) -> str:
        shown = f"{100 * value:+.4g}" if is_of_differences else f"{100 * value:.4g}"
        return shown.replace("-", "−") if float(shown) else "0"

    axis = linear_axis(low, high, 0, 100, label)

    def place(value: float) -> float:
        return round(min(100.0, max(0.0, axis.place(value))), 2)

    def bar(e: Estimate) -> Bar:
        return Bar(e, place(e.value), place(e.low), place(e.high), e.kind(reference))

    drawn = [(row, [bar(estimate) for estimate in row.estimates]) for row in rows]
    drawn_ends = [axis.place(end) for e in estimates if e.around for end in (e.low, e.high)]
    is_cut = any(end < -0.1 or end > 100.1 for end in drawn_ends)
    return Forest(heading, axis.ticks, place(reference), drawn, is_of_differences, is_cut)
