"""Every method on `places`, each tuned with the same number of trials and the same steps.

    python benchmarks/methods.py tune           8 trials a method, chosen on validation
    python benchmarks/methods.py seeds          the chosen settings, seeds 1 to 3, on test
    python benchmarks/methods.py time --steps 20   milliseconds a step, one method after another
    python benchmarks/methods.py sweep          annealed S2M with k' from 32 to the whole batch
    python benchmarks/methods.py table          the tables of docs/methods.md, from the results

    ... --noise 0.2                             that share of the training labels drawn at random
    ... --rare                                  even-handed mining, its parts, and what others do
                                                for rare labels: 4 trials a method, two rates

A trial is one of four learning rates with one of two values of what the method itself offers
(its k, k', loss ...). The choice is by pair recall@10 over the whole validation part: the
figure one has when nobody labelled the groups. Trials and seeds already in the results are not
repeated, so a command that was stopped goes on where it was.
"""

import argparse
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from evenhand.config import Config, build_config
from evenhand.data import Dataset, Rows, open_dataset, save_dataset
from evenhand.files import write_json
from places import (
    CRITERION,
    RESULTS,
    SIZES,
    about,
    compared,
    device_name,
    figures_of,
    prepared,
    train_all,
    train_once,
)  # fmt: skip

NUM_STEPS = 3000
LEARNING_RATES = (0.012, 0.024, 0.048, 0.096)
BASE: dict[str, dict[str, Any]] = {key: SIZES["demo"][key] for key in ("data", "model", "mining")}
SOFTMAX = {"loss.name": "softmax", "model.scale": 16.0}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sgd": ({}, SOFTMAX),
    "snm": ({}, {"mining.num_hard_labels": 128}),
    "topk-sgd": ({}, SOFTMAX),
    "s2m": ({}, {"mining.num_hard_examples": 512}),
    "s2m-annealed": ({}, {"mining.num_hard_examples": 128}),
    "s2m-even": ({}, {"risk.mined_share": 0.75}),
    "ranked-range": ({"risk.num_dropped": 16}, {"risk.num_dropped": 64}),
    "cvar": ({}, {"mining.num_hard_examples": 512}),
    "group-dro": (
        {"risk.group": "country", "risk.step_size": 0.001},
        {"risk.group": "country", "risk.step_size": 0.01},
    ),
}
NO_LONGER_THERE = {  # methods of the results that were taken out of the package
    "snm-nonzero": "SNM, averaged over the losses above 0",
    "chi-square": "worst weights of a chi-square ball",
    "kl": "worst weights of a Kullback-Leibler ball",
    "max": "maximum of the minibatch (`s2m` with k' = 1)",
    "stochastic-max": "maximum over all data, by a weight for each pair",
}
OPTIONS_NOISE = {
    "snm": OPTIONS["snm"],
    "s2m": OPTIONS["s2m"],
    "s2m-annealed": ({}, {"mining.num_hard_examples": 512}),
    "ranked-range": (
        {"risk.num_dropped": 205, "mining.num_hard_examples": 512},
        {"risk.num_dropped": 256, "mining.num_hard_examples": 512},
    ),
    "s2m-even": ({}, {"mining.num_hard_examples": 512}),
}
OPTIONS_NOISE["even-range"] = OPTIONS_NOISE["ranked-range"]
SOFTMAX_OF_KEPT = {"loss.name": "softmax", "model.scale": 8.0}  # the best scale of places.py losses
OPPONENTS = ("reweighted", "ldam", "adjusted")  # SNM, changed as opponents.py says
OPTIONS_RARE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "snm": OPTIONS["snm"],
    "s2m-even": OPTIONS["s2m-even"],
    "reweighted": ({"opponent": 0.25}, {"opponent": 0.5}),
    "ldam": ({"opponent": 0.1}, {"opponent": 0.2}),
    "adjusted": ({"opponent": 0.5} | SOFTMAX_OF_KEPT, {"opponent": 1.0} | SOFTMAX_OF_KEPT),
}
LEARNING_RATES_RARE = (0.024, 0.048)  # those that the methods above chose
ABLATIONS: dict[str, dict[str, Any]] = {  # of s2m-even, at its chosen setting
    "ranking alone": {"risk.mined_share": 1.0},
    "mixture alone": {"risk.gap_weight": 0.0},
} | {f"k' {count}": {"mining.num_hard_examples": count} for count in (64, 128, 256, 512)}


