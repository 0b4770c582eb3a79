"""Evenhand, PECOS XR-Linear and napkinXC on the same files and features, with the same additions.

    python -m experiments.peers.compare --data FOLDER --preset PRESET.toml --trials FOLDER \\
        --pecos PECOS/bin/python --napkinxc NAPKINXC/bin/python --json RESULT.json

The folder holds train.txt and test.txt (plain or compressed) in the Extreme Classification format.
Every system has the same number of model settings and, for each, the same number of mixtures with
votes and handicap (`score_mixtures.py`), judged by the mean of the 16 cells, recall@5/10/25/50 of
head, torso, tail (over labels) and all pairs, on the validation part. What is best there is trained
on all of the training part and asked the test part. See README.md for the environments.
"""

import argparse
import dataclasses
import hashlib
import json
import os
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

from evenhand.build import build_training
from evenhand.config import build_config, read_settings
from evenhand.data import load_extreme
from evenhand.data.weighting import weight_features
from evenhand.files import read_json, write_json
from evenhand.models import BagEncoder, Retriever, features_of
from evenhand.runs import mine_and_fit_ranker
from evenhand.search import label_index
from evenhand.training.checkpoint import CheckpointManager
from evenhand.training.loop import train
from experiments.peers.score_mixtures import (
    STAGES,
    Judge,
    Mixer,
    Mixture,
    Scored,
    with_labels,
    with_worst_scores,
)

PEER = Path(__file__).with_name("peer.py")
NUM_CANDIDATES = 300  # of the model, a system's own best labels; all where labels are fewer than
MOST_LABELS_OF_OVR = 5000  # above it one-vs-rest would train for hours, and trials are fewer
ASKED = {"tune": "validation", "whole": "test"}  # what is asked, by what is trained on


def pecos(cost, other_cost, threshold, **tree):
    """Settings of PECOS: costs of right and wrong labels, the size of weights to drop, the tree."""
    costs = {"Cp": cost, "Cn": other_cost, "threshold": threshold}
    return "pecos", {"train": costs, "ask": {"beam_size": 50}, **({"tree": tree} if tree else {})}


def napkin(kind, cost, **more):
    return f"napkinxc-{kind}", {"train": {"liblinear_c": cost, **more}}


FLAT = {"max_leaf_size": 400, "nr_splits": 32}
ONE_LEVEL = {"max_leaf_size": 1000, "nr_splits": 2}
FEW = {  # settings to try where labels are few; ours: shares of the preset's steps, ranker costs
    "PECOS XR-Linear": [
        ("pecos", {}),
        pecos(1, 1, 0),
        pecos(0.3, 0.3, 0),
        pecos(1, 0.3, 0),
        pecos(3, 1, 0.02),
        pecos(1, 1, 0, **ONE_LEVEL),
        pecos(0.3, 0.3, 0, **ONE_LEVEL),
        pecos(1, 0.3, 0, **ONE_LEVEL),
    ],
    "napkinXC": [
        napkin("ovr", 1, weights_threshold=0),
        napkin("ovr", 3, weights_threshold=0),
        napkin("ovr", 10),
        napkin("ovr", 30),
        napkin("plt", 3, weights_threshold=0),
        napkin("plt", 10),
        napkin("plt", 30),
        napkin("plt", 10, ensemble=3),
    ],
    "Evenhand": [
        (share, factor)
        for share, factors in ((0.75, (0.5, 1, 2)), (1, (0.5, 1, 2)), (1.5, (0.5, 1)))
        for factor in factors
    ],
}
MANY = {
    "PECOS XR-Linear": [
        pecos(3, 1, 0.02, **FLAT),
        pecos(1, 1, 0.05, **FLAT),
        pecos(3, 0.3, 0.02, **FLAT),
    ],
    "napkinXC": [
        napkin("plt", 10),
        napkin("plt", 30),
        napkin("plt", 100),
    ],
    "Evenhand": [(0.75, 1), (1, 1), (1.5, 1)],
}
MINES_ALL = "Evenhand, all examples"  # stochastic negative mining: k' is the batch


