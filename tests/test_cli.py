"""The command as a user meets it: files in, run folders and words out."""

import dataclasses
import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import numpy as np
import pytest
import safetensors.torch
import torch

import small
from evenhand.cli import EPILOG, main
from evenhand.cli.options import choose_device
from evenhand.config import SAMPLERS, to_toml
from evenhand.data import Groups, Strings, open_dataset, save_dataset, take_rows
from evenhand.methods import METHODS
from evenhand.version import __version__
from small import fruits_of, run_main, settings_file

QUICK = {"training__num_steps": 20}


def test_a_device_with_a_number_becomes_the_current_one(monkeypatch):
    """Or kernels and streams would go to the first."""
    chosen = []
    monkeypatch.setattr(torch, "empty", lambda *size, device: None)  # as if there were two
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    device = choose_device("cuda:1")
    assert chosen == [device] == [torch.device("cuda:1")]
    choose_device("cpu")
    assert len(chosen) == 1


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a data set and two evaluated runs, as a user would have after two commands."""
    folder = tmp_path_factory.mktemp("cli")
    save_dataset(small.text_dataset(), folder / "data")
    settings_file(folder / "a.toml", "data", **QUICK)
    for name, words in {"first": [], "second": ["--method", "snm", "--seed", "3"]}.items():
        answer = small.run(folder, "train", "a.toml", "--run", f"runs/{name}", *words)
        assert answer.code == 0, answer.err
        (folder / f"{name}.out").write_text(answer.out, "utf-8")
    return folder


@pytest.fixture
def user(home, monkeypatch, capsys):
    """Runs a command there that must succeed, and returns what it prints."""
    monkeypatch.chdir(home)

    def user(*arguments):
        answer = run_main(capsys, *arguments)
        assert answer.code == 0, answer.err
        assert not answer.err
        return answer.out

    return user


# --- train ----------------------------------------------------------------------------------------


def test_a_run_folder_holds_all_that_was_promised(home):
    files = set(small.bytes_of(home / "runs/first"))
    stores = ["model/weights", "checkpoints/step-00000015", "checkpoints/step-00000020"]
    assert files == {
        "config.toml", "run.json", "metrics.jsonl", "model/query_data.safetensors",
        *(f"{store}/manifest.json" for store in stores),
        *(f"{store}/rank-0-file-0.safetensors" for store in stores),
        "evaluation/test/outcome.npz", "evaluation/test/scores.json",
    }  # fmt: skip


def test_training_shows_the_bar_the_table_and_where_the_run_is(home):
    out = (home / "first.out").read_text("utf-8")
    assert "training s2m-annealed" in out
    assert "20/20" in out or "20…" in out
    assert "pair recall on the test part" in out
    assert re.search(r"│ all +│ +150 │ +0\.\d{4} │ +0\.\d{4} │", out)
    assert "worst 3 region" in out
    assert out.rstrip().endswith("run folder: runs/first")


def test_the_run_says_what_was_run_on_what_and_where(home):
    about = json.loads((home / "runs/second/run.json").read_text("utf-8"))
    expected = {"name": "second", "method": "snm", "seed": 3, "is_complete": True, "num_steps": 20}
    assert {key: about[key] for key in expected} == expected
    assert about["best_step"] in (10, 20)
    assert about["versions"]["evenhand"] == __version__
    assert set(about["versions"]) == {"evenhand", "python", "torch", "numpy"}
    assert about["device"]
    dataset = open_dataset(home / "data")
    assert about["dataset"]["fingerprint"] == dataset.fingerprint
    assert about["dataset"]["num_queries"] == small.SIZES
    assert about["training_seconds"] >= 0
    assert about["milliseconds_a_step"] > 0


def test_the_saved_settings_begin_with_the_command_that_repeats_the_run(user, home):
    text = (home / "runs/first/config.toml").read_text("utf-8")
    first_line = text.splitlines()[0]
    assert first_line == "# evenhand train runs/first/config.toml"
    command = shlex.split(first_line.removeprefix("# "))
    user(*command[1:], "--run", "runs/repeated")
    assert fruits_of(home / "runs/repeated") == fruits_of(home / "runs/first")
    repeated = (home / "runs/repeated/config.toml").read_text("utf-8")
    assert repeated.splitlines()[1:] == text.splitlines()[1:]


def test_every_setting_is_written_out_and_flags_win_over_the_file(home):
    settings = tomllib.loads((home / "runs/second/config.toml").read_text("utf-8"))
    assert settings["mining"]["method"] == "snm"  # a flag
    assert settings["training"]["seed"] == 3
    assert settings["training"]["num_steps"] == 20  # the file
    assert settings["loss"] == {  # defaults
        "name": "contrastive", "margin": 0.3, "power": 1.0, "margin_loss": "hinge", "log_q": False,
    }  # fmt: skip


def test_each_flag_reaches_its_setting_and_set_has_the_last_word(user, home, tmp_path):
    user(
        "train", "a.toml", "--run", tmp_path / "run", "--data", home / "data", "--method", "s2m",
        "--hard-labels", 3, "--hard-examples", 4, "--steps", 2, "--learning-rate", 1,
        "--seed", 9, "--set", "training.seed=10", "--set", "loss.margin=0",
        "--device", "cpu",
    )  # fmt: skip
    settings = tomllib.loads((tmp_path / "run/config.toml").read_text("utf-8"))
    assert settings["data"]["dataset"] == str(home / "data")
    mining, training = settings["mining"], settings["training"]
    assert (mining["method"], mining["num_hard_labels"], mining["num_hard_examples"]) == (
        "s2m", 3, 4,
    )  # fmt: skip
    assert (training["num_steps"], training["learning_rate"], training["seed"]) == (2, 1.0, 10)
    assert settings["loss"]["margin"] == 0.0


def test_without_a_folder_the_run_is_named_after_data_method_and_seed(user, home, tmp_path):
    user("train", "a.toml", "--steps", 2, "--method", "sgd", "--seed", 5)
    assert (home / "runs/small-sgd-seed5/model/weights").is_dir()


@pytest.mark.parametrize("name", ["2024", "true", "a b", "it's [b]", "1e3"])
def test_a_folder_may_have_any_name(user, home, tmp_path, monkeypatch, name):
    """Also one that would be a number, a truth or markup elsewhere."""
    shutil.copytree(home / "data", tmp_path / name)
    settings_file(tmp_path / "a.toml", "unused", **QUICK)
    monkeypatch.chdir(tmp_path)
    out = user("train", "a.toml", "--data", name, "--run", f"runs/{name}", "--steps", 2)
    assert f"run folder: runs/{name}\n" in out
    assert user("evaluate", f"runs/{name}").rstrip().endswith(f"runs/{name}/evaluation/test")
    first_line = (tmp_path / "runs" / name / "config.toml").read_text("utf-8").splitlines()[0]
    command = shlex.split(first_line.removeprefix("# "))
    assert command == ["evenhand", "train", f"runs/{name}/config.toml"]


OF_METHODS = {  # what a method needs beside its name
    "ranked-range": {"risk__num_dropped": 2},
    "even-range": {"risk__num_dropped": 2},
    "group-dro": {"risk__group": "region"},
    "max": {"training__num_steps": 300, "training__log_every": 40},  # one example a step
}
VARIANTS = {
    **{
        f"method {method}": {"mining__method": method, **OF_METHODS.get(method, {})}
        for method in METHODS
    },
    **{
        f"sampler {sampler}": {
            "mining__sampler": sampler,
            "mining__num_sampled_labels": 50,
            "mining__in_batch_share": 0.7,
        }
        for sampler in SAMPLERS
    },
    "a sample for each example": {"mining__for_each_example": True},
    "whole queries": {"mining__whole_queries": True},
    "the paper's mask": {"mining__masks_all_positives": False},
    "softmax with log q": {"loss__name": "softmax", "loss__log_q": True, "model__scale": 5},
    "mixed softmax with log q": {
        "loss__name": "softmax",
        "loss__log_q": True,
        "mining__sampler": "mixed",
        "mining__in_batch_share": 0.85,
    },
    "bowl": {"loss__name": "bowl", "loss__margin_loss": "logistic"},
    "crammer-singer": {"loss__name": "crammer-singer"},
    "averaged": {"loss__name": "averaged", "loss__margin_loss": "squared-hinge"},
    "dot with bias": {
        "loss__name": "softmax",
        "model__similarity": "dot",
        "model__label_bias": True,
    },
    "row-adagrad": {"training__optimizer": "row-adagrad", "training__learning_rate": 0.2},
    "cosine, warmed up, clipped": {
        "training__learning_rate_shape": "cosine",
        "training__warmup_steps": 3,
        "training__max_gradient_norm": 0.5,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_method_sampler_loss_and_optimizer_learns(tmp_path, home, variant):
    """Untrained, a model finds 1 of 6 labels among its first 10."""
    changes = {"training__num_steps": 40, **VARIANTS[variant]}
    changes["training__evaluate_every"] = changes["training__num_steps"]
    path = settings_file(tmp_path / "a.toml", home / "data", **changes)
    answer = small.run(tmp_path, "train", path, "--run", "run")
    assert answer.code == 0, answer.err
    lines = (tmp_path / "run/metrics.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert rows[-1]["validation"]["recall@10"] > 0.4


def test_a_perceptron_learns_from_dense_features(tmp_path):
    save_dataset(small.dense_dataset(), tmp_path / "data")
    changes = {"training__num_steps": 40, "model__hidden_widths": [24]}
    settings_file(tmp_path / "a.toml", "data", **changes)
    assert small.run(tmp_path, "train", "a.toml", "--run", "run").code == 0
    weights = safetensors.torch.load_file(small.weights_file(tmp_path / "run"))
    assert weights["encoder.layers.0.weight"].shape == (24, 12)
    rows = (tmp_path / "run/metrics.jsonl").read_text("utf-8").splitlines()
    assert json.loads(rows[-1])["validation"]["recall@10"] > 0.6


# --- the readers ----------------------------------------------------------------------------------


def test_evaluate_writes_and_prints_the_scores_of_a_part(user, home):
    out = user("evaluate", "runs/second", "--part", "validation")
    place = home / "runs/second/evaluation/validation"
    assert "pair recall on the validation part" in out
    assert "written to runs/second/evaluation/validation" in out
    scores = json.loads((place / "scores.json").read_text("utf-8"))
    (score,) = [s for s in scores if (s["metric"], s["group"]) == ("recall@10", "all")]
    assert f"{score['value']:.4f}" in out
    assert (place / "outcome.npz").is_file()
    shutil.rmtree(place)


def test_evaluating_again_changes_nothing(user, home):
    before = fruits_of(home / "runs/first")
    user("evaluate", "runs/first")
    assert fruits_of(home / "runs/first") == before


def recall(run, metric):
    scores = json.loads((run / "evaluation/test/scores.json").read_text("utf-8"))
    (score,) = [s for s in scores if (s["metric"], s["group"]) == (metric, "all")]
    return score["value"]


def test_the_difference_is_what_the_later_run_has_more_than_the_first(user, home, tmp_path):
    run = tmp_path / "untrained"
    user("train", "a.toml", "--run", run, "--steps", 1, "--learning-rate", 1e-9)
    out = user("compare", "runs/first", run, "--metric", "recall@5")
    assert "recall@5: untrained minus first" in out
    _, differences = out.split("untrained minus first")
    (row,) = [line for line in differences.splitlines() if "│ all " in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    first, later = recall(home / "runs/first", "recall@5"), recall(run, "recall@5")
    assert later < first
    assert cells[2:5] == [f"{first:.4f}", f"{later:.4f}", f"{later - first:+.4f}"]
    assert "worst 3 styles" in differences
    assert "worst style" in differences  # and no tenth of so few
    assert "worst tenth" not in differences
    note = "in the differences they are those of first on the validation part, the same for all"
    assert note in out


def test_the_help_sets_every_method_apart_from_what_it_does():
    lines = [line.split() for line in EPILOG.splitlines()]
    for name, method in METHODS.items():
        assert [name, *method.summary.split()] in lines


def test_compare_works_where_no_group_is_large_enough_to_judge(user, tmp_path):
    dataset, rows = small.text_dataset(), np.arange(12)
    part = dataset.parts["test"]
    few = dataclasses.replace(
        part,
        features=take_rows(part.features, rows),
        positives=take_rows(part.positives, rows),
        groups={"style": Groups(part.groups["style"].ids[:12], part.groups["style"].names)},
        texts=Strings.pack(part.texts[query] for query in rows),
    )
    save_dataset(small.with_parts(dataset, test=few), tmp_path / "data")
    for seed, name in enumerate(("one", "two")):
        words = ("--data", tmp_path / "data", "--run", tmp_path / name, "--steps", 2)
        user("train", "a.toml", *words, "--seed", seed)
    out = user("compare", tmp_path / "one", tmp_path / "two")
    assert "two minus one" in out
    assert "worst 3" not in out


def test_the_report_goes_into_the_first_run_unless_told(user, home, tmp_path):
    out = user("report", "runs/first", "runs/second", "--out", tmp_path / "page.html")
    assert str(tmp_path / "page.html") in out
    assert "report: runs/second/report.html" in user("report", "runs/second")
    (home / "runs/second/report.html").unlink()


def test_search_prints_the_labels_found_best_first(user, home):
    names = list(open_dataset(home / "data").label_names)
    out = user("search", "runs/first", names[7], names[30], "--results", "4")
    first, second = out.split("“")[1:]
    assert first.startswith(f"{names[7]}”")
    assert second.startswith(f"{names[30]}”")
    for block in (first, second):
        rows = re.findall(r"^ *(-?\d\.\d{3}) +(\S+) *$", block, flags=re.MULTILINE)
        assert len(rows) == 4
        scores = [float(score) for score, _ in rows]
        assert scores == sorted(scores, reverse=True)
        assert all(name in names for _, name in rows)
    assert names[7] in first.split("”", 1)[1]


def test_labels_and_queries_are_printed_as_they_are(user, tmp_path, home):
    """Square brackets and colons mean something to the library that prints tables."""
    dataset = small.text_dataset()
    strange = ["[/b]", "[bold]x[/]", ":smile: y", "[link=z]w"]
    names = [strange[label % 4] + str(label) for label in range(small.NUM_LABELS)]
    save_dataset(
        dataclasses.replace(dataset, label_names=Strings.pack(names), name="[red]"),
        tmp_path / "data",
    )
    assert "[red]" in user("data", "show", tmp_path / "data")
    user("train", "a.toml", "--data", tmp_path / "data", "--run", tmp_path / "run", "--steps", 2)
    out = user("search", tmp_path / "run", "[/i]:heart:", "--results", "60")
    assert "“[/i]:heart:”" in out
    for name in names:
        assert name in out


# --- data -----------------------------------------------------------------------------------------


def test_data_extreme_makes_a_data_set_to_train_on(user, home, tmp_path):
    lines = [f"{n % 5} {n % 5}:1 {5 + n * n % 20}:0.5\n" for n in range(60)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.txt").write_text("".join(["60 25 5\n", *lines]))
        groups = "".join(f"{row}\t{'even' if row % 2 else 'odd'}\n" for row in range(60))
        (tmp_path / f"{name}.tsv").write_text(groups)
    (tmp_path / "names.txt").write_text("\n".join("abcde") + "\n")
    out = user(
        "data", "extreme", "--train", tmp_path / "train.txt", "--test", tmp_path / "test.txt",
        "--name", "letters", "--label-names", tmp_path / "names.txt",
        "--train-groups", tmp_path / "train.tsv", "--test-groups", tmp_path / "test.tsv",
        "--out", tmp_path / "letters",
    )  # fmt: skip
    assert "5 labels, 25 features" in out
    assert f"train on it with: evenhand train --data {tmp_path / 'letters'}" in out
    dataset = open_dataset(tmp_path / "letters")
    assert dataset.label_name(4) == "e"
    assert dataset.parts["test"].groups["group"].names == ("even", "odd")
    sizes = ["batch_size=16", "num_sampled_labels=5", "num_hard_labels=2", "num_hard_examples=8"]
    sets = [word for size in sizes for word in ("--set", f"mining.{size}")]
    words = ("--data", tmp_path / "letters", "--steps", 30, "--run", tmp_path / "run")
    out = user("train", *words, *sets, "--set", "evaluation.num_resamples=10")
    (row,) = [line for line in out.splitlines() if line.startswith("│ all ")]
    assert "1.0000" in row  # every document holds its own label as a feature


def test_data_show_counts_parts_pairs_labels_and_groups(user):
    out = user("data", "show", "data")
    assert re.search(r"train +│ 420 +│ 525 +│ style \(3\)", out)
    assert "60 labels, 512 features; labels are grouped by region (4)" in out


def test_the_demonstration_trains_both_compares_and_can_be_run_again(
    user, home, tmp_path, monkeypatch
):
    def read_preset(name):
        method = "snm" if "snm" in name else "s2m-annealed"
        config = small.config(home / "data", mining__method=method, training__num_steps=10)
        return tomllib.loads(to_toml(config))

    monkeypatch.setattr("evenhand.config.read_preset", read_preset)
    folder = tmp_path / "demo"
    out = user("demo", "--run", folder, "--device", "cpu")
    assert "420 names to learn from" in out
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    assert {row["method"] for row in summary} == {"snm", "s2m"}
    assert {row["group"] for row in summary} == {"all", "head", "torso", "tail"}
    assert "SNM and S²M on places" in (folder / "report.html").read_text("utf-8")
    before = fruits_of(folder / "s2m")
    user("demo", "--run", folder, "--device", "cpu")
    assert fruits_of(folder / "s2m") == before
    assert json.loads((folder / "summary.json").read_text("utf-8")) == summary


# --- help and usage -------------------------------------------------------------------------------

HELP = {
    (): ["A first session", "Exit codes", "s2m-annealed", "Train a model", "Use it", "Data"],
    ("train",): ["TOML", "--resume", "--hard-examples", "--set", "run folder"],
    ("evaluate",): ["--part", "evaluate a run on a part"],
    ("compare",): ["--metric", "intervals"],
    ("search",): ["--results", "trained"],
    ("data",): ["places", "extreme", "table", "show", "Public data sets"],
    ("data", "places"): ["--min-population", "GeoNames", "15000"],
    ("data", "extreme"): ["--label-names", "Extreme Classification"],
    ("demo",): ["--run", "SNM and S2M"],
}


@pytest.mark.parametrize("command", HELP, ids=" ".join)
def test_help_says_what_a_command_does_in_80_columns(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    for flag in ("--help", "-h"):
        answer = run_main(capsys, *command, flag)
        assert (answer.code, answer.err) == (0, "")
    assert all(len(line) <= 80 for line in answer.out.splitlines())
    text = " ".join(answer.out.split()).lower()
    for fragment in HELP[command]:
        assert fragment.lower() in text, f"{fragment!r} is not in: {text}"


USAGE = {  # words, what the sentence must hold
    "": ["missing command", "(see evenhand --help)"],
    "trian": ["'trian'", "did you mean 'train'?"],
    "train --stepz 3": ["--stepz", "did you mean --steps?", "(see evenhand train --help)"],
    "train --steps x": ["'--steps'", "'x'", "int"],
    "train --steps": ["'--steps'", "requires an argument"],
    "train --run --resume": ["'--run'", "requires an argument", "'--resume'"],
    "train a b": ["unexpected extra argument", "b"],
    "search": ["missing argument 'RUN'"],
    "search runs/first": ["missing argument 'QUERY...'"],
    "export runs/first": ["missing option '--out'"],
    "evaluate runs/first --part all": ["'--part'", "'all'", "'train', 'validation', 'test'"],
    "slices runs/first --conditions 4": ["'--conditions'", "4", "1<=x<=3"],
    "data nonsense": ["'nonsense'", "(see evenhand data --help)"],
    "train --seed -1 --steps=3": ["training.seed must be at least 0, got -1"],
}


@pytest.mark.parametrize("words", USAGE)
def test_wrong_words_are_answered_in_one_sentence(capsys, words):
    sentence = run_main(capsys, *words.split()).sentence
    for fragment in USAGE[words]:
        assert fragment in sentence, f"{fragment!r} is not in: {sentence}"


def test_the_version_is_printed(capsys):
    assert run_main(capsys, "--version").out == f"evenhand {__version__}\n"


@pytest.mark.parametrize(
    ("number", "path"),
    [(errno.ENOSPC, "some/file"), (errno.EFBIG, "f"), (errno.EACCES, "f"), (errno.ENOTDIR, "f")],
)
def test_an_error_of_the_disk_is_one_sentence(home, monkeypatch, capsys, number, path):
    monkeypatch.setattr(
        "evenhand.runs.run_config", raising(OSError(number, os.strerror(number), path))
    )
    sentence = run_main(capsys, "evaluate", home / "runs/first").sentence
    assert sentence.startswith(f"{path} could not be opened or written")
    assert os.strerror(number) in sentence


def raising(error):
    def function(*arguments, **options):
        raise error

    return function


def test_a_bug_is_not_hidden_and_an_interruption_is_told(home, monkeypatch, capsys):
    monkeypatch.setattr("evenhand.runs.run_config", raising(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        main(["evaluate", str(home / "runs/first")])
    monkeypatch.setattr("evenhand.runs.run_config", raising(KeyboardInterrupt()))
    answer = run_main(capsys, "evaluate", home / "runs/first")
    assert (answer.code, answer.err) == (130, "evenhand: interrupted\n")


def test_the_installed_command_runs():
    script = shutil.which("evenhand", path=str(small.Path(sys.executable).parent))
    if script is None:
        pytest.skip("the package is not installed")
    answer = subprocess.run(
        [script, "--version"], capture_output=True, text=True, check=True, env=small.ENVIRONMENT
    )
    assert answer.stdout == f"evenhand {__version__}\n"