def config_of(
    method: str, own: dict[str, Any], learning_rate: float, *, seed: int, steps: int
) -> Config:
    settings = {section: dict(values) for section, values in BASE.items()}
    name_of = dict.fromkeys(OPPONENTS, "snm") | dict.fromkeys(ABLATIONS, "s2m-even")
    settings["mining"]["method"] = name_of.get(method, method)
    for name, value in own.items():
        if name == "opponent":
            continue
        section, key = name.split(".")
        settings.setdefault(section, {})[key] = value
    settings["training"] = {
        "num_steps": steps, "learning_rate": learning_rate, "seed": seed, "checkpoint_every": 0,
    }  # fmt: skip
    return build_config(settings)


def opponent_of(method: str, own: dict[str, Any]) -> tuple[str, float] | None:
    return (method, own["opponent"]) if "opponent" in own else None


# --- data -----------------------------------------------------------------------------------------


def with_noise(dataset: Dataset, share: float, seed: int = 0) -> Dataset:
    """A share of the training pairs has a label drawn at random; the other parts stay as they are.

    A query keeps its number of positives, so that which pairs are wrong is not to be seen.
    """
    train_part = dataset.parts["train"]
    generator = np.random.default_rng(seed)
    ids = np.array(train_part.positives.ids)
    is_wrong = generator.random(len(ids)) < share
    ids[is_wrong] = generator.integers(dataset.num_labels, size=is_wrong.sum())
    positives = Rows(train_part.positives.offsets, ids.astype(np.int32))
    parts = dataset.parts | {"train": dataclasses.replace(train_part, positives=positives)}
    return dataclasses.replace(dataset, parts=parts, name=f"{dataset.name}-noise", fingerprint="")


def data_folder(options: argparse.Namespace, console: Console) -> str:
    """The prepared data set, with label noise if there is any: made once, for all workers."""
    clean = Path(prepared(options, build_config(BASE), console))
    if not options.noise:
        return str(clean)
    noisy = clean.with_name(f"{clean.name}-noise-{options.noise}")
    if not noisy.exists():
        save_dataset(with_noise(open_dataset(clean), options.noise), noisy)
    return str(noisy)


# --- results --------------------------------------------------------------------------------------


def results_path(options: argparse.Namespace, what: str) -> Path:
    study = f"-noise-{options.noise}" if options.noise else "-rare" if options.rare else ""
    return Path(options.results) / f"methods{study}-{what}.json"


