"""The speed benchmark runs at a tiny shape and writes the form that its figure reads."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "cpu.py"
NUMBERS = ("labels", "batch_size", "sampled", "hard_labels", "hard_examples", "dim", "repeats")
TIMES = ("milliseconds", "milliseconds_min", "ratio_to_product")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("speed") / "speed.json"
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return json.loads(path.read_text())


def test_every_way_has_a_row_of_the_same_form(rows):
    names = [row["name"] for row in rows]
    assert len(set(names)) == len(names) >= 8
    assert names[0] == "score product alone"
    assert [name for name in names if name.startswith("evenhand")] == [
        "evenhand S2M step",
        "evenhand SNM step",
    ]
    for row in rows:
        assert row.keys() == rows[0].keys()
        assert all(isinstance(row[key], int) and row[key] > 0 for key in NUMBERS)
        assert all(row[key] > 0 for key in TIMES)
        assert row["milliseconds_min"] <= row["milliseconds"]
        assert row["peak_bytes"] is None or row["peak_bytes"] >= 0
        assert "threads" in row["device"]
        assert {"python", "torch", "numpy"} <= row["versions"].keys()


def test_the_ways_that_mine_examples_train_the_same_table(monkeypatch):
    """Autograd over all scores, autograd over the survivors: one objective, one gradient."""
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    ways, cpu = importlib.import_module("ways"), importlib.import_module("cpu")
    tables = []
    for name in (
        "PyTorch shared negatives, sparse Adagrad",
        "PyTorch mined first, then autograd over the survivors",
    ):
        problem = ways.Problem(cpu.TINY)
        before = problem.table.clone()
        step = ways.WAYS[name].build(problem)
        for _ in range(3):
            step()
        assert not torch.equal(problem.table, before)
        tables.append(problem.table)
    torch.testing.assert_close(*tables)


def test_the_figure_is_drawn_from_such_rows(rows, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    figures = importlib.import_module("figures")
    more = [
        {**row, "labels": 10 * row["labels"]} for row in rows if row["name"] != rows[-1]["name"]
    ]
    (tmp_path / "speed-cpu.json").write_text(json.dumps(rows + more))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    drawn = figures.save_figure("speed", tmp_path, "svg").read_text()
    assert all(row["name"] in drawn for row in rows)
