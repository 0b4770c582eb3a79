"""Single queries: the worst misses, and what changed from the first run to the last."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from evenhand.data.dataset import IntArray, memberships
from evenhand.evaluation import Outcome
from evenhand.report.markup import (
    Attributes,
    Child,
    Html,
    element,
    folded,
    fragment,
    head_row,
    note,
    number,
    paragraph,
    percent,
    section,
    table,
    user_text,
)
from evenhand.report.study import Study, is_found

NUM_HARDEST = 8  # of all pairs
NUM_OF_GROUP = 4  # of the worst group of each column
NUM_CHANGED = 8  # repaired, and as many broken
NUM_RETURNED = 3

BoolArray = NDArray[np.bool_]


def examples_section(study: Study) -> Html:
    parts = [
        paragraph(
            f"Pairs missed among the first {study.cutoff} results, by how far the best wrong "
            f"result outscored the right label (the gap; scores compare within one run alone)."
        ),
        *(_hardest(study, run) for run in range(len(study.results))),
    ]
    if len(study.results) > 1:
        parts.append(_changed(study))
    return section("examples", "The hardest examples", *parts)


# --- the worst misses -----------------------------------------------------------------------------


def _hardest(study: Study, run: int) -> Html:
    outcome = study.results[run].outcome
    is_right = _is_right(outcome, study.dataset.num_labels)
    gaps = _gaps(outcome, is_right)
    is_missed = ~is_found(outcome.ranks, study.cutoff) & np.isfinite(gaps)  # (N,)
    blocks: list[tuple[Child, IntArray]] = [
        ("of all pairs", _largest(gaps, is_missed, outcome.query_ids, NUM_HARDEST))
    ]
    for column in study.own_columns:
        worst = study.row(column, "worst")[run].members
        if worst:
            is_member = np.zeros_like(is_missed)
            is_member[study.columns[column].pairs_of(worst[0])] = True
            chosen = _largest(gaps, is_missed & is_member, outcome.query_ids, NUM_OF_GROUP)
            blocks.append((fragment(f"of the worst {column}, ", user_text(worst[0])), chosen))
    head = head_row("Query", "Belongs to", "Right label", "Rank", "Gap", "Returned instead")
    rows = []
    for title, pair_ids in blocks:
        if len(pair_ids):
            heading: Attributes = {"colspan": 6, "scope": "rowgroup", "class": "block"}
            rows.append(element("tr", {}, element("th", heading, "The hardest ", title)))
        for pair in pair_ids:
            cells = _returned(study, outcome, int(outcome.query_ids[pair]), is_right)
            rows.append(_example_row(study, pair, _rank(outcome, pair), f"{gaps[pair]:.2f}", cells))
    name = study.run_names[run]
    if not rows:
        return note(element("bdi", {}, name), " missed nothing that could be listed.")
    whole = table(f"The hardest misses of {name}", [head], rows, css_class="examples")
    title = fragment("The hardest misses of ", element("bdi", {}, name))
    return folded(title, whole, is_open=run == 0)


def _is_right(outcome: Outcome, num_labels: int) -> BoolArray:
    """Which of the shown results are positives of their query: (Q, 10)."""
    rows = np.arange(len(outcome.retrieved_ids))[:, None]  # (Q, 1)
    shown = rows * num_labels + outcome.retrieved_ids  # (Q, 10)
    is_right = np.isin(shown, outcome.query_ids * num_labels + outcome.label_ids)
    return np.asarray(is_right & (outcome.retrieved_ids >= 0))


def _gaps(outcome: Outcome, is_right: BoolArray) -> NDArray[np.float64]:
    """Best wrong score minus the positive's, -inf where nothing wrong was returned: (N,)."""
    wrong = np.where(is_right, -np.inf, outcome.retrieved_scores.astype(np.float64))  # (Q, 10)
    return np.asarray(wrong.max(axis=1, initial=-np.inf)[outcome.query_ids] - outcome.scores)


def _largest(
    gaps: NDArray[np.float64], is_candidate: BoolArray, query_ids: IntArray, count: int
) -> IntArray:
    """Pairs with the largest gaps, one a query."""
    pair_ids = np.flatnonzero(is_candidate)
    pair_ids = pair_ids[np.argsort(-gaps[pair_ids], kind="stable")]
    _, first = np.unique(query_ids[pair_ids], return_index=True)
    return np.asarray(pair_ids[np.sort(first)[:count]])


