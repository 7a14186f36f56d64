"""Conversions that need no other rank: a function for each kind, and their table."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ...strategy.cut import Cut
from ...strategy.placement import Kind, Shard
from .instructions import Relayout
from .slices import padded
from .strides import contiguous


def _slice(c: Relayout, part: Tensor, position: int) -> Tensor:
    assert isinstance(c.target, Shard)
    dim = c.target.dim
    cut = c.target.cut or Cut(part.shape[dim], (c.size,))
    start, stop = cut.spans[position]
    taken = padded(part.narrow(dim, start, stop - start), dim, cut.width)
    return taken if c.loose else contiguous(taken)


def _pad(c: Relayout, part: Tensor, position: int) -> Tensor:
    assert isinstance(c.source, Shard)
    dim = c.source.dim
    cut = c.source.cut or Cut(part.shape[dim] * c.size, (c.size,))
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