def main():
    options = parse_arguments()
    bench = Bench(options)
    report = {
        "data": Path(options.data).name,
        "command": " ".join(["python -m experiments.peers.compare", *without_paths(sys.argv[1:])]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, busy with other work too",
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "systems": {},
    }
    for system, trials in bench.trials.items():
        tried = [bench.tried(system, *trial) for trial in trials]
        if options.tune_only:
            continue
        is_peer = system in bench.interpreters
        seeds = (0,) if is_peer else options.seeds
        stages = {}
        for stage in tried[0]["stages"]:
            # Rows have the model that is best with everything, so that they differ by what is
            # added and by nothing else; a peer as it comes has the one that is best so.
            judged_by = stage if is_peer and stage == "alone" else list(tried[0]["stages"])[-1]
            best = max(range(len(tried)), key=lambda at: tried[at]["stages"][judged_by]["mean"])
            mixture = Mixture(**tried[best]["stages"][stage]["mixture"])
            runs = {
                ASKED[side]: [
                    {"seed": seed, **bench.figures(*trials[best], side, (seed,), mixture)}
                    for seed in seeds
                ]
                for side in ASKED
            }
            if options.members > 1 and not is_peer:
                members = tuple(range(1, options.members + 1))
                runs["mean of models"] = bench.figures(*trials[best], "whole", members, mixture)
            stages[stage] = {"trial": best, "mixture": dataclasses.asdict(mixture), **runs}
            shown = [f"{name} {mean(runs[name]):.4f}" for name in ASKED.values()]
            bench.console.print(f"{system}, {stage}: {', '.join(shown)}")
        report["systems"][system] = {"trials": tried, "stages": stages}
        report["versions"].update(bench.versions)
    if options.json and not options.tune_only:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--preset", required=True)
    parser.add_argument("--trials", required=True, help="folder where all models' scores are kept")
    parser.add_argument("--pecos", help="interpreter of the environment with libpecos")
    parser.add_argument("--napkinxc", help="interpreter of the environment with napkinxc")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--members", type=int, default=1, help="models whose scores are averaged")
    parser.add_argument(
        "--validation-block", type=int, default=1, help="rows that stay together (%(default)s)"
    )
    parser.add_argument("--validation-fraction", type=float, default=0.1, help="(%(default)s)")
    parser.add_argument("--only", help="a system, to try its settings beside another process")
    parser.add_argument("--tune-only", action="store_true", help="only the validation trials")
    parser.add_argument("--json")
    return parser.parse_args()


def without_paths(arguments):
    """The command as it is to be read elsewhere: names of files and folders alone."""
    return [Path(argument).name if "/" in argument else argument for argument in arguments]


def mean(runs):
    return float(np.mean([run["mean"] for run in runs]))


class Bench:
    """The data of both sides, the settings to try, and every model's scores, kept on disk."""

    def __init__(self, options):
        self.console = Console(width=160)
        self.kept = Path(options.trials)
        self.kept.mkdir(parents=True, exist_ok=True)
        preset = read_settings(Path(options.preset))
        folder = Path(options.data)
        paths = [next(folder.glob(f"{part}.txt*")) for part in ("train", "test")]
        held_out = {
            "validation_fraction": options.validation_fraction,
            "validation_block": options.validation_block,
        }
        weighting = build_config(preset).data.weighting
        self.sides = {
            side: weight_features(load_extreme(*paths, name=folder.name, **kinds), weighting)
            for side, kinds in (("tune", held_out), ("whole", {"validation_fraction": 0.0}))
        }
        num_labels = self.sides["whole"].num_labels
        self.is_few = num_labels <= MOST_LABELS_OF_OVR
        self.num_candidates = num_labels if self.is_few else NUM_CANDIDATES
        self.judges, self.models, self.mixers, self.versions = {}, {}, {}, {}
        given = {"PECOS XR-Linear": options.pecos, "napkinXC": options.napkinxc}
        self.interpreters = {system: python for system, python in given.items() if python}
        self.trials = self.settings_to_try(preset)
        if options.only:
            self.trials = {options.only: self.trials[options.only]}

    def settings_to_try(self, preset):
        """For each system, (kind of model, settings) to try: as many for all."""
        grid = FEW if self.is_few else MANY
        found = {system: grid[system] for system in self.interpreters}
        found["Evenhand"] = [("ours", our_settings(preset, *pair)) for pair in grid["Evenhand"]]
        if preset["mining"]["method"] == "s2m":
            everything = {"num_hard_examples": preset["mining"]["batch_size"]}
            found[MINES_ALL] = [
                (kind, {**settings, "mining": {**settings["mining"], **everything}})
                for kind, settings in found["Evenhand"]
            ]
        return found

    def tried(self, system, kind, settings):
        """Settings with the best mixture of every stage on the validation part."""
        path = self.kept / f"{kind}-tried-{digest(kind, settings)}.json"
        if not path.is_file():
            mixer = self.mixer(kind, settings, "tune", (1,))
            has_ranker = mixer.scored.ranker_scores is not None
            stages = {}
            for stage, weights in STAGES.items():
                if stage == "ranker" and not has_ranker:
                    continue
                mixture, figures, means = mixer.best(weights, may_take_logs=kind != "ours")
                stages[stage] = {
                    "mixture": dataclasses.asdict(mixture),
                    "mean": figures["mean"],
                    "precision@1": figures["precision@1"],
                    "means_tried": [round(value, 4) for value in means],
                }
            shown = {"kind": kind, "settings": settings, **self.seconds(kind, settings)}
            write_json(path, {**shown, "stages": stages})
        tried = read_json(path)
        means = {stage: round(found["mean"], 4) for stage, found in tried["stages"].items()}
        varied = settings if kind != "ours" else [settings["training"], settings.get("ranker")]
        self.console.print(f"{system} {kind} {varied}: {means}")
        return tried

    def figures(self, kind, settings, side, seeds, mixture):
        return self.mixer(kind, settings, side, seeds).figures(mixture)

    def mixer(self, kind, settings, side, seeds):
        """Scores of one model, or of the mean of models with these seeds, ready to be mixed."""
        path = self.path(kind, settings, side, seeds)
        if path in self.mixers:
            return self.mixers[path]
        if not path.is_file():
            with tempfile.TemporaryDirectory(dir=self.kept) as place:
                out = Path(place) / "scores.npz"
                if kind == "ours":
                    np.savez(out, **self.our_scores(settings, side, seeds))
                else:
                    self.run_peer(kind, settings, side, Path(place), out)
                out.rename(path)
        arrays = np.load(path)
        judge = self.judge(side)
        ids, scores = torch.from_numpy(arrays["ids"]).long(), torch.from_numpy(arrays["scores"])
        if kind == "ours":
            ranker_scores = arrays.get("ranker_scores")
            if ranker_scores is not None:
                ranker_scores = torch.from_numpy(ranker_scores)
            num_ranked = build_config(settings).ranker.num_candidates
            scored = Scored(ids, scores, ranker_scores, num_ranked)
        else:
            scored = with_worst_scores(ids, scores, judge.most_voted())
            self.versions[kind.split("-")[0]] = str(arrays["version"])
        self.mixers = {path: Mixer(scored, judge)}  # one at a time: they are large
        return self.mixers[path]

    def judge(self, side):
        if side not in self.judges:
            self.judges[side] = Judge(self.sides[side], ASKED[side])
        return self.judges[side]

    def path(self, kind, settings, side, seeds):
        about = [kind, settings, side, ASKED[side]]
        if kind == "ours":
            about.append(seeds)
        return self.kept / f"{kind}-{side}-{digest(*about)}.npz"

    def seconds(self, kind, settings):
        arrays = np.load(self.path(kind, settings, "tune", (1,)))
        return {name: round(float(arrays[name]), 2) for name in arrays if "seconds" in name}

    # --- one model --------------------------------------------------------------------------------

    def run_peer(self, kind, settings, side, place, out):
        dataset = self.sides[side]
        for name in ("train", ASKED[side]):
            part = dataset.parts[name]
            ones = np.ones(len(part.positives.ids), np.float32)
            features = part.features.values, part.features.ids, part.features.offsets
            labels = ones, part.positives.ids, part.positives.offsets
            shapes = (len(part), dataset.num_features), (len(part), dataset.num_labels)
            for letter, matrix, shape in zip("xy", (features, labels), shapes, strict=True):
                matrix = scipy.sparse.csr_matrix(matrix, shape=shape)
                scipy.sparse.save_npz(place / f"{name}.{letter}.npz", matrix)
        python = next(
            python
            for system, python in self.interpreters.items()
            if system.lower().startswith(kind.split("-")[0])
        )
        command = [
            python, str(PEER), kind, "--fit", str(place / "train"),
            "--ask", str(place / ASKED[side]), "--out", str(out),
            "--settings", json.dumps(settings), "--num-results", str(self.num_candidates),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{kind} {settings} failed:\n{done.stderr[-2000:]}")

    @torch.no_grad()
    def our_scores(self, settings, side, seeds):
        """Candidates, their scores by the model and by the ranker, and the seconds taken."""
        dataset = self.sides[side]
        trained = [self.trained_model(settings, side, seed) for seed in seeds]
        models = [model for model, _ in trained]
        model = average_models(models) if len(models) > 1 else models[0]
        config = build_config(settings)
        began = time.perf_counter()
        ranker = mine_and_fit_ranker(model, dataset, config, console=Console(quiet=True))
        ranker_seconds = time.perf_counter() - began if ranker is not None else 0.0
        began = time.perf_counter()
        part = dataset.parts[ASKED[side]]
        row_ids = np.arange(len(part))
        queries = model.query_vectors(features_of(part, row_ids, device=torch.device("cpu")))
        index = label_index(model)  # the settings have no handicap
        ids = index.search(queries, self.num_candidates).label_ids
        ids = with_labels(ids, self.judge(side).most_voted())
        arrays = {"ids": ids.numpy().astype(np.int32)}
        arrays["scores"] = index.scores_of(queries, ids).numpy()
        if ranker is not None:
            arrays["ranker_scores"] = ranker.scores(part.features, ids.numpy())
        return {
            **arrays,
            "train_seconds": sum(seconds for _, seconds in trained) + ranker_seconds,
            "ranker_seconds": ranker_seconds,
            "ask_seconds": time.perf_counter() - began,
        }

    def trained_model(self, settings, side, seed):
        """A model and the seconds it took; settings that differ in the ranker alone share it."""
        settings = {**settings, "training": {**settings["training"], "seed": seed}, "ranker": {}}
        key = digest(settings, side)
        if key not in self.models:
            dataset = self.sides[side]
            built = build_training(build_config(settings), dataset, torch.device("cpu"))
            began = time.perf_counter()
            with tempfile.TemporaryDirectory() as place, torch.enable_grad():
                train(
                    built.training,
                    built.plan,
                    built.choose_step().step,
                    metrics_path=Path(place) / "metrics.jsonl",
                    keeper=CheckpointManager(Path(place) / "checkpoints"),
                )
            built.training.feed.close()
            self.models[key] = built.training.model, time.perf_counter() - began
        return self.models[key]


def average_models(models):
    """One model whose scores are the mean of the models': dot products of bags, of one scale."""
    first = models[0]
    table = torch.cat([model.encoder.weight for model in models], dim=1)  # (F, sum of D)
    whole = Retriever(
        BagEncoder(*table.shape),
        len(first.label_table),
        table.shape[1],
        is_cosine=False,
        scale=first.scale,
        has_label_bias=first.label_bias is not None,
    )
    whole.encoder.weight.data = table
    whole.label_table.data = torch.cat([m.label_table for m in models], dim=1) / len(models)
    if first.label_bias is not None:
        whole.label_bias.data = torch.stack([m.label_bias.data for m in models]).mean(0)
    return whole


def our_settings(preset, share, factor):
    """The preset with a share of its steps, and the costs of its ranker times a factor.

    Its votes, handicap and weight of the ranker are left out: a mixture has its own.
    """
    config = build_config(preset)
    training = {**preset["training"], "num_steps": round(share * config.training.num_steps)}
    settings = {**preset, "training": training, "search": {}}
    if config.ranker.num_mined_labels:
        costs = {
            name: round(factor * getattr(config.ranker, name), 6)
            for name in ("positive_cost", "negative_cost")
        }
        settings["ranker"] = {**preset["ranker"], **costs, "weight": 1.0}
    return settings


def digest(*about):
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main())
