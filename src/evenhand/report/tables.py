"""The main table, and recall by subpopulation."""

from collections.abc import Sequence

from evenhand.evaluation import Score
from evenhand.report.charts import interval_axis, interval_row, legend
from evenhand.report.markup import (
    Child,
    Html,
    data_row,
    element,
    folded,
    fragment,
    head_row,
    interval,
    listed,
    note,
    number,
    paragraph,
    percent,
    section,
    table,
    user_text,
)
from evenhand.report.study import FREQUENCY, GroupRow, Study
from evenhand.tables import summary_title

NUM_WORST, NUM_BEST = 25, 5  # drawn of a long column
NUM_NAMED = 3  # members named in the main table
NUM_LISTS = 3  # runs whose members are named there; with more, the full lists are below
NUM_SMALL_NAMED = 24


def score_cell(score: Score, *, is_best: bool = False) -> Html:
    """A value in per cent over its interval."""
    value = element("b", {}, percent(score.value)) if is_best else percent(score.value)
    around = element("small", {}, interval(score.low, score.high) or "")
    is_grey = not score.is_judged and score.value == score.value
    return element("td", {"class": "number grey" if is_grey else "number"}, value, around)


def _score_cells(scores: Sequence[Score]) -> list[Html]:
    """One cell a run, the highest as shown in bold; none is where all are alike."""
    shown = [percent(score.value) for score in scores]
    values = [score.value for score in scores if score.value == score.value]
    best = percent(max(values)) if len(set(shown)) > 1 and len(values) > 1 else None
    return [score_cell(score, is_best=percent(score.value) == best) for score in scores]


def _run_heads(study: Study) -> list[Html]:
    return [
        element("th", {"scope": "col", "class": "number"}, element("bdi", {}, name))
        for name in study.run_names
    ]


# --- the main table -------------------------------------------------------------------------------


def main_section(study: Study) -> Html:
    rows = [_main_row(study, "all", "all", "All pairs")]
    rows += [
        _main_row(study, "frequency", name, f"{name.capitalize()} labels")
        for name in study.columns["frequency"].group_names
    ]
    worst = [
        (column, summary) for column in study.own_columns for summary in study.summaries(column)
    ]
    rows += [
        _main_row(study, column, summary, _capital(summary_title(summary, column)))
        for column, summary in worst
    ]
    cutoff_heads = [
        element(
            "th",
            {"scope": "colgroup", "colspan": len(study.results), "class": "number"},
            f"recall@{cutoff}, %",
        )
        for cutoff in study.shown_cutoffs
    ]
    corner = element("th", {"scope": "col", "rowspan": 2}, "Pairs of")
    counts = element("th", {"scope": "col", "rowspan": 2, "class": "number"}, "pairs")
    head = [
        element("tr", {}, corner, *cutoff_heads, counts),
        element("tr", {}, *(th for _ in cutoff_heads for th in _run_heads(study))),
    ]
    explained = note(
        "recall@r is the share of (query, label) pairs whose label is among the first r results. "
        "Small figures: 95 % bootstrap interval over queries. ",
        "Bold: the higher figure, which need not be a clear one. "
        if len(study.results) > 1
        else "",
        "Head, torso and tail: labels with many, some and few training pairs. A worst row is the "
        f"plain mean over the lowest groups that can be judged, for each run its own; those "
        f"named are the lowest by {study.metric}.",
    )
    whole = table("Recall for everyone and for the worst served", head, rows, css_class="main")
    return section("summary", "Who is served", whole, explained, _all_members(study, worst))


def _main_row(study: Study, column: str, group: str, title: str) -> Html:
    cells = [
        cell
        for cutoff in study.shown_cutoffs
        for cell in _score_cells(study.row(column, group, cutoff))
    ]
    scores = study.row(column, group)
    counts = list(dict.fromkeys(number(score.count) for score in scores))
    heading: list[Child] = [title, *_members(study, scores)]
    return element(
        "tr",
        {"class": "worst" if any(score.members for score in scores) else None},
        element("th", {"scope": "row"}, *heading),
        *cells,
        element("td", {"class": "number"}, " / ".join(counts)),
    )


def _members(study: Study, scores: Sequence[Score]) -> list[Html]:
    """Under the title of a worst row: whom it averages, for each run where they differ."""
    lists = [score.members for score in scores]
    if not any(lists):
        return []
    if len({frozenset(members) for members in lists}) == 1:
        return [element("small", {}, _named(lists[0]))]
    if len(lists) > NUM_LISTS:
        return [element("small", {}, "each run's own: see below")]
    return [
        element("small", {}, element("bdi", {}, name), ": ", _named(members))
        for name, members in zip(study.run_names, lists, strict=True)
    ]


