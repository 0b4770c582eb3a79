"""`evenhand train`: by one process, or by the ranks that torchrun started, each in this command."""

import contextlib
import dataclasses
import math
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from evenhand.cli import options
from evenhand.cli.options import SettingsFlags, TableFlags, flag, read_flags
from evenhand.errors import UserError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from evenhand.config import Config
    from evenhand.data import Dataset
    from evenhand.defaults import Choice
    from evenhand.distributed.ranks import Ranks

LAUNCHED = "EVENHAND_LAUNCHED"  # set for the ranks that `launch` starts with its own words


@options.takes_flags
def train(
    run: Annotated[Path | None, flag("Run folder.", show_default="runs/DATA-METHOD-seedN")] = None,
    resume: Annotated[bool, flag("Continue the run in --run.", "--resume")] = False,
    keep_checkpoints: Annotated[
        bool, flag("Keep the checkpoints of a finished run.", "--keep-checkpoints")
    ] = False,
    minutes: Annotated[
        float | None,
        flag("Spend so long: on trials around the settings, then on the best of them."),
    ] = None,
    *,
    flags: SettingsFlags,
    table: TableFlags,
    seed: Annotated[int | None, flag("Seed of everything random.")] = None,
    ranks: Annotated[
        int | None, flag("Train with this many processes, by torchrun.", min=1)
    ] = None,
    max_restarts: Annotated[
        int, flag("How often ranks are started again after one fails.", min=0)
    ] = 10,
    rank_timeout: options.RankTimeout = 600.0,
    log_to: Annotated[
        str | None, flag("Send the figures to tensorboard (in the run folder) or mlflow, too.")
    ] = None,
    device: options.Device = None,
) -> int:
    """Train a model into a run folder.

    Trains a model, evaluates it on the test part and writes a run folder. A table (CSV, Parquet,
    ...) becomes a data set in datasets/ first, once. Settings come from the
    TOML file, then from the flags; every one that is not given is chosen to fit the data, and all
    of them are written to config.toml in the run folder, with the reasons.
    """
    if ranks is not None and LAUNCHED not in os.environ:
        launch(ranks, max_restarts=max_restarts)
    if resume and run is None:
        raise UserError("--resume needs the folder of the run: evenhand train --resume --run …")
    if minutes is not None and (resume or ranks is not None or not 0 < minutes < math.inf):
        raise UserError(
            f"--minutes must be above 0, and goes with neither --resume nor --ranks (what it chose "
            f"is in the run's config.toml), got {minutes:g}"
        )
    flags = dataclasses.replace(flags, seed=seed)
    from evenhand.build import choose_device
    from evenhand.cli.console import console
    from evenhand.distributed.ranks import joined_ranks, wait_for_all
    from evenhand.files import locked
    from evenhand.integrations.loggers import check_logger, log_metrics
    from evenhand.progress import stop_requested
    from evenhand.result_tables import unseen_notes
    from evenhand.runs import is_trained, train_run

    check_logger(log_to)
    with joined_ranks(choose_device(device), timeout=rank_timeout) as (own_ranks, own_device):
        is_first = own_ranks is None or own_ranks.rank == 0
        console.quiet |= not is_first  # only the first rank speaks
        if not is_first:
            wait_for_all(own_ranks)  # the first one makes the data set and the run folder
        folder, config, dataset = _open_run(
            run, flags, table, minutes, device=own_device, is_resumed=resume, is_first=is_first
        )
        if is_first:
            wait_for_all(own_ranks)
        for note in unseen_notes(dataset):
            console.print(note)
        lock = locked(folder) if is_first else contextlib.nullcontext()
        logged = log_metrics(folder, log_to if is_first else None)
        with lock, logged, stop_requested() as should_stop_fn:
            is_complete = train_run(
                folder,
                config,
                dataset,
                device=own_device,
                console=console,
                title=f"training {config.mining.method}",
                should_stop_fn=should_stop_fn,
                ranks=own_ranks,
                keeps_checkpoints=keep_checkpoints,
            )
        if not is_complete:
            again = f"continue with: evenhand train --resume --run {shlex.quote(str(folder))}"
            if not config.training.checkpoint_every and not is_trained(folder):
                again = "there is no checkpoint (training.checkpoint_every = 0)"
            console.print(f"stopped; {again}")
            return 130
        show_results(folder, dataset, device=own_device, console=console, ranks=own_ranks)
        console.print(f"run folder: {folder}")
        return 0


