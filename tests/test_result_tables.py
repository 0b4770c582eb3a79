"""Tables in the terminal hold the figures, mark the best and what is too small to judge."""

import dataclasses
import io
import math
import re

import pytest
from rich.console import Console

from evenhand.evaluation import Score
from evenhand.result_tables import (
    main_rows,
    results_table,
)


def score(column, group, value=0.5, *, metric="recall@10", count=100, is_judged=True):
    members = ("one", "two") if group.startswith("worst") and not math.isnan(value) else ()
    return Score(metric, column, group, value, math.nan, math.nan, count, is_judged, members)


ALL, TAIL = score("all", "all", 0.25, count=1234), score("frequency", "tail", 0.75)


def text_of(table, **options):
    console = Console(file=io.StringIO(), width=150, **{"color_system": None, **options})
    console.print(table)
    return console.file.getvalue()


def cells_of(text, title):
    """The cells of the row with this title."""
    (row,) = [line for line in text.splitlines() if re.match(f"│ +{re.escape(title)} +│", line)]
    return [cell.strip() for cell in row.split("│")[2:-1]]


@pytest.mark.parametrize(
    ("num_judged", "shown"),
    [
        (1, []),
        (2, ["worst"]),
        (3, ["worst"]),
        (4, ["worst", "worst 3"]),
        (39, ["worst", "worst 3"]),  # whose worst tenth are the worst 3
        (40, ["worst", "worst 3", "worst tenth"]),
    ],
)
def test_the_main_rows_are_all_the_frequencies_and_what_tells_of_the_worst(num_judged, shown):
    groups = [score("device", f"{n}") for n in range(num_judged)]
    groups += [score("device", "rare", is_judged=False), score("device", "none", math.nan)]
    for column in ("frequency", "frequency over pairs", "device"):
        groups += [score(column, summary) for summary in ("worst", "worst 3", "worst tenth")]
    kept = [(row.column, row.group) for row in main_rows([ALL, TAIL, *groups])]
    assert kept == [("all", "all"), ("frequency", "tail"), *(("device", name) for name in shown)]


def test_what_is_missing_is_a_dash_and_what_is_too_small_in_brackets_that_are_explained():
    rare = score("frequency", "head", 0.5, is_judged=False)
    none = score("frequency", "torso", math.nan)
    text = text_of(results_table([("one", [ALL, TAIL, rare, none]), ("two", [ALL])]))
    assert "recall@1 " not in text  # which no run has
    assert cells_of(text, "tail")[1:] == ["0.7500", "–"]  # which only the first run has
    assert cells_of(text, "head")[1] == "(0.5000)"
    assert cells_of(text, "torso")[1] == "–"
    explained = "(…): too few pairs to judge"
    assert explained in text
    assert explained not in text_of(results_table([("one", [ALL, TAIL, none])]))


def test_what_is_behind_a_cut_off_that_finds_all_is_left_out():
    whole = [score("all", "all", 1.0, metric=f"recall@{cutoff}") for cutoff in (1, 10, 50)]
    assert "recall@10" not in text_of(results_table([("one", whole)]))
    other = [dataclasses.replace(row, value=0.9) for row in whole]
    assert "recall@50" in text_of(results_table([("one", whole), ("two", other)]))