def _rank(outcome: Outcome, pair: int) -> str:
    rank = int(outcome.ranks[pair])
    return number(rank) if rank else f"> {outcome.num_results}"


def _returned(
    study: Study, outcome: Outcome, query: int, is_right: BoolArray, count: int = NUM_RETURNED
) -> Html:
    """The first results; marked are those that are right too, for a query of several labels."""
    items = [
        element(
            "li",
            {},
            user_text(study.dataset.label_name(int(label))),
            " (also right)" if is_right[query, place] else "",
        )
        for place, label in enumerate(outcome.retrieved_ids[query, :count])
        if label >= 0
    ]
    return element("ol", {}, *items) if items else Html("–")


def _example_row(study: Study, pair: int, *cells: Child) -> Html:
    outcome = study.results[0].outcome  # every run has the same pairs
    query, label = int(outcome.query_ids[pair]), int(outcome.label_ids[pair])
    return element(
        "tr",
        {},
        element("th", {"scope": "row"}, _query(study, query)),
        element("td", {}, _groups(study, pair)),
        element("td", {}, user_text(study.dataset.label_name(label))),
        *(element("td", {}, cell) for cell in cells),
    )


def _query(study: Study, query: int) -> Html:
    texts = study.part.texts
    return Html(f"query {query}") if texts is None else user_text(texts[query])


def _groups(study: Study, pair: int) -> str:
    names = []
    for column in study.own_columns:
        groups = study.columns[column].groups
        _, group_ids = memberships(groups._replace(ids=groups.ids[[pair]]))
        if len(group_ids):
            names.append(", ".join(groups.names[group].strip() for group in group_ids))
    return " · ".join(names) or "–"


# --- what changed ---------------------------------------------------------------------------------


def _changed(study: Study) -> Html:
    """Repaired and broken pairs, counted, and drawn at random to be looked at."""
    first, last = study.results[0].outcome, study.results[-1].outcome
    before, after = is_found(first.ranks, study.cutoff), is_found(last.ranks, study.cutoff)
    first_name, last_name = study.run_names[0], study.run_names[-1]
    is_repaired, is_broken = ~before & after, before & ~after
    repaired, broken = int(is_repaired.sum()), int(is_broken.sum())
    told = paragraph(
        f"From {first_name} to {last_name}, {number(repaired)} pairs are repaired and "
        f"{number(broken)} broken, of {number(len(before))} "
        f"(net {percent((repaired - broken) / max(1, len(before))).replace('-', '−')} %). "
        f"Those below are drawn at random, not chosen."
    )
    tables = [
        _changed_table(
            study, f"Repaired: missed by {first_name}, found by {last_name}", is_repaired, missing=0
        ),
        _changed_table(
            study, f"Broken: found by {first_name}, missed by {last_name}", is_broken, missing=-1
        ),
    ]
    return fragment(element("h3", {}, "Repaired and broken"), told, *tables)


def _changed_table(study: Study, title: str, is_chosen: BoolArray, *, missing: int) -> Html:
    """Some of the chosen pairs, with the first result of the run that missed them."""
    pair_ids = _drawn(np.flatnonzero(is_chosen), NUM_CHANGED)
    first, last = study.results[0].outcome, study.results[-1].outcome
    missed = study.results[missing].outcome
    is_right = _is_right(missed, study.dataset.num_labels)
    rows = [
        _example_row(
            study,
            pair,
            _rank(first, pair),
            _rank(last, pair),
            _returned(study, missed, int(missed.query_ids[pair]), is_right, count=1),
        )
        for pair in pair_ids
    ]
    head = head_row(
        "Query",
        "Belongs to",
        "Right label",
        *(f"Rank, {study.run_names[run]}" for run in (0, -1)),
        f"First result of {study.run_names[missing]}",
    )
    caption = f"{title} ({number(int(is_chosen.sum()))})"
    return table(caption, [head], rows, css_class="examples") if rows else note(f"{caption}.")


def _drawn(pair_ids: IntArray, count: int) -> Sequence[int]:
    """A few at random, the same ones every time."""
    generator = np.random.default_rng(0)
    chosen: Iterable[int] = generator.permutation(pair_ids)[:count].tolist()
    return sorted(chosen)
