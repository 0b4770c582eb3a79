"""Finished trials: the rule that chooses one, and how they are shown in the terminal and on a page.

The rule: the best for the worst served, of those good enough for all.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from evenhand.files import write_text
from evenhand.report.charts import LARGE, MARKS, Label, Line, Mark, Plot, linear_axis
from evenhand.report.rendering import percent, points, render
from evenhand.tuning.space import NAN, Trial, format_settings

ROUNDING = 1e-9  # 0.415 - 0.410 is a little more than 0.005 in floating point


class Rule(NamedTuple):
    """Names of scores, as `selected_score` knows them, and how far the average may fall."""

    criterion: str  # made as high as it can be
    average: str  # must not fall far below its best
    max_drop: float


# --- the rule -------------------------------------------------------------------------------------


def sort_by_criterion(trials: Sequence[Trial]) -> list[Trial]:
    """The trials, the best criterion first, then the average, then the first; unscored last."""
    scored = [trial for trial in trials if trial.is_scored]
    scored.sort(key=lambda t: (-t.criterion, -t.average))
    return [*scored, *(trial for trial in trials if not trial.is_scored)]


def feasible_trials(trials: Sequence[Trial], *, max_drop: float) -> list[Trial]:
    """Trials whose average is at most `max_drop` below the best of all, the best criterion first.

    The first of them is the one that is chosen.

    Example:
        >>> def trial(number, average, criterion):
        ...     values = {"average": average, "criterion": criterion}
        ...     return Trial(number=number, role="", settings={}, **values)
        >>> trials = [trial(1, 0.50, 0.20), trial(2, 0.49, 0.30), trial(3, 0.40, 0.40)]
        >>> [trial.number for trial in feasible_trials(trials, max_drop=0.02)]
        [2, 1]
    """
    scored = [trial for trial in sort_by_criterion(trials) if trial.is_scored]
    best = max((trial.average for trial in scored), default=NAN)
    return [trial for trial in scored if best - trial.average <= max_drop + ROUNDING]


def choose_trial(trials: Sequence[Trial], *, max_drop: float) -> Trial | None:
    """The feasible trial with the best criterion, if any trial came to an end."""
    return next(iter(feasible_trials(trials, max_drop=max_drop)), None)


def name_rivals(feasible: Sequence[Trial]) -> str:
    """'trials 3, 5': those whose criterion lies within the interval of the chosen, first one's."""
    chosen, *others = feasible
    numbers = sorted(t.number for t in others if t.criterion >= chosen.low)  # NaN: none
    return f"trial{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}" if numbers else ""


