"""`evenhand tune`: from its flags to what it prints."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from evenhand.cli import options
from evenhand.cli.options import SettingsFlags, choose_device, flag, read_config
from evenhand.errors import UserError

if TYPE_CHECKING:
    from evenhand.data import Dataset


def tune(
    config: options.ConfigFile = None,
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
    data: options.DataSet = None,
    method: options.MethodName = None,
    hard_labels: options.HardLabels = None,
    hard_examples: options.HardExamples = None,
    smallest_share: options.SmallestShare = None,
    smallest_group: options.SmallestGroup = None,
    steps: options.Steps = None,
    learning_rate: options.LearningRate = None,
    assignments: options.Assignments = None,
    device: options.Device = None,
) -> int:
    """Choose k' and other settings on the validation part.

    Tries settings, and chooses those that serve the worst groups of the validation part best while
    the average stays near its best. The first trials are SNM and the settings as given. The test
    part is never read.
    """
    flags = SettingsFlags(
        config=config,
        data=data,
        method=method,
        hard_labels=hard_labels,
        hard_examples=hard_examples,
        smallest_share=smallest_share,
        smallest_group=smallest_group,
        steps=steps,
        learning_rate=learning_rate,
        assignments=assignments,
    )
    wishes = {
        "num_trials": trials,
        "criterion": criterion,
        "average": average,
        "max_drop": max_drop,
        "words": search,
        "seed": seed,
    }
    given = {name: wish for name, wish in wishes.items() if wish is not None}
    folder, dataset = (_resume_search if resume else _begin_search)(run, flags, given)
    from evenhand.cli.console import console
    from evenhand.locking import locked
    from evenhand.progress import stop_requested
    from evenhand.tuning.search import run_search

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


def _begin_search(
    run: Path | None, flags: SettingsFlags, given: dict[str, Any]
) -> tuple[Path, "Dataset"]:
    """The folder of a new search, and its data."""
    from evenhand.cli.console import console
    from evenhand.runs import open_data
    from evenhand.tuning.search import begin_search, plan_search, without_test

    config = read_config(flags)
    if flags.smallest is not None:
        given = {**given, "advised": config.mining.num_hard_examples}
    dataset = without_test(open_data(config.data, console))
    folder = run or Path(f"runs/{dataset.name}-tune")
    begin_search(folder, plan_search(config, dataset, **given))
    return folder, dataset


def _resume_search(
    run: Path | None, flags: SettingsFlags, given: dict[str, Any]
) -> tuple[Path, "Dataset"]:
    """The folder of a search that was begun, and its data."""
    from evenhand.cli.console import console
    from evenhand.tuning.search import open_search_data

    if run is None:
        raise UserError("--resume needs the folder of the search: evenhand tune --resume --run …")
    names = {"words": "search", "assignments": "set"}  # where the flag has another
    for name, value in (vars(flags) | given).items():
        if value is not None and name not in ("data", "num_trials"):
            flag = names.get(name, name).replace("_", "-")
            raise UserError(
                f"a search goes on with its own settings, so --resume takes no {flag}; leave it "
                f"out, or begin another search in another --run folder"
            )
    place = None if flags.data is None else Path(flags.data)
    return run, open_search_data(run, console, place=place)
