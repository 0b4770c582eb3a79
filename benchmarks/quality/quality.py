"""Evenhand, PECOS XR-Linear and napkinXC on the same files: recall by group, P@1, times.

    python benchmarks/quality/quality.py --data FOLDER --preset PRESET.toml \\
        --pecos PECOS/bin/python --napkinxc NAPKINXC/bin/python --json RESULT.json

The folder holds train.txt and test.txt (plain or compressed) in the Extreme Classification format.
Each side has six trials (four where labels are many): trained on the training part without its
validation rows, judged by the mean of the 16 cells, recall@5/10/25/50 of head, torso, tail (over
labels) and all pairs, on the validation part. The best setting of each is trained on all of the
training part and asked the test part once. A peer whose interpreter is not given is left out.
--validation-block N makes the validation part of whole blocks of N rows, for files that list
related documents one after the other. See README.md for the environments.
"""

import argparse
import hashlib
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import scipy.sparse
import torch
from rich.console import Console
from rich.table import Table

from evenhand.averaging import averaged_model
from evenhand.building import build_training
from evenhand.config import build_config, read_settings
from evenhand.data import load_extreme
from evenhand.data.dataset import padded_rows
from evenhand.data.frequency import frequency_groups_by_labels, frequency_groups_by_pairs
from evenhand.data.weighting import weighted
from evenhand.files import read_json, write_json
from evenhand.metrics import pair_ranks
from evenhand.pipeline import evaluate_model
from evenhand.ranking import fitted_ranker
from evenhand.training.loop import Places, train

CUTOFFS = (5, 10, 25, 50)
GROUPINGS = {"labels": frequency_groups_by_labels, "pairs": frequency_groups_by_pairs}
SHARES = (0.1, 0.2, 0.4, 0.7, 1.0)  # of the steps, for the curve of recall over time
VARIED = ("training", "search", "ranker")  # sections in which our trials differ
PEER = Path(__file__).with_name("peer.py")

WIDE = {"ask": {"beam_size": 50}}
FLAT = {**WIDE, "tree": {"max_leaf_size": 400, "nr_splits": 32}}
PECOS_FEW = [
    {},
    {**WIDE, "train": {"threshold": 0.0}},
    {**WIDE, "train": {"Cp": 0.3, "Cn": 0.3, "threshold": 0.0}},
    {**WIDE, "train": {"Cp": 3, "Cn": 3}},
    {**WIDE, "tree": {"max_leaf_size": 1000, "nr_splits": 2}},
    {"train": {"solver_type": "L2R_LR_DUAL", "threshold": 0.05},
     "ask": {"beam_size": 50, "post_processor": "sigmoid"}},
]  # fmt: skip
NAPKIN_FEW = [  # one-vs-rest where the labels are few enough
    ("napkinxc-ovr", {}),
    ("napkinxc-ovr", {"train": {"liblinear_c": 3, "weights_threshold": 0}}),
    ("napkinxc-ovr", {"train": {"liblinear_c": 30}}),
    ("napkinxc-plt", {}),
    ("napkinxc-plt", {"train": {"liblinear_c": 30}}),
    ("napkinxc-plt", {"train": {"ensemble": 3}}),
]
PECOS_MANY = [{}, WIDE, FLAT, {**FLAT, "train": {"threshold": 0.05}}]
NAPKIN_MANY = [
    ("napkinxc-plt", {}),
    ("napkinxc-plt", {"train": {"liblinear_c": 3}}),
    ("napkinxc-plt", {"train": {"liblinear_c": 30}}),
    ("napkinxc-plt", {"train": {"liblinear_c": 100}}),
]
FACTORS_FEW, FACTORS_MANY = (0.6, 1.0, 1.5), (1.0, 1.5)  # of a weight, in our trials
MOST_LABELS_OF_OVR = 5000


