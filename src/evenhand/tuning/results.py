"""Finished trials: the rule that chooses one, and how they are shown in the terminal and on a page.

The rule: the best for the worst served, of those good enough for all.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from evenhand.files import write_text
from evenhand.report.charts import LARGE, Line, Mark, Plot, linear_axis
from evenhand.report.rendering import percent, render
from evenhand.result_tables import selector_title
from evenhand.tuning.space import NAN, Trial, format_settings

ROUNDING = 1e-9  # 0.415 - 0.410 is a little more than 0.005 in floating point


class Rule(NamedTuple):
    """Names of scores, as `selected_score` knows them, and how far the average may fall."""

    criterion: str  # made as high as it can be
    average: str  # must not fall far below its best
    max_drop: float


@dataclasses.dataclass(frozen=True)
class Results:
    """The first trials of a search, by number, and what the rule makes of them."""

    trials: Sequence[Trial]
    rule: Rule

    @cached_property
    def ranked(self) -> list[Trial]:
        """The best criterion first, then the average, then the first; unscored ones last."""
        return sorted(self.trials, key=lambda t: (not t.is_scored, -t.criterion, -t.average))

    @cached_property
    def feasible(self) -> list[Trial]:
        """Those whose average is near enough to the best of all, the best criterion first."""
        scored = [trial for trial in self.ranked if trial.is_scored]
        best = max((trial.average for trial in scored), default=NAN)
        return [t for t in scored if best - t.average <= self.rule.max_drop + ROUNDING]

    @property
    def chosen(self) -> Trial | None:
        """The feasible trial with the best criterion, if any trial came to an end."""
        return self.feasible[0] if self.feasible else None

    @property
    def rivals(self) -> str:
        """'trials 3, 5': the feasible ones within the interval of the chosen one's criterion."""
        chosen, *others = self.feasible
        numbers = sorted(t.number for t in others if t.criterion >= chosen.low)  # NaN: none
        return f"trial{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}" if numbers else ""

    @cached_property
    def front(self) -> list[Trial]:
        """Those that no other equals in one figure and beats in the other, worst average first.

        Of trials that are alike in both figures the first one stands for all.
        """
        front: list[Trial] = []
        scored = [trial for trial in self.trials if trial.is_scored]
        for trial in sorted(scored, key=lambda t: (-t.average, -t.criterion)):
            if not front or trial.criterion > front[-1].criterion:
                front.append(trial)
        return front[::-1]

    @cached_property
    def settings(self) -> list[dict[str, str]]:
        """Of each trial, for people."""
        return format_settings([trial.settings for trial in self.trials])

    def describe(self, trial: Trial) -> str:
        """'chosen, SNM': what sets a trial apart."""
        words = ["chosen" if trial is self.chosen else "", trial.role, trial.failure]
        return ", ".join(filter(None, words))


def trials_table(results: Results) -> Table:
    """The trials of a search, the best criterion first; the chosen one is bold."""
    rule, settings = results.rule, results.settings
    table = Table(title=Text(f"trials by {rule.criterion}"), title_justify="left")
    for heading in ["trial", *settings[0], rule.average, "criterion", "95 %", "tail", "seconds"]:
        table.add_column(Text(heading), justify="right", no_wrap=True)
    for heading in ("near best", ""):
        table.add_column(heading)
    for trial in results.ranked:
        has_interval = trial.is_scored and not math.isnan(trial.low)
        figures = [trial.average, trial.criterion, trial.figures.get("tail", NAN)]
        shown = ["–" if math.isnan(figure) else f"{figure:.4f}" for figure in figures]
        shown.insert(2, f"{trial.low:.3f}–{trial.high:.3f}" if has_interval else "–")
        cells = [str(trial.number), *settings[trial.number - 1].values(), *shown]
        is_near = trial in results.feasible
        cells += [f"{trial.seconds:.0f}", "yes" if is_near else "", results.describe(trial)]
        style = "bold" if trial is results.chosen else "" if is_near else "dim"
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table


