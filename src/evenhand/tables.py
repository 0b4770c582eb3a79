"""Results in the terminal: one table a person can read at a glance."""

import math
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from evenhand.data.dataset import Dataset, count_unseen_labels
from evenhand.evaluation import Difference, Score


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


def main_rows(scores: Sequence[Score]) -> list[Score]:
    """All, head, torso, tail, and the worst groups of every column."""

    def is_main(score: Score) -> bool:
        is_worst = score.group.startswith("worst")
        if score.column in ("all", "frequency"):
            return not is_worst
        is_summary = score.group in ("worst 3", "worst tenth") and len(score.members) > 1
        return is_summary and score.column != "frequency over pairs"

    return [score for score in scores if is_main(score)]


def score_text(score: Score) -> str:
    if math.isnan(score.value):
        return "–"
    return f"{score.value:.4f}" if score.is_judged else f"({score.value:.4f})"


def results_table(
    results: Sequence[tuple[str, Sequence[Score]]],
    *,
    metrics: Sequence[str] = ("recall@1", "recall@10", "recall@50"),
    part_name: str = "test",
) -> Table:
    """Rows are groups, columns are runs under each metric; the best of a metric is bold."""
    known = {score.metric for _, scores in results for score in scores}
    metrics = [metric for metric in metrics if metric in known] or sorted(known)[:3]
    table = Table(title=f"pair recall on the {part_name} part", title_justify="left")
    table.add_column("group")
    table.add_column("pairs", justify="right")
    for metric in metrics:
        for name, _ in results:
            table.add_column(Text(f"{metric}\n{name}"), justify="right")
    cells = [{(s.column, s.group, s.metric): s for s in main_rows(scores)} for _, scores in results]
    keys = list(dict.fromkeys((column, group) for column, group, _ in cells[0]))
    for column, group in keys:
        row: list[Text] = []
        first = next(s for s in cells[0].values() if (s.column, s.group) == (column, group))
        for metric in metrics:
            scores = [cell.get((column, group, metric)) for cell in cells]
            best = max((s.value for s in scores if s is not None), default=math.nan)
            row += [
                Text("–")
                if s is None
                else Text(score_text(s), "bold" if s.value == best and len(scores) > 1 else "")
                for s in scores
            ]
        counts = [
            cell[column, group, metric].count
            for cell in cells
            for metric in metrics
            if (column, group, metric) in cell
        ]
        table.add_row(Text(row_title(first)), _range(counts), *row)
    return table


def _range(counts: Sequence[int]) -> str:
    """The worst groups of two runs, or by two metrics, need not be the same."""
    least, most = min(counts), max(counts)
    return f"{least:,}" if least == most else f"{least:,}–{most:,}"


def differences_table(
    differences: Sequence[Difference], *, baseline: str, contender: str, metric: str = "recall@10"
) -> Table:
    """Contender minus baseline, with both intervals."""
    table = Table(title=Text(f"{metric}: {contender} minus {baseline}"), title_justify="left")
    for heading in ("group", "pairs", baseline, contender, "difference", "95 % over queries"):
        table.add_column(Text(heading), justify="left" if heading == "group" else "right")
    has_seeds = any(row.num_runs > 1 for row in differences)
    if has_seeds:
        table.add_column("95 % over seeds", justify="right")
    for row in differences:
        if row.metric != metric:
            continue
        cells: list[str | Text] = [
            Text(_list_title(row.group)),
            f"{row.count:,}",
            f"{row.baseline:.4f}",
            f"{row.contender:.4f}",
            f"{row.difference:+.4f}",
            f"{row.low:+.4f} to {row.high:+.4f}",
        ]
        if has_seeds:
            cells.append(f"{row.seed_low:+.4f} to {row.seed_high:+.4f}")
        table.add_row(*cells)
    return table


def _list_title(group: str) -> str:
    summary, of, column = group.partition(" of ")
    return summary_title(summary, column) if of and summary.startswith("worst") else group


def parts_table(dataset: Dataset) -> Table:
    """The parts of a data set, how large they are and how their queries are grouped."""
    table = Table("part", "queries", "pairs", "groups", title_justify="left")
    table.title = Text(dataset.name)
    for name, part in dataset.parts.items():
        groups = ", ".join(f"{column} ({len(g.names)})" for column, g in part.groups.items())
        table.add_row(name, f"{len(part):,}", f"{len(part.positives.ids):,}", Text(groups or "–"))
    return table


def unseen_notes(dataset: Dataset) -> list[str]:
    """A sentence for each part with labels that no training pair has: said, and not fatal."""
    notes = []
    for part_name in dataset.parts:
        if part_name != "train" and (count := count_unseen_labels(dataset, part_name)):
            pairs = len(dataset.parts[part_name].positives.ids)
            notes.append(
                f"note: {count:,} of the {pairs:,} {part_name} pairs have a label that is never "
                f"seen in training; they stay in the figures"
            )
    return notes
