"""The tables of docs/reproduction.md, from the committed results."""

import itertools
import statistics
from collections.abc import Iterable
from typing import Any

from markdown import RESULTS, read, table
from markdown import share as _short

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


def tables() -> dict[str, list[str]]:
    """Every table, by the mark in docs/reproduction.md that it stands under."""
    return {
        "mnist runs": mnist_runs(),
        "mnist": table2("table2-mnist.json"),
        "mnist standardised": table2("table2-mnist-standardised.json"),
        "mnist odd": table2("table2-mnist-odd.json"),
        "mnist odd cosine": table2("table2-mnist-odd-cosine.json"),
        "cifar10": table2("table2-cifar10.json"),
        "cifar10 resnet18": without_paper("table2-cifar10-resnet18.json"),
        "cifar10 resnet18 short": without_paper("table2-cifar10-resnet18-10000.json"),
        "table3 choices": choices(),
        "table3 pairs": recalls(" over pairs"),
        "table3 best": best_of_both_powers(),
        "table3 labels": recalls(""),
        "quality": quality(),
        "quality cells": quality_cells(),
        "quality parts": quality_parts(),
        "quality times": quality_times(),
    }


def table2(file: str) -> list[str]:
    """A line for each row of the paper's table 2: ours, the paper's, the difference to SGD."""
    heads = [head for part in PARTS for head in (part, "paper", "minus SGD")]
    lines = []
    for row in read(file)["rows"]:
        cells = [_name(row), f"{row['learning_rate']:g}"]
        for part in PARTS:
            figures, paper = row[part], row["paper"]
            cells += [
                f"{figures['mean']:.4f} ± {figures['sd']:.4f}",
                "" if paper is None else f"{paper[part]:.4f}",
                _difference(figures.get("minus_sgd")),
            ]
        lines.append(cells)
    return table(["method", "learning rate", *heads], lines)


def without_paper(file: str) -> list[str]:
    """A table of configurations that the paper has not."""
    heads = [head for part in PARTS for head in (part, "minus SGD")]
    lines = []
    for row in read(file)["rows"]:
        cells = [_name(row), f"{row['learning_rate']:g}"]
        for part in PARTS:
            cells.append(f"{row[part]['mean']:.4f} ± {row[part]['sd']:.4f}")
            cells.append(_difference(row[part].get("minus_sgd")))
        lines.append(cells)
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
                    _short(_validation(report, row)),
                    _short(sum(precisions) / len(precisions)),
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
                cell = _cell(report, cutoff, group, ending)
                cells.append(f"{_short(cell['snm'])} {_with_interval(cell['s2m'][count])}")
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
                baseline = _cell(reports[snm], cutoff, group, " over pairs")["snm"]
                contenders = _cell(reports[s2m], cutoff, group, " over pairs")["s2m"]
                contender = contenders[str(count)]["contender"]
                words = _short(baseline), _short(contender), _signed(contender - baseline)
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


def _cell(report: dict[str, Any], cutoff: str, group: str, ending: str) -> dict[str, Any]:
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
