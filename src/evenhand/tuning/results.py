"""Finished trials: the rule that chooses one, and how they are shown in the terminal and on a page.

The rule: the best for the worst served, of those good enough for all.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from evenhand.files import write_text
from evenhand.report.charts import LARGE, MARKS, Axis, Label, Line, Mark, Plot, linear_axis
from evenhand.report.rendering import interval, percent, points, render
from evenhand.tuning.space import NUM_HARD_EXAMPLES, Settings, format_settings

NAN = float("nan")
ROUNDING = 1e-9  # 0.415 - 0.410 is a little more than 0.005 in floating point


class Rule(NamedTuple):
    """Names of scores, as `selected_score` knows them, and how far the average may fall."""

    criterion: str  # made as high as it can be
    average: str  # must not fall far below its best
    max_drop: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial and its figures on the validation part."""

    number: int  # from 1
    role: str
    settings: Settings
    average: float = NAN  # NaN: it did not come to an end
    criterion: float = NAN
    low: float = NAN  # 95 % interval of the criterion
    high: float = NAN
    figures: dict[str, float] = dataclasses.field(default_factory=dict)  # head, tail, worst groups
    seconds: float = 0.0
    failure: str = ""  # why there are no figures

    @property
    def num_hard_examples(self) -> int:
        return int(self.settings[NUM_HARD_EXAMPLES])

    @property
    def is_scored(self) -> bool:
        return not math.isnan(self.average) and not math.isnan(self.criterion)


# --- the rule -------------------------------------------------------------------------------------


def feasible_trials(trials: Sequence[Trial], *, max_drop: float) -> list[Trial]:
    """The trials whose average is at most `max_drop` below the best average of all."""
    scored = [trial for trial in trials if trial.is_scored]
    best = max((trial.average for trial in scored), default=NAN)
    return [trial for trial in scored if best - trial.average <= max_drop + ROUNDING]


def choose_trial(trials: Sequence[Trial], *, max_drop: float) -> Trial | None:
    """The feasible trial with the best criterion; of equals the better average, then the first.

    Example:
        >>> def trial(number, average, criterion):
        ...     settings = {"mining.num_hard_examples": 8}
        ...     return Trial(
        ...         number=number, role="", settings=settings, average=average, criterion=criterion
        ...     )
        >>> trials = [trial(0, 0.50, 0.20), trial(1, 0.49, 0.30), trial(2, 0.40, 0.40)]
        >>> choose_trial(trials, max_drop=0.02).number
        1
    """
    feasible = feasible_trials(trials, max_drop=max_drop)
    return max(feasible, key=lambda t: (t.criterion, t.average, -t.number), default=None)


def sort_by_criterion(trials: Sequence[Trial]) -> list[Trial]:
    """The trials, the best criterion first; those without figures last."""
    scored = [trial for trial in trials if trial.is_scored]
    scored.sort(key=lambda t: (-t.criterion, -t.average, t.number))
    return [*scored, *(trial for trial in trials if not trial.is_scored)]


def rival_trials(trials: Sequence[Trial], *, max_drop: float) -> list[Trial]:
    """Feasible trials whose criterion lies within the interval of the chosen one's."""
    chosen = choose_trial(trials, max_drop=max_drop)
    if chosen is None or math.isnan(chosen.low):
        return []
    feasible = feasible_trials(trials, max_drop=max_drop)
    return [t for t in feasible if t.number != chosen.number and t.criterion >= chosen.low]


