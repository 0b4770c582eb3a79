"""The demonstration: SNM and S2M on `places`, side by side, in a few minutes on two cores."""

import tomllib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from evenhand.config import Config, build_config
from evenhand.errors import StoppedError
from evenhand.evaluation import Score
from evenhand.faults import explain_out_of_memory
from evenhand.files import write_json
from evenhand.locking import locked
from evenhand.progress import stop_requested
from evenhand.report import write_report
from evenhand.run_folder import load_result
from evenhand.runs import begin_run, evaluate_run, open_data, resumable_config, train_run
from evenhand.tables import main_rows, results_table, row_title

METHODS = {"snm": "demo-snm.toml", "s2m": "demo-s2m.toml"}
GROUPS = ("all", "head", "torso", "tail", "worst tenth of countries", "worst 3 scripts")


def preset(name: str) -> Config:
    """A config that comes with the package."""
    text = resources.files("evenhand").joinpath("presets", name).read_text(encoding="utf-8")
    return build_config(tomllib.loads(text))


def run_demo(folder: Path, *, device: torch.device, console: Console) -> None:
    """Trains what is not trained yet, evaluates, prints the table, writes the report."""
    with locked(folder), stop_requested() as should_stop_fn:
        _run_demo(folder, device=device, console=console, should_stop_fn=should_stop_fn)


def _run_demo(
    folder: Path, *, device: torch.device, console: Console, should_stop_fn: Callable[[], bool]
) -> None:
    configs = {method: preset(name) for method, name in METHODS.items()}
    dataset = open_data(configs["snm"].data, console)
    console.print(
        f"places: {len(dataset.parts['train']):,} names to learn from, "
        f"{dataset.num_labels:,} cities to find, {len(dataset.parts['test']):,} names to test with"
    )
    results: dict[str, list[Score]] = {}
    for method, config in configs.items():
        run = folder / method
        if (run / "config.toml").is_file():
            resumable_config(run, config, dataset)
        else:
            begin_run(run, config, dataset, device=device)
        with explain_out_of_memory(config, dataset):
            is_complete = train_run(
                run, config, dataset,
                device=device, console=console, title=f"training {method}",
                should_stop_fn=should_stop_fn,
            )  # fmt: skip
        if not is_complete:
            raise StoppedError("stopped; the same command continues")
        results[method] = evaluate_run(
            run, dataset, "test", device=device, console=console, title=f"evaluating {method}"
        )
    console.print(results_table(list(results.items())))
    write_json(
        folder / "summary.json",
        [
            row
            for method, scores in results.items()
            for row in _summary(method, configs[method].training.seed, scores)
        ],
    )
    report = folder / "report.html"
    write_report(
        [load_result(folder / method) for method in METHODS],
        dataset,
        report,
        title="SNM and S²M on places",
    )
    console.print(dataset.attribution)
    console.print(f"figures: {folder / 'summary.json'}")
    console.print(f"report:  {report}")


def _summary(method: str, seed: int, scores: list[Score]) -> list[dict[str, Any]]:
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
