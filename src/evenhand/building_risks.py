"""From settings to how a step weighs its examples."""

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from evenhand.config import Config
from evenhand.data import Dataset
from evenhand.data.dataset import Groups, Rows, memberships, pad_rows
from evenhand.evaluation import group_columns
from evenhand.evaluation.scores import check_known
from evenhand.risk import (
    DualCvar,
    GroupRisk,
    RiskFn,
    StochasticMaximum,
    chi_square_weights,
    kl_weights,
    nonzero_weights,
    ranked_range_weights,
    top_weights,
)
from evenhand.training.loop import StepRisk, hardest_of_batch, whole_batch
from evenhand.training.step import Batch


def groups_of_pairs(config: Config, dataset: Dataset) -> Groups | None:
    """The known groups of every training pair; pairs without one are a group too."""
    if config.mining.method != "group-dro":
        return None
    columns = {column.name: column for column in group_columns(dataset, "train")}
    check_known(config.risk.group, list(columns), "column of groups (risk.group)")
    groups = columns[config.risk.group].groups
    if groups.sets is None:
        return groups._replace(ids=np.where(groups.ids < 0, len(groups.names), groups.ids))
    offsets = np.append(groups.sets.offsets, len(groups.sets.ids) + 1)  # and the set of that group
    sets = Rows(offsets, np.append(groups.sets.ids, len(groups.names)))
    return groups._replace(ids=np.where(groups.ids < 0, len(sets) - 1, groups.ids), sets=sets)


def build_risk(config: Config, *, num_pairs: int, pair_groups: Groups | None) -> StepRisk:
    method, risk = config.mining.method, config.risk
    if method in ("sgd", "snm"):
        return StepRisk(whole_batch)
    without_memory: dict[str, RiskFn] = {
        "snm-nonzero": nonzero_weights,
        "max": partial(top_weights, num_hard_examples=1),
    }
    if method in without_memory:
        return StepRisk(lambda losses, batch, count: without_memory[method](losses))
    if method == "chi-square":
        return StepRisk(_chi_square)
    if method == "kl":
        return StepRisk(_kl)
    if method == "ranked-range":
        ends = config.mining.num_counting, risk.num_dropped
        return StepRisk(lambda losses, _, count: _ranked_range(losses, count, *ends))
    if method == "cvar":
        cvar = DualCvar(window=risk.window)
        return StepRisk(partial(_dual_cvar, risk=cvar), cvar)
    if method == "stochastic-max":
        maximum = StochasticMaximum(num_pairs, step_size=risk.step_size, mixing=risk.mixing)
        return StepRisk(lambda losses, batch, _: maximum(losses, _known(batch.pair_ids)), maximum)
    if pair_groups is not None:
        groups = _group_risk(config, pair_groups)
        sets = None
        if pair_groups.sets is not None:
            all_sets = np.arange(len(pair_groups.sets))
            sets = torch.from_numpy(pad_rows(pair_groups.sets, all_sets))  # (sets, P)
        return StepRisk(partial(_group_weights, risk=groups, sets=sets), groups)
    return StepRisk(hardest_of_batch)


def _ranked_range(losses: Tensor, count: int, last_count: int, last_dropped: int) -> Tensor:
    """As k' shrinks from the whole batch, the number of dropped examples grows from none.

    At first every example is hard, and a wrong label does not show: what is dropped then is what
    has not been learnt yet (docs/experiments.md).
    """
    shrunk = (len(losses) - count) / max(1, len(losses) - last_count)  # 0 at first, then 1
    return ranked_range_weights(
        losses, num_dropped=round(shrunk * last_dropped), num_hard_examples=count
    )


def _chi_square(losses: Tensor, batch: Batch, count: int) -> Tensor:
    """The ball that reaches as far as equal weights for k' examples and none for the others."""
    return chi_square_weights(losses, radius=len(losses) / count - 1)


def _kl(losses: Tensor, batch: Batch, count: int) -> Tensor:
    """The ball that reaches as far as equal weights for k' examples and none for the others."""
    return kl_weights(losses, radius=math.log(len(losses) / count))


def _dual_cvar(losses: Tensor, batch: Batch, count: int, *, risk: DualCvar) -> Tensor:
    return risk(losses, tail_fraction=count / len(losses))


def _group_weights(
    losses: Tensor, batch: Batch, count: int, *, risk: GroupRisk, sets: Tensor | None
) -> Tensor:
    """A batch has one number an example: its group, or the row of `sets` that holds its groups."""
    ids = _known(batch.group_ids)
    return risk(losses, ids if sets is None else sets[ids.cpu()].to(losses.device))


def _group_risk(config: Config, pair_groups: Groups) -> GroupRisk:
    counts = np.bincount(memberships(pair_groups)[1])
    share, mixtures = config.risk.natural_share, None
    if share:
        shares = counts / counts.sum()
        mixtures = torch.from_numpy(share * shares + (1 - share) * np.eye(len(counts)))
    return GroupRisk(len(counts), step_size=config.risk.step_size, mixtures=mixtures)


def _known(ids: Tensor | None) -> Tensor:
    assert ids is not None  # the feed gives them
    return ids