def main():
    options = parsed()
    console = Console(width=160)
    folder = Path(options.data)
    paths = [next(folder.glob(f"{part}.txt*")) for part in ("train", "test")]
    sides = {
        "tune": load_extreme(
            *paths,
            name=folder.name,
            validation_fraction=options.validation_fraction,
            validation_block=options.validation_block,
        ),
        "whole": load_extreme(*paths, name=folder.name, validation_fraction=0.0),
    }
    with tempfile.TemporaryDirectory() as place:
        write_matrices(sides, Path(place))
        trials = systems(options, sides["whole"].num_labels)
        (num_trials,) = {len(own) for own in trials.values()}  # the same for all
        tried = {
            system: tried_settings(system, own, sides, Path(place), console, kept=options.trials)
            for system, own in trials.items()
        }
        if options.tune_only:
            return
        results = {
            system: best_of(trials[system], tried[system], sides, Path(place)) for system in trials
        }
        results["Evenhand"]["curve"] = curve(results["Evenhand"]["settings"], sides["tune"])
    report = {
        "data": folder.name,
        "command": f"quality.py --data {folder.name} --preset {Path(options.preset).name} "
        f"--members {options.members} --validation-block {options.validation_block} "
        f"--validation-fraction {options.validation_fraction}",
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "num_trials": num_trials,
        "validation_fraction": options.validation_fraction,
        "validation_block": options.validation_block,
        "systems": results,
    }
    for grouping in GROUPINGS:
        console.print(printed(report, grouping))
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--preset", required=True)
    parser.add_argument("--members", type=int, default=2, help="models whose scores are averaged")
    parser.add_argument("--pecos", help="interpreter of the environment with libpecos")
    parser.add_argument("--napkinxc", help="interpreter of the environment with napkinxc")
    parser.add_argument(
        "--validation-block", type=int, default=1, help="rows that stay together (%(default)s)"
    )
    parser.add_argument("--validation-fraction", type=float, default=0.1, help="(%(default)s)")
    parser.add_argument("--tune-only", action="store_true", help="only the trials, for --trials")
    parser.add_argument("--trials", help="folder where trials are kept, to go on after a stop")
    parser.add_argument("--json")
    return parser.parse_args()


def systems(options, num_labels):
    """For each system, functions (side, part asked) -> (ranks, first hits, seconds)."""
    found = {}
    are_few = num_labels <= MOST_LABELS_OF_OVR
    if options.pecos:
        trials = PECOS_FEW if are_few else PECOS_MANY
        found["PECOS XR-Linear"] = [("peer", options.pecos, "pecos", trial) for trial in trials]
    if options.napkinxc:
        trials = NAPKIN_FEW if are_few else NAPKIN_MANY
        found["napkinXC"] = [("peer", options.napkinxc, *trial) for trial in trials]
    trials = our_trials(
        read_settings(Path(options.preset)), FACTORS_FEW if are_few else FACTORS_MANY
    )
    found["Evenhand"] = [("ours", trial, options.members) for trial in trials]
    return found


def our_trials(settings, factors):
    """The preset with two numbers of steps and some weights: of the ranker, or the neighbours."""
    has_ranker = settings.get("ranker", {}).get("num_mined_labels", 0) > 0
    section, name = ("ranker", "weight") if has_ranker else ("search", "neighbour_weight")
    config = build_config(settings)
    weight = getattr(getattr(config, section), name)
    return [
        {
            **settings,
            "training": {
                **settings["training"],
                "num_steps": round(share * config.training.num_steps),
            },
            section: {**settings[section], name: round(factor * weight, 6)},
        }
        for share in (0.75, 1.0)
        for factor in factors
    ]


