"""Tables of results for the terminal."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from rich.table import Column, Table
from rich.text import Text

from evenhand.data import Dataset, count_unseen_labels, memberships, pairs_of
from evenhand.data.overview import count_known_pairs
from evenhand.evaluation import (
    SUMMARIES,
    Difference,
    Findings,
    GroupList,
    Outcome,
    Score,
    findings_json,
)

METRICS = ("recall@1", "recall@10", "recall@50")


def row_title(score: Score) -> str:
    """How a row of the score table is called: `all`, `tail`, `worst 3 scripts`."""
    if score.column in ("all", "frequency"):
        return score.group
    if score.group.startswith("worst"):
        return summary_title(score.group, score.column)
    return f"{score.column} {score.group}"


def summary_title(summary: str, column: str) -> str:
    """`worst continent`, `worst 3 scripts`, `worst tenth of countries`."""
    if summary == "worst":
        return f"worst {column}"
    plural = f"{column[:-1]}ies" if column.endswith("y") else f"{column}s"
    return f"{summary} of {plural}" if summary == "worst tenth" else f"{summary} {plural}"


def difference_title(row: Difference) -> str:
    """`all`, `tail`, `worst 3 scripts`."""
    summary, of, column = row.group.partition(" of ")
    is_summary = of and summary.startswith("worst")
    return summary_title(summary, column) if is_summary else row.group


def telling_titles(groups: dict[str, GroupList]) -> dict[str, GroupList]:
    """Three of two devices, or a tenth of seven continents, are called what they are: the worst."""
    lists = {}
    for title, (column, names) in groups.items():
        if len(names) < (3 if title.startswith("worst 3 ") else 2):
            title, names = f"worst of {column}", names[:1]
        lists[title] = GroupList(column, names)
    return lists


def main_rows(scores: Sequence[Score]) -> list[Score]:
    """All, head, torso, tail, and for every column what tells the most about its worst groups.

    The worst 3 of three groups would be all of them, and a tenth of 39 groups is their worst 3: a
    row is shown only where it says what those before it do not.
    """
    num_judged = Counter(
        (score.metric, score.column)
        for score in scores
        if score.is_judged and not math.isnan(score.value) and score.group not in SUMMARIES
    )

    def is_main(score: Score) -> bool:
        if score.column in ("all", "frequency", "frequency over pairs"):
            return score.group not in SUMMARIES and score.column != "frequency over pairs"
        fewest = {"worst": 2, "worst 3": 4, "worst tenth": 40}
        return num_judged[score.metric, score.column] >= fewest.get(score.group, math.inf)

    return [score for score in scores if is_main(score)]


def results_table(
    results: Sequence[tuple[str, Sequence[Score]]], *, part_name: str = "test"
) -> Table:
    """Rows are groups, columns are runs under each metric; the best of a metric is bold.

    A score of too few pairs stands in brackets; a dash where there is none.
    """
    known = {score.metric for _, scores in results for score in scores}
    metrics = [metric for metric in METRICS if metric in known] or sorted(known)[:3]
    values = {
        metric: {s.value for _, scores in results for s in main_rows(scores) if s.metric == metric}
        for metric in metrics
    }
    is_whole = [{v for v in values[metric] if not math.isnan(v)} == {1.0} for metric in metrics]
    if any(is_whole):  # all is found already: what is behind says nothing
        metrics = metrics[: is_whole.index(True) + 1]
    table = Table(title=f"pair recall on the {part_name} part", title_justify="left")
    table.add_column("group")
    table.add_column("pairs", justify="right")
    for metric in metrics:
        for name, _ in results:
            table.add_column(Text(f"{metric}\n{name}"), justify="right")
    by_run = [
        {(row_title(s), s.metric): s for s in main_rows(scores) if s.metric in metrics}
        for _, scores in results
    ]
    for title in dict.fromkeys(title for title, _ in by_run[0]):
        cells = []
        for metric in metrics:
            row = [scores.get((title, metric)) for scores in by_run]
            best = max((s.value for s in row if s is not None), default=math.nan)
            for score in row:
                if score is None or math.isnan(score.value):
                    cells.append(Text("–"))
                    continue
                shown = f"{score.value:.4f}" if score.is_judged else f"({score.value:.4f})"
                cells.append(Text(shown, "bold" if score.value == best and len(row) > 1 else ""))
        # The worst groups of two runs, or by two metrics, need not be the same.
        counts = {s.count for scores in by_run for (t, _), s in scores.items() if t == title}
        pairs = "–".join(f"{count:,}" for count in sorted({min(counts), max(counts)}))
        table.add_row(Text(title), pairs, *cells)
    all_scores = [score for scores in by_run for score in scores.values()]
    if any(not score.is_judged and not math.isnan(score.value) for score in all_scores):
        table.caption, table.caption_justify = "(…): too few pairs to judge", "left"
    return table


def differences_table(
    differences: Sequence[Difference], *, baseline: str, contender: str, metric: str = "recall@10"
) -> Table:
    """Contender minus baseline, with the interval over queries."""
    table = Table(title=Text(f"{metric}: {contender} minus {baseline}"), title_justify="left")
    counted = "pairs" if metric.startswith("recall@") else "queries"
    for heading in ("group", counted, baseline, contender, "difference", "95 % over queries"):
        table.add_column(Text(heading), justify="left" if heading == "group" else "right")
    for row in (row for row in differences if row.metric == metric):
        figures = [f"{row.count:,}", f"{row.baseline:.4f}", f"{row.contender:.4f}"]
        figures += [f"{row.difference:+.4f}", f"{row.low:+.4f} to {row.high:+.4f}"]
        table.add_row(Text(difference_title(row)), *figures)
    return table


def slices_table(
    findings: Findings, outcome: Outcome, dataset: Dataset, *, part_name: str, metric: str
) -> Table:
    """The slices in the order they were found, with some of the queries that fail there."""

    def cut(text: str) -> str:
        return text if len(text) <= 16 else f"{text[:15]}…"

    whole = f"{findings.value:.4f} over {findings.num_pairs:,} pairs"
    title = Text(f"who is failed: {metric} on the {part_name} part ({whole})")
    table = Table(Column("who", min_width=24), title=title, title_justify="left")
    for heading in ("pairs", metric, "95 %", "elsewhere", "excess failures", "p"):
        table.add_column(Text(heading), justify="right")
    table.add_column("such as", no_wrap=True, overflow="ellipsis")
    shown = findings_json(findings, outcome, dataset, part_name)["slices"]
    for row, texts in zip(findings.slices, shown, strict=True):
        examples = [
            f"{cut(e['query'] or 'query ' + str(e['query_id']))} → {cut(e['label'])}"
            for e in texts["examples"]
        ]
        figures = [f"{row.value:.4f}", f"{row.low:.3f}–{row.high:.3f}"]
        cells = [f"{row.num_pairs:,}", *(figures if row.num_pairs else ("–", "–"))]
        cells += [f"{row.rest:.4f}", f"{row.excess:,.0f}", f"{row.p_value:.3f}"]
        table.add_row(Text("\nand ".join(row.conditions)), *cells, Text("\n".join(examples)))
    return table


def slice_notes(findings: Findings, *, found_on: str, shown_on: str) -> list[str]:
    """How the slices were found, and how far to trust their figures."""
    pairs = f"{findings.min_pairs:,} pairs of the {found_on} part"
    looks = f"{findings.num_looks:,} slices of at least {pairs}"
    if not findings.num_looks:
        return [f"nothing to look at: no slice holds {pairs}"]
    if not findings.slices:
        return [f"no slice is worse than chance explains: {looks} were looked at"]
    chosen = (
        f"the figures are of the {shown_on} part, which did not choose the slices"
        if found_on != shown_on
        else "the slices were chosen on these very pairs: expect them to be less bad on others"
    )
    return [
        f"found among {looks}; p allows for every one of these looks",
        "excess failures: beyond as many average pairs, each pair counted once, from the top",
        chosen,
    ]


def parts_table(dataset: Dataset) -> Table:
    """The parts of a data set, how large they are and how their queries are grouped."""
    table = Table("part", "queries", "pairs", "groups", title_justify="left")
    table.title = Text(dataset.name)
    for name, part in dataset.parts.items():
        groups = ", ".join(f"{column} ({len(g.names)})" for column, g in part.groups.items())
        table.add_row(name, f"{len(part):,}", f"{len(part.positives.ids):,}", Text(groups or "–"))
    return table


def group_notes(dataset: Dataset) -> list[str]:
    """For each column of queries, how many of them and of their pairs are in several groups."""
    pairs_in, queries_in = Counter[str](), Counter[str]()
    for part in dataset.parts.values():
        for column, groups in part.groups.items():
            pairs_in[column] += 0  # a column without any is listed too
            if groups.sets is not None:
                pair_ids, group_ids = memberships(groups)
                query_ids = pairs_of(part.positives).query_ids[pair_ids]
                places = np.unique(query_ids * len(groups.names) + group_ids)
                of_queries = places // len(groups.names)  # each once for each of its groups
                pairs_in[column] += int((np.bincount(pair_ids) > 1).sum())
                queries_in[column] += int((np.bincount(of_queries) > 1).sum())
    return [
        f"in several groups of {column}, and counted in each: queries {queries_in[column]:,}, "
        f"(query, label) pairs {pairs_in[column]:,}"
        for column in pairs_in
    ]


def unseen_notes(dataset: Dataset) -> list[str]:
    """What to know before training: no test part, labels never trained, pairs that train too."""
    notes = []
    if "test" not in dataset.parts:
        have = "the validation part" if "validation" in dataset.parts else "nothing"
        notes.append(
            f"note: there is no test part, so a run is judged on {have}; split some rows off, or "
            f"name a file with --test"
        )
    for part_name in filter(lambda name: name != "train", dataset.parts):
        total = len(dataset.parts[part_name].positives.ids)
        of_part = f"of the {total:,} {part_name} pairs"
        if count := count_unseen_labels(dataset, part_name):
            outcome = "they stay in the figures"
            if count == total:
                outcome = "so no model can find one; most labels need several queries"
            notes.append(
                f"note: {count:,} {of_part} have a label that is never seen in training; {outcome}"
            )
        if count := count_known_pairs(dataset, part_name):
            notes.append(
                f"note: {count:,} {of_part} are in the training part too, and a model may know "
                f"them by heart; they stay in the figures"
            )
    return notes