def saved(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def header(options: argparse.Namespace) -> dict[str, Any]:
    study = f" --noise {options.noise}" if options.noise else " --rare" if options.rare else ""
    return about(argparse.Namespace(what="tune", size="demo")) | {
        "command": f"python benchmarks/methods.py {options.what}{study}",
        "num_steps": options.steps,
        "noise": options.noise,
        "settings": BASE,
    }


# --- commands -------------------------------------------------------------------------------------


def tune(options: argparse.Namespace, console: Console) -> None:
    """All trials of the chosen methods that are not in the results yet."""
    path, data = results_path(options, "tuning"), data_folder(options, console)
    trials: list[dict[str, Any]] = saved(path).get("trials", [])
    done = {(t["method"], json.dumps(t["options"]), t["learning_rate"]) for t in trials}
    grid, rates = options_of(options), LEARNING_RATES_RARE if options.rare else LEARNING_RATES
    jobs = [
        (method, own, rate)
        for method, rate in itertools.product(options.methods, rates)
        for own in grid[method]
        if (method, json.dumps(own), rate) not in done
    ]
    configs = [config_of(*job, seed=0, steps=options.steps) for job in jobs]
    opponents = [opponent_of(method, own) for method, own, _ in jobs]
    found = train_all(configs, data, ["validation"], options.workers, opponents)
    for (method, own, rate), (outcomes, seconds) in zip(jobs, found, strict=True):
        figures = figures_of(outcomes["validation"], data, build_config(BASE), "validation")
        trials.append({
            "method": method, "options": own, "learning_rate": rate, "validation": figures,
            "training_seconds": round(seconds, 1), "device": device_name(),
        })  # fmt: skip
        console.print(f"{method:15s} {rate} {own}: {figures[CRITERION]:.4f} ({seconds:.0f} s)")
        write_json(path, header(options) | {"criterion": CRITERION, "trials": trials})
    chosen = {
        method: max(group, key=lambda t: t["validation"][CRITERION])
        for method in grid
        if (group := [t for t in trials if t["method"] == method])
    }
    write_json(path, header(options) | {"criterion": CRITERION, "chosen": chosen, "trials": trials})
    for method, trial in chosen.items():
        console.print(
            f"chosen for {method}: rate {trial['learning_rate']}, {trial['options']}, "
            f"{trial['validation'][CRITERION]:.4f}"
        )


def seeds(options: argparse.Namespace, console: Console) -> None:
    """The chosen settings with new seeds; differences to SNM on groups fixed on validation."""
    chosen = saved(results_path(options, "tuning"))["chosen"]
    if options.rare:
        even = chosen["s2m-even"]
        chosen |= {
            name: even | {"options": even["options"] | own} for name, own in ABLATIONS.items()
        }
        options.methods = list(chosen)
    data = data_folder(options, console)
    methods = list(dict.fromkeys(["snm", *options.methods]))  # all are compared with SNM
    jobs = [(method, seed) for seed in options.seeds for method in methods]
    runs: dict[str, list[Any]] = {method: [] for method in methods}
    configs = [
        config_of(method, *setting_of(chosen[method]), seed=seed, steps=options.steps)
        for method, seed in jobs
    ]
    opponents = [opponent_of(method, chosen[method]["options"]) for method, _ in jobs]
    parts = ["validation", "test"]
    rows, found = [], train_all(configs, data, parts, options.workers, opponents)
    for (method, seed), (outcomes, seconds) in zip(jobs, found, strict=True):
        runs[method].append(outcomes)
        figures = figures_of(outcomes["test"], data, build_config(BASE), "test")
        rows.append({"method": method, "seed": seed, "test": figures, "device": device_name()})
        console.print(f"{method:15s} seed {seed}: {figures[CRITERION]:.4f} ({seconds:.0f} s)")
    differences = {}
    for method in methods:
        compared_rows = compared(runs["snm"], runs[method], data, build_config(BASE))
        differences[method] = [
            vars(row) for row in compared_rows if options.rare or row.metric == CRITERION
        ]
    path = results_path(options, "seeds")
    before = saved(path)  # other methods keep their results
    kept = [row for row in before.get("runs", []) if row["method"] not in options.methods]
    if kept:
        rows = [row for row in rows if row["method"] in options.methods]
        differences = {name: differences[name] for name in options.methods}
    differences = before.get("differences", {}) | differences
    write_json(
        path,
        header(options)
        | {
            "chosen": chosen,
            "runs": [*kept, *rows],
            "differences": {name: differences[name] for name in chosen if name in differences},
        },
    )


def setting_of(trial: dict[str, Any]) -> tuple[dict[str, Any], float]:
    return trial["options"], trial["learning_rate"]


def sweep(options: argparse.Namespace, console: Console) -> None:
    """Annealed S2M with ever fewer hard examples, at the tuned rate: what k' does to whom."""
    trial = saved(results_path(options, "tuning"))["chosen"]["s2m-annealed"]
    data = data_folder(options, console)
    counts = (32, 64, 128, 256, 512, 1024)
    jobs = list(itertools.product(counts, options.seeds))
    configs = [
        config_of("s2m-annealed", {"mining.num_hard_examples": count}, trial["learning_rate"],
                  seed=seed, steps=options.steps)
        for count, seed in jobs
    ]  # fmt: skip
    rows, found = [], train_all(configs, data, ["test"], options.workers)
    for (count, seed), (outcomes, _) in zip(jobs, found, strict=True):
        figures = figures_of(outcomes["test"], data, build_config(BASE), "test")
        rows.append({"num_hard_examples": count, "seed": seed, "test": figures})
        console.print(f"k' {count}, seed {seed}: {figures[CRITERION]:.4f}")
    write_json(results_path(options, "sweep"), header(options) | {"runs": rows})


def time_steps(options: argparse.Namespace, console: Console) -> None:
    """Milliseconds a step at the chosen settings, each method alone: the median of 3 rounds."""
    chosen = saved(results_path(options, "tuning"))["chosen"]
    data = open_dataset(Path(data_folder(options, console)))
    times: dict[str, list[float]] = {method: [] for method in options.methods}
    for _, method in itertools.product(range(3), options.methods):
        config = config_of(method, *setting_of(chosen[method]), seed=0, steps=options.steps)
        times[method].append(1000 * train_once(config, data)[1] / options.steps)
    median = {method: round(float(np.median(values)), 3) for method, values in times.items()}
    for method, value in median.items():
        console.print(f"{method:15s} {value:8.2f} ms, {value / median['snm']:.2f} of snm's")
    about_time = header(options) | {"num_threads": torch.get_num_threads(), "milliseconds": median}
    write_json(results_path(options, "time"), about_time)


def table(options: argparse.Namespace, console: Console) -> None:
    print(table_of(options.results, options.noise))


def table_of(results: str | Path, noise: float, *, no_longer_there: bool = False) -> str:
    """The seeds as Markdown: means over seeds, and differences to SNM with intervals."""
    options = argparse.Namespace(results=results, noise=noise, rare=False)
    study = saved(results_path(options, "seeds"))
    milliseconds = saved(results_path(options, "time")).get("milliseconds", {})
    heads = ["method", "all", "worst 3 scripts", "worst tenth of countries", "head / torso / tail"]
    heads += ["time of a step"] if milliseconds else []
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for method, differences in study["differences"].items():
        if (method in NO_LONGER_THERE) != no_longer_there:
            continue
        by_group = {row["group"]: row for row in differences}
        cells = [
            _cell(by_group[group], is_base=method == "snm")
            for group in ("all", "worst 3 of script", "worst tenth of country")
        ]
        bands = " / ".join(f"{by_group[g]['contender']:.3f}" for g in ("head", "torso", "tail"))
        cells += [bands]
        if milliseconds:
            cells.append(f"{milliseconds[method] / milliseconds['snm']:.2f}")
        name = NO_LONGER_THERE.get(method, f"`{method}`")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any], *, is_base: bool) -> str:
    """Recall, and the difference to SNM with the wider of its two 95 % intervals."""
    if is_base:
        return f"{row['contender']:.4f}"
    low, high = min(row["low"], row["seed_low"]), max(row["high"], row["seed_high"])
    points = [f"{100 * value:+.1f}" for value in (row["difference"], low, high)]
    return f"{row['contender']:.4f} ({points[0]}; {points[1]} to {points[2]})"


def options_of(options: argparse.Namespace) -> dict[str, Any]:
    return OPTIONS_NOISE if options.noise else OPTIONS_RARE if options.rare else OPTIONS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = {"tune": tune, "seeds": seeds, "time": time_steps, "sweep": sweep, "table": table}
    parser.add_argument("what", choices=tuple(commands))
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--rare", action="store_true")
    known = tuple(OPTIONS | OPTIONS_NOISE | OPTIONS_RARE)
    parser.add_argument("--methods", nargs="+", choices=known)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--workers", type=int, default=1, help="trainings at a time")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--data", help="folder of the prepared data set")
    parser.add_argument("--results", default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    options.methods = options.methods or list(options_of(options))
    commands[options.what](options, Console(soft_wrap=True))


if __name__ == "__main__":
    main()
