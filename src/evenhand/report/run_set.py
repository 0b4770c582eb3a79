"""The runs side by side, as every section of the report reads them."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from evenhand.data import Dataset, IntArray, Part
from evenhand.errors import UserError
from evenhand.evaluation import Difference, GroupColumn, Score, group_columns
from evenhand.evaluation.baselines import compare_with_baselines
from evenhand.evaluation.comparison import is_of_pairs
from evenhand.evaluation.groups import check_belongs
from evenhand.evaluation.scores import main_cutoff
from evenhand.result_tables import main_rows
from evenhand.run_folder import (
    RunResult,
    check_trained_on,
    is_evaluated,
    is_of_predictions,
    load_result,
    read_about,
)
from evenhand.runs import evaluate_run, open_result

SHOWN_CUTOFFS = (1, 10, 50)
FREQUENCY = ("frequency", "frequency over pairs")  # columns that every data set has


class GroupRow(NamedTuple):
    """One group of a column in every run."""

    name: str
    scores: list[Score]  # one a run
    is_judged: bool
    num_pairs: int


@dataclasses.dataclass(frozen=True)
class RunSet:
    """Runs evaluated on the same part of one data set; `make_run_set` checks that they are."""

    results: tuple[RunResult, ...]
    dataset: Dataset
    cutoffs: tuple[int, ...]  # those that every run has
    metric: str  # that the page, or the comparison, is about

    @property
    def part_name(self) -> str:
        """The part of the data that all runs are judged on."""
        return self.results[0].part_name

    @property
    def part(self) -> Part:
        """Its queries, positives and groups."""
        return self.dataset.parts[self.part_name]

    @cached_property
    def run_names(self) -> tuple[str, ...]:
        """Names of the runs, with a number where one occurs twice.

        Of the names that `evenhand train` gives, `shop-snm-seed0` and `shop-s2m-even-seed0`, what
        differs is enough: `snm` and `s2m-even`.
        """
        names = [result.name for result in self.results]
        given = [
            re.fullmatch(rf"{re.escape(self.dataset.name)}-(.+)-seed(\d+)", name) for name in names
        ]
        if len(names) > 1 and all(given) and len({match[2] for match in given if match}) == 1:
            names = [match[1] for match in given if match]
        seen: Counter[str] = Counter()
        for place, name in enumerate(names):
            seen[name] += 1
            names[place] = name if seen[name] == 1 else f"{name} ({seen[name]})"
        return tuple(names)

    @property
    def shown_cutoffs(self) -> tuple[int, ...]:
        """The cut-offs that tables show: few, that of the page among them, none of all labels."""
        shown = {self.cutoff, *(c for c in SHOWN_CUTOFFS if c < self.dataset.num_labels)}
        return tuple(cutoff for cutoff in self.cutoffs if cutoff in shown)

    @property
    def shown_metrics(self) -> tuple[str, ...]:
        """What tables show: recall at those cut-offs, or a metric of queries alone."""
        recalls = tuple(f"recall@{cutoff}" for cutoff in self.shown_cutoffs)
        return recalls if self.is_of_pairs else (self.metric,)

    @property
    def is_of_pairs(self) -> bool:
        """Whether the metric is a recall over pairs, as it is on every page."""
        return is_of_pairs(self.metric)

    @property
    def cutoff(self) -> int:
        """That of the metric, or the main one beside a metric of queries."""
        if self.is_of_pairs:
            return int(self.metric.partition("@")[2])
        return main_cutoff(self.cutoffs, num_labels=self.dataset.num_labels)

    @property
    def where_found(self) -> str:
        """What the cut-off asks for: `among the first 10 results`."""
        return (
            "as the first result" if self.cutoff == 1 else f"among the first {self.cutoff} results"
        )

    @cached_property
    def above_baselines(self) -> list[dict[str, Difference]]:
        """Every run minus each baseline of the first one, over all, at the metric."""
        metric = None if self.is_of_pairs else self.metric
        where = self.results[0].baselines, self.dataset, self.part_name
        compared = [compare_with_baselines(r.outcome, *where, metric=metric) for r in self.results]
        key = "all", self.metric
        return [
            {
                name: next(r for r in rows if (r.group, r.metric) == key)
                for name, rows in run.items()
            }
            for run in compared
        ]

    @cached_property
    def columns(self) -> dict[str, GroupColumn]:
        """The columns of groups of this part, by name."""
        return {column.name: column for column in group_columns(self.dataset, self.part_name)}

    @cached_property
    def own_columns(self) -> list[str]:
        """The data set's own columns: of queries, then of labels, those with few groups first."""
        columns = [c for name, c in self.columns.items() if name not in ("all", *FREQUENCY)]
        columns.sort(key=lambda c: (not c.is_of_queries, len(c.group_names)))
        return [column.name for column in columns]

    @cached_property
    def _scores(self) -> list[dict[tuple[str, str, str], Score]]:
        return [{(s.metric, s.column, s.group): s for s in r.scores} for r in self.results]

    def row(self, column: str, group: str, metric: str | None = None) -> list[Score]:
        """The score of one group in every run, NaN without one; by default at the cut-off."""
        key = metric or f"recall@{self.cutoff}", column, group
        nothing = Score(*key, math.nan, math.nan, math.nan, 0, is_judged=False)
        return [scores.get(key, nothing) for scores in self._scores]

    def rows(self, column: str) -> list[GroupRow]:
        """The groups of a column: those that can be judged, worst first; then the others."""
        rows = []
        for name in self.columns[column].group_names:
            scores = self.row(column, name)
            is_judged = all(s.is_judged and not math.isnan(s.value) for s in scores)
            rows.append(GroupRow(name, scores, is_judged, max(s.count for s in scores)))
        judged = [row for row in rows if row.is_judged]
        judged.sort(key=lambda row: min(score.value for score in row.scores))
        others = sorted((row for row in rows if not row.is_judged), key=lambda row: -row.num_pairs)
        return [*judged, *others]

    @cached_property
    def _summaries(self) -> list[Score]:
        return [s for s in main_rows(self.results[0].scores) if s.metric == self.metric]

    def summaries(self, column: str) -> list[str]:
        """Those of worst, worst 3 and worst tenth that are shown, as in the terminal."""
        return [score.group for score in self._summaries if score.column == column]

    def telling_summary(self, column: str) -> str | None:
        """The summary that stands for a column, or None: 'worst 3' of five groups says little."""
        summaries = self.summaries(column)
        num_judged = sum(row.is_judged for row in self.rows(column))
        return summaries[-1 if num_judged >= 10 else 0] if summaries else None


