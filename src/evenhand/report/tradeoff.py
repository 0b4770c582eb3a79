"""The picture of a search: what every trial does for all, and for the worst served."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from evenhand.files import write_text
from evenhand.report.charts import Axis, linear_axis, mark
from evenhand.report.markup import (
    Attributes,
    Html,
    element,
    folded,
    fragment,
    interval,
    note,
    paragraph,
    percent,
    points,
    section,
    table,
)
from evenhand.report.page import page
from evenhand.tuning.choice import (
    Trial,
    by_criterion,
    chosen_trial,
    feasible_trials,
    pareto_front,
    rivals,
)
from evenhand.tuning.space import shown_settings
from evenhand.version import __version__

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 58, 20, 14, 44  # margins
SHOWN_WIDTH = 800  # on a wide screen; a narrow one shrinks it
MAX_LEVELS = 6  # of k' with a shape and a colour of their own
LETTER, LINE = 6.8, 13.0  # about the size of a letter of a label


def write_tradeoff(
    trials: Sequence[Trial],
    path: Path,
    *,
    title: str,
    criterion: str,
    average: str,
    max_drop: float,
    next_command: str,
) -> None:
    """Writes one HTML file about the trials of a search; it needs no network.

    Args:
        trials: at least one of them has its figures.
        next_command: what to run to learn how good the chosen settings really are.
    """
    chosen = chosen_trial(trials, max_drop=max_drop)
    if chosen is None:
        raise ValueError("trials must hold at least one that came to an end")
    header = element(
        "header",
        {},
        element("h1", {}, title),
        element("p", {"class": "verdict"}, _verdict(trials, chosen, criterion, average)),
        paragraph(_rule(trials, chosen, criterion, average, max_drop)),
        note(
            "The figures are of the validation part, on which the trial was chosen: the chosen "
            "one is chosen for them, so they flatter it. For honest figures, train with its "
            "settings, which ends with an evaluation on the test part:"
        ),
        element("pre", {}, element("code", {}, next_command)),
    )
    picture = section(
        "tradeoff",
        "For all, and for the worst served",
        _legend(trials),
        *_charts(trials, chosen, criterion=criterion, average=average, max_drop=max_drop),
        note(
            "One mark a trial; its bar is the 95 % interval of the criterion over queries, which "
            "does not say how much another seed would change. Shaded: near enough to the best "
            "average. Dashed: the trials that no other beats in one figure and equals in the "
            "other. Point at a mark to read its settings."
        ),
    )
    rows = section(
        "trials",
        "The trials",
        _trials_table(trials, chosen, criterion=criterion, average=average, max_drop=max_drop),
    )
    footer = element("footer", {}, element("p", {}, f"Made by evenhand {__version__}."))
    write_text(path, page(title, [header, picture, rows, footer]))


# --- in words -------------------------------------------------------------------------------------


def _verdict(trials: Sequence[Trial], chosen: Trial, criterion: str, average: str) -> str:
    said = f"Trial {chosen.number} is chosen, with k' = {chosen.num_hard_examples:,}"
    if trials[0].role == "SNM" and chosen.num_hard_examples == trials[0].num_hard_examples:
        said += " (as in SNM)"
    said += f": {criterion} "
    said += f"is {percent(chosen.criterion)} %, {average} is {percent(chosen.average)} %."
    baseline = trials[0]
    if chosen.number == baseline.number:
        return f"{said} It is the {baseline.role} baseline: no other setting did better."
    if not baseline.is_scored:
        return said
    return (
        f"{said} Beside {baseline.role} that is {points(chosen.criterion - baseline.criterion)} "
        f"for the worst served and {points(chosen.average - baseline.average)} for all."
    )


def _rule(
    trials: Sequence[Trial], chosen: Trial, criterion: str, average: str, max_drop: float
) -> str:
    feasible = feasible_trials(trials, max_drop=max_drop)
    best = max(trial.average for trial in feasible)
    said = (
        f"The rule: of the trials whose {average} is at most {100 * max_drop:g} points below the "
        f"best one's ({percent(best)} %), which are {len(feasible)} of {len(trials)}, the one with "
        f"the highest {criterion}."
    )
    close = [str(trial.number) for trial in rivals(trials, max_drop=max_drop)]
    if close:
        said += (
            f" Within its interval ({interval(chosen.low, chosen.high)} %), and so hardly to be "
            f"told from it: trial{'s' * (len(close) > 1)} {', '.join(close)}."
        )
    return said


# --- the picture ----------------------------------------------------------------------------------


def _levels(trials: Sequence[Trial]) -> list[tuple[int, int]]:
    """Least and largest k' of each shape: one value a shape while there are shapes enough."""
    sizes = sorted({trial.num_hard_examples for trial in trials})
    width = math.ceil(len(sizes) / MAX_LEVELS)
    pieces = [sizes[start : start + width] for start in range(0, len(sizes), width)]
    return [(piece[0], piece[-1]) for piece in pieces]


