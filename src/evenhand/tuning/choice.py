"""The rule that chooses a trial: the best for the worst served, of those good enough for all."""

import dataclasses
import math
from collections.abc import Sequence

from evenhand.tuning.space import NUM_HARD_EXAMPLES, Settings

NAN = float("nan")
ROUNDING = 1e-9  # 0.415 - 0.410 is a little more than 0.005 in floating point


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


def feasible_trials(trials: Sequence[Trial], *, max_drop: float) -> list[Trial]:
    """The trials whose average is at most `max_drop` below the best average of all."""
    scored = [trial for trial in trials if trial.is_scored]
    best = max((trial.average for trial in scored), default=NAN)
    return [trial for trial in scored if best - trial.average <= max_drop + ROUNDING]


def chosen_trial(trials: Sequence[Trial], *, max_drop: float) -> Trial | None:
    """The feasible trial with the best criterion; of equals the better average, then the first.

    Example:
        >>> def trial(number, average, criterion):
        ...     settings = {"mining.num_hard_examples": 8}
        ...     return Trial(
        ...         number=number, role="", settings=settings, average=average, criterion=criterion
        ...     )
        >>> trials = [trial(0, 0.50, 0.20), trial(1, 0.49, 0.30), trial(2, 0.40, 0.40)]
        >>> chosen_trial(trials, max_drop=0.02).number
        1
    """
    feasible = feasible_trials(trials, max_drop=max_drop)
    return max(feasible, key=lambda t: (t.criterion, t.average, -t.number), default=None)


def by_criterion(trials: Sequence[Trial]) -> list[Trial]:
    """The trials, the best criterion first; those without figures last."""
    scored = [trial for trial in trials if trial.is_scored]
    scored.sort(key=lambda t: (-t.criterion, -t.average, t.number))
    return [*scored, *(trial for trial in trials if not trial.is_scored)]


def rivals(trials: Sequence[Trial], *, max_drop: float) -> list[Trial]:
    """Feasible trials whose criterion lies within the interval of the chosen one's."""
    chosen = chosen_trial(trials, max_drop=max_drop)
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
