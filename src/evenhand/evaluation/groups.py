"""Group membership of the pairs and queries of a part; scores are broken down by these columns."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenhand.data import Dataset, Groups, IntArray, Part, memberships, pairs_of
from evenhand.data.groups import frequency_groups
from evenhand.errors import UserError
from evenhand.evaluation.outcome import Outcome

BUILT_IN = ("all", "frequency", "frequency over pairs")  # columns that every data set has
SUMMARIES = ("worst", "worst 3", "worst tenth")  # of the groups of a column

DoubleArray = NDArray[np.float64]


class GroupColumn(NamedTuple):
    """One way to divide the pairs of a part, and its queries where they can be divided.

    A pair may be in several groups, and a query in the groups of all its pairs.
    """

    name: str
    groups: Groups  # of the pairs: see `memberships`
    is_of_queries: bool  # False: it divides labels

    @property
    def group_names(self) -> tuple[str, ...]:
        return self.groups.names

    def pairs_of(self, group: str) -> IntArray:
        """Positions of the pairs in one group, in order."""
        pair_ids, group_ids = memberships(self.groups)
        return np.asarray(pair_ids[group_ids == self.group_names.index(group)])


def group_columns(dataset: Dataset, part_name: str) -> list[GroupColumn]:
    """Every column of groups: all, frequency (two kinds), those of labels, those of queries.

    A column of the data whose name is taken is called '<name> of labels' or '<name> of queries',
    and a group whose name is that of a summary, such as 'worst 3', '<name> (group)'.
    """
    part = dataset.parts[part_name]
    pairs, label_counts = pairs_of(part.positives), dataset.label_counts()
    everyone = Groups(np.zeros(len(pairs.query_ids), dtype=np.int32), ("all",))
    of_labels = [
        ("frequency", frequency_groups(label_counts, over="labels")),
        ("frequency over pairs", frequency_groups(label_counts, over="pairs")),
    ]
    if not label_counts.any():  # nothing is known of training: none is frequent, and none rare
        of_labels = [(name, Groups(np.full_like(g.ids, -1), ())) for name, g in of_labels]
    of_labels += dataset.label_groups.items()
    columns = {"all": GroupColumn("all", everyone, is_of_queries=True)}
    for name, groups in of_labels:
        while name in columns:
            name = f"{name} of labels"
        of_pairs = _rename(groups)._replace(ids=groups.ids[pairs.label_ids])
        columns[name] = GroupColumn(name, of_pairs, is_of_queries=False)
    for name, groups in part.groups.items():
        while name in columns:
            name = f"{name} of queries"
        if groups.sets is None:
            groups = groups._replace(ids=groups.ids[pairs.query_ids])
        elif len(groups.ids) != len(pairs.query_ids):
            raise UserError(
                f"the groups of {name!r} have sets, so their ids must be of the "
                f"{len(pairs.query_ids)} pairs of the {part_name} part, got {len(groups.ids)}"
            )
        columns[name] = GroupColumn(name, _rename(groups), is_of_queries=True)
    return list(columns.values())


def _rename(groups: Groups) -> Groups:
    names = (f"{name} (group)" if name in SUMMARIES else name for name in groups.names)
    return groups._replace(names=tuple(names))


def check_belongs(outcome: Outcome, part: Part, part_name: str) -> None:
    pairs = pairs_of(part.positives)
    if (
        len(outcome.retrieved_ids) != len(part)
        or not np.array_equal(outcome.query_ids, pairs.query_ids)
        or not np.array_equal(outcome.label_ids, pairs.label_ids)
    ):
        raise UserError(
            f"the outcome ({len(outcome.retrieved_ids)} queries, {len(outcome.ranks)} pairs) is "
            f"not of the {part_name} part of this data set ({len(part)} queries, "
            f"{len(pairs.query_ids)} pairs); evaluate the run again on this data set"
        )
