"""`evenhand evaluate`."""

from evenhand.cli import options
from evenhand.cli.options import choose_device
from evenhand.cli.ranks import join_ranks


def evaluate(
    run: options.RunFolder,
    part: options.Part = "test",
    data: options.MovedData = None,
    rank_timeout: options.RankTimeout = 600.0,
    device: options.Device = None,
) -> None:
    """Evaluate a run on a part of its data."""
    from evenhand.cli.console import console
    from evenhand.runs import evaluate_run, open_run_data
    from evenhand.tables import results_table

    dataset = open_run_data(run, console, data=data)
    with join_ranks(choose_device(device), timeout=rank_timeout) as (ranks, own_device):
        scores = evaluate_run(run, dataset, part, device=own_device, console=console, ranks=ranks)
    console.print(results_table([(run.resolve().name, scores)], part_name=part))
    console.print(f"written to {run / 'evaluation' / part}")
