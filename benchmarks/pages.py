"""README.md and pages of docs/ whose tables come from committed results: a mark, then a table.

    python benchmarks/pages.py      writes the tables of all of them anew

A test compares each page with what this writes.
"""

import itertools
import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

DOCS = Path(__file__).parents[1] / "docs"
Tables = dict[str, list[str]]  # lines of a table, by its mark
RESULTS = Path(__file__).parent / "results"


def read(file: str) -> Any:
    return json.loads((RESULTS / file).read_text("utf-8"))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [_line(heads), "|---" * len(heads) + "|", *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def share(value: float) -> str:
    """.8659"""
    return f"{value:.4f}".removeprefix("0")


# --- README.md and results.md ---------------------------------------------------------------------

MODELS = {"demo": "small model (16,384 n-gram vectors of 128)", "full": "full (1,048,576 of 512)"}
PLACES_GROUPS = ("all", "worst 3 of script", "worst tenth of country", "head", "torso", "tail")
SHOWN = [(f"recall@{cutoff}", group) for cutoff in (10, 1, 50) for group in PLACES_GROUPS]
README_SHOWN = [
    *(("recall@10", group) for group in ("all", "worst 3 of script", "head", "tail")),
    ("recall@1", "tail"),
]
WORDS = {
    "worst 3 of script": "worst 3 scripts",
    "worst tenth of country": "worst tenth of countries",
}


SPEED = [  # what it is called here, in the results of the GPU, and in those of the CPU
    ("the score product alone", "score product alone, CUDA graph", "score product alone"),
    ("**Evenhand, S²M**", "evenhand S2M step", "evenhand S2M step"),
    (
        "S²M in plain PyTorch: mine first, autograd over the survivors (GPU: as a CUDA graph)",
        "mined first, autograd over the survivors, SGD, CUDA graph",
        "PyTorch mined first, then autograd over the survivors",
    ),
    (
        "S²M in plain PyTorch: shared negatives, autograd over all scores",
        "shared negatives, autograd, sparse SGD",
        "PyTorch shared negatives, sparse Adagrad",
    ),
    (
        "S²M in plain PyTorch: gathering the vectors of each example's sample",
        "obvious PyTorch: gather (B, M, D), autograd",
        None,
    ),
    (
        "**Evenhand, SNM**: no mining of examples",
        "evenhand SNM step, all examples",
        "evenhand SNM step",
    ),
    (
        "sentence-transformers, MultipleNegativesRankingLoss",
        None,
        "sentence-transformers MultipleNegativesRankingLoss",
    ),
    ("pytorch-metric-learning, BatchHardMiner", None, "pytorch-metric-learning BatchHardMiner"),
    ("TensorFlow Recommenders, hard negatives", None, "TensorFlow Recommenders, hard negatives"),
    ("full softmax", "full softmax, autograd, CUDA graph", "PyTorch full softmax"),
    (
        "full softmax, compiled",
        "full softmax, compiled, CUDA graph",
        "PyTorch full softmax, compiled",
    ),
]


def speed_table() -> list[str]:
    """Milliseconds of a step, and their ratio to the product, at 13,330 labels."""
    gpu, cpu = (
        {row["name"]: row for row in read(file) if (row["labels"], row["dim"]) == (13_330, 512)}
        for file in ("speed-gpu.json", "speed-cpu.json")
    )
    rows = [
        (title, _time(gpu, on_gpu, digits=3), _time(cpu, on_cpu, digits=0))
        for title, on_gpu, on_cpu in SPEED
    ]
    return table(("ms, over the product", "H200, bfloat16", "2 CPU cores, float32"), rows)


def _time(rows: dict[str, Any], name: str | None, *, digits: int) -> str:
    if name is None:
        return ""
    row = rows[name]
    return f"{row['milliseconds']:,.{digits}f}, {row['ratio_to_product']:,.1f}"


def places_table(methods: dict[str, str], shown: list[tuple[str, str]]) -> list[str]:
    """SNM beside other methods (name -> title): recall, and the difference to SNM in points."""
    lines = []
    for size, model in MODELS.items():
        differences = read(f"places-{size}-seeds.json")["differences"]
        for metric, group in shown:
            rows = [_score(differences[method], metric, group) for method in methods]
            head = f"**{model}**, " if (metric, group) == shown[0] else ""
            title = f"{head}{metric}, {WORDS.get(group, group)}"
            lines.append([title, share(rows[-1]["baseline"]), *map(_gain, rows)])
    return table(["", "SNM", *methods.values()], lines)


def _score(rows: list[dict[str, Any]], metric: str, group: str) -> dict[str, Any]:
    (found,) = (row for row in rows if (row["metric"], row["group"]) == (metric, group))
    return found


def _gain(row: dict[str, Any]) -> str:
    """Bold: the wider of the intervals over queries and over seeds does not hold 0."""
    low, high = min(row["low"], row["seed_low"]), max(row["high"], row["seed_high"])
    points = f"{100 * row['difference']:+.1f}; {100 * low:+.1f} to {100 * high:+.1f}"
    is_certain = low > 0 or high < 0
    return f"{share(row['contender'])} ({f'**{points}**' if is_certain else points})"


def readme_tables() -> dict[str, list[str]]:
    """The tables of README.md, by the mark that they stand under."""
    methods = {"s2m-annealed": "S²M, annealed", "s2m-even": "even-handed, the default"}
    return {"places": places_table(methods, README_SHOWN)}


def results_tables() -> dict[str, list[str]]:
    """The tables of docs/results.md, by the mark that they stand under."""
    methods = {
        "s2m": "S²M, Algorithm 1",
        "s2m-annealed": "S²M, annealed",
        "s2m-even": "even-handed, the default",
    }
    return {"places": places_table(methods, SHOWN), "speed": speed_table()}


# --- speed.md -------------------------------------------------------------------------------------


def step_table(file: str, *, dim: int, labels: list[int]) -> list[str]:
    """A line for each way: milliseconds and ratio to the product at each number of labels."""
    ways, digits = _ways(file, dim), 3 if "gpu" in file else 1
    lines = []
    for name, by_labels in ways.items():
        found = [by_labels.get(count, {}) for count in labels]
        if any(found):
            cells = [_figure(row, *key) for row in found
                     for key in (("milliseconds", digits), ("ratio_to_product", 1))]  # fmt: skip
            peaks = [row["peak_bytes"] for row in found if row and row["peak_bytes"] is not None]
            lines.append([name, *cells, f"{peaks[0] / 2**30:.2f}" if peaks else ""])
    heads = [head for count in labels for head in (f"{count:,} labels", "over the product")]
    return table(["step", *heads, "GiB"], lines)


def sweep_table(file: str, *, dim: int) -> list[str]:
    """A line for each way: milliseconds over the number of labels."""
    ways, digits = _ways(file, dim), 3 if "gpu" in file else 1
    labels = sorted({count for by_labels in ways.values() for count in by_labels})
    rows = [
        [name, *(_figure(by_labels.get(count, {}), "milliseconds", digits) for count in labels)]
        for name, by_labels in ways.items()
    ]
    return table(["ms", *(f"{count:,}" for count in labels)], rows)


def precision_table() -> list[str]:
    rows, lines = read("precision.json"), []
    for method, precision in dict.fromkeys((row["method"], row["precision"]) for row in rows):
        chosen = [r for r in rows if (r["method"], r["precision"]) == (method, precision)]
        cells = []
        for group in ("all", "worst 3 scripts"):
            values = [row[group] for row in chosen]
            spread = f" ({np.ptp(values):.4f})" if len(values) > 1 else " (one seed)"
            cells.append(f"{np.mean(values):.4f}{spread}")
        lines.append([method, precision, *cells])
    return table(["method", "precision", "all", "worst 3 scripts"], lines)


def speed_tables() -> dict[str, list[str]]:
    """Every table, by the mark in docs/speed.md that it stands under."""
    return {
        "gpu": step_table("speed-gpu.json", dim=512, labels=[13_330, 10**6]),
        "gpu sweep": sweep_table("speed-gpu.json", dim=128),
        "precision": precision_table(),
        "cpu": step_table("speed-cpu.json", dim=512, labels=[13_330]),
        "cpu sweep": sweep_table("speed-cpu.json", dim=128),
    }


def _ways(file: str, dim: int) -> dict[str, dict[int, dict[str, Any]]]:
    """Name of a way -> number of labels -> its row; our own names are bold."""
    ways: dict[str, dict[int, dict[str, Any]]] = {}
    for row in read(file):
        if row["dim"] == dim and "ratio_to_product" in row:
            name = row["name"]
            shown = f"**{name}**" if name.startswith("evenhand") else name
            ways.setdefault(shown, {}).setdefault(row["labels"], row)
    return ways


def _figure(row: dict[str, Any], key: str, digits: int) -> str:
    return f"{row[key]:,.{digits}f}" if row else ""


# --- scaling.md -----------------------------------------------------------------------------------


def kills_table() -> list[str]:
    """What became of the runs that were killed."""
    found = read("kills.json")
    runs, summary = found["runs"], found["summary"]
    lost = [item["lost_steps"] for run in runs for item in run["interruptions"]]
    every = found["settings"]["training"]["checkpoint_every"]
    rows = {
        "runs": summary["runs"],
        "killed before their end": summary["killed_before_the_end"],
        "of them while a checkpoint was being written": summary["killed_within_a_checkpoint"],
        "of them on rank 0": sum(
            run["rank"] == 0 and run["killed_at_step"] is not None for run in runs
        ),
        "ended byte for byte as the undisturbed run, unaided": summary["as_undisturbed"],
        f"most logged steps trained again (a checkpoint every {every})": max(lost, default=0),
    }
    return table(["", ""], [[name, f"{value:,}"] for name, value in rows.items()])


# --- reproduction.md ------------------------------------------------------------------------------

PARTS = ("tail", "head", "full")
CUTOFFS = ("5", "10", "25", "50")
GROUPS = ("head", "torso", "tail", "all")
MULTILABEL = ("bibtex", "delicious", "debian-deps", "places")
QUALITY = ("bibtex", "delicious", "debian-deps")
PEERS = ("PECOS XR-Linear", "napkinXC")
STAGES = {
    "alone": "nothing added",
    "votes": "votes",
    "handicap": "votes, handicap",
    "ranker": "votes, handicap, ranker",
}
POWERS = {1: "", 2: "-power2"}  # of table 3's loss: how the file of results ends
MASKED = "-power2-masked"  # not run on places
MNIST_RUNS = {  # how the file of results ends, and that of the tuning
    "5 to 9": ("", ""),
    "5 to 9, standardised": ("-standardised", "-standardised"),
    "odd, stopped": ("-odd-68400", "-odd"),
    "odd": ("-odd", "-odd"),
    "odd, dropout, stopped": ("-odd-dropout", "-odd-dropout"),
    "odd, falling rate": ("-odd-cosine", "-odd-cosine"),
}


def reproduction_tables() -> dict[str, list[str]]:
    """Every table, by the mark in docs/reproduction.md that it stands under."""
    return {
        "mnist runs": mnist_runs(),
        "mnist": table2("table2-mnist.json"),
        "mnist standardised": table2("table2-mnist-standardised.json"),
        "mnist odd": table2("table2-mnist-odd.json"),
        "mnist odd cosine": table2("table2-mnist-odd-cosine.json"),
        "cifar10": table2("table2-cifar10.json"),
        "cifar10 resnet18": table2("table2-cifar10-resnet18.json", has_paper=False),
        "cifar10 resnet18 short": table2("table2-cifar10-resnet18-10000.json", has_paper=False),
        "table3 choices": choices(),
        "table3 pairs": recalls(" over pairs"),
        "table3 best": best_of_both_powers(),
        "table3 labels": recalls(""),
        "quality": quality(),
        "quality cells": quality_cells(),
        "quality parts": quality_parts(),
        "quality times": quality_times(),
    }


def table2(file: str, *, has_paper: bool = True) -> list[str]:
    """A line for each row: ours, the paper's where its table 2 has it, the difference to SGD."""
    kinds = ["paper"] * has_paper + ["minus SGD"]
    lines = []
    for row in read(file)["rows"]:
        cells = [_name(row), f"{row['learning_rate']:g}"]
        for part in PARTS:
            figures, paper = row[part], row["paper"]
            cells.append(f"{figures['mean']:.4f} ± {figures['sd']:.4f}")
            cells += ["" if paper is None else f"{paper[part]:.4f}"] * has_paper
            cells.append(_difference(figures.get("minus_sgd")))
        lines.append(cells)
    heads = [head for part in PARTS for head in (part, *kinds)]
    return table(["method", "learning rate", *heads], lines)


def mnist_runs() -> list[str]:
    """Every run that saw MNIST's test part: what validation preferred, and the gains of all k'."""
    gains = [f"top-{count} minus SGD" for count in (1, 16, 32)]
    heads = ["rare digits", "steps", "validation prefers", "its tail", "its head", *gains]
    lines = []
    for name, (ending, tuning_ending) in MNIST_RUNS.items():
        report = read(f"table2-mnist{ending}.json")
        tuning = read(f"table2-mnist{tuning_ending}-tuning.json")
        chosen = max(tuning["chosen"], key=_validation_of_rate)
        rows = {row["name"]: row for row in report["rows"]}
        best = rows[chosen["name"]]
        assert best["learning_rate"] == chosen["learning_rate"], f"{name}: another rate was tuned"
        cells = [name, f"{report['num_steps']:,}"]
        cells.append(f"{chosen['name']} ({_validation_of_rate(chosen):.4f})")
        cells += [f"{best[part]['mean']:.4f}" for part in ("tail", "head")]
        for count in (1, 16, 32):
            gain = rows[f"top-{count}"]["tail"]["minus_sgd"]
            cells.append(f"**{_difference(gain)}**" if gain["low"] > 0 else _difference(gain))
        lines.append(cells)
    return table(heads, lines)


def choices() -> list[str]:
    """What validation chose for each method of table 3, and what it thought of it."""
    heads = ["SNM", "rate, steps", "validation", "P@1"]
    heads += ["S²M", *heads[1:]]
    lines = []
    for name in MULTILABEL:
        files = {str(power): ending for power, ending in POWERS.items()}
        if (RESULTS / f"table3-{name}{MASKED}.json").is_file():
            files["2, all positives masked"] = MASKED
        for power, ending in files.items():
            report = _table3(name, ending)
            cells = [name, power]
            for row in (_snm(report), _best_s2m(report)):
                precisions = row["precision@1"]
                cells += [
                    f"k' = {row['num_hard_examples']}",
                    _setting(row, report["protocol"]),
                    share(_validation(report, row)),
                    share(sum(precisions) / len(precisions)),
                ]
            lines.append(cells)
    return table(["data", "power", *heads], lines)


def recalls(ending: str) -> list[str]:
    """SNM's recall and S2M's difference to it, S2M with the k' that validation prefers.

    Args:
        ending: of the groups' names, which says by what they are thirds.
    """
    lines = []
    for name, (power, file_ending) in itertools.product(MULTILABEL, POWERS.items()):
        report = _table3(name, file_ending)
        count = str(_best_s2m(report)["num_hard_examples"])
        for cutoff in CUTOFFS:
            cells = [name, str(power), cutoff]
            for group in GROUPS:
                cell = _recall(report, cutoff, group, ending)
                cells.append(f"{share(cell['snm'])} {_with_interval(cell['s2m'][count])}")
            lines.append(cells)
    return table(["data", "power", "recall@", *GROUPS], lines)


def best_of_both_powers() -> list[str]:
    """SNM and S2M, each with the power (and k') that validation prefers: recall over pairs."""
    lines = []
    for name in MULTILABEL:
        reports = {power: _table3(name, ending) for power, ending in POWERS.items()}
        snm = max(POWERS, key=lambda p: _validation(reports[p], _snm(reports[p])))
        s2m = max(POWERS, key=lambda p: _validation(reports[p], _best_s2m(reports[p])))
        count = _best_s2m(reports[s2m])["num_hard_examples"]
        for cutoff in CUTOFFS:
            cells = [name, f"power {snm}", f"power {s2m}, k' = {count}", cutoff]
            for group in GROUPS:
                baseline = _recall(reports[snm], cutoff, group, " over pairs")["snm"]
                contenders = _recall(reports[s2m], cutoff, group, " over pairs")["s2m"]
                contender = contenders[str(count)]["contender"]
                words = share(baseline), share(contender), _signed(contender - baseline)
                cells.append("{} {} ({})".format(*words))
            lines.append(cells)
    return table(["data", "SNM", "S²M", "recall@", *GROUPS], lines)


def quality() -> list[str]:
    """A line for each system and data set: recall of head / torso / tail (over labels) / all."""
    heads = ["P@1", "mean", *(f"recall@{cutoff}" for cutoff in CUTOFFS)]
    lines = []
    for name, report in _quality_reports():
        for system, runs in _quality_rows(report).items():
            cells = _mean_recall(runs)
            recalls = [
                " / ".join(f"{cells[cutoff, group]:.3f}"[1:] for group in (*GROUPS[:3], "full"))
                for cutoff in CUTOFFS
            ]
            means = [f"{_mean(run[kind] for run in runs):.3f}" for kind in ("precision@1", "mean")]
            lines.append([name, system, *means, *recalls])
    return table(["data", "system", *heads], lines)


def quality_cells() -> list[str]:
    """In how many cells one Evenhand model, mean of its seeds, is above the peers."""
    heads = ["data", "peers", *(f"above {peer}" for peer in PEERS), "above both"]
    lines = []
    for name, report in _quality_reports():
        rows = _quality_rows(report)
        ours = _mean_recall(rows["Evenhand"])
        for kind in ("tuned", "votes and handicap"):
            peers = [_mean_recall(rows[f"{peer}, {kind}"]) for peer in PEERS]
            best = {cell: max(peer[cell] for peer in peers) for cell in ours}
            counts = [sum(ours[cell] > peer[cell] for cell in ours) for peer in (*peers, best)]
            short = [
                f"{group.replace('full', 'all')} at {cutoff} ({value - ours[cutoff, group]:.3f})"
                for (cutoff, group), value in best.items()
                if value >= ours[cutoff, group]
            ]
            words = [name, kind, *map(str, counts), ", ".join(short) or "none"]
            lines.append(words)
    return table([*heads, "short of the better one in (by)"], lines)


def quality_parts() -> list[str]:
    """What each addition brings, for every system: means of 16 cells and P@1 over the seeds."""
    heads = ["data", "system", "with", "validation mean", "test mean", "test P@1", "seeds"]
    lines = []
    for name, report in _quality_reports():
        for system, found in report["systems"].items():
            for stage, row in found["stages"].items():
                figures = [
                    _with_deviation([run[kind] for run in row[part]])
                    for part, kind in (
                        ("validation", "mean"),
                        ("test", "mean"),
                        ("test", "precision@1"),
                    )
                ]
                cells = [name, system, STAGES[stage], *figures, str(len(row["test"]))]
                lines.append(cells)
    return table(heads, lines)


def quality_times() -> list[str]:
    """Seconds on an idle machine, from a run before the one of the other tables."""
    lines = []
    for name in QUALITY:
        report = read(f"quality-idle-{name}.json")
        for system, row in report["systems"].items():
            seconds = [f"{row[kind]:.1f}" for kind in ("train_seconds", "ask_seconds")]
            lines.append([name, system, *seconds])
    return table(["data", "system", "train s", "ask s"], lines)


def _quality_reports() -> list[tuple[str, dict[str, Any]]]:
    return [(name, read(f"quality-{name}.json")) for name in QUALITY]


def _quality_rows(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Figures on the test part, one for each seed, of every system that is compared."""
    rows = {}
    for system, found in report["systems"].items():
        stages = found["stages"]
        if not system.startswith("Evenhand"):
            rows[f"{system}, tuned"] = stages["alone"]["test"]
            rows[f"{system}, votes and handicap"] = stages["handicap"]["test"]
    ours = list(report["systems"]["Evenhand"]["stages"].values())[-1]
    rows["Evenhand"] = ours["test"]
    if "mean of models" in ours:
        rows["Evenhand, models averaged"] = [ours["mean of models"]]
    return rows


def _mean_recall(runs: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """Recall in the 16 cells by (cutoff, group), averaged over runs."""
    cells = {cutoff: runs[0]["recall"]["labels"][cutoff] for cutoff in CUTOFFS}
    return {
        (cutoff, group): _mean(run["recall"]["labels"][cutoff][group] for run in runs)
        for cutoff, groups in cells.items()
        for group in groups
    }


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _with_deviation(values: list[float]) -> str:
    words = f"{_mean(values):.4f}"
    return f"{words} ± {statistics.stdev(values):.4f}" if len(values) > 1 else words


def _name(row: dict[str, Any]) -> str:
    num_diverged = sum(seed["diverged"] for seed in row["per_seed"])
    note = f" ({num_diverged} of {len(row['per_seed'])} diverged)" if num_diverged else ""
    return f"{row['name']}{note}"


def _difference(interval: dict[str, float] | None) -> str:
    if interval is None:
        return ""
    return f"{interval['mean']:+.4f} ({interval['low']:+.4f} to {interval['high']:+.4f})"


def _validation_of_rate(chosen: dict[str, Any]) -> float:
    value: float = chosen["means"][str(chosen["learning_rate"])]
    return value


def _table3(name: str, ending: str) -> dict[str, Any]:
    report: dict[str, Any] = read(f"table3-{name}{ending}.json")
    # Results without a power are older than the setting, when the loss was always squared.
    power = 2 if ending else 1
    assert report["protocol"].get("power", 2) == power, f"{name}{ending} is not of power {power}"
    return report


def _snm(report: dict[str, Any]) -> dict[str, Any]:
    return next(row for row in report["rows"] if row["method"] == "snm")


def _best_s2m(report: dict[str, Any]) -> dict[str, Any]:
    rows = [row for row in report["rows"] if row["method"] == "s2m"]
    return max(rows, key=lambda row: _validation(report, row))


def _validation(report: dict[str, Any], row: dict[str, Any]) -> float:
    """What the row's settings were chosen by: the best trial of its k'."""
    count = row["num_hard_examples"]
    return max(t["mean_recall"] for t in report["trials"] if t["num_hard_examples"] == count)


def _setting(row: dict[str, Any], protocol: dict[str, Any]) -> str:
    """Learning rate and steps, each with a star where it is the first or last one tried."""
    words = []
    for name, tried in (("learning_rate", "learning_rates"), ("num_steps", "steps")):
        is_at_edge = row[name] in (min(protocol[tried]), max(protocol[tried]))
        words.append(f"{row[name]:,}" + "\\*" * is_at_edge)
    return ", ".join(words)


def _recall(report: dict[str, Any], cutoff: str, group: str, ending: str) -> dict[str, Any]:
    name = group if group == "all" else f"{group}{ending}"
    found = (cell for cell in report["cells"] if cell["metric"] == f"recall@{cutoff}")
    cell: dict[str, Any] = next(cell for cell in found if cell["group"] == name)
    return cell


def _with_interval(row: dict[str, float]) -> str:
    """Bold where the whole interval is above 0."""
    difference, low, high = (_signed(row[name]) for name in ("difference", "low", "high"))
    words = f"{difference} ({low} to {high})"
    return f"**{words}**" if row["low"] > 0 else words


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("0.", ".", 1)


# --- serving.md -----------------------------------------------------------------------------------


def serving_tables() -> dict[str, list[str]]:
    found: dict[str, list[Any]] = {}  # by command, whatever runs it was about
    for words, section in read("serving.json").items():
        found.setdefault(words.split()[0], []).extend(section["rows"])
    load = [
        (
            f"{row['labels']:,}",
            f"{row['requests_a_second']:,.0f}",
            *(f"{row['milliseconds'][name]:.0f}" for name in ("p50", "p99")),
            f"{row['mb_at_the_end']:,.0f}",
        )
        for row in found["load"]
    ]
    faiss = [
        (
            f"{row['labels']:,}",
            row["index"],
            f"{row['recall_at_10']['all']['recall']:.2%}",
            f"{row['worst_group'][0]:.2%} ({row['worst_group'][1]})",
            f"{row['milliseconds_a_query']['exact search']:.1f}",
            f"{row['milliseconds_a_query']['index']:.2f}",
            f"{row['seconds_to_build']:.0f}",
            f"{row['megabytes']:,.0f}",
        )
        for row in found["faiss"]
    ]
    stores = [
        (
            row["store"],
            f"{row['labels']:,}",
            f"{row['seconds_to_load']:.0f}",
            f"{row['overlap_with_exact_at_10']:.2%}",
            f"{row['milliseconds_a_query']:.1f}",
        )
        for row in found["databases"]
    ]
    return {
        "load": table(["labels", "requests a second", "ms, median", "ms, p99", "memory, MB"], load),
        "faiss": table(
            ["labels", "index", "finds of the exact first 10", "in the worst group", "exact, ms",
             "index, ms", "built in s", "MB"], faiss,
        ),
        "databases": table(
            ["store", "labels", "loaded in s", "finds of the exact first 10", "ms a query"], stores
        ),
    }  # fmt: skip


# --- pages ----------------------------------------------------------------------------------------

PAGES: dict[str, Callable[[], Tables]] = {
    "../README.md": readme_tables,
    "results.md": results_tables,
    "speed.md": speed_tables,
    "reproduction.md": reproduction_tables,
    "serving.md": serving_tables,
    "scaling.md": lambda: {"kills": kills_table()},
}


def with_tables(page: str, tables: Tables) -> str:
    """The page, with every marked table replaced by that of the results."""
    for mark, lines in tables.items():
        marked = f"<!-- {mark} -->\n" + "\n".join(lines) + "\n"
        parts = re.split(rf"<!-- {re.escape(mark)} -->\n(?:\|.*\n)+", page)
        assert len(parts) == 2, f"{mark}: {len(parts) - 1} tables"
        page = marked.join(parts)
    return page


if __name__ == "__main__":
    for name, tables_fn in PAGES.items():
        path = DOCS / name
        path.write_text(with_tables(path.read_text("utf-8"), tables_fn()), "utf-8")
