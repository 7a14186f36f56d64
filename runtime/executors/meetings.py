"""Simulates each kind of collective: one entry of `MEETINGS` for each.

The ranks of a group hand in their parts of a tensor in order; then each gets its result, in memory that no other code
writes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...strategy.cut import SliceWindow, Strip
from ...strategy.placement import PARTIAL_MAX, Kind, Shard
from ..code.instructions import Relayout
from ..code.recorders import note
from ..code.slices import addends_of, first_row, joined, pieces, slice_of, window_of
from ..code.strides import contiguous

Parts = list[Tensor]


class Meeting:
    """One conversion, of one or several tensors, on all groups of ranks."""

    def __init__(self, c: Relayout, groups: Sequence[Sequence[int]]) -> None:
        self._c, self._groups = c, groups
        gather = MEETINGS[c.kind]
        self._handed = [[gather(c, private) for private in c.private] for _ in groups]
        self._of = {rank: handed for group, handed in zip(groups, self._handed, strict=True) for rank in group}

    def __call__(self, rank: int, *parts: Tensor) -> None:
        """Hand in the `parts` of `rank`, one for each tensor, and the numbers of routed rows."""
        every = self._of[rank]
        if rank == 0:
            note(self._c, parts[: len(every)])
        for handed, part in zip(every, parts, strict=False):
            handed.add(part, *parts[len(every) :])

    def results(self) -> list[Any]:
        """The result of each rank: a tensor, or a list for a group of conversions."""
        of_rank: dict[int, list[Tensor]] = {}
        for group, handed in zip(self._groups, self._handed, strict=True):
            each = [one.results(len(group)) for one in handed]
            of_rank.update(zip(group, map(list, zip(*each, strict=True)), strict=True))
        ranks = range(len(of_rank))
        return [of_rank[rank] if self._c.grouped else of_rank[rank][0] for rank in ranks]


class _Handed(ABC):
    """The parts of one tensor that the ranks of one group hand in."""

    @abstractmethod
    def add(self, part: Tensor, *counts: Tensor) -> None:
        """Add the `part` of the next rank; `counts`: the numbers of its routed rows."""

    @abstractmethod
    def results(self, n: int) -> Parts:
        """The results of the `n` ranks."""


class _Total(_Handed):
    """Parts that are reduced as they arrive, by sum or maximum. `private`: the memory of a part belongs to its rank."""

    def __init__(self, c: Relayout, private: bool) -> None:
        self._c, self._own = c, private
        self._sum: Tensor | None = None

    def add(self, part: Tensor, *counts: Tensor) -> None:
        """Reduce `part` into the total; the first part becomes the total if its memory is private."""
        if self._sum is None:
            self._sum = part
            return
        reduction = torch.maximum if self._c.source == PARTIAL_MAX else torch.add
        self._sum = reduction(self._sum, part, out=self._sum if self._own else None)
        self._own = True

    @property
    def total(self) -> Tensor:
        """The total of all parts, in its own memory."""
        assert self._sum is not None
        return self._sum if self._own else self._sum.clone()


class _AllReduced(_Total):
    def results(self, n: int) -> Parts:
        return [contiguous(self.total)] * n


class _ReduceScattered(_Total):
    def results(self, n: int) -> Parts:
        assert isinstance(self._c.target, Shard)
        return [contiguous(part) for part in pieces(self.total, self._c.target, n)]


class _Row(_Handed):
    """Parts in the order of the ranks."""

    def __init__(self, c: Relayout, private: bool) -> None:
        self._c = c
        self._parts: Parts = []
        self._counts: Parts = []

    def add(self, part: Tensor, *counts: Tensor) -> None:
        self._parts.append(part)
        self._counts.extend(counts)

    @property
    def whole(self) -> Tensor:
        """The tensor whose slices are the parts."""
        assert isinstance(self._c.source, Shard)
        return joined(self._parts, self._c.source)


class _AllGathered(_Row):
    def results(self, n: int) -> Parts:
        return [contiguous(self.whole)] * n


class _AllToAll(_Row):
    def results(self, n: int) -> Parts:
        assert isinstance(self._c.target, Shard)
        return [contiguous(part) for part in pieces(self.whole, self._c.target, n)]


class _Sent(_Row):
    def results(self, n: int) -> Parts:
        by_sender = [part.split(counts[0].tolist()) for part, counts in zip(self._parts, self._counts, strict=True)]
        return [torch.cat(to_one) for to_one in zip(*by_sender, strict=True)]


class _Exchanged(_Row):
    def results(self, n: int) -> Parts:
        window = self._c.window
        assert window is not None
        return _sums(window, self._parts) if window.adds else _windows(window, self._parts)


def _windows(window: SliceWindow, parts: Parts) -> Parts:
    """The windows of ranks that hold the slices `parts`."""

    def rows(strip: Strip) -> Tensor:
        return parts[strip.source].narrow(window.dim, first_row(strip), strip.rows)

    return [window_of(window, i, part, rows) for i, part in enumerate(parts)]


def _sums(window: SliceWindow, parts: Parts) -> Parts:
    """The slices of the sum of `parts`, which are addends in windows."""
    received: list[list[tuple[Strip, Tensor]]] = [[] for _ in parts]
    for i, part in enumerate(parts):
        for strip in window.strips(i):
            if strip.source != i:
                received[strip.source].append((strip, addends_of(window, strip, part)))
    return [slice_of(window, i, part, received[i]) for i, part in enumerate(parts)]


MEETINGS: Mapping[Kind, Callable[[Relayout, bool], _Handed]] = {
    Kind.ALL_REDUCE: _AllReduced,
    Kind.ALL_GATHER: _AllGathered,
    Kind.REDUCE_SCATTER: _ReduceScattered,
    Kind.ALL_TO_ALL: _AllToAll,
    Kind.ALL_TO_ALLV: _Sent,
    Kind.EXCHANGE: _Exchanged,
}
"""For each kind what ranks hand in and get, of a conversion and whether each part's memory is its rank's own."""
