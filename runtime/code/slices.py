"""Joins and cuts the slices of tensors that ranks hold, including short slices and overlapping windows, and converts
parts where no other rank is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ...strategy.cut import Cut, SliceWindow, Strip
from ...strategy.layout import Layout
from ...strategy.placement import Kind, Shard
from .instructions import Relayout
from .strides import Strides, contiguous


@dataclass(frozen=True, eq=False)
class Placed:
    """The layout of a tensor of global `shape`. `strides`: those of the whole tensor, as on one device; None: any."""

    layout: Layout
    shape: tuple[int, ...]
    strides: Strides | None = None

    @cached_property
    def even(self) -> bool:
        """Whether no slice of it is short."""
        return not self.layout.cuts or self.layout.divides(self.shape)

    def held(self, rank: int) -> tuple[int, ...]:
        """The shape of the part that `rank` holds, without the padding of its slices."""
        return tuple(s.stop - s.start for s in self.layout.slices(self.shape, rank))


def padded(part: Tensor, dim: int, width: int) -> Tensor:
    """`part` padded with zeros at its end along `dim` to `width` elements."""
    missing = width - part.shape[dim]
    if not missing:
        return part
    shape = list(part.shape)
    shape[dim] = missing
    return torch.cat((part, part.new_zeros(shape)), dim)


def part_of(tensor: Tensor, layout: Layout, rank: int) -> Tensor:
    """The contiguous part of a whole `tensor` on `rank`, with zeros where its slices are short."""
    shape = tuple(tensor.shape)
    return full_part(tensor[layout.slices(shape, rank)], layout.local_shape(shape))


def full_part(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`part` padded with zeros to the local `shape`, contiguous."""
    for dim, width in enumerate(shape):
        part = padded(part, dim, width)
    return contiguous(part)


def short_part(part: Tensor, placed: Placed, rank: int) -> Tensor:
    """The full `part` of `rank` without the padding of short slices."""
    return part if placed.even else part[tuple(slice(0, size) for size in placed.held(rank))]


def pieces(whole: Tensor, placement: Shard, count: int) -> Sequence[Tensor]:
    """The slices of `whole` on `count` ranks under `placement`, short ones padded."""
    dim, cut = placement.dim, placement.cut
    if cut is None:
        return whole.chunk(count, dim)
    return [padded(whole.narrow(dim, start, stop - start), dim, cut.width) for start, stop in cut.spans]


def joined(parts: Sequence[Tensor], placement: Shard) -> Tensor:
    """The tensor whose slices under `placement` are `parts`, on all ranks."""
    dim, cut = placement.dim, placement.cut
    if cut is not None:
        parts = [part.narrow(dim, 0, stop - start) for part, (start, stop) in zip(parts, cut.spans, strict=True)]
    return torch.cat(tuple(parts), dim)


# -- Windows -----------------------------------------------------------------------------------------------------------


def window_of(window: SliceWindow, position: int, part: Tensor, fetch: Callable[[Strip], Tensor]) -> Tensor:
    """The window of the rank at `position`, which holds `part`; `fetch(strip)` returns the rows of another rank."""
    dim, shape = window.dim, list(part.shape)
    shape[dim] = window.width
    strips = window.strips(position)
    whole = part.new_empty(shape)
    span = window.spans[position]
    place = 0
    for strip in strips:
        whole.narrow(dim, place, strip.at - place).fill_(window.filled)
        rows = part.narrow(dim, first_row(strip), strip.rows) if strip.source == position else fetch(strip)
        whole.narrow(dim, strip.at, strip.count).copy_(rows.flip(dim) if strip.step < 0 else rows)
        place = strip.at + strip.count
    whole.narrow(dim, place, span[1] - span[0] - place).fill_(window.filled)
    whole.narrow(dim, span[1] - span[0], window.width - (span[1] - span[0])).zero_()
    return whole


def first_row(strip: Strip) -> int:
    """The first row of `strip` in the slice of its source."""
    return strip.start - (strip.count - 1) if strip.step < 0 else strip.start


def addends_of(window: SliceWindow, strip: Strip, part: Tensor) -> Tensor:
    """The addends for the source rows of `strip`, from `part`, the gradient of a rank's window."""
    rows = part.narrow(window.dim, strip.at, strip.count)
    if strip.step == 0 and strip.count > 1:
        return rows.sum(window.dim, keepdim=True)
    return rows.flip(window.dim) if strip.step < 0 else rows


def slice_of(window: SliceWindow, position: int, part: Tensor, received: Sequence[tuple[Strip, Tensor]]) -> Tensor:
    """The sum of all addends of the slice of the rank at `position`: its own, from its window `part`, and those
    `received`."""
    dim, shape = window.dim, list(part.shape)
    shape[dim] = window.cut.width
    total = part.new_zeros(shape)
    own = [(strip, addends_of(window, strip, part)) for strip in window.strips(position) if strip.source == position]
    for strip, rows in (*own, *received):
        total.narrow(dim, first_row(strip), strip.rows).add_(rows)
    return total


# -- Conversions that need no other rank -----------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _even(size: int, count: int) -> Cut:
    """A dim of `size` elements in `count` slices."""
    return Cut(size, (count,))


def _slice(c: Relayout, part: Tensor, position: int) -> Tensor:
    assert isinstance(c.target, Shard)
    dim = c.target.dim
    cut = c.target.cut or _even(part.shape[dim], c.size)
    start, stop = cut.spans[position]
    taken = padded(part.narrow(dim, start, stop - start), dim, cut.width)
    return taken if c.loose else contiguous(taken)


def _pad(c: Relayout, part: Tensor, position: int) -> Tensor:
    assert isinstance(c.source, Shard)
    dim = c.source.dim
    cut = c.source.cut or _even(part.shape[dim] * c.size, c.size)
    start, stop = cut.spans[position]
    shape = list(part.shape)
    shape[dim] = cut.size
    whole = part.new_zeros(shape)
    whole.narrow(dim, start, stop - start).copy_(part.narrow(dim, 0, stop - start))
    return whole


def _keep(c: Relayout, part: Tensor, position: int) -> Tensor:
    return contiguous(part) if position == 0 else part.new_zeros(part.shape)


def _nothing(c: Relayout, part: Tensor, position: int) -> Tensor:
    return part


LOCAL: Mapping[Kind, Callable[[Relayout, Tensor, int], Tensor]] = {
    Kind.SLICE: _slice,
    Kind.PAD: _pad,
    Kind.KEEP: _keep,
    Kind.NOTHING: _nothing,
}
"""For each kind what it makes of the part of the rank at a position of its group; contiguous, but for NOTHING, and for
a SLICE of which that is not asked (`loose`)."""
