"""The command as a user meets it: files in, run folders and words out."""

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest
import safetensors.torch
import torch

import small
from evenhand.build import choose_device
from evenhand.cli import EPILOG, main
from evenhand.config import SAMPLERS, to_toml
from evenhand.data import open_dataset, save_dataset
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
    save_dataset(small.dense_dataset(), folder / "dense")
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


def test_a_run_folder_holds_all_that_was_promised_and_the_command_shows_it(home):
    assert set(small.bytes_of(home / "runs/first")) == {
        "config.toml", "run.json", "metrics.jsonl", "model/query_data.safetensors",
        "model/weights/manifest.json", "model/weights/rank-0-file-0.safetensors",
        "evaluation/test/outcome.npz", "evaluation/test/scores.json",
        *(f"evaluation/test/{name}/outcome.npz" for name in ("popularity", "nearest-queries")),
    }  # fmt: skip
    out = (home / "first.out").read_text("utf-8")
    for words in ("training s2m-annealed", "pair recall on the test part", "worst 3 region"):
        assert words in out
    assert "20/20" in out or "20…" in out
    assert re.search(r"│ all +│ +150 │ +0\.\d{4} │ +0\.\d{4} │", out)
    assert out.rstrip().endswith("run folder: runs/first")
    about = json.loads((home / "runs/second/run.json").read_text("utf-8"))
    expected = {"name": "second", "method": "snm", "seed": 3, "is_complete": True, "num_steps": 20}
    assert {key: about[key] for key in expected} == expected
    assert about["best_step"] in (10, 20)
    assert about["versions"]["evenhand"] == __version__
    assert set(about["versions"]) == {"evenhand", "python", "torch", "numpy"}
    assert about["device"]
    assert about["dataset"]["fingerprint"] == open_dataset(home / "data").fingerprint
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
    assert "  # n-grams of short texts\n" in text  # why a rule chose it
    repeated = (home / "runs/repeated/config.toml").read_text("utf-8")
    assert repeated.splitlines()[1:] == [line.split("  #")[0] for line in text.splitlines()[1:]]


def test_each_flag_reaches_its_setting_and_set_has_the_last_word(user, home, tmp_path):
    user(
        "train", "a.toml", "--run", tmp_path / "run", "--data", home / "data", "--method", "s2m",
        "--hard-labels", 3, "--hard-examples", 4, "--steps", 2, "--learning-rate", 1,
        "--seed", 9, "--set", "training.seed=10", "--set", "loss.margin=0",
        "--device", "cpu",
    )  # fmt: skip
    found = tomllib.loads((tmp_path / "run/config.toml").read_text("utf-8"))
    expected = small.settings(
        home / "data", mining__method="s2m", mining__num_hard_labels=3,
        mining__num_hard_examples=4, training__num_steps=2, training__learning_rate=1.0,
        training__seed=10, loss__margin=0.0, loss__power=1.0,  # the last is the default
    )  # fmt: skip
    for section, values in expected.items():
        assert {key: found[section][key] for key in values} == values