def _level(trial: Trial, levels: Sequence[tuple[int, int]]) -> int:
    return next(n for n, (_, high) in enumerate(levels) if trial.num_hard_examples <= high)


def _legend(trials: Sequence[Trial]) -> Html:
    items = []
    for level, (low, high) in enumerate(_levels(trials)):
        drawing = element(
            "svg", {"width": 16, "height": 16, "aria-hidden": "true"}, mark(level, 8, 8)
        )
        shown = f"k' = {low:,}" if low == high else f"k' = {low:,} to {high:,}"
        if high == trials[0].num_hard_examples and trials[0].role:
            shown += f" (all: {trials[0].role})" if low == high else ""
        items.append(element("li", {}, drawing, shown))
    return element("ul", {"class": "legend", "aria-label": "Hard examples kept"}, *items)


def _charts(
    trials: Sequence[Trial], chosen: Trial, *, criterion: str, average: str, max_drop: float
) -> list[Html]:
    """The trials near the best, and all of them where that is another picture."""
    near = _near(trials, chosen, max_drop)
    num_far = sum(trial.is_scored for trial in trials) - len(near)

    def chart(shown: Sequence[Trial]) -> Html:
        return _chart(
            trials, shown, chosen, criterion=criterion, average=average, max_drop=max_drop
        )

    if not num_far:
        return [chart(near)]
    left_out = f"{num_far} trial{'s' * (num_far > 1)} with much lower averages"
    return [
        chart(near),
        note(f"Not in this picture: {left_out}."),
        folded("The picture with every trial", chart([t for t in trials if t.is_scored])),
    ]


def _near(trials: Sequence[Trial], chosen: Trial, max_drop: float) -> list[Trial]:
    """Trials that can share a picture: one far off would press the others together."""
    scored = [trial for trial in trials if trial.is_scored]
    best = max(trial.average for trial in scored)
    always = [best - trial.average for trial in scored if trial.role or trial is chosen]
    width = max(6 * max_drop, 1.5 * statistics.median(best - t.average for t in scored), *always)
    return [trial for trial in scored if best - trial.average <= width]


def _chart(
    trials: Sequence[Trial],
    shown: Sequence[Trial],
    chosen: Trial,
    *,
    criterion: str,
    average: str,
    max_drop: float,
) -> Html:
    best = max(trial.average for trial in shown)
    averages = [*(trial.average for trial in shown), best - max_drop]
    bars = [y for t in shown for y in (t.low, t.high, t.criterion) if not math.isnan(y)]
    x_axis = linear_axis(min(averages), max(averages), LEFT, WIDTH - RIGHT)
    y_axis = linear_axis(min(bars), max(bars), HEIGHT - BOTTOM, TOP)
    said = (
        f"{len(shown)} trials: {average} to the right, {criterion} upwards. "
        f"{_verdict(trials, chosen, criterion, average)} The figures are in the table below."
    )
    start = x_axis.place(best - max_drop)
    region = {"x": start, "y": TOP, "width": WIDTH - RIGHT - start, "height": HEIGHT - BOTTOM - TOP}
    levels = _levels(trials)
    settings = shown_settings([trial.settings for trial in trials])
    drawing = element(
        "svg",
        {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "width": SHOWN_WIDTH, "role": "img"},
        element("title", {}, said),
        element("rect", {**region, "fill": "var(--soft)"}),
        *_grid(x_axis, y_axis),
        *_axis_titles(criterion, average),
        _front(shown, x_axis, y_axis),
        *(_interval(trial, x_axis, y_axis) for trial in shown),
        *(_mark(t, _level(t, levels), settings[t.number - 1], x_axis, y_axis) for t in shown),
        *_labels(shown, chosen, x_axis, y_axis),
    )
    return element("figure", {}, drawing)