def _capital(title: str) -> str:
    return title[:1].upper() + title[1:]  # str.capitalize would change the rest


def _named(members: Sequence[str]) -> str:
    return listed([name.strip() for name in members], most=NUM_NAMED)


def _all_members(study: Study, worst: Sequence[tuple[str, str]]) -> Html:
    """The full lists, at every cut-off."""
    rows = [
        data_row(
            f"{_capital(summary_title(summary, column))}, {name}",
            *(
                ", ".join(study.row(column, summary, cutoff)[run].members) or "–"
                for cutoff in study.shown_cutoffs
            ),
        )
        for column, summary in worst
        for run, name in enumerate(study.run_names)
    ]
    if not rows:
        return Html("")
    head = head_row("Row", *(f"by recall@{cutoff}" for cutoff in study.shown_cutoffs))
    whole = table(
        "Groups that each worst row averages, lowest first", [head], rows, css_class="prose"
    )
    return folded("Which groups the worst rows average", whole)


# --- by subpopulation -----------------------------------------------------------------------------


def groups_section(study: Study) -> Html:
    columns = [*study.own_columns, *FREQUENCY]
    return section(
        "groups",
        f"Recall@{study.cutoff} by subpopulation",
        paragraph(
            "One line a group, the worst served first; the bar is the 95 % interval. A wide bar "
            "means few pairs, not a bad model."
        ),
        legend(study.run_names),
        *(_column(study, column) for column in columns if study.columns[column].group_names),
    )


def _column(study: Study, column: str) -> Html:
    rows = study.rows(column)
    judged = [row for row in rows if row.is_judged]
    drawn = [_drawn_row(study, row) for row in judged]
    if len(judged) > NUM_WORST + NUM_BEST:
        between = len(judged) - NUM_WORST - NUM_BEST
        gap = element("td", {"colspan": 3, "class": "gap"}, f"… {between} groups between, below …")
        drawn = [*drawn[:NUM_WORST], element("tr", {}, gap), *drawn[-NUM_BEST:]]
    head = element(
        "tr",
        {},
        element("th", {"scope": "col"}, column),
        element(
            "th", {"scope": "col", "class": "axis"}, _hidden(f"{study.metric}, %"), interval_axis()
        ),
        element("th", {"scope": "col", "class": "number"}, "pairs"),
    )
    caption = f"{study.metric} in per cent, by {column}"
    parts = [element("h3", {}, _title(column))]
    if drawn:
        parts.append(table(caption, [head], drawn, css_class="dots"))
    parts.append(_too_small([row for row in rows if not row.is_judged]))
    parts.append(_full_list(study, column, rows))
    return fragment(*parts)


def _title(column: str) -> str:
    titles = {
        "frequency": "By frequency of the label (thirds of the labels)",
        "frequency over pairs": "By frequency of the label (thirds of the training pairs)",
    }
    return titles.get(column, f"By {column}")


def _hidden(text: str) -> Html:
    """For those who listen to the page."""
    return element("span", {"class": "hidden"}, text)


def _drawn_row(study: Study, row: GroupRow) -> Html:
    return element(
        "tr",
        {},
        element("th", {"scope": "row"}, user_text(row.name)),
        element("td", {"class": "axis"}, interval_row(study.run_names, row.scores)),
        element("td", {"class": "number"}, number(row.num_pairs)),
    )


def _too_small(rows: Sequence[GroupRow]) -> Html:
    some = [f"{row.name.strip()} ({number(row.num_pairs)})" for row in rows if row.num_pairs]
    num_empty = len(rows) - len(some)
    if not rows:
        return Html("")
    said = []
    if some:
        said.append(f"Too small to judge (pairs): {listed(some, most=NUM_SMALL_NAMED)}.")
    if num_empty:
        said.append(f"Without any pair: {number(num_empty)} group{'s' * (num_empty > 1)}.")
    return element("p", {"class": "note grey"}, " ".join(said))


def _full_list(study: Study, column: str, rows: Sequence[GroupRow]) -> Html:
    body = [
        element(
            "tr",
            {"class": None if row.is_judged else "grey"},
            element("th", {"scope": "row"}, user_text(row.name)),
            *_score_cells(row.scores),
            element("td", {"class": "number"}, number(row.num_pairs)),
            element("td", {}, "" if row.is_judged else "too small to judge"),
        )
        for row in rows
    ]
    head = element(
        "tr",
        {},
        element("th", {"scope": "col"}, column),
        *_run_heads(study),
        element("th", {"scope": "col", "class": "number"}, "pairs"),
        element("th", {"scope": "col"}, ""),
    )
    whole = table(
        f"{study.metric} of every group of {column}, %", [head], body, css_class="sortable"
    )
    return folded(f"{study.metric} of all {len(rows)} groups of {column}, in numbers", whole)