def tried_settings(system, trials, sides, place, console, *, kept):
    tried = []
    for trial in trials:
        path = kept and Path(kept) / f"{system}-{digest_of(trial, sides)}.json"
        if path and path.is_file():
            figures = read_json(path)
        else:
            figures = run(trial, sides["tune"], "tune", "validation", place, members=1)
            if path:
                write_json(path, figures)
        tried.append({"settings": shown(trial), **figures})
        told = shown(trial)
        if trial[0] != "peer":
            told = [told[section] for section in VARIED if section in told]
        console.print(f"{system}: {told}: {mean_of_cells(figures):.4f}")
    return tried


def best_of(trials, tried, sides, place):
    """The setting that validation prefers, trained on all training rows, on the test part."""
    best = max(range(len(tried)), key=lambda number: mean_of_cells(tried[number]))
    final = run(trials[best], sides["whole"], "whole", "test", place, members=None)
    return {"settings": shown(trials[best]), **final, "trials": tried}


def digest_of(trial, sides):
    """What the figures of a trial depend on, code and versions aside."""
    parts = sides["tune"].parts
    sums = {name: [len(part), int(part.positives.ids.sum())] for name, part in parts.items()}
    about = json.dumps([shown(trial), sums], sort_keys=True)
    return hashlib.sha256(about.encode()).hexdigest()[:12]


def curve(settings, dataset):
    """Recall on the validation part after ever more training: seconds and figures."""
    steps = settings["training"]["num_steps"]
    points = []
    for share in SHARES:
        training = {**settings["training"], "num_steps": round(share * steps)}
        found = run_ours({**settings, "training": training}, dataset, "validation", members=1)
        cells = cells_of(found["ranks"], dataset, "validation")
        points.append({"train_seconds": found["train_seconds"], **cells})
    return points


def run(trial, dataset, side, part_name, place, *, members):
    kind, *rest = trial
    if kind == "peer":
        found = run_peer(*rest, place / side, part_name)
    else:
        settings, wanted = rest
        found = run_ours(settings, dataset, part_name, members=members or wanted)
    return found | cells_of(found.pop("ranks"), dataset, part_name)


def shown(trial):
    return {"system": trial[2], **trial[3]} if trial[0] == "peer" else trial[1]


# --- one model ------------------------------------------------------------------------------------


def write_matrices(sides, place):
    for side, dataset in sides.items():
        for name, part in dataset.parts.items():
            (place / side).mkdir(exist_ok=True)
            shapes = dataset.num_features, dataset.num_labels
            for kind, rows, width in zip(
                "xy", (part.features, part.positives), shapes, strict=True
            ):
                values = np.ones(len(rows.ids), np.float32) if rows.values is None else rows.values
                matrix = (values, rows.ids, rows.offsets)
                scipy.sparse.save_npz(
                    place / side / f"{name}.{kind}.npz",
                    scipy.sparse.csr_matrix(matrix, shape=(len(rows), width)),
                )


