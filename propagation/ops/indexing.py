"""Operators that look up an index in a dim of which a rank may hold a part: rows of an embedding, and classes.

partway::position(axes, sizes)            the index of this rank's part along all `axes` (0-dim, int64, on the CPU): a
                                          symbol, which the executors of `runtime/` run
partway::part_index(index, position, bounds, wraps)
                                          `index` relative to the start of this rank's part of a dim, which goes from
                                          bounds[position] to the next of `bounds`, and -1 outside of it. With `wraps`
                                          it may be negative, counted from the end of the dim
partway::behind(x, position, dim, counts) the padding of this rank's uneven shard along `dim`, which has
                                          `counts[position]` elements: a mask that broadcasts to x
"""

from __future__ import annotations

import torch
from torch import Tensor

from .registration import define

aten = torch.ops.aten


def span_of(position: Tensor | None, bounds: list[int]) -> tuple[int, int]:
    """The start and end of this rank's part of a dim with cuts at `bounds`."""
    place = 0 if position is None else int(position)
    return bounds[place], bounds[place + 1]


def out_of_range(whole: int) -> str:
    """The message of an assertion on a device, where finding the wrong index costs too much."""
    return f"an index is out of range of a dim of size {whole}"


def within(index: Tensor, start: int, stop: int, whole: int, ignored: int | None = None) -> Tensor:
    """`index - start` as int64, or -1 outside of [start, stop) and for `ignored`. For an index outside of `whole`,
    raises IndexError on the CPU; on other devices an asynchronous assertion fails."""
    index = index.long()
    wrong = (index < 0) | (index >= whole)
    if ignored is not None:
        wrong &= index != ignored
    if index.device.type != "cpu":
        aten._assert_async.msg(~wrong.any(), out_of_range(whole))
    elif wrong.any():
        raise IndexError(f"index {int(index[wrong][0])} is out of range of a dim of size {whole}")
    outside = (index < start) | (index >= stop)
    if ignored is not None:
        outside |= index == ignored
    return (index - start).masked_fill_(outside, -1)


def _part_index(index: Tensor, position: Tensor, bounds: list[int], wraps: bool = False) -> Tensor:
    if wraps:
        index = torch.where(index < 0, index + bounds[-1], index)
    return within(index, *span_of(position, bounds), bounds[-1])


def _behind(x: Tensor, position: Tensor, dim: int, counts: list[int]) -> Tensor:
    place = torch.arange(x.shape[dim], device=x.device)
    return (place >= counts[int(position)]).view(_behind_shape(x, dim))


def _behind_shape(x: Tensor, dim: int) -> list[int]:
    return [size if d == dim else 1 for d, size in enumerate(x.shape)]


def _fake_position(axes: list[str], sizes: list[int]) -> Tensor:
    return torch.empty((), dtype=torch.int64)


def _fake_part_index(index: Tensor, position: Tensor, bounds: list[int], wraps: bool = False) -> Tensor:
    return torch.empty_like(index, dtype=torch.int64)


def _fake_behind(x: Tensor, position: Tensor, dim: int, counts: list[int]) -> Tensor:
    return x.new_empty(_behind_shape(x, dim), dtype=torch.bool)


# -- The operators

position = define("position(str[] axes, int[] sizes) -> Tensor", fake=_fake_position)
part_index = define(
    "part_index(Tensor index, Tensor position, int[] bounds, bool wraps=False) -> Tensor", _part_index, _fake_part_index
)
behind = define("behind(Tensor x, Tensor position, int dim, int[] counts) -> Tensor", _behind, _fake_behind)
