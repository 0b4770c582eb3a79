"""What a person is told before a search and after it."""

from collections.abc import Sequence
from pathlib import Path

from evenhand.tuning.choice import Trial, chosen_trial, feasible_trials, rivals
from evenhand.tuning.search import PART, Search
from evenhand.tuning.trials import next_command


def search_notes(search: Search, *, num_asked: int | None = None) -> list[str]:
    """What is searched, and by which rule a trial will be chosen."""
    num_trials = len(search.planned)
    notes = [
        f"{num_trials} trials, judged on the {PART} part: the highest {search.criterion} of those "
        f"whose {search.average} is at most {search.max_drop:g} below the best",
        "searched: " + " ".join(f"{name}={axis}" for name, axis in search.space.items()),
    ]
    if num_asked is not None and num_trials < num_asked:
        notes.append(f"note: there are only {num_trials} different trials in what is searched")
    return notes


def choice_notes(folder: Path, search: Search, trials: Sequence[Trial]) -> list[str]:
    """What was chosen and why, how far to trust it, and what to do next."""
    chosen = chosen_trial(trials, max_drop=search.max_drop)
    assert chosen is not None
    feasible = feasible_trials(trials, max_drop=search.max_drop)
    close = [str(trial.number) for trial in rivals(trials, max_drop=search.max_drop)]
    notes = [
        f"chosen: trial {chosen.number}, the highest {search.criterion} of the trials near the "
        f"best average ({len(feasible)} of {len(trials)}: {search.average} at most "
        f"{search.max_drop:g} below {max(trial.average for trial in feasible):.4f})"
    ]
    if chosen.criterion == 0:
        notes.append(
            "note: it finds nothing by that criterion, so the average alone decided; give the "
            "trials more --steps, or name another --criterion"
        )
    elif close:
        notes.append(
            f"within its interval, so hardly to be told from it: trial{'s' * (len(close) > 1)} "
            f"{', '.join(close)}"
        )
    return [
        *notes,
        f"its figures flatter it, because it was chosen by them; honest ones, on the test part: "
        f"{next_command(folder)}",
        f"settings: {folder / 'best.toml'}",
        f"figures:  {folder / 'tuning.json'}",
        f"picture:  {folder / 'tradeoff.html'}",
    ]
