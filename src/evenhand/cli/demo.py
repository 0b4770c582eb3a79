"""`evenhand demo`: SNM and even-handed S2M on `places`, side by side, in minutes on two cores."""

import shlex
from pathlib import Path
from typing import Annotated

from evenhand.cli import options
from evenhand.cli.options import flag
from evenhand.errors import StoppedError

PRESETS = {"snm": "demo-snm", "s2m": "demo-s2m"}  # by the name of the run


def demo(
    run: Annotated[Path, flag("Folder to write to.")] = Path("runs/demo"),
    device: options.Device = None,
) -> None:
    """SNM and even-handed S2M on places, side by side, in minutes.

    Trains what is not trained yet, evaluates both on the test part, prints the table and writes the
    report.
    """
    from evenhand.build import choose_device
    from evenhand.cli.console import console
    from evenhand.config import build_config, read_preset
    from evenhand.files import locked
    from evenhand.progress import stop_requested
    from evenhand.report import write_report
    from evenhand.result_tables import results_table
    from evenhand.run_folder import load_result
    from evenhand.runs import (
        begin_run,
        evaluate_run,
        open_data,
        open_result,
        resumable_config,
        train_run,
    )

    own_device = choose_device(device)
    with locked(run), stop_requested() as should_stop_fn:
        configs = {name: build_config(read_preset(preset)) for name, preset in PRESETS.items()}
        dataset = open_data(configs["snm"].data, console)
        console.print(
            f"places: {len(dataset.parts['train']):,} names to learn from, "
            f"{dataset.num_labels:,} cities to find, {len(dataset.parts['test']):,} names to test "
            f"with"
        )
        results = {}
        for name, config in configs.items():
            folder = run / name
            if (folder / "config.toml").is_file():
                resumable_config(folder, config, dataset)
            else:
                begin_run(folder, config, dataset, device=own_device)
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
            # The worst groups are those of SNM on the validation part: see the report's headline.
            for part_name in ("validation", "test") if name == "snm" else ("test",):
                results[name] = evaluate_run(
                    folder,
                    dataset,
                    part_name,
                    device=own_device,
                    console=console,
                    title=f"evaluating {name}",
                )
        console.print(results_table(list(results.items())))
        first, *others = PRESETS
        runs = [open_result(run / first, dataset), *(load_result(run / name) for name in others)]
        write_report(runs, dataset, run / "report.html", title="SNM and even-handed S²M on places")
    console.print(dataset.attribution)
    console.print(f"report:  {run / 'report.html'}")
    served = " ".join(shlex.quote(str(run / name)) for name in reversed(PRESETS))
    console.print(f"ask both in a browser: evenhand serve {served}")
