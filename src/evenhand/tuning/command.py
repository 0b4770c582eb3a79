"""The command `evenhand tune`: from its flags to what it prints."""

import argparse
import shlex
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from evenhand.config import Config
from evenhand.data import Dataset
from evenhand.errors import UserError
from evenhand.locking import locked
from evenhand.progress import stop_requested
from evenhand.runs import open_data
from evenhand.tables import trials_table
from evenhand.tuning.notes import choice_notes, search_notes
from evenhand.tuning.search import (
    Search,
    begin_search,
    check_begun_on,
    extend_search,
    open_search,
    plan_search,
    without_test,
)
from evenhand.tuning.trials import conclude, run_trials


def tune(
    options: argparse.Namespace, config: Config | None, *, device: torch.device, console: Console
) -> int:
    """Runs a search and says what it chose; without a config, the one in --run goes on."""
    if config is None:
        folder, search, dataset = _resumed(options, console)
    else:
        dataset = without_test(open_data(config.data, console))
        folder = Path(options.run or f"runs/{dataset.name}-tune")
        search = plan_search(config, dataset, **_search_settings(options, config))
        begin_search(folder, search)
    with locked(folder), stop_requested() as should_stop_fn:
        if options.resume and options.trials is not None:
            search = extend_search(folder, options.trials)
        for note in search_notes(search, num_asked=options.trials):
            console.print(note)
        trials = run_trials(
            folder, dataset, device=device, console=console, should_stop_fn=should_stop_fn
        )
    if trials is None:
        again = shlex.quote(str(folder))
        console.print(f"stopped; continue with: evenhand tune --resume --run {again}")
        return 130
    conclude(folder, trials)
    console.print(
        trials_table(
            trials, criterion=search.criterion, average=search.average, max_drop=search.max_drop
        )
    )
    for note in choice_notes(folder, search, trials):
        console.print(note)
    return 0


def _search_settings(options: argparse.Namespace, config: Config) -> dict[str, Any]:
    is_guarding = options.smallest_share is not None or options.smallest_group is not None
    given = {
        "num_trials": options.trials,
        "criterion": options.criterion,
        "average": options.average,
        "max_drop": options.max_drop,
        "words": options.search,
        "advised": config.mining.num_hard_examples if is_guarding else None,
        "seed": options.search_seed,
    }
    return {name: value for name, value in given.items() if value is not None}


def _resumed(options: argparse.Namespace, console: Console) -> tuple[Path, Search, Dataset]:
    if options.run is None:
        raise UserError("--resume needs the folder of the search: evenhand tune --resume --run …")
    free = ("run", "resume", "trials", "data", "device", "command")
    given = [name for name, value in vars(options).items() if name not in free and value]
    if given:
        flag = given[0].removeprefix("search_").replace("_", "-")
        raise UserError(
            f"a search goes on with its own settings, so --resume takes no {flag}; leave it out, "
            f"or begin another search in another --run folder"
        )
    folder = Path(options.run)
    search, _ = open_search(folder)
    place = None if options.data is None else Path(options.data)
    dataset = without_test(open_data(search.config.data, console, folder=place))
    check_begun_on(folder, search, dataset)
    return folder, search, dataset
