"""Tables in the terminal hold the figures, mark the best and what is too small to judge."""

import dataclasses
import io
import math
import re

import pytest
from rich.console import Console

import small
from evenhand.data import Rows
from evenhand.evaluation import Difference, Score
from evenhand.tables import (
    differences_table,
    format_score,
    main_rows,
    parts_table,
    results_table,
    row_title,
    unseen_notes,
)


def score(column, group, value, *, metric="recall@10", count=100, is_judged=True):
    members = ("one", "two") if group.startswith("worst") and not math.isnan(value) else ()
    return Score(metric, column, group, value, math.nan, math.nan, count, is_judged, members)


def text_of(table, *, has_style=False):
    console = Console(
        file=io.StringIO(),
        width=150,
        force_terminal=has_style,
        color_system="standard" if has_style else None,
    )
    console.print(table)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("column", "group", "title"),
    [
        ("all", "all", "all"),
        ("frequency", "tail", "tail"),
        ("country", "worst tenth", "worst tenth of countries"),
        ("script", "worst 3", "worst 3 scripts"),
        ("script", "worst", "worst script"),
        ("colour", "worst 3", "worst 3 colours"),
        ("script", "THAI", "script THAI"),
    ],
)
def test_rows_are_called_as_people_call_them(column, group, title):
    assert row_title(score(column, group, 0.5)) == title


def test_the_main_rows_are_all_the_frequencies_and_the_worst_of_every_column():
    scores = [
        score("all", "all", 0.5),
        score("frequency", "tail", 0.4),
        score("frequency", "worst 3", 0.4),
        score("frequency over pairs", "worst 3", 0.4),
        *(score("script", name, 0.3) for name in ("THAI", "CJK", "GREEK", "LATIN")),
        score("script", "worst", 0.3),
        score("script", "worst 3", 0.2),
        score("script", "worst tenth", math.nan),
    ]
    kept = [(row.column, row.group) for row in main_rows(scores)]
    assert kept == [("all", "all"), ("frequency", "tail"), ("script", "worst 3")]


@pytest.mark.parametrize(("num_judged", "shown"), [(1, []), (2, ["worst"]), (3, ["worst"])])
def test_the_worst_3_of_two_or_three_groups_are_not_shown_but_the_worst_is(num_judged, shown):
    groups = [score("device", f"{n}", 0.5) for n in range(num_judged)]
    groups.append(score("device", "rare", 0.1, count=2, is_judged=False))
    scores = [*groups, score("device", "worst", 0.5), score("device", "worst 3", 0.5)]
    assert [row.group for row in main_rows(scores)] == shown


def test_brackets_are_explained_where_there_are_any():
    rare = score("frequency", "tail", 0.5, is_judged=False)
    told = "(…): too few pairs to judge"
    assert told in text_of(results_table([("a", [score("all", "all", 0.5), rare])]))
    assert told not in text_of(results_table([("a", [score("all", "all", 0.5)])]))


def test_nothing_is_a_dash_and_too_small_is_in_brackets():
    assert format_score(score("all", "all", 0.5)) == "0.5000"
    assert format_score(score("all", "all", math.nan)) == "–"
    assert format_score(score("all", "all", 0.5, is_judged=False)) == "(0.5000)"


def test_the_results_of_two_runs_stand_side_by_side_and_the_best_is_bold():
    first = [score("all", "all", 0.25, count=1234), score("frequency", "tail", 0.75)]
    second = [score("all", "all", 0.5, count=1234), score("frequency", "tail", 0.5)]
    table = results_table([("one [b]", first), ("two", second)], part_name="validation")
    text = text_of(table)
    assert "pair recall on the validation part" in text
    assert "one [b]" in text
    lines = {line.split("│")[1].strip(): line for line in text.splitlines() if "│" in line}
    assert [cell.strip() for cell in lines["all"].split("│")[2:5]] == ["1,234", "0.2500", "0.5000"]
    styled = text_of(table, has_style=True).splitlines()
    (all_row,) = [line for line in styled if "1,234" in line]
    (tail_row,) = [line for line in styled if "tail" in line]
    assert re.findall(r"\x1b\[1m *([\d.]+)", all_row) == ["0.5000"]
    assert re.findall(r"\x1b\[1m *([\d.]+)", tail_row) == ["0.7500"]


def test_worst_groups_of_different_size_show_the_range_of_their_pairs():
    scripts = [score("script", name, 0.5) for name in ("THAI", "CJK", "GREEK", "LATIN")]
    runs = [
        (name, [*scripts, score("script", "worst 3", 0.5, count=count)])
        for name, count in (("one", 423), ("two", 3632))
    ]
    (row,) = [
        line for line in text_of(results_table(runs)).splitlines() if "worst 3 scripts" in line
    ]
    assert "423–3,632" in row


def test_a_group_that_only_the_first_run_has_is_a_dash_in_the_other():
    first = [score("all", "all", 0.25), score("frequency", "tail", 0.75)]
    text = text_of(results_table([("one", first), ("two", first[:1])]))
    (row,) = [line for line in text.splitlines() if " tail " in line]
    assert "–" in row


def test_metrics_that_are_not_there_are_not_shown():
    text = text_of(results_table([("one", [score("all", "all", 0.25, metric="recall@3")])]))
    assert "recall@3" in text
    assert "recall@10" not in text


def difference(group, **values):
    numbers = {
        "baseline": 0.5, "contender": 0.75, "difference": 0.25, "low": 0.125, "high": 0.375,
        "seed_low": math.nan, "seed_high": math.nan, "num_runs": 1, "count": 4321,
    }  # fmt: skip
    return Difference("recall@10", group, **(numbers | values))


def test_differences_have_a_sign_and_an_interval():
    rows = [difference("all"), difference("tail", difference=-0.0625, low=-0.5, high=0.25)]
    other = dataclasses.replace(rows[0], metric="recall@1", group="elsewhere")
    text = text_of(differences_table([*rows, other], baseline="snm", contender="s2m"))
    assert "recall@10: s2m minus snm" in text
    assert "4,321" in text
    assert "+0.2500" in text
    assert "+0.1250 to +0.3750" in text
    assert "-0.0625" in text
    assert "elsewhere" not in text
    assert "over seeds" not in text


def test_several_runs_have_an_interval_over_seeds():
    rows = [difference("all", num_runs=3, seed_low=0.0625, seed_high=0.4375)]
    text = text_of(differences_table(rows, baseline="snm", contender="s2m"))
    assert "95 % over seeds" in text
    assert "+0.0625 to +0.4375" in text


def test_the_parts_of_a_data_set_are_counted():
    text = text_of(parts_table(small.text_dataset(name="[i]")))
    assert "[i]" in text
    (row,) = [line for line in text.splitlines() if " train " in line]
    assert [cell.strip() for cell in row.split("│")[1:5]] == ["train", "420", "525", "style (3)"]
    assert "–" in text_of(parts_table(small.dense_dataset()))


def test_labels_that_cannot_be_learnt_are_counted():
    dataset = small.dense_dataset()
    assert unseen_notes(dataset) == []
    train = dataset.parts["train"]
    ids = train.positives.ids.copy()
    missing = ids[0]
    ids[ids == missing] = (missing + 1) % small.NUM_LABELS
    positives = Rows(train.positives.offsets, ids)
    dataset = small.with_parts(dataset, train=dataclasses.replace(train, positives=positives))
    notes = unseen_notes(dataset)
    count = int((dataset.parts["test"].positives.ids == missing).sum())
    assert any(note.startswith(f"note: {count} of the 120 test pairs") for note in notes)