def describe_choice(results: Results) -> list[str]:
    """What was chosen and why, and how far to trust it; some trial must have its figures."""
    feasible, rule = results.feasible, results.rule
    sentences = [
        f"chosen: trial {feasible[0].number}, the highest {rule.criterion} of the trials near the "
        f"best average ({len(feasible)} of {len(results.trials)}: {rule.average} at most "
        f"{rule.max_drop:g} below {max(trial.average for trial in feasible):.4f})"
    ]
    if feasible[0].criterion == 0:
        sentences.append(
            "note: it finds nothing by that criterion, so the average alone decided; give the "
            "trials more --steps, or name another --criterion"
        )
    elif results.rivals:
        sentences.append(f"too close to call, by its 95 % interval: {results.rivals}")
    return sentences


def write_search_page(results: Results, path: Path, *, title: str, command: str) -> None:
    """Writes one HTML file about the trials of a search, one of which was chosen.

    Args:
        command: what to run to learn how good the chosen settings really are.
    """
    trials, rule, chosen = results.trials, results.rule, results.feasible[0]
    named = {"chosen": chosen} | {trial.role: trial for trial in trials[:2] if trial.is_scored}
    named.pop("", None)
    # Trials so far below that they would press the others together are left out of the picture,
    # but never one that the legend names.
    scored = [trial for trial in trials if trial.is_scored]
    best = max(trial.average for trial in scored)
    reach = max(6 * rule.max_drop, 1.5 * statistics.median(best - t.average for t in scored))
    near = [t for t in scored if best - t.average <= reach or t in named.values()]
    page = render(
        "tuning.html",
        title=title,
        results=results,
        rule=rule,
        average=selector_title(rule.average),
        criterion=selector_title(rule.criterion),
        chosen=chosen,
        baseline=trials[0],
        next_command=command,
        legend=[*(f"{words}: trial {t.number}" for words, t in named.items()), "other trials"],
        plot=_plot(results, near, list(named.values())),
        num_far=len(scored) - len(near),
        figure_names=list(dict.fromkeys(n for t in trials for n in t.figures if n != "all")),
    )
    write_text(path, page)


def _plot(results: Results, shown: Sequence[Trial], named: Sequence[Trial]) -> Plot:
    """The average to the right and the criterion upwards, a mark for each trial that is shown."""

    def tick(share: float) -> str:
        return f"{100 * share:.4g} %"

    def place(trial: Trial) -> tuple[float, float]:
        return x_axis.place(trial.average), y_axis.place(trial.criterion)

    criterion, average = map(selector_title, results.rule[:2])
    start = max(trial.average for trial in shown) - results.rule.max_drop
    averages = [*(trial.average for trial in shown), start]
    heights = [y for t in shown for y in (t.low, t.high, t.criterion) if not math.isnan(y)]
    x_axis = linear_axis(min(averages), max(averages), LARGE.left, LARGE.right, tick)
    y_axis = linear_axis(min(heights), max(heights), LARGE.bottom, LARGE.top, tick)
    marks = []
    for trial in sorted(shown, key=lambda t: -named.index(t) if t in named else -len(named)):
        settings = results.settings[trial.number - 1].items()
        title = (
            f"trial {trial.number}: {', '.join(f'{name} {value}' for name, value in settings)}; "
            f"{average} {percent(trial.average)} %, {criterion} {percent(trial.criterion)} %"
        )
        kind = named.index(trial) if trial in named else len(named)
        marks.append(Mark(kind, *place(trial), title, 1.5 if trial in named else 1.0))
    (left, top), *others = [place(trial) for trial in results.front if trial in shown]
    steps = "".join(f"V{y:.1f}H{x:.1f}" for x, y in others)
    return Plot(
        "",
        f"{len(shown)} trials: {average} to the right, {criterion} upwards. The figures are in the "
        f"table below.",
        LARGE,
        x_axis,
        y_axis,
        average,
        [Line(f"M{left:.1f} {top:.1f}{steps}", "front", "5 4")],
        marks,
        y_title=criterion,
        intervals=[
            (x_axis.place(t.average), y_axis.place(t.low), y_axis.place(t.high))
            for t in shown
            if not math.isnan(t.low) and not math.isnan(t.high)
        ],
        shaded_from=x_axis.place(start),
    )
