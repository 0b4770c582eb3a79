"""Pictures moved and mirrored at random, so that a network learns more than single points."""

import torch
from torch import Tensor

from experiments.counter_random import uniform

EDGE = 4  # points that a picture is moved by at most, each way


def shift_and_mirror(pixels: Tensor, ids: Tensor, keys: Tensor) -> Tensor:
    """(N, H, W, C), (S, B), (S,) -> (S, B, H, W, C): the pictures `ids`, changed by their keys.

    Each is moved by -4 to 4 points either way, black coming in from beyond the border, and half of
    them are mirrored. All in one gather: no picture is made larger first.
    """
    _, height, width, channels = pixels.shape
    drawn = uniform(keys, 3 * ids.shape[1]).view(*ids.shape, 3)
    moves = (drawn[..., :2] * (2 * EDGE + 1)).long() - EDGE  # (S, B, 2)
    x = torch.arange(width, device=ids.device)
    columns = torch.where(drawn[..., 2:] < 0.5, width - 1 - x, x) + moves[..., 1:]  # (S, B, W)
    rows = torch.arange(height, device=ids.device) + moves[..., :1]  # (S, B, H)
    is_inside = ((rows >= 0) & (rows < height)).unsqueeze(3) & (
        (columns >= 0) & (columns < width)
    ).unsqueeze(2)  # (S, B, H, W)
    lines = ids.unsqueeze(2) * height + rows.clamp(0, height - 1)  # (S, B, H)
    places = lines.unsqueeze(3) * width + columns.clamp(0, width - 1).unsqueeze(2)
    found = pixels.view(-1, channels).index_select(0, places.flatten())
    found = found.view(*ids.shape, height, width, channels)
    return found.masked_fill(~is_inside.unsqueeze(4), 0)