def _open_run(
    run: Path | None,
    flags: SettingsFlags,
    table: TableFlags,
    minutes: float | None,
    *,
    device: "torch.device",
    is_resumed: bool,
    is_first: bool,
) -> tuple[Path, "Config", "Dataset"]:
    """The run to train, new or to be continued; only the first rank makes anything."""
    from evenhand.cli.console import console
    from evenhand.config import build_config
    from evenhand.distributed.ranks import num_restarts
    from evenhand.run_folder import run_settings
    from evenhand.runs import (
        begin_run,
        check_unfinished,
        default_folder,
        open_fitted,
        open_run_data,
        resumable_config,
    )

    choices: list[Choice] = []
    if is_resumed and run is not None:
        resumable_config(run, None)  # there is something to resume
        # --data is where the data lie now; the setting stays.
        given = read_flags(dataclasses.replace(flags, data=None), table, base=run_settings(run))
        dataset = open_run_data(run, console, data=flags.data)
        config = build_config(given)
    else:
        given = read_flags(flags, table)
        dataset, config, choices = open_fitted(given, console, device=device)
    folder = run or default_folder(config, dataset)
    # Started again by torchrun, the same command finds the folder that it made itself.
    if is_resumed or not is_first or (num_restarts() > 0 and folder.is_dir()):
        config = resumable_config(folder, config, dataset)
        if is_resumed and num_restarts() == 0:
            check_unfinished(folder, config, dataset)
        return folder, config, dataset
    if minutes is not None:
        from evenhand.progress import stop_requested
        from evenhand.runs import check_new
        from evenhand.tuning.space import get_setting
        from evenhand.tuning.time_budget import choose_within

        check_new(folder)
        trials = folder.with_name(f"{folder.name}-trials")
        with stop_requested() as should_stop_fn:
            config = choose_within(
                minutes, trials, config, dataset,
                device=device, console=console, should_stop_fn=should_stop_fn,
            )  # fmt: skip
        choices = [choice for choice in choices if get_setting(config, choice.name) == choice.value]
    begin_run(folder, config, dataset, device=device, choices=choices)
    return folder, config, dataset


def show_results(
    folder: Path,
    dataset: "Dataset",
    *,
    device: "torch.device",
    console: "Console",
    ranks: "Ranks | None" = None,
    encoder: "torch.nn.Module | None" = None,
) -> None:
    """Evaluates a trained run on the part it is judged on, beside baselines without training."""
    from evenhand.report.headline import baseline_warning, describe_baselines
    from evenhand.report.run_set import make_run_set
    from evenhand.result_tables import results_table
    from evenhand.run_folder import run_config
    from evenhand.runs import evaluate_run, open_result

    part = "test" if "test" in dataset.parts else "validation"
    if part not in dataset.parts:
        return
    how: Any = {"device": device, "console": console, "ranks": ranks, "encoder": encoder}
    scores = evaluate_run(folder, dataset, part, **how)
    console.print(results_table([(run_config(folder).mining.method, scores)], part_name=part))
    if ranks is None or ranks.rank == 0:
        with console.status("baselines without training"):
            runs = make_run_set([open_result(folder, dataset, part)], dataset)
            lines = [*describe_baselines(runs), baseline_warning(runs)]
        for line in filter(None, lines):
            console.print(line, markup=False)


def launch(ranks: int, *, max_restarts: int) -> NoReturn:
    """Becomes torchrun, which starts this command once for each rank, and again if one fails."""
    from evenhand.distributed.ranks import num_launched

    if num_launched() > 1:
        raise UserError("--ranks is for a command that torchrun has not started already")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    environment = {
        "OMP_NUM_THREADS": str(max(1, (cores or 1) // ranks)),
        # With one store for the launcher and the ranks, ranks that start again meet leftovers.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        LAUNCHED: "1",
        **os.environ,
    }
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(ranks), "--max-restarts", str(max_restarts)]
    sys.stdout.flush()
    # The two dashes: torchrun would take `--run` for the beginning of a flag of its own.
    command = [sys.executable, *launcher, "-m", "--", "evenhand", *sys.argv[1:]]
    os.execve(sys.executable, command, environment)