def _grid(x_axis: Axis, y_axis: Axis) -> list[Html]:
    parts = []
    for tick in y_axis.ticks:
        y = y_axis.place(tick)
        ends = {"x1": LEFT, "x2": WIDTH - RIGHT, "y1": y, "y2": y}
        place: Attributes = {"x": LEFT - 6, "y": y + 4, "text-anchor": "end"}
        parts.append(element("line", {**ends, "class": "grid"}))
        parts.append(element("text", place, _share(tick)))
    for tick in x_axis.ticks:
        x = x_axis.place(tick)
        ends = {"x1": x, "x2": x, "y1": HEIGHT - BOTTOM, "y2": HEIGHT - BOTTOM + 4}
        place = {"x": x, "y": HEIGHT - BOTTOM + 17, "text-anchor": "middle"}
        parts.append(element("line", {**ends, "class": "tick"}))
        parts.append(element("text", place, _share(tick)))
    return parts


def _share(tick: float) -> str:
    return f"{100 * tick:.4g} %"


def _axis_titles(criterion: str, average: str) -> list[Html]:
    middle, centre = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    turned = f"translate(13 {centre:.0f}) rotate(-90)"
    return [
        element("text", {"x": middle, "y": HEIGHT - 8, "text-anchor": "middle"}, f"{average}, all"),
        element("text", {"transform": turned, "text-anchor": "middle"}, criterion),
    ]


def _front(trials: Sequence[Trial], x_axis: Axis, y_axis: Axis) -> Html:
    first, *others = [_place(trial, x_axis, y_axis) for trial in pareto_front(trials)]
    drawn = f"M{first[0]:.1f} {first[1]:.1f}" + "".join(f"V{y:.1f}H{x:.1f}" for x, y in others)
    line = {"d": drawn, "class": "line", "stroke": "var(--quiet)", "stroke-dasharray": "5 4"}
    return element("path", line)


def _place(trial: Trial, x_axis: Axis, y_axis: Axis) -> tuple[float, float]:
    return x_axis.place(trial.average), y_axis.place(trial.criterion)


def _interval(trial: Trial, x_axis: Axis, y_axis: Axis) -> Html:
    if not interval(trial.low, trial.high):
        return fragment()
    x, _ = _place(trial, x_axis, y_axis)
    ends = {"x1": x, "x2": x, "y1": y_axis.place(trial.low), "y2": y_axis.place(trial.high)}
    return element("line", {**ends, "class": "tick", "stroke-opacity": "0.35"})


def _mark(trial: Trial, level: int, shown: dict[str, str], x_axis: Axis, y_axis: Axis) -> Html:
    settings = ", ".join(f"{name} {value}" for name, value in shown.items())
    said = f"trial {trial.number}: {settings}; {percent(trial.average)} % for all, "
    said += f"{percent(trial.criterion)} % by the criterion"
    drawing = mark(level, *_place(trial, x_axis, y_axis))
    return element("g", {}, element("title", {}, said), drawing)


# --- its labels -----------------------------------------------------------------------------------


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "Box") -> bool:
        is_beside = self.right <= other.left or other.right <= self.left
        return not (is_beside or self.bottom <= other.top or other.bottom <= self.top)


