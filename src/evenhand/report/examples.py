"""Single queries: the worst misses, and what changed from the first run to the last."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.data import IntArray, memberships
from evenhand.evaluation import Outcome
from evenhand.report.rendering import NOTHING, number
from evenhand.report.run_set import RunSet, is_found

NUM_HARDEST = 8  # of all pairs
NUM_OF_GROUP = 4  # of the worst group of each column
NUM_CHANGED = 8  # repaired, and as many broken
NUM_RETURNED = 3

BoolArray = NDArray[np.bool_]


def describe_pair(runs: RunSet, outcome: Outcome, pair: int) -> dict[str, Any]:
    """A (query, label) pair as examples show it: its texts, its groups, and its rank."""
    query, texts = int(outcome.query_ids[pair]), runs.part.texts
    groups = []
    for column in runs.own_columns:
        column_groups = runs.columns[column].groups
        _, ids = memberships(column_groups._replace(ids=column_groups.ids[[pair]]))
        if len(ids):
            groups.append(", ".join(column_groups.names[group].strip() for group in ids))
    return {
        "query": f"query {query}" if texts is None else texts[query],
        "groups": " · ".join(groups) or NOTHING,
        "label": runs.dataset.label_name(int(outcome.label_ids[pair])),
        "rank": _format_rank(outcome, pair),
    }


def _format_rank(outcome: Outcome, pair: int) -> str:
    rank = int(outcome.ranks[pair])
    return number(rank) if rank else f"> {outcome.num_results}"


def _first_results(
    runs: RunSet, outcome: Outcome, pair: int, is_right: BoolArray, count: int
) -> list[tuple[str, bool]]:
    """Names of the first results of a pair's query, and whether each is right, too."""
    query = outcome.query_ids[pair]
    ids, right = outcome.retrieved_ids[query, :count], is_right[query, :count]
    return [
        (runs.dataset.label_name(label), also)
        for label, also in zip(ids.tolist(), right.tolist(), strict=True)
        if label >= 0
    ]


def hardest_misses(runs: RunSet) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """(title, group, pairs) of the last run, by how far a wrong result outscored the right label.

    Blocks without a pair are left out.
    """
    outcome = runs.results[-1].outcome
    is_right = right_results(outcome, runs.dataset.num_labels)
    gaps = score_gaps(outcome, is_right)
    is_missed = ~is_found(outcome.ranks, runs.cutoff) & np.isfinite(gaps)  # (N,)
    chosen = [("of all pairs", "", largest_gaps(gaps, is_missed, outcome.query_ids, NUM_HARDEST))]
    for column in runs.own_columns:
        for group in runs.row(column, "worst")[-1].members[:1]:
            is_member = np.zeros_like(is_missed)
            is_member[runs.columns[column].pairs_of(group)] = True
            pair_ids = largest_gaps(gaps, is_missed & is_member, outcome.query_ids, NUM_OF_GROUP)
            chosen.append((f"of the worst {column}, ", group, pair_ids))
    blocks = []
    for title, group, pair_ids in chosen:
        pairs = [
            describe_pair(runs, outcome, pair)
            | {"gap": f"{gaps[pair]:.2f}"}
            | {"returned": _first_results(runs, outcome, pair, is_right, NUM_RETURNED)}
            for pair in pair_ids.tolist()
        ]
        if pairs:
            blocks.append((title, group, pairs))
    return blocks


def right_results(outcome: Outcome, num_labels: int) -> BoolArray:
    """Which of the shown results are positives of their query: (Q, 10)."""
    rows = np.arange(len(outcome.retrieved_ids))[:, None]  # (Q, 1)
    shown = rows * num_labels + outcome.retrieved_ids  # (Q, 10)
    is_right = np.isin(shown, outcome.query_ids * num_labels + outcome.label_ids)
    return np.asarray(is_right & (outcome.retrieved_ids >= 0))


def score_gaps(outcome: Outcome, is_right: BoolArray) -> NDArray[np.float64]:
    """Best wrong score minus the positive's, -inf where nothing wrong was returned: (N,)."""
    wrong = np.where(is_right, -np.inf, outcome.retrieved_scores.astype(np.float64))  # (Q, 10)
    with np.errstate(invalid="ignore"):  # predictions without a list, or without the right label
        return np.asarray(wrong.max(axis=1, initial=-np.inf)[outcome.query_ids] - outcome.scores)


def largest_gaps(
    gaps: NDArray[np.float64], is_candidate: BoolArray, query_ids: IntArray, count: int
) -> IntArray:
    """Pairs with the largest gaps, one a query."""
    pair_ids = np.flatnonzero(is_candidate)
    pair_ids = pair_ids[np.argsort(-gaps[pair_ids], kind="stable")]
    _, first = np.unique(query_ids[pair_ids], return_index=True)
    return np.asarray(pair_ids[np.sort(first)[:count]])


def changed_pairs(runs: RunSet) -> list[dict[str, Any]]:
    """Pairs that the last run repairs, and those it breaks: counted, and some drawn at random."""
    first, last = runs.results[0].outcome, runs.results[-1].outcome
    before, after = is_found(first.ranks, runs.cutoff), is_found(last.ranks, runs.cutoff)
    tables = []
    for kind, is_chosen, missed_by in (
        ("Repaired", ~before & after, 0),
        ("Broken", before & ~after, -1),
    ):
        missed = runs.results[missed_by].outcome
        is_right = right_results(missed, runs.dataset.num_labels)
        drawn = np.random.default_rng(0).permutation(np.flatnonzero(is_chosen))[:NUM_CHANGED]
        pairs = [
            describe_pair(runs, first, pair)
            | {"last_rank": _format_rank(last, pair)}
            | {"returned": _first_results(runs, missed, pair, is_right, 1)}
            for pair in sorted(drawn.tolist())
        ]
        names = runs.run_names[missed_by], runs.run_names[-1 - missed_by]
        values = {"count": int(is_chosen.sum()), "missed_by": names[0], "found_by": names[1]}
        tables.append({"kind": kind, "pairs": pairs, **values})
    return tables
