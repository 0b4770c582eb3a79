"""`evenhand train`: by one process, or by the ranks that torchrun started, each in this command."""

import contextlib
import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from evenhand.cli import options
from evenhand.cli.options import SettingsFlags, choose_device, flag, read_config
from evenhand.cli.ranks import check_timeout, join_ranks, launch
from evenhand.errors import UserError

if TYPE_CHECKING:
    import torch

    from evenhand.config import Config
    from evenhand.data import Dataset


def train(
    config: options.ConfigFile = None,
    run: Annotated[Path | None, flag("Run folder.", show_default="runs/DATA-METHOD-seedN")] = None,
    resume: Annotated[bool, flag("Continue the run in --run.", "--resume")] = False,
    data: options.DataSet = None,
    method: options.MethodName = None,
    hard_labels: options.HardLabels = None,
    hard_examples: options.HardExamples = None,
    smallest_share: options.SmallestShare = None,
    smallest_group: options.SmallestGroup = None,
    steps: options.Steps = None,
    learning_rate: options.LearningRate = None,
    seed: Annotated[int | None, flag("Seed of everything random.")] = None,
    assignments: options.Assignments = None,
    ranks: Annotated[
        int | None, flag("Train with this many processes, by torchrun.", min=1)
    ] = None,
    max_restarts: Annotated[
        int, flag("How often ranks are started again after one fails.", min=0)
    ] = 10,
    rank_timeout: options.RankTimeout = 600.0,
    device: options.Device = None,
) -> int:
    """Train a model into a run folder.

    Trains a model, evaluates it on the test part and writes a run folder. Settings come from the
    TOML file, then from the flags; every one that is not given has a default, and all of them are
    written to config.toml in the run folder.
    """
    if ranks is not None:
        check_timeout(rank_timeout)
        launch(ranks, max_restarts=max_restarts)
    if resume and run is None:
        raise UserError("--resume needs the folder of the run: evenhand train --resume --run …")
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
        seed=seed,
        assignments=assignments,
    )
    return _train(run, flags, is_resumed=resume, device=choose_device(device), timeout=rank_timeout)


def _train(
    run: Path | None,
    flags: SettingsFlags,
    *,
    is_resumed: bool,
    device: "torch.device",
    timeout: float,
) -> int:
    from evenhand.cli.console import console
    from evenhand.distributed.ranks import wait_for_all
    from evenhand.faults import explain_out_of_memory
    from evenhand.locking import locked
    from evenhand.progress import stop_requested
    from evenhand.runs import evaluate_run, is_trained, train_run
    from evenhand.tables import results_table, unseen_notes

    with join_ranks(device, timeout=timeout) as (ranks, device):
        is_first = ranks is None or ranks.rank == 0
        if not is_first:
            wait_for_all(ranks)  # the first one makes the data set and the run folder
        folder, config, dataset = _open_run(
            run, flags, device=device, is_resumed=is_resumed, is_first=is_first
        )
        if is_first:
            wait_for_all(ranks)
        for note in unseen_notes(dataset):
            console.print(note)
        method = config.mining.method
        lock = locked(folder) if is_first else contextlib.nullcontext()
        with lock, explain_out_of_memory(config, dataset), stop_requested() as should_stop_fn:
            is_complete = train_run(
                folder,
                config,
                dataset,
                device=device,
                console=console,
                title=f"training {method}",
                should_stop_fn=should_stop_fn,
                ranks=ranks,
            )
        if not is_complete:
            again = f"continue with: evenhand train --resume --run {shlex.quote(str(folder))}"
            if not config.training.checkpoint_every and not is_trained(folder):
                again = "there is no checkpoint (training.checkpoint_every = 0)"
            console.print(f"stopped; {again}")
            return 130
        part = "test" if "test" in dataset.parts else "validation"
        if part in dataset.parts:
            scores = evaluate_run(
                folder, dataset, part, device=device, console=console, ranks=ranks
            )
            console.print(results_table([(method, scores)], part_name=part))
        console.print(f"run folder: {folder}")
        return 0


def _open_run(
    run: Path | None,
    flags: SettingsFlags,
    *,
    device: "torch.device",
    is_resumed: bool,
    is_first: bool,
) -> tuple[Path, "Config", "Dataset"]:
    """The run to train, new or to be continued; only the first rank makes anything."""
    from evenhand.cli.console import console
    from evenhand.distributed.processes import num_restarts
    from evenhand.runs import begin_run, open_data, open_run_data, resumable_config

    if is_resumed and run is not None:
        resumable_config(run, None)  # there is something to resume
        # --data is where the data lie now; the setting stays.
        config = read_config(dataclasses.replace(flags, data=None), default=run / "config.toml")
        dataset = open_run_data(run, console, data=flags.data)
    else:
        config = read_config(flags)
        dataset = open_data(config.data, console)
    name = f"{dataset.name}-{config.mining.method}-seed{config.training.seed}"
    folder = run or Path("runs") / name
    # Started again by torchrun, the same command finds the folder that it made itself.
    if is_resumed or not is_first or (num_restarts() > 0 and folder.is_dir()):
        config = resumable_config(folder, config, dataset)
    else:
        begin_run(folder, config, dataset, device=device)
    return folder, config, dataset
