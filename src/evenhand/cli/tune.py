"""`evenhand tune`."""

from pathlib import Path
from typing import Annotated

from evenhand.cli import options
from evenhand.cli.options import SettingsFlags, TableFlags, flag, read_flags
from evenhand.errors import StoppedError


@options.takes_flags
def tune(
    run: Annotated[Path | None, flag("Folder to write.", show_default="runs/DATA-tune")] = None,
    trials: Annotated[int, flag("Number of settings to try.")] = 16,
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
    max_drop: Annotated[float, flag("How far below its best the average may be.")] = 0.005,
    search: Annotated[
        list[str] | None,
        flag(
            "A setting to vary, as 64,128,256; repeatable; others stay.",
            metavar="SECTION.KEY=VALUES",
            show_default="k', k, learning rate, steps, anneal_fraction",
        ),
    ] = None,
    seed: Annotated[int, flag("Seed of the search.")] = 0,
    *,
    flags: SettingsFlags,
    table: TableFlags,
    device: options.Device = None,
) -> None:
    """Choose k' and other settings on the validation part.

    Tries settings, and chooses those that serve the worst groups of the validation part best while
    the average stays near its best. The first trials are SNM and the settings as given. The test
    part is never read. Stopped or killed, the same command goes on; more --trials begin with the
    same ones.
    """
    from evenhand.build import choose_device
    from evenhand.cli.console import console
    from evenhand.files import locked
    from evenhand.progress import stop_requested
    from evenhand.runs import open_fitted
    from evenhand.tuning.search import plan_search, run_search, without_test

    own_device = choose_device(device)
    dataset, config, _ = open_fitted(read_flags(flags, table), console, device=own_device)
    dataset = without_test(dataset)
    planned = plan_search(
        config,
        dataset,
        num_trials=trials,
        criterion=criterion,
        average=average,
        max_drop=max_drop,
        words=search or (),
        seed=seed,
    )
    folder = run or Path(f"runs/{dataset.name}-tune")
    with locked(folder), stop_requested() as should_stop_fn:
        try:
            run_search(
                folder,
                planned,
                dataset,
                device=own_device,
                console=console,
                should_stop_fn=should_stop_fn,
            )
        except StoppedError:
            raise StoppedError("stopped; the same command continues") from None
