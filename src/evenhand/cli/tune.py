"""`evenhand tune`."""

import shlex
from pathlib import Path
from typing import Annotated, Any

from evenhand.cli import options
from evenhand.cli.options import SettingsFlags, TableFlags, flag, read_flags
from evenhand.errors import UserError


@options.takes_flags
def tune(
    run: Annotated[Path | None, flag("Folder to write.", show_default="runs/DATA-tune")] = None,
    resume: Annotated[bool, flag("Continue the search in --run.", "--resume")] = False,
    trials: Annotated[int | None, flag("Number of settings to try.", show_default="16")] = None,
    criterion: Annotated[
        str | None,
        flag(
            'Score to maximize, such as "recall@10 on worst 3 of script".',
            show_default="worst tenth of the column with the most groups, or else the tail",
        ),
    ] = None,
    average: Annotated[
        str | None, flag("Score that must stay near its best.", show_default="recall@10")
    ] = None,
    max_drop: Annotated[
        float | None, flag("How far below its best the average may be.", show_default="0.005")
    ] = None,
    search: Annotated[
        list[str] | None,
        flag(
            "A setting to vary, as 64,128,256 or 0.01..0.04; repeatable; others stay.",
            metavar="SECTION.KEY=VALUES",
            show_default="k', k, learning rate, steps, anneal_fraction",
        ),
    ] = None,
    seed: Annotated[int | None, flag("Seed of the search.", show_default="0")] = None,
    *,
    flags: SettingsFlags,
    table: TableFlags,
    device: options.Device = None,
) -> int:
    """Choose k' and other settings on the validation part.

    Tries settings, and chooses those that serve the worst groups of the validation part best while
    the average stays near its best. The first trials are SNM and the settings as given. The test
    part is never read.
    """
    from evenhand.build import choose_device
    from evenhand.cli.console import console
    from evenhand.files import locked
    from evenhand.progress import stop_requested
    from evenhand.runs import open_fitted
    from evenhand.tuning.search import (
        begin_search,
        open_search_data,
        plan_search,
        run_search,
        without_test,
    )
    from evenhand.tuning.space import build_guarding_config

    wishes: dict[str, Any] = {
        "criterion": criterion,
        "average": average,
        "max_drop": max_drop,
        "words": search,
        "seed": seed,
    }
    given = {name: wish for name, wish in wishes.items() if wish is not None}
    if not resume:
        settings = read_flags(flags, table)
        dataset, config, _ = open_fitted(settings, console, device=choose_device(device))
        dataset, advised = without_test(dataset), None
        if flags.smallest is not None:
            config = build_guarding_config(config, dataset, flags.smallest, console)
            advised = config.mining.num_hard_examples
        folder = run or Path(f"runs/{dataset.name}-tune")
        trials = 16 if trials is None else trials
        planned = plan_search(config, dataset, advised=advised, num_trials=trials, **given)
        begin_search(folder, planned)
    elif run is None:
        raise UserError("--resume needs the folder of the search: evenhand tune --resume --run …")
    else:
        others = {name for name, value in vars(flags).items() if value is not None} - {"data"}
        for name in sorted(others | set(given)):
            flag_name = {"words": "search", "assignments": "set"}.get(name, name)
            raise UserError(
                f"a search is resumed with its own settings, so --resume takes no "
                f"{flag_name.replace('_', '-')}; leave it out, or begin another search in another "
                f"--run folder"
            )
        folder, place = run, None if flags.data is None else Path(flags.data)
        dataset = open_search_data(run, console, place=place)
    with locked(folder), stop_requested() as should_stop_fn:
        is_complete = run_search(
            folder,
            dataset,
            num_trials=trials,
            device=choose_device(device),
            console=console,
            should_stop_fn=should_stop_fn,
        )
    if not is_complete:
        again = shlex.quote(str(folder))
        console.print(f"stopped; continue with: evenhand tune --resume --run {again}")
    return 0 if is_complete else 130