def pareto_front(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that no other equals in one figure and beats in the other, worst average first.

    Of trials that are alike in both figures the first one stands for all.
    """
    front: list[Trial] = []
    scored = [trial for trial in trials if trial.is_scored]
    for trial in sorted(scored, key=lambda t: (-t.average, -t.criterion)):
        if not front or trial.criterion > front[-1].criterion:
            front.append(trial)
    return front[::-1]


# --- in the terminal ------------------------------------------------------------------------------


def trials_table(trials: Sequence[Trial], rule: Rule) -> Table:
    """The trials of a search, the best criterion first; the chosen one is bold."""
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
        cells.append(describe_trial(trial, feasible))
        style = "bold" if trial in feasible[:1] else "" if trial in feasible else "dim"
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table


def describe_trial(trial: Trial, feasible: Sequence[Trial]) -> str:
    """'chosen, SNM': what sets a trial apart."""
    words = ["chosen" if trial in feasible[:1] else "", trial.role, trial.failure]
    return ", ".join(filter(None, words))


def describe_choice(trials: Sequence[Trial], rule: Rule) -> list[str]:
    """What was chosen and why, and how far to trust it; some trial must have its figures."""
    feasible = feasible_trials(trials, max_drop=rule.max_drop)
    sentences = [
        f"chosen: trial {feasible[0].number}, the highest {rule.criterion} of the trials near the "
        f"best average ({len(feasible)} of {len(trials)}: {rule.average} at most "
        f"{rule.max_drop:g} below {max(trial.average for trial in feasible):.4f})"
    ]
    if feasible[0].criterion == 0:
        sentences.append(
            "note: it finds nothing by that criterion, so the average alone decided; give the "
            "trials more --steps, or name another --criterion"
        )
    elif rivals := name_rivals(feasible):
        sentences.append(f"within its interval, so hardly to be told from it: {rivals}")
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
    feasible = feasible_trials(trials, max_drop=rule.max_drop)
    if not feasible:
        raise ValueError("trials must hold at least one that came to an end")
    chosen, baseline = feasible[0], trials[0]
    same = baseline.role == "SNM" and chosen.num_hard_examples == baseline.num_hard_examples
    verdict = (
        f"Trial {chosen.number} is chosen, with k' = {chosen.num_hard_examples:,}"
        f"{' (as in SNM)' if same else ''}: {rule.criterion} is {percent(chosen.criterion)} %, "
        f"{rule.average} is {percent(chosen.average)} %."
    )
    if chosen is baseline:
        verdict += f" It is the {baseline.role} baseline: no other setting did better."
    elif baseline.is_scored:
        verdict += (
            f" Beside {baseline.role} that is {points(chosen.criterion - baseline.criterion)} "
            f"for the worst served and {points(chosen.average - baseline.average)} for all."
        )
    settings = format_settings([trial.settings for trial in trials])
    names = list(dict.fromkeys(name for t in trials for name in t.figures if name != "all"))
    scored = [trial for trial in trials if trial.is_scored]
    near = nearby_trials(trials, chosen, rule.max_drop)
    page = render(
        "search.html",
        title=title,
        verdict=verdict,
        rule=rule,
        trials=sort_by_criterion(trials),
        feasible=feasible,
        front=pareto_front(trials),
        chosen=chosen,
        baseline=baseline,
        rivals=name_rivals(feasible),
        next_command=next_command,
        levels=size_levels(trials),
        plots=[_plot(trials, shown, chosen, rule, verdict) for shown in (near, scored)],
        num_far=len(scored) - len(near),
        settings=settings,
        figure_names=names,
        describe_trial=describe_trial,
    )
    write_text(path, page)


def size_levels(trials: Sequence[Trial]) -> list[tuple[int, int]]:
    """Least and largest k' of each shape: one value a shape while there are shapes enough."""
    sizes = sorted({trial.num_hard_examples for trial in trials})
    width = math.ceil(len(sizes) / len(MARKS))
    pieces = [sizes[start : start + width] for start in range(0, len(sizes), width)]
    return [(piece[0], piece[-1]) for piece in pieces]


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
    """The average to the right and the criterion upwards, a mark for each trial that is shown.

    The chosen trial is named above its mark, the baseline below, the given one beside; names run
    towards the middle, so that none leaves the frame.
    """

    def tick(share: float) -> str:
        return f"{100 * share:.4g} %"

    start = max(trial.average for trial in shown) - rule.max_drop
    averages = [*(trial.average for trial in shown), start]
    heights = [y for t in shown for y in (t.low, t.high, t.criterion) if not math.isnan(y)]
    x_axis = linear_axis(min(averages), max(averages), LARGE.left, LARGE.right, tick)
    y_axis = linear_axis(min(heights), max(heights), LARGE.bottom, LARGE.top, tick)
    levels, settings = size_levels(trials), format_settings([trial.settings for trial in trials])
    marks, intervals, labels = [], [], []
    for trial in shown:
        level = next(n for n, (_, high) in enumerate(levels) if trial.num_hard_examples <= high)
        words = ", ".join(f"{name} {value}" for name, value in settings[trial.number - 1].items())
        title = (
            f"trial {trial.number}: {words}; {percent(trial.average)} % for all, "
            f"{percent(trial.criterion)} % by the criterion"
        )
        x, y = x_axis.place(trial.average), y_axis.place(trial.criterion)
        marks.append(Mark(level, x, y, title))
        if not math.isnan(trial.low) and not math.isnan(trial.high):
            intervals.append((x, y_axis.place(trial.low), y_axis.place(trial.high)))
        anchor, side = ("start", 1) if x < (LARGE.left + LARGE.right) / 2 else ("end", -1)
        if trial is chosen:
            role = f" ({trial.role})" if trial.role else ""
            text = f"chosen: trial {trial.number}{role}"
            labels.append(Label(x + 11 * side, y - 10, text, anchor, is_strong=True))
        elif trial.role:
            below = 18 if trial is shown[0] else 4
            labels.append(Label(x + 11 * side, y + below, trial.role, anchor, is_strong=False))
    front = [
        (x_axis.place(trial.average), y_axis.place(trial.criterion))
        for trial in pareto_front(shown)
    ]
    steps = "".join(f"V{y:.1f}H{x:.1f}" for x, y in front[1:])
    description = (
        f"{len(shown)} trials: {rule.average} to the right, {rule.criterion} upwards. {verdict} "
        f"The figures are in the table below."
    )
    return Plot(
        "",
        description,
        LARGE,
        x_axis,
        y_axis,
        f"{rule.average}, all",
        [Line(f"M{front[0][0]:.1f} {front[0][1]:.1f}{steps}", "front", "5 4")],
        marks,
        y_title=rule.criterion,
        intervals=intervals,
        shaded_from=x_axis.place(start),
        ring=(x_axis.place(chosen.average), y_axis.place(chosen.criterion)),
        labels=labels,
    )
