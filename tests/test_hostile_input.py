"""What nobody writes by mistake, and an attacker or a broken disk does: one sentence, no harm."""

import json
import os
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

import small
from evenhand.config import build_config
from evenhand.data import save_dataset
from evenhand.data.dataset import Groups
from small import bytes_of, run_main, settings_file

SOURCE = Path(__file__).parent.parent / "src"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with two data sets and an evaluated run of each."""
    folder = tmp_path_factory.mktemp("hostile")
    save_dataset(small.text_dataset(), folder / "data")
    save_dataset(small.dense_dataset(), folder / "dense")
    for name, data in {"a": "data", "b": "dense"}.items():
        settings_file(folder / f"{name}.toml", data, training__num_steps=20)
        answer = small.run(folder, "train", f"{name}.toml", "--run", f"runs/{name}")
        assert answer.code == 0, answer.err
    return folder


@pytest.fixture
def copy(home, tmp_path, monkeypatch):
    """A copy of all of it as the working folder, which a test may damage."""
    folder = shutil.copytree(home, tmp_path / "copy")
    monkeypatch.chdir(folder)
    return folder


def refused(capsys, *arguments, says=()):
    sentence = run_main(capsys, *arguments).sentence
    for fragment in says:
        assert str(fragment) in sentence, f"{fragment!r} is not in: {sentence}"
    return sentence


def in_a_process(folder, *arguments, **environment):
    """The command as a user starts it, for what is decided when Python starts."""
    answer = subprocess.run(
        [sys.executable, "-m", "evenhand", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCE), **environment},
        capture_output=True,
        check=False,
        timeout=120,
    )
    out, err = (stream.decode("utf-8", "replace") for stream in (answer.stdout, answer.stderr))
    return small.Answer(answer.returncode, out, err)


# --- numbers --------------------------------------------------------------------------------------


def scale_weights(run, **factors):
    path = run / "model/weights.safetensors"
    tensors = safetensors.torch.load_file(path)
    for name, largest in factors.items():
        name = name.replace("__", ".")
        tensors[name] = tensors[name] * (largest / tensors[name].abs().max())
    safetensors.torch.save_file(tensors, path)


def test_label_vectors_of_any_length_are_searched_by_their_direction(copy, capsys):
    before = run_main(capsys, "search", "runs/a", "badoki")
    scale_weights(copy / "runs/a", label_table=3e38)
    assert run_main(capsys, "search", "runs/a", "badoki").out == before.out


@pytest.mark.parametrize(
    "command",
    [("search", "runs/a", "badoki"), ("evaluate", "runs/a"),
     ("export", "runs/a", "--out", "new", "--queries", "test")],
    ids=lambda command: command[0],
)  # fmt: skip
def test_scores_that_are_no_numbers_are_refused(copy, capsys, command):
    scale_weights(copy / "runs/a", encoder__weight=3e38)
    refused(capsys, *command, says=["infinite or no number", "learning_rate"])
    assert not (copy / "new").exists()
