"""Who is served and who is not: what a model finds, for every group, with intervals.

`evaluate` asks an index for every query of a part and keeps what happened to each (query,
positive) pair: an `Outcome`. All figures come from it, without the model: `score_table` for one
run, `compare_outcomes` for two methods, `selected_value` for the number that chooses a checkpoint,
`slices_of` for the subpopulations that explain its failures.

Pair metrics are the paper's recall@r: the share of (query, label) pairs whose label is among the
first r results. A pair belongs to a group of labels by its label, to a group of queries by its
query or by its lines in a table. One in several groups counts in each of them, and once in the
figures over all. Query metrics ('query recall@r', 'precision@r', 'ndcg@r', 'psp@r', 'mrr') are
means over queries, and exist for all queries and for groups of queries.

Intervals are 95 % percentile intervals of the bootstrap over whole queries: the pairs of a query
stand or fall together, so resampling single pairs would make intervals too narrow.
"""

from evenhand.evaluation.comparison import Difference, GroupList, compare_outcomes, worst_groups
from evenhand.evaluation.groups import SUMMARIES, GroupColumn, group_columns
from evenhand.evaluation.outcome import (
    Outcome,
    evaluate,
    load_outcome,
    save_outcome,
)
from evenhand.evaluation.scores import (
    Score,
    check_selector,
    score_table,
    selected_score,
    selected_value,
    worst_members,
)
from evenhand.evaluation.slices import (
    Findings,
    checked_slices,
    find_slices,
    findings_json,
    slices_of,
)

__all__ = [
    "SUMMARIES",
    "Difference",
    "Findings",
    "GroupColumn",
    "GroupList",
    "Outcome",
    "Score",
    "check_selector",
    "checked_slices",
    "compare_outcomes",
    "evaluate",
    "find_slices",
    "findings_json",
    "group_columns",
    "load_outcome",
    "save_outcome",
    "score_table",
    "selected_score",
    "selected_value",
    "slices_of",
    "worst_groups",
    "worst_members",
]
