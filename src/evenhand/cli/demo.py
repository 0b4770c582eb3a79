"""`evenhand demo`: SNM and S2M on `places`, side by side, in a few minutes on two cores."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from evenhand.cli import options
from evenhand.cli.options import choose_device, flag
from evenhand.errors import StoppedError

if TYPE_CHECKING:
    from evenhand.evaluation import Score

PRESETS = {"snm": "demo-snm", "s2m": "demo-s2m"}  # by the name of the run
GROUPS = ("all", "head", "torso", "tail", "worst tenth of countries", "worst 3 scripts")


def demo(
    run: Annotated[Path, flag("Folder to write to.")] = Path("runs/demo"),
    device: options.Device = None,
) -> None:
    """SNM and S2M on places, side by side, in minutes.

    Trains what is not trained yet, evaluates both on the test part, prints the table and writes the
    report.
    """
    from evenhand.cli.console import console
    from evenhand.config import build_config, read_preset
    from evenhand.faults import explain_out_of_memory
    from evenhand.files import write_json
    from evenhand.locking import locked
    from evenhand.progress import stop_requested
    from evenhand.report import write_report
    from evenhand.run_folder import load_result
    from evenhand.runs import begin_run, evaluate_run, open_data, resumable_config, train_run
    from evenhand.tables import results_table

    own_device = choose_device(device)
    with locked(run), stop_requested() as should_stop_fn:
        configs = {name: build_config(read_preset(preset)) for name, preset in PRESETS.items()}
        dataset = open_data(configs["snm"].data, console)
        console.print(
            f"places: {len(dataset.parts['train']):,} names to learn from, "
            f"{dataset.num_labels:,} cities to find, {len(dataset.parts['test']):,} names to test "
            f"with"
        )
        results: dict[str, list[Score]] = {}
        for name, config in configs.items():
            folder = run / name
            if (folder / "config.toml").is_file():
                resumable_config(folder, config, dataset)
            else:
                begin_run(folder, config, dataset, device=own_device)
            with explain_out_of_memory(config, dataset):
                is_complete = train_run(
                    folder,
                    config,
                    dataset,
                    device=own_device,
                    console=console,
                    title=f"training {name}",
                    should_stop_fn=should_stop_fn,
                )
            if not is_complete:
                raise StoppedError("stopped; the same command continues")
            results[name] = evaluate_run(
                folder,
                dataset,
                "test",
                device=own_device,
                console=console,
                title=f"evaluating {name}",
            )
        console.print(results_table(list(results.items())))
        rows = [
            row
            for name, scores in results.items()
            for row in _summarize(name, configs[name].training.seed, scores)
        ]
        write_json(run / "summary.json", rows)
        runs = [load_result(run / name) for name in PRESETS]
        write_report(runs, dataset, run / "report.html", title="SNM and S²M on places")
    console.print(dataset.attribution)
    console.print(f"figures: {run / 'summary.json'}")
    console.print(f"report:  {run / 'report.html'}")


def _summarize(method: str, seed: int, scores: list["Score"]) -> list[dict[str, Any]]:
    """The rows of summary.json about one run."""
    from evenhand.tables import main_rows, row_title

    rows = [(row_title(score), score) for score in main_rows(scores)]
    return [
        {
            "method": method,
            "seed": seed,
            "group": title,
            "metric": score.metric,
            "value": score.value,
            "count": score.count,
        }
        for title, score in rows
        if title in GROUPS and score.metric in ("recall@1", "recall@10", "recall@50")
    ]