def run_peer(python, system, settings, place, part_name):
    out = place / "found.npy"
    command = [
        python, str(PEER), system, "--fit", str(place / "train"), "--ask", str(place / part_name),
        "--out", str(out), "--settings", json.dumps(settings),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{system} {settings} failed:\n{done.stderr[-2000:]}")
    times = json.loads(done.stdout.strip().splitlines()[-1])
    return {
        "train_seconds": times["train_seconds"],
        "ask_seconds": round(sum(times["ask_seconds"]), 2),
        "ranks": torch.from_numpy(np.load(out)),
    }


def run_ours(settings, dataset, part_name, *, members):
    config = build_config(settings)
    dataset = weighted(dataset, config.data.weighting)
    trained = [trained_model(settings, dataset, seed) for seed in range(1, members + 1)]
    models = [model for model, _ in trained]
    model = averaged_model(models) if members > 1 else models[0]
    ranker, ranker_seconds = ranker_of(model, settings, dataset, members=members)
    began = time.perf_counter()
    outcome = evaluate_model(model, dataset, part_name, config, ranker=ranker)
    return {
        "train_seconds": round(sum(seconds for _, seconds in trained) + ranker_seconds, 2),
        "ranker_seconds": round(ranker_seconds, 2),
        "ask_seconds": round(time.perf_counter() - began, 2),
        "members": members,
        "ranks": outcome,
    }


# Trials that differ in the search, or in the weight of the ranker, share models and rankers, and
# their seconds.
MODELS, RANKERS = {}, {}


def key_of(settings, dataset, **more):
    """What a model, or a ranker, is made from."""
    return json.dumps({**settings, "search": {}, "rows": len(dataset.parts["train"]), **more})


def trained_model(settings, dataset, seed):
    settings = {**settings, "training": {**settings["training"], "seed": seed}, "ranker": {}}
    key = key_of(settings, dataset)
    if key in MODELS:
        return MODELS[key]
    built = build_training(build_config(settings), dataset, torch.device("cpu"))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        train(
            built.training,
            built.plan,
            sampler=built.sampler,
            loss_fn=built.loss_fn,
            places=Places(Path(place) / "metrics.jsonl", Path(place) / "checkpoints"),
        )
    built.training.feed.close()
    MODELS[key] = built.training.model, time.perf_counter() - began
    return MODELS[key]


def ranker_of(model, settings, dataset, *, members):
    """The ranker of a model, None where the settings have none, and the seconds it took."""
    fitted_by = {**settings.get("ranker", {}), "weight": 0.0, "num_candidates": 1}
    key = key_of({**settings, "ranker": fitted_by}, dataset, members=members)
    if key not in RANKERS:
        began = time.perf_counter()
        ranker = fitted_ranker(model, dataset, build_config(settings), console=Console(quiet=True))
        RANKERS[key] = ranker, 0.0 if ranker is None else time.perf_counter() - began
    return RANKERS[key]


# --- figures --------------------------------------------------------------------------------------


def cells_of(found, dataset, part_name):
    """Recall in every cell, by both definitions of head, torso and tail, and P@1."""
    positives = dataset.parts[part_name].positives
    if isinstance(found, torch.Tensor):  # (Q, R) label ids
        wanted = torch.from_numpy(padded_rows(positives, np.arange(len(positives))))
        table = pair_ranks(found, wanted)  # (Q, P)
        ranks = table[table >= 0].numpy()
    else:
        ranks = np.asarray(found.ranks)
    queries = np.repeat(np.arange(len(positives)), positives.lengths())
    is_first = np.zeros(len(positives), bool)
    is_first[queries[ranks == 1]] = True
    cells = {}
    for name, groups_fn in GROUPINGS.items():
        groups = groups_fn(dataset.label_counts())
        group_ids = groups.ids[positives.ids]
        for cutoff in CUTOFFS:
            is_hit = (ranks > 0) & (ranks <= cutoff)
            row = {
                group: float(is_hit[group_ids == number].mean())
                for number, group in enumerate(groups.names)
            }
            cells.setdefault(name, {})[str(cutoff)] = {**row, "full": float(is_hit.mean())}
    return {"precision@1": float(is_first[positives.lengths() > 0].mean()), "recall": cells}


def mean_of_cells(figures):
    rows = figures["recall"]["labels"].values()
    return float(np.mean([list(row.values()) for row in rows]))


def printed(report, grouping):
    table = Table(title=f"{report['data']}: recall over pairs, head / torso / tail over {grouping}")
    table.add_column("system")
    for name in ("train s", "ask s", "P@1", *(f"recall@{cutoff}" for cutoff in CUTOFFS)):
        table.add_column(name, justify="right")
    for system, row in report["systems"].items():
        cells = [
            " / ".join(f"{value:.3f}".lstrip("0") for value in row["recall"][grouping][c].values())
            for c in map(str, CUTOFFS)
        ]
        times = f"{row['train_seconds']:.1f}", f"{row['ask_seconds']:.1f}"
        table.add_row(system, *times, f"{row['precision@1']:.3f}", *cells)
    return table


if __name__ == "__main__":
    sys.exit(main())
