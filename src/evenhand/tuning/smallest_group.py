"""The paper's advice for k', which needs no search: what the smallest group fills of a batch."""

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from evenhand.config import Config, build_config, with_assignments
from evenhand.data import Dataset
from evenhand.errors import UserError
from evenhand.evaluation import group_columns
from evenhand.evaluation.scores import check_known
from evenhand.runs import open_data
from evenhand.tuning.space import NUM_HARD_EXAMPLES, with_settings


def num_hard_examples_for(share: float, *, batch_size: int) -> int:
    """How many examples of a batch a group with this share of the data is expected to fill.

    Example:
        >>> num_hard_examples_for(0.02, batch_size=2048)
        41
    """
    if not 0 < share <= 1:
        raise UserError(f"the smallest share must be above 0 and at most 1, got {share}")
    return math.ceil(share * batch_size * (1 - 1e-12))  # 0.07 * 100 is a little more than 7


def count_members(dataset: Dataset, name: str) -> tuple[int, int]:
    """Training pairs of a group, such as 'script=THAI', of queries or labels; and of all."""
    column_name, equals, group = (piece.strip() for piece in name.partition("="))
    if not equals:
        raise UserError(f"a group is named column=group, such as script=THAI, got {name!r}")
    columns = {column.name: column for column in group_columns(dataset, "train")}
    check_known(column_name, list(columns), f"column of {name!r}")
    column = columns[column_name]
    check_known(group, column.group_names, f"group of {name!r}")
    num_members = len(column.pairs_of(group))
    if not num_members:
        raise UserError(f"{name!r} has no training pair in {dataset.name}, so it has no share")
    return num_members, len(column.groups.ids)


def build_guarding_config(
    settings: Mapping[str, Mapping[str, Any]], smallest: float | str, console: Console
) -> Config:
    """The config of these settings, with the k' of the smallest group: its share, or its name."""
    # Whatever k' the settings have, it may not fit the batch, and it does not count.
    config = build_config(with_assignments(settings, [f"{NUM_HARD_EXAMPLES}=1"]))
    mining = config.mining
    if isinstance(smallest, str):
        num_members, num_pairs = count_members(open_data(config.data, console), smallest)
        console.print(f"{smallest}: {num_members:,} of {num_pairs:,} training pairs")
        smallest = num_members / num_pairs
    if not mining.mines_examples:
        raise UserError(
            f"a smallest group sets k', which mining.method = {mining.method!r} has no use for; "
            f"choose another method, such as --method s2m-annealed"
        )
    num_hard_examples = num_hard_examples_for(smallest, batch_size=mining.batch_size)
    console.print(
        f"k' = {num_hard_examples:,}, what a share of {smallest:.2%} is expected to fill of a "
        f"batch of {mining.batch_size:,}"
    )
    return with_settings(config, {NUM_HARD_EXAMPLES: num_hard_examples})
