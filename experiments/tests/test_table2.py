"""Table 2: which rows a seed trains on, what is chosen and reported, and the command as a whole."""

import dataclasses
import io
import json
import math

import numpy as np
import pytest
import torch
from rich.console import Console

from evenhand.errors import StoppedError, UserError
from experiments.imbalanced_images import accuracies, fixture, held_out, training_rows
from experiments.output_folder import claim
from experiments.reproduce import main
from experiments.table2 import Run, choose_rate, paired_difference, run_table, with_controls
from experiments.table2_rows import TABLES, table_rows

LABELS = np.repeat(np.arange(10), 300)
ROW = table_rows("table2-mnist")[1]


@pytest.mark.parametrize("table", ["table2-mnist", "table2-mnist-odd", "table2-cifar10"])
def test_the_rows_are_those_of_the_paper(table):
    rows = [row for row in table_rows(table) if not row.is_even]
    assert [row.num_hard_examples for row in rows] == [1, 16, 32, 64]
    assert [row.is_sgd for row in rows] == [False, False, False, True]
    for row in rows:
        assert row.batch_size == 64
        assert row.learning_rate > 0
        mean = (row.paper["head"] + row.paper["tail"]) / 2
        assert row.paper["full"] == pytest.approx(mean, abs=0.006)  # the classes are about as large
    assert len({len(row.learning_rates) for row in rows}) == 1  # as many trials for each


def test_a_seed_keeps_the_head_and_its_own_hundredth_of_the_tail():
    first, second = (training_rows(LABELS, ROW, seed) for seed in (1, 2))
    counts = np.bincount(LABELS[first])
    assert counts.tolist() == [300] * 5 + [3] * 5
    assert len(np.unique(first)) == len(first)
    assert not np.array_equal(first, second)
    assert np.array_equal(first, training_rows(LABELS, ROW, 1))


def test_validation_comes_out_of_training_and_never_from_what_was_cut():
    rows = training_rows(LABELS, ROW, 7)
    train, validation = held_out(LABELS, rows, ROW, 7)
    assert not set(train) & set(validation)
    assert set(train) | set(validation) == set(rows)
    assert np.bincount(LABELS[validation]).tolist() == [60] * 5 + [1] * 5


def test_head_and_tail_accuracy_are_over_their_classes():
    labels = np.array([0, 1, 5, 5, 9, 4])
    found = accuracies(np.array([0, 1, 5, 0, 0, 0]), labels, ROW)
    assert found == {"head": pytest.approx(2 / 3), "tail": pytest.approx(1 / 3), "full": 0.5}


def test_the_chosen_rate_is_the_best_mean_and_one_that_diverged_has_lost():
    values = {0.0003: (0.5, 0.6), 0.001: (0.9, math.nan), 0.003: (0.7, 0.6), 0.01: (0.6, 0.6),
              0.03: (math.nan, math.nan)}  # fmt: skip
    figures = [
        {"num_hard_examples": 16, "is_even": False, "learning_rate": rate,
         "head": value + 0.2, "tail": value - 0.2}
        for rate, pair in values.items()
        for value in pair
    ]  # fmt: skip
    for count, is_even in ((64, False), (16, True)):  # of other rows
        other = {"num_hard_examples": count, "is_even": is_even, "learning_rate": 0.01}
        figures.append(other | {"head": 1.0, "tail": 1.0})
    chosen = choose_rate(ROW, figures)
    assert chosen["learning_rate"] == 0.003
    assert not chosen["is_at_edge"]


def test_controls_are_sgd_at_the_rate_that_a_small_k_amounts_to():
    controls = with_controls(table_rows("table2-mnist"))[4:]
    assert [row.num_hard_examples for row in controls] == [64] * 3
    rates = {row.num_hard_examples: row.learning_rate for row in table_rows("table2-mnist")}
    expected = [rates[count] * 64 / count for count in (1, 16, 32)]
    assert [row.learning_rate for row in controls] == expected


# --- figures --------------------------------------------------------------------------------------


def test_the_paired_interval_is_students():
    # Differences 1, 2, 3: mean 2, sd 1, t(2) = 4.3027.
    found = paired_difference([2.0, 4.0, 6.0, math.nan], [1.0, 2.0, 3.0, 9.0])
    assert found["mean"] == pytest.approx(2)
    assert found["high"] - found["mean"] == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert found["seeds"] == 3
    assert math.isnan(paired_difference([1.0], [0.5])["low"])
    assert math.isnan(paired_difference([math.nan], [0.5])["mean"])