def pareto_front(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that no other equals in one figure and beats in the other, worst average first.

    Of trials that are alike in both figures the first one stands for all.
    """
    front: list[Trial] = []
    for trial in sorted(
        (trial for trial in trials if trial.is_scored),
        key=lambda t: (-t.average, -t.criterion, t.number),
    ):
        if not front or trial.criterion > front[-1].criterion:
            front.append(trial)
    return front[::-1]


def _numbers(trials: Sequence[Trial]) -> str:
    """'trial 3' or 'trials 3, 5'."""
    return f"trial{'s' * (len(trials) > 1)} {', '.join(str(trial.number) for trial in trials)}"


# --- in the terminal ------------------------------------------------------------------------------


def trials_table(trials: Sequence[Trial], rule: Rule) -> Table:
    """The trials of a search, the best criterion first; the chosen one is bold."""
    chosen = choose_trial(trials, max_drop=rule.max_drop)
    feasible = feasible_trials(trials, max_drop=rule.max_drop)
    settings = format_settings([trial.settings for trial in trials])
    table = Table(title=Text(f"trials by {rule.criterion}"), title_justify="left")
    for heading in ["trial", *settings[0], rule.average, "criterion", "95 %", "tail", "seconds"]:
        table.add_column(Text(heading), justify="right", no_wrap=True)
    for heading in ("near best", ""):
        table.add_column(heading)
    for trial in sort_by_criterion(trials):
        has_interval = trial.is_scored and not math.isnan(trial.low)
        figures = [trial.average, trial.criterion, trial.figures.get("tail", NAN)]
        shown = ["–" if math.isnan(figure) else f"{figure:.4f}" for figure in figures]
        shown.insert(2, f"{trial.low:.3f}–{trial.high:.3f}" if has_interval else "–")
        cells = [str(trial.number), *settings[trial.number - 1].values(), *shown]
        cells += [f"{trial.seconds:.0f}", "yes" if trial in feasible else ""]
        cells.append(_remarks(trial, chosen))
        style = "bold" if trial is chosen else "" if trial in feasible else "dim"
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table


def _remarks(trial: Trial, chosen: Trial | None) -> str:
    return ", ".join(filter(None, ["chosen" if trial is chosen else "", trial.role, trial.failure]))


def describe_choice(trials: Sequence[Trial], rule: Rule) -> list[str]:
    """What was chosen and why, and how far to trust it; some trial must have its figures."""
    chosen = choose_trial(trials, max_drop=rule.max_drop)
    assert chosen is not None
    feasible = feasible_trials(trials, max_drop=rule.max_drop)
    sentences = [
        f"chosen: trial {chosen.number}, the highest {rule.criterion} of the trials near the "
        f"best average ({len(feasible)} of {len(trials)}: {rule.average} at most "
        f"{rule.max_drop:g} below {max(trial.average for trial in feasible):.4f})"
    ]
    if chosen.criterion == 0:
        sentences.append(
            "note: it finds nothing by that criterion, so the average alone decided; give the "
            "trials more --steps, or name another --criterion"
        )
    elif rivals := rival_trials(trials, max_drop=rule.max_drop):
        sentences.append(f"within its interval, so hardly to be told from it: {_numbers(rivals)}")
    return sentences


# --- on a page ------------------------------------------------------------------------------------


def write_search_page(
    trials: Sequence[Trial], path: Path, *, title: str, rule: Rule, next_command: str
) -> None:
    """Writes one HTML file about the trials of a search; it needs no network.

    Args:
        trials: at least one of them has its figures.
        next_command: what to run to learn how good the chosen settings really are.
    """
    chosen = choose_trial(trials, max_drop=rule.max_drop)
    if chosen is None:
        raise ValueError("trials must hold at least one that came to an end")
    scored = [trial for trial in trials if trial.is_scored]
    near = nearby_trials(trials, chosen, rule.max_drop)
    feasible = feasible_trials(trials, max_drop=rule.max_drop)
    rivals = rival_trials(trials, max_drop=rule.max_drop)
    verdict = _describe_gain(trials, chosen, rule)
    page = render(
        "search.html",
        title=title,
        verdict=verdict,
        rule=rule,
        num_feasible=len(feasible),
        num_trials=len(trials),
        best_average=max(trial.average for trial in feasible),
        chosen=chosen,
        rivals=_numbers(rivals) if rivals else "",
        next_command=next_command,
        levels=_describe_levels(trials),
        plot=_plot(trials, near, chosen, rule, verdict),
        num_far=len(scored) - len(near),
        full_plot=_plot(trials, scored, chosen, rule, verdict),
        **_table_values(trials, chosen, rule),
    )
    write_text(path, page)


def _describe_gain(trials: Sequence[Trial], chosen: Trial, rule: Rule) -> str:
    baseline = trials[0]
    same = baseline.role == "SNM" and chosen.num_hard_examples == baseline.num_hard_examples
    said = (
        f"Trial {chosen.number} is chosen, with k' = {chosen.num_hard_examples:,}"
        f"{' (as in SNM)' if same else ''}: {rule.criterion} is {percent(chosen.criterion)} %, "
        f"{rule.average} is {percent(chosen.average)} %."
    )
    if chosen.number == baseline.number:
        return f"{said} It is the {baseline.role} baseline: no other setting did better."
    if not baseline.is_scored:
        return said
    return (
        f"{said} Beside {baseline.role} that is {points(chosen.criterion - baseline.criterion)} "
        f"for the worst served and {points(chosen.average - baseline.average)} for all."
    )


def _table_values(trials: Sequence[Trial], chosen: Trial, rule: Rule) -> dict[str, Any]:
    settings = format_settings([trial.settings for trial in trials])
    names = dict.fromkeys(name for trial in trials for name in trial.figures if name != "all")
    feasible = {trial.number for trial in feasible_trials(trials, max_drop=rule.max_drop)}
    front = {trial.number for trial in pareto_front(trials)}
    rows = [
        {
            "trial": trial,
            "is_chosen": trial is chosen,
            "remarks": _remarks(trial, chosen),
            "settings": list(settings[trial.number - 1].values()),
            "interval": interval(trial.low, trial.high),
            "is_feasible": trial.number in feasible,
            "is_unbeaten": trial.number in front,
            "figures": [trial.figures.get(name, NAN) for name in names],
        }
        for trial in sort_by_criterion(trials)
    ]
    titles = ["trial", *settings[0], rule.average, "criterion", "near best", "unbeaten", "seconds"]
    titles += names
    numbers = [title for title in titles if title not in ("trial", "near best", "unbeaten")]
    return {"rows": rows, "titles": titles, "numbers": numbers}


def size_levels(trials: Sequence[Trial]) -> list[tuple[int, int]]:
    """Least and largest k' of each shape: one value a shape while there are shapes enough."""
    sizes = sorted({trial.num_hard_examples for trial in trials})
    width = math.ceil(len(sizes) / len(MARKS))
    pieces = [sizes[start : start + width] for start in range(0, len(sizes), width)]
    return [(piece[0], piece[-1]) for piece in pieces]


def _describe_levels(trials: Sequence[Trial]) -> list[str]:
    words, baseline = [], trials[0]
    for low, high in size_levels(trials):
        is_baseline = low == high == baseline.num_hard_examples and baseline.role
        sizes = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        words.append(f"k' = {sizes}" + (f" (all: {baseline.role})" if is_baseline else ""))
    return words


def nearby_trials(trials: Sequence[Trial], chosen: Trial, max_drop: float) -> list[Trial]:
    """The trials that are drawn first: not those so far below that the others would fall together.

    The chosen one and those with a role are always among them.
    """
    scored = [trial for trial in trials if trial.is_scored]
    best = max(trial.average for trial in scored)
    always = [best - trial.average for trial in scored if trial.role or trial is chosen]
    width = max(6 * max_drop, 1.5 * statistics.median(best - t.average for t in scored), *always)
    return [trial for trial in scored if best - trial.average <= width]


def _plot(
    trials: Sequence[Trial], shown: Sequence[Trial], chosen: Trial, rule: Rule, verdict: str
) -> Plot:
    """The average to the right and the criterion upwards, a mark for each trial that is shown."""
    start = max(trial.average for trial in shown) - rule.max_drop
    averages = [*(trial.average for trial in shown), start]
    bars = [y for t in shown for y in (t.low, t.high, t.criterion) if not math.isnan(y)]
    x_axis = linear_axis(min(averages), max(averages), LARGE.left, LARGE.right, _tick)
    y_axis = linear_axis(min(bars), max(bars), LARGE.bottom, LARGE.top, _tick)
    levels, settings = size_levels(trials), format_settings([trial.settings for trial in trials])
    marks = []
    for trial in shown:
        level = next(n for n, (_, high) in enumerate(levels) if trial.num_hard_examples <= high)
        words = ", ".join(f"{name} {value}" for name, value in settings[trial.number - 1].items())
        title = (
            f"trial {trial.number}: {words}; {percent(trial.average)} % for all, "
            f"{percent(trial.criterion)} % by the criterion"
        )
        marks.append(Mark(level, *_place(trial, x_axis, y_axis), title))
    first, *others = [_place(trial, x_axis, y_axis) for trial in pareto_front(shown)]
    front = f"M{first[0]:.1f} {first[1]:.1f}" + "".join(f"V{y:.1f}H{x:.1f}" for x, y in others)
    return Plot(
        title="",
        description=f"{len(shown)} trials: {rule.average} to the right, {rule.criterion} upwards. "
        f"{verdict} The figures are in the table below.",
        frame=LARGE,
        x_axis=x_axis,
        y_axis=y_axis,
        x_title=f"{rule.average}, all",
        y_title=rule.criterion,
        lines=[Line(front, "front", "5 4")],
        marks=marks,
        intervals=[
            (x_axis.place(trial.average), y_axis.place(trial.low), y_axis.place(trial.high))
            for trial in shown
            if not math.isnan(trial.low) and not math.isnan(trial.high)
        ],
        shaded_from=x_axis.place(start),
        ring=_place(chosen, x_axis, y_axis),
        labels=_place_labels(shown, chosen, x_axis, y_axis),
    )


def _tick(share: float) -> str:
    return f"{100 * share:.4g} %"


def _place(trial: Trial, x_axis: Axis, y_axis: Axis) -> tuple[float, float]:
    return x_axis.place(trial.average), y_axis.place(trial.criterion)


def _place_labels(
    trials: Sequence[Trial], chosen: Trial, x_axis: Axis, y_axis: Axis
) -> list[Label]:
    """Names of the chosen trial (over it), the baseline (under it) and the given one (beside it).

    They run towards the middle, so that none leaves the frame.
    """
    labels = []
    for trial in (trial for trial in trials if trial.role or trial is chosen):
        x, y = _place(trial, x_axis, y_axis)
        anchor, side = ("start", 1) if x < (LARGE.left + LARGE.right) / 2 else ("end", -1)
        text, x, y = trial.role, x + 11 * side, y + 4
        if trial is chosen:
            text = f"chosen: trial {trial.number}" + (f" ({trial.role})" if trial.role else "")
            y -= 14
        elif trial is trials[0]:
            y += 14
        labels.append(Label(x, y, text, anchor, trial is chosen))
    return labels
