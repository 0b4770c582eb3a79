"""Trainings of one process and of ranks, in either precision."""

import copy

import torch

from evenhand.build import build_training
from evenhand.distributed.ranks import Shards

TABLES = ("label_table", "label_bias", "encoder.weight")  # the encoder's, of sparse features


def whole_training(config, dataset, *, dtype=torch.float32, ranks=None, encoder=None):
    """What one process would train, or one of ranks."""
    built = build_training(config, dataset, torch.device("cpu"), ranks=ranks, encoder=encoder)
    if dtype != torch.float32:
        built.training.model.to(dtype)
        for optimizer in built.training.optimizers.rows.values():
            for name, state in vars(optimizer).items():
                if isinstance(state, torch.Tensor) and name != "table":
                    setattr(optimizer, name, state.to(dtype))
        _with_features(built.training.feed, dtype)
    return built


def rank_model(model, ranks):
    """One rank's rows of a whole model."""
    model = copy.deepcopy(model)
    for name, weights in model.named_parameters():
        if name in TABLES:
            rows = Shards(len(weights), ranks.num_ranks).rows_of(ranks.rank)
            weights.data = weights.data[slice(*rows)].clone()
    return model


def take_steps(built, num_steps):
    """(num_steps, 2) the figures of the steps."""
    training, plan, step = built.training, built.plan, built.choose_step().step
    figures = []
    for _ in range(num_steps):
        scheduled = plan.at_step(training.step, batch_size=training.feed.batch_size)
        figures.append(step(scheduled).clone())
        training.step += 1
    return torch.stack(figures)


def tables_of(training):
    """What is split, and what is not: name -> tensor."""
    held = dict(training.model.state_dict())
    for name, optimizer in training.optimizers.rows.items():
        for key, value in optimizer.state().items():
            held[f"{name}.{key}"] = value
    if training.optimizers.dense is not None:
        for index, slots in training.optimizers.dense.state_dict()["state"].items():
            held |= {f"dense.{index}.{key}": value for key, value in slots.items()}
    return copy.deepcopy(held)


def joined(parts, whole):
    """The shards of all ranks as one, by name; what is not split must be equal on all."""
    result = {}
    for name, tensor in whole.items():
        pieces = [part[name] for part in parts]
        is_split = len(parts) > 1 and tensor.dim() and sum(map(len, pieces)) == len(tensor)
        if is_split:
            result[name] = torch.cat(pieces)
        else:
            assert all(torch.equal(piece, pieces[0]) for piece in pieces), name
            result[name] = pieces[0]
    return result


def _with_features(feed, dtype):
    """Dense features of another precision."""
    import dataclasses

    import numpy as np

    if isinstance(feed.part.features, np.ndarray) and dtype == torch.float64:
        feed.part = dataclasses.replace(feed.part, features=feed.part.features.astype(np.float64))