def make_run_set(
    results: Sequence[RunResult], dataset: Dataset, metric: str | None = None
) -> RunSet:
    """Runs evaluated on the same part of one data set, made ready to be read side by side.

    Args:
        metric: recall at a cut-off, or a metric of queries; if not given, by `main_cutoff`.
    """
    if not results:
        raise ValueError("results must hold at least one run, got none")
    part_names = {result.part_name for result in results}
    if len(part_names) > 1:
        raise UserError(f"the runs were evaluated on different parts: {sorted(part_names)}")
    part_name = results[0].part_name
    if part_name not in dataset.parts:
        raise UserError(f"data set {dataset.name} has no part {part_name!r}")
    for result in results:
        try:
            check_belongs(result.outcome, dataset.parts[part_name], part_name)
        except UserError as error:
            raise UserError(f"run {result.name}: {error}") from error
    cutoffs = sorted(set.intersection(*(set(result.outcome.cutoffs) for result in results)))
    if not cutoffs:
        raise UserError("the runs have no cutoff in common; evaluate them again with the same ones")
    recalls = [f"recall@{cutoff}" for cutoff in cutoffs]
    of_queries = results[0].outcome.query_metrics
    known = [
        *recalls,
        *(n for n in of_queries if all(n in r.outcome.query_metrics for r in results)),
    ]
    if metric is None:
        metric = f"recall@{main_cutoff(cutoffs, num_labels=dataset.num_labels)}"
    if metric not in known:
        raise UserError(f"--metric must be one of {', '.join(known)}, got {metric!r}")
    return RunSet(tuple(results), dataset, tuple(cutoffs), metric)


def open_results(
    folders: Sequence[Path],
    dataset: Dataset,
    part_name: str,
    *,
    metric: str | None,
    device: torch.device,
    console: Console,
) -> list[RunResult]:
    """The evaluated runs of some folders, which belong together; the first has the baselines."""
    check_trained_on(folders[0], dataset)
    first, *others = (read_about(folder)["dataset"] for folder in folders)
    for folder, other in zip(folders[1:], others, strict=True):
        if other.get("fingerprint") != first.get("fingerprint"):
            raise UserError(
                f"{folders[0]} and {folder} were trained on different data sets "
                f"({first.get('folder')} and {other.get('folder')}), so their queries cannot be "
                f"paired; train one of them on the data set of the other"
            )
    results = [load_result(folder, part_name) for folder in folders]
    for folder, result in zip(folders, results, strict=True):
        highest = int(result.outcome.retrieved_ids.max(initial=-1))
        if highest >= dataset.num_labels:
            raise UserError(
                f"the outcome of {folder} names label {highest} of {dataset.num_labels}: it is "
                f"damaged; evaluate the run again"
            )
    make_run_set(results, dataset, metric)  # refuses what does not belong together
    # The first run's worst groups are chosen on the validation part.
    has_validation = "validation" not in dataset.parts or is_evaluated(folders[0], "validation")
    if not has_validation and not is_of_predictions(folders[0]):
        evaluate_run(folders[0], dataset, "validation", device=device, console=console)
    with console.status("baselines without training"):
        results[0] = open_result(folders[0], dataset, part_name)
    return results


def is_found(ranks: IntArray, cutoff: int) -> NDArray[np.bool_]:
    """Which pairs have their label among the first `cutoff` results: (N,) -> (N,)."""
    return (ranks > 0) & (ranks <= cutoff)