def _labels(trials: Sequence[Trial], chosen: Trial, x_axis: Axis, y_axis: Axis) -> list[Html]:
    """Names of the chosen one, the baseline and the given one, each where it hides least."""
    x, y = _place(chosen, x_axis, y_axis)
    taken = [Box(x - 11, y - 11, x + 11, y + 11)]
    for trial in trials:
        left, top = (place - 6 for place in _place(trial, x_axis, y_axis))
        taken.append(Box(left, top, left + 12, top + 12))
    ring: Attributes = {"cx": x, "cy": y, "r": 9, "fill": "none", "stroke": "var(--ink)"}
    parts = [element("circle", {**ring, "stroke-width": 1.5})]
    named = [trial for trial in trials if trial.role and trial.number != chosen.number]
    for trial in [chosen, *named]:
        is_chosen = trial.number == chosen.number
        text = f"chosen: trial {trial.number}" if is_chosen else trial.role
        text += f" ({trial.role})" if is_chosen and trial.role else ""
        box = _free_box(*_place(trial, x_axis, y_axis), LETTER * len(text), taken)
        taken.append(box)
        strong: Attributes = {"fill": "var(--ink)", "font-weight": "600" if is_chosen else None}
        halo: Attributes = {"stroke": "var(--page)", "stroke-width": 3, "paint-order": "stroke"}
        place: Attributes = {"x": box.left, "y": box.bottom - 3}
        parts.append(element("text", place, element("tspan", {**strong, **halo}, text)))
    return parts


def _free_box(x: float, y: float, width: float, taken: Sequence[Box]) -> Box:
    """Where a label of this width beside a mark meets the fewest others, within the frame."""
    frame = Box(LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM)
    boxes = []
    for below in (-8 - LINE, 8, -LINE / 2, -24 - LINE, 24):
        for left in (x + 11, x - width / 2, x - 11 - width):
            boxes.append(Box(left, y + below, left + width, y + below + LINE))
    inside = [
        box
        for box in boxes
        if frame.left <= box.left and box.right <= frame.right
        and frame.top <= box.top and box.bottom <= frame.bottom
    ]  # fmt: skip
    return min(inside or boxes, key=lambda box: sum(box.meets(other) for other in taken))


# --- the table ------------------------------------------------------------------------------------


def _trials_table(
    trials: Sequence[Trial], chosen: Trial, *, criterion: str, average: str, max_drop: float
) -> Html:
    settings = shown_settings([trial.settings for trial in trials])
    names = list(dict.fromkeys(name for trial in trials for name in trial.figures))
    figures = [name for name in names if name != "all"]
    feasible = {trial.number for trial in feasible_trials(trials, max_drop=max_drop)}
    front = {trial.number for trial in pareto_front(trials)}
    titles = ["trial", *settings[0], average, "criterion", "near best", "unbeaten", "seconds"]
    head = element("tr", {}, *(_title(title) for title in [*titles, *figures]))
    rows = []
    for trial in by_criterion(trials):
        is_chosen = trial.number == chosen.number
        words = ["chosen" if is_chosen else "", trial.role, trial.failure]
        number = element("b", {}, str(trial.number)) if is_chosen else str(trial.number)
        said = ", ".join(filter(None, words))
        rows.append(
            element(
                "tr",
                {"class": None if trial.number in feasible else "grey"},
                element("th", {"scope": "row"}, number, _remark(said)),
                *(_number(value) for value in settings[trial.number - 1].values()),
                _number(percent(trial.average)),
                _number(
                    percent(trial.criterion), element("small", {}, interval(trial.low, trial.high))
                ),
                element("td", {}, "yes" if trial.number in feasible else ""),
                element("td", {}, "yes" if trial.number in front else ""),
                _number(f"{trial.seconds:.0f}"),
                *(_number(percent(trial.figures.get(name, math.nan))) for name in figures),
            )
        )
    caption = f"Figures of the validation part in per cent; the criterion is {criterion}"
    return table(caption, [head], rows, css_class="sortable")


def _title(title: str) -> Html:
    is_word = title in ("trial", "near best", "unbeaten")
    return element("th", {"scope": "col", "class": None if is_word else "number"}, title)


def _remark(said: str) -> Html:
    return element("small", {}, said) if said else fragment()


def _number(*children: Html | str) -> Html:
    return element("td", {"class": "number"}, fragment(*children))