VARIANTS = {
    **{f"method {method}": {"mining__method": method} for method in METHODS},
    "method ranked-range": {"mining__method": "ranked-range", "risk__num_dropped": 2},
    "method even-range": {"mining__method": "even-range", "risk__num_dropped": 2},
    "method group-dro": {"mining__method": "group-dro", "risk__group": "region"},
    **{
        f"sampler {sampler}": {
            "mining__sampler": sampler, "mining__num_sampled_labels": 50,
            "mining__in_batch_share": 0.7,
        }
        for sampler in SAMPLERS
    },
    "a sample for each example": {"mining__for_each_example": True},
    "whole queries": {"mining__whole_queries": True},
    "the paper's mask": {"mining__masks_all_positives": False},
    "softmax with log q": {"loss__name": "softmax", "loss__log_q": True, "model__scale": 5},
    "mixed softmax with log q": {
        "loss__name": "softmax", "loss__log_q": True, "mining__sampler": "mixed",
        "mining__in_batch_share": 0.85,
    },
    "bowl": {"loss__name": "bowl", "loss__margin_loss": "logistic"},
    "crammer-singer": {"loss__name": "crammer-singer"},
    "averaged": {"loss__name": "averaged", "loss__margin_loss": "squared-hinge"},
    "dot with bias": {
        "loss__name": "softmax", "model__similarity": "dot", "model__label_bias": True,
    },
    "row-adagrad": {"training__optimizer": "row-adagrad", "training__learning_rate": 0.2},
    "cosine, warmed up, clipped": {
        "training__learning_rate_shape": "cosine", "training__warmup_steps": 3,
        "training__max_gradient_norm": 0.5,
    },
    "perceptron": {"data__dataset": "dense", "model__hidden_widths": [24]},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_method_sampler_loss_and_optimizer_learns(tmp_path, home, variant):
    """Untrained, a model finds 1 of 6 labels among its first 10."""
    changes = {"training__num_steps": 40, **VARIANTS[variant]}
    changes["training__evaluate_every"] = changes["training__num_steps"]
    path = settings_file(tmp_path / "a.toml", "data", **changes)
    answer = small.run(home, "train", path, "--run", tmp_path / "run")
    assert answer.code == 0, answer.err
    lines = (tmp_path / "run/metrics.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert rows[-1]["validation"]["recall@10"] > (0.6 if variant == "perceptron" else 0.4)
    if variant == "perceptron":
        weights = safetensors.torch.load_file(small.weights_file(tmp_path / "run"))
        assert weights["encoder.layers.0.weight"].shape == (24, 12)


# --- the readers ----------------------------------------------------------------------------------


def recall(run, metric, part="test"):
    scores = json.loads((run / f"evaluation/{part}/scores.json").read_text("utf-8"))
    (score,) = [s for s in scores if (s["metric"], s["group"]) == (metric, "all")]
    return score["value"]


def test_evaluating_again_changes_nothing_and_another_part_is_written_and_printed(user, home):
    before = fruits_of(home / "runs/first")
    user("evaluate", "runs/first")
    assert fruits_of(home / "runs/first") == before
    out = user("evaluate", "runs/second", "--part", "validation")
    assert "pair recall on the validation part" in out
    assert "written to runs/second/evaluation/validation" in out
    assert f"{recall(home / 'runs/second', 'recall@10', 'validation'):.4f}" in out
    assert (home / "runs/second/evaluation/validation/outcome.npz").is_file()


@pytest.mark.parametrize("metric", ["mrr", "ndcg@10", "precision@1", "psp@5", "query recall@5"])
def test_compare_takes_every_metric_that_is_computed(user, home, capsys, metric):
    out = user("compare", "runs/first", "runs/second", "--metric", metric)
    first, second = (
        {
            (score["column"], score["group"]): score["value"]
            for score in json.loads((home / run / "evaluation/test/scores.json").read_text("utf-8"))
            if score["metric"] == metric
        }
        for run in ("runs/first", "runs/second")
    )
    assert f"{metric}: second minus first" in out
    cells = [line.split("│")[1:6] for line in out.splitlines() if line.startswith("│")]
    rows = {cell[0].strip(): [float(number) for number in cell[2:5]] for cell in cells}
    a, b = first["all", "all"], second["all", "all"]
    assert rows["all"] == pytest.approx([a, b, b - a], abs=6e-5)
    assert set(rows) == {"all", "worst 3 styles", "worst style"}
    mean = sum(second["style", name] for name in ("plain", "odd", "rare")) / 3
    assert rows["worst 3 styles"][1] == pytest.approx(mean, abs=6e-5)
    words = ("compare", "runs/first", "runs/second", "--metric", "ndcg@7")
    sentence = run_main(capsys, *words).sentence
    assert "--metric must be one of recall@1, recall@5, recall@10, query recall@1" in sentence
    assert sentence.endswith("got 'ndcg@7'")


# --- data -----------------------------------------------------------------------------------------


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
    assert out.endswith(f"evenhand serve {folder / 's2m'} {folder / 'snm'}\n")
    assert all(re.search(rf"^│ {group} ", out, re.MULTILINE) for group in ("all", "head", "tail"))
    assert "SNM and even-handed S²M on places" in (folder / "report.html").read_text("utf-8")
    before = fruits_of(folder / "s2m")
    user("demo", "--run", folder, "--device", "cpu")
    assert fruits_of(folder / "s2m") == before


# --- help and usage -------------------------------------------------------------------------------


@pytest.mark.parametrize("command", small.all_verbs())
def test_help_of_every_command_fits_80_columns(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    for flag in ("--help", "-h"):
        answer = run_main(capsys, *command.split(), flag)
        assert (answer.code, answer.err) == (0, "")
    assert all(len(line) <= 80 for line in answer.out.splitlines())
    for name, method in METHODS.items() if not command else ():
        assert [name, *method.summary.split()] in [line.split() for line in EPILOG.splitlines()]


USAGE = {  # words, what the sentence must hold
    "": ["missing command", "(see evenhand --help)"],
    "trian": ["'trian'", "did you mean 'train'?"],
    "train --stepz 3": ["--stepz", "did you mean --steps?", "(see evenhand train --help)"],
    "train --steps x": ["'--steps'", "'x'", "int"],
    "train --steps": ["'--steps'", "requires an argument"],
    "train --run --resume": ["'--run'", "requires an argument", "'--resume'"],
    "train a b": ["unexpected extra argument", "b"],
    "search": ["missing argument 'RUN'"],
    "search runs/first x --input y": ["as words or from --input"],
    "export runs/first": ["missing option '--out'"],
    "evaluate runs/first --part all": ["'--part'", "'all'", "'train', 'validation', 'test'"],
    "slices runs/first --conditions 4": ["'--conditions'", "4", "1<=x<=3"],
    "data nonsense": ["'nonsense'", "(see evenhand data --help)"],
    "train --seed -1 --steps=3": ["training.seed must be at least 0, got -1"],
}


@pytest.mark.parametrize("words", USAGE)
def test_wrong_words_are_answered_in_one_sentence(capsys, words):
    run_main(capsys, *words.split()).says(*USAGE[words])


def test_an_error_of_the_disk_is_one_sentence_an_interruption_is_told_and_a_bug_not_hidden(
    home, monkeypatch, capsys
):
    def raises(error):
        def function(*arguments, **options):
            raise error

        monkeypatch.setattr("evenhand.runs.run_config", function)

    words = ("evaluate", str(home / "runs/first"))
    for number in (errno.ENOSPC, errno.EFBIG, errno.EACCES, errno.ENOTDIR):
        raises(OSError(number, os.strerror(number), "some/file"))
        sentence = run_main(capsys, *words).sentence
        assert sentence.startswith("some/file could not be opened or written")
        assert os.strerror(number) in sentence
    raises(KeyboardInterrupt())
    answer = run_main(capsys, *words)
    assert (answer.code, answer.err) == (130, "evenhand: interrupted\n")
    raises(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        main(words)


def test_the_version_is_printed_also_by_the_installed_command(capsys):
    assert run_main(capsys, "--version").out == f"evenhand {__version__}\n"
    script = shutil.which("evenhand", path=str(small.Path(sys.executable).parent))
    if script is None:
        pytest.skip("the package is not installed")
    answer = subprocess.run(
        [script, "--version"], capture_output=True, text=True, check=True, env=small.ENVIRONMENT
    )
    assert answer.stdout == f"evenhand {__version__}\n"
