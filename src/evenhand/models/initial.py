"""The rows that tables begin with: any range of them, the same on any number of ranks.

A table's first rows come from the generator that is passed, in one stream. Later rows come in
blocks with a generator each, so that a rank draws the blocks of its own rows alone, and threads
share them out. No more than a block a thread is ever held beside the table itself.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from evenhand.kernels.mix import GOLDEN32


class RowRange(NamedTuple):
    first: int
    last: int  # the row after the last one

    @property
    def size(self) -> int:
        return self.last - self.first


FIRST_BLOCK = 2**20  # rows of the stream; a table of so many or fewer is one stream
LATER_BLOCK = 2**16
_CHUNK = 2**15  # numbers drawn at once: in a core's cache, and too few for torch to start threads
_GROUP = 16  # torch draws normal numbers in groups of so many: a chunk must not end within one


def random_rows(
    num_rows: int,
    embedding_dim: int,
    generator: torch.Generator | None = None,
    *,
    rows: RowRange | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Rows of length about 1 in random directions: (R, D), or of a range of them alone."""
    first, last = checked_range(rows, num_rows)
    drawn = torch.empty(last - first, embedding_dim, device=device, dtype=dtype)
    fill_random_rows(drawn, first_row=first, num_rows=num_rows, generator=generator)
    return drawn


def checked_range(rows: RowRange | None, num_rows: int) -> RowRange:
    """The range, or all rows."""
    first, last = RowRange(0, num_rows) if rows is None else rows
    if not 0 <= first <= last <= num_rows:
        raise ValueError(f"rows must be a range within 0 to {num_rows}, got {first} to {last}")
    return RowRange(first, last)


@torch.no_grad()
def fill_random_rows(
    target: Tensor, *, first_row: int, num_rows: int, generator: torch.Generator | None = None
) -> None:
    """Fills `target` (n, D) with rows `first_row` and after of a table of `num_rows`.

    Numbers are drawn in float32 on the CPU whatever the target's type and device are. The generator
    ends in the same state whichever rows were asked for. On the meta device nothing is drawn.
    """
    if target.device.type == "meta":
        return
    wanted = range(first_row, first_row + len(target))
    _fill_block(target, wanted, range(min(num_rows, FIRST_BLOCK)), generator, is_drawn_whole=True)
    if num_rows <= FIRST_BLOCK:
        return
    seed = int(torch.randint(2**32, (), generator=generator))

    def fill(block: int) -> None:
        first = FIRST_BLOCK + block * LATER_BLOCK
        # An odd stride, so that all blocks of a table have seeds of their own.
        own = torch.Generator().manual_seed((seed + block * GOLDEN32) % 2**32)
        _fill_block(target, wanted, range(first, min(first + LATER_BLOCK, num_rows)), own)

    first_block = max(0, (wanted.start - FIRST_BLOCK) // LATER_BLOCK)
    blocks = range(first_block, math.ceil((wanted.stop - FIRST_BLOCK) / LATER_BLOCK))
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for _ in threads.map(fill, blocks):
            pass


def _fill_block(
    target: Tensor,
    wanted: range,
    block: range,
    generator: torch.Generator | None,
    *,
    is_drawn_whole: bool = False,
) -> None:
    """Draws a block of a table's rows and keeps what is wanted of it, and `target` holds."""
    kept = range(max(block.start, wanted.start), min(block.stop, wanted.stop))
    place = target[kept.start - wanted.start : kept.stop - wanted.start] if kept else target[:0]
    is_here = target.device.type == "cpu"
    staged = place if is_here else torch.empty(place.shape, dtype=place.dtype)
    width = target.shape[1]
    for chunk in _chunks(block, width):
        if chunk.start >= kept.stop and not is_drawn_whole:
            break
        drawn = torch.empty(len(chunk), width).normal_(generator=generator)
        first, last = max(chunk.start, kept.start), min(chunk.stop, kept.stop)
        if first < last:
            drawn = drawn[first - chunk.start : last - chunk.start].div_(math.sqrt(width))
            staged[first - kept.start : last - kept.start].copy_(drawn)
    if not is_here:
        place.copy_(staged)


def _chunks(block: range, width: int) -> Iterator[range]:
    """Rows to draw at once, such that all chunks give the very numbers that one draw would.

    All but the last must be whole groups of numbers, and the last must be a group or more, because
    torch draws the group at the end anew where numbers are left over.
    """
    least = _GROUP // math.gcd(_GROUP, width)  # rows of a whole number of groups
    step = max(_CHUNK // (least * max(width, 1)), 1) * least
    first = block.start
    while first < block.stop:
        last = first + step
        if (block.stop - last) * width < _GROUP:
            last = block.stop
        yield range(first, last)
        first = last