# --- the command ----------------------------------------------------------------------------------


def test_the_quick_look_runs_every_table(tmp_path, capsys):
    assert main(["--quick", "--device", "cpu", "--json", str(tmp_path / "q.json")]) == 0
    assert "table2-cifar10" in capsys.readouterr().out
    for table in TABLES:
        result = json.loads((tmp_path / f"q-{table}.json").read_text())
        assert result["num_steps"] == 12
        smallest = "top-32" if table == "table2-cifar10-resnet18" else "top-1"
        assert [row["name"] for row in result["rows"]] == [smallest, "SGD"]
        assert all(len(row["per_seed"]) == 2 for row in result["rows"])
        assert {"machine", "versions", "command"} <= result.keys()


def small_run(folder, should_stop_fn=lambda: False, at_once=1):
    console = Console(file=io.StringIO())
    return Run(
        table="small", folder=folder, command="", device=torch.device("cpu"), console=console,
        is_small=True, should_stop_fn=should_stop_fn, at_once=at_once,
    )  # fmt: skip


def small_rows(**changes):
    numbers = {"num_steps": 10, "batch_size": 16, "seeds": (1, 2), "tail_share": 0.1, **changes}
    return [
        dataclasses.replace(
            row,
            **numbers,
            num_hard_examples=min(16, row.num_hard_examples * 4),
            has_control=False,
        )
        for row in (table_rows("table2-mnist")[0], table_rows("table2-mnist")[3])
    ]


def without_seconds(result):
    return [[one | {"seconds": 0} for one in row["per_seed"]] for row in result["rows"]]


def test_a_stopped_table_continues_to_the_same_figures(tmp_path):
    rows = small_rows(schedule="cosine", augments=True, dropout=0.5)
    data, asked = fixture(rows[0]), []
    whole = run_table(rows, data, small_run(tmp_path / "whole", at_once=3))

    def stop():
        asked.append(1)
        return len(asked) > 2  # each of four trainings asks once

    with pytest.raises(StoppedError, match="trains what is missing"):
        run_table(rows, data, small_run(tmp_path / "parts", stop))
    assert len(json.loads((tmp_path / "parts/trainings.json").read_text())) == 2
    again = run_table(rows, data, small_run(tmp_path / "parts"))
    assert without_seconds(again) == without_seconds(whole)
    (tmp_path / "parts/trainings.json").write_text("{}")
    with pytest.raises(UserError, match=r"trainings\.json is damaged"):
        run_table(rows, data, small_run(tmp_path / "parts"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a table"),
        (["table9"], "invalid choice: 'table9'"),
        (["table2-mnist"], "--data is missing: the folder with the files of MNIST"),
        (["table2-mnist", "--data", "nowhere"], "nowhere has no train-images"),
        (["table2-mnist", "--data", ".", "--seeds", "1", "1"], "different numbers"),
        (["table2-mnist", "--data", ".", "--seeds", "101"], "other seeds"),
        (["table2-mnist", "--data", ".", "--steps", "-5"], "--steps: must be above 0, got -5"),
        (["table2-mnist", "--data", ".", "--minutes", "0"], "--minutes: must be above 0, got 0"),
        (["table3", "--data", "."], "neither a dataset.json nor train.txt"),
        (["table3", "--data", ".", "--power", "0"], "power must be at least 1, got 0"),
    ],
)
def test_bad_words_are_one_sentence(words, message, capsys):
    try:
        code = main(["--device", "cpu", *words])
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2
    assert message in capsys.readouterr().err


# What is refused


def test_a_folder_of_other_settings_is_not_continued(tmp_path):
    claim(tmp_path / "run", {"seeds": (1, 2), "data": "a"})
    claim(tmp_path / "run", {"seeds": (1, 2), "data": "a"})
    kept = (tmp_path / "run" / "settings.json").read_bytes()
    with pytest.raises(UserError, match=r"begun with seeds = \[1, 2\], and now seeds = \[1, 3\]"):
        claim(tmp_path / "run", {"seeds": (1, 3), "data": "a"})
    with pytest.raises(UserError, match=r"begun with data = a, and now data = b; .*--out"):
        claim(tmp_path / "run", {"seeds": (1, 2), "data": "b"})
    assert (tmp_path / "run" / "settings.json").read_bytes() == kept
