"""Issues each kind of collective on a process group: one entry of `ISSUERS` for each.

A collective is issued when its operands are ready and waited for where its result is read (`Pending`). Collectives that
only move data send bytes, so they take every dtype; gloo and NCCL add up all dtypes except 16-bit ints (added here as
32-bit ints) and 8-bit floats (an error of the backend).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...propagation.ops.collectives import WORTH_A_CALL
from ...strategy.cut import SliceWindow, Strip
from ...strategy.placement import PARTIAL_MAX, Kind, Placement, Shard
from ...strategy.torch_mesh import has_nccl
from ..code.instructions import Relayout
from ..code.recorders import note
from ..code.slices import addends_of, first_row, joined, pieces, slice_of, window_of
from ..code.strides import contiguous
from ..ranks.stragglers import waits
from ..torch_internals import coalescing_manager
from .hierarchical import HierarchicalGroup

# torch 2.13 renamed these two and warns about the old names.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_MAPPED = 2**25  # bytes: from this size on, glibc's malloc maps memory for each call
_ADDED_AS = {torch.int16: torch.int32}  # neither backend adds these


class Pending:
    """An issued collective: the works to wait for, and a function that then returns the tensors of the results."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], list[Tensor]], single: bool) -> None:
        self.works, self._finish, self._single = works, finish, single

    def wait(self) -> Any:
        """Wait for the result: one tensor, or a list for a collective of several."""
        with waits():
            for work in self.works:
                work.wait()
        results = self._finish()
        return results[0] if self._single else results


class Scratch:
    """Send and receive buffers, returned after use. Large CPU buffers are kept: the CPU allocator maps and clears such
    memory anew each time, which takes longer than a copy. (Smaller ones, and those on a GPU, are left to the allocator,
    which reuses them itself.)

    It keeps as many buffers as were taken at a time; a larger one replaces one that is too small."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []  # bytes, the smallest first
        self._taken: dict[int, Tensor] = {}  # by address

    def take(self, count: int, like: Tensor) -> Tensor:
        """An uninitialised vector of `count` elements, with the dtype and device of `like`."""
        size = count * like.element_size()
        if like.device.type != "cpu" or size < _MAPPED:
            return like.new_empty(count)
        place = bisect_left(self._kept, size, key=len)
        if place < len(self._kept):
            whole = self._kept.pop(place)
        else:
            del self._kept[-1:]
            whole = torch.empty(size, dtype=torch.uint8)
        self._taken[whole.data_ptr()] = whole
        return whole[:size].view(like.dtype)

    def give_back(self, taken: Iterable[Tensor]) -> None:
        """Return these buffers. Nothing may read them from now on."""
        for tensor in taken:
            if (whole := self._taken.pop(tensor.data_ptr(), None)) is not None:
                insort(self._kept, whole, key=len)


@dataclass(frozen=True)
class Seat:
    """This rank's seat in a collective: its position in the process group, memory for buffers, and what runs it in
    steps from a payload of `large` bytes on, if it has several."""

    group: Any
    position: int
    scratch: Scratch
    in_steps: HierarchicalGroup | None = None
    large: int = 0

    def all_reduce(self, buffer: Tensor, reduction: Any) -> Any:
        """Start to reduce a contiguous `buffer` in place; returns what to wait for, as those below do."""
        if (steps := self._steps(buffer)) is not None:
            return steps.all_reduce(buffer, reduction)
        return dist.all_reduce(buffer, reduction, group=self.group, async_op=True)

    def all_gather(self, out: Tensor, part: Tensor) -> Any:
        """Start to write the vectors `part` of all ranks into the vector `out`."""
        if (steps := self._steps(out)) is not None:
            return steps.all_gather(out, part)
        return all_gather(out, part, group=self.group, async_op=True)

    def reduce_scatter(self, out: Tensor, addends: Tensor) -> Any:
        """Start to write the sum of this rank's part of the vectors `addends` into the vector `out`."""
        if (steps := self._steps(addends)) is not None:
            return steps.reduce_scatter(out, addends)
        return reduce_scatter(out, addends, group=self.group, async_op=True)

    def all_to_all(self, out: Tensor, parts: Tensor) -> Any:
        """Start to send each rank its part of the vector `parts`, and to write what arrives into the vector `out`."""
        return dist.all_to_all_single(out, parts, group=self.group, async_op=True)

    def _steps(self, payload: Tensor) -> HierarchicalGroup | None:
        return self.in_steps if payload.nbytes >= self.large and payload.device.type == "cpu" else None


Issue = Callable[..., Pending]  # takes the tensors of a conversion
Issuer = Callable[[Relayout, Seat], Issue]


# -- Several tensors as one collective -------------------------------------------------------------------------------

# The work of a collective, the function that returns its results after it, and the memory that it reads until then.
_Issued = tuple[Any, Callable[[], list[Tensor]], Tensor]
_Send = Callable[[Relayout, list[Tensor], list[bool], Seat], _Issued]


@dataclass(frozen=True)
class _Together:
    """A kind of collective of which one call can carry several tensors.

    send       issues one call for tensors of one dtype, and takes for each whether its memory may hold its result
    adds       it is elementwise, so that a tensor may become its own result
    coalesces  NCCL can run several calls as one, without a copy
    """

    send: _Send
    adds: bool = False
    coalesces: bool = True

    def __call__(self, c: Relayout, seat: Seat) -> Issue:
        coalesces = self.coalesces and len(c.tags) > 1 and has_nccl(seat.group)
        return lambda *parts: self._started(c, parts, seat, coalesces)

    def _started(self, c: Relayout, parts: Sequence[Tensor], seat: Seat, coalesces: bool) -> Pending:
        """Issue the collectives of `c` for all of `parts`: one, or several together where that saves a copy."""
        note(c, parts)
        batches = self._batches(c, parts, coalesces)
        with coalescing_manager(seat.group, async_ops=True) if coalesces else nullcontext() as manager:
            issued = [self.send(c, [parts[i] for i in batch], [c.owned[i] for i in batch], seat) for batch in batches]
        works = [manager] if coalesces else [work for work, _, _ in issued]
        count = len(parts)  # so that `finish` does not keep the parts alive

        def finish() -> list[Tensor]:
            results = {
                i: result
                for batch, (_, received, _) in zip(batches, issued, strict=True)
                for i, result in zip(batch, received(), strict=True)
            }
            return [contiguous(results[i]) for i in range(count)]

        return Pending(works, finish, not c.grouped)

    def _batches(self, c: Relayout, parts: Sequence[Tensor], coalesces: bool) -> list[list[int]]:
        """The indices of `parts` by call; those of one call are copied into one buffer. A coalescing backend takes each
        part by itself, as does a part that is reduced in place and so large that a copy would cost more than a call."""
        every = range(len(parts))
        if coalesces:
            return [[i] for i in every]
        alone = [
            i
            for i in every
            if self.adds and may_become_its_sum(parts[i], c.owned[i]) and parts[i].nbytes >= WORTH_A_CALL
        ]
        rest = [i for i in every if i not in alone]
        return [[i] for i in alone] + ([rest] if rest else [])


def may_become_its_sum(part: Tensor, owned: bool) -> bool:
    """Whether a part may be reduced in place."""
    return owned and part.dtype not in _ADDED_AS and part.is_contiguous()


def _all_reduce(c: Relayout, parts: list[Tensor], owned: list[bool], seat: Seat) -> _Issued:
    """The sums or maxima of `parts` over the group, in place or in one buffer of copies."""
    reduction = dist.ReduceOp.MAX if c.source == PARTIAL_MAX else dist.ReduceOp.SUM
    dtype = parts[0].dtype
    wide = _ADDED_AS.get(dtype, dtype)
    taken: list[Tensor] = []
    if len(parts) > 1:
        rows, taken = _pack([part[None] for part in parts], seat.scratch)
        buffer = rows.view(-1).to(wide)
    elif may_become_its_sum(parts[0], owned[0]):
        buffer = parts[0]
    else:
        buffer = parts[0].to(wide, copy=True, memory_format=torch.contiguous_format)
    shapes = [part.shape for part in parts]
    into = list(map(may_become_its_sum, parts, owned))

    def reduced() -> list[Tensor]:
        sums = buffer.to(dtype)
        if len(shapes) == 1:
            return [sums]
        pieces = [piece[0] for piece in _unpack(sums[None], shapes)]
        results = [
            part.copy_(piece) if own else piece.clone() for part, own, piece in zip(parts, into, pieces, strict=True)
        ]
        seat.scratch.give_back(taken)
        return results

    return seat.all_reduce(buffer, reduction), reduced, buffer


def _reduce_scatter(c: Relayout, parts: list[Tensor], owned: list[bool], seat: Seat) -> _Issued:
    """This rank's slices of the sums of `parts`."""
    stacks = [_pieces(part, c.target, c.size) for part in parts]
    rows, taken = _pack(stacks, seat.scratch)
    sent = rows.to(_ADDED_AS.get(rows.dtype, rows.dtype))
    alone, shapes = len(parts) == 1, [stack.shape[1:] for stack in stacks]
    out = _room(sent.shape[1], sent, alone, taken, seat.scratch)
    dtype, width = rows.dtype, rows.shape[1]
    work = seat.reduce_scatter(out, sent.view(-1))

    def received() -> list[Tensor]:
        slices = [piece[0] for piece in _unpack(out.to(dtype).view(1, width), shapes)]
        results = slices if alone else [piece.clone() for piece in slices]
        seat.scratch.give_back(taken)
        return results

    return work, received, sent


def _all_gather(c: Relayout, parts: list[Tensor], owned: list[bool], seat: Seat) -> _Issued:
    """The tensors whose slices are the `parts` of the ranks."""
    return _collected(c, [part[None] for part in parts], seat.all_gather, seat)


def _all_to_all(c: Relayout, parts: list[Tensor], owned: list[bool], seat: Seat) -> _Issued:
    """This rank's slices, along one dim, of the tensors whose slices along another dim are the `parts` of the ranks."""
    return _collected(c, [_pieces(part, c.target, c.size) for part in parts], seat.all_to_all, seat)


def _collected(c: Relayout, stacks: list[Tensor], call: Callable[..., Any], seat: Seat) -> _Issued:
    """Send `stacks` of pieces by `call`, and join the pieces received from all ranks."""
    rows, taken = _pack(stacks, seat.scratch)
    short = isinstance(c.source, Shard) and c.source.cut is not None
    whole = len(stacks) == 1 and c.dims[0] == 0 and not short  # the received buffer is the result
    out = _room(rows.shape[1] * c.size, rows, whole, taken, seat.scratch)
    work = call(as_bytes(out), as_bytes(rows))
    shapes, width = [stack.shape[1:] for stack in stacks], rows.shape[1]

    def received() -> list[Tensor]:
        pieces = _unpack(out.view(c.size, width), shapes)
        results = [piece.flatten(0, 1) if whole else _joined(piece, c.source) for piece in pieces]
        seat.scratch.give_back(taken)
        return results

    return work, received, rows


def _room(count: int, like: Tensor, kept: bool, taken: list[Tensor], scratch: Scratch) -> Tensor:
    """A vector to receive into: new memory if it is `kept` as the result, else from `scratch`, and added to `taken`."""
    if kept:
        return like.new_empty(count)
    taken.append(scratch.take(count, like))
    return taken[-1]


def _pieces(part: Tensor, placement: Placement, n: int) -> Tensor:
    """The slices of `part` on `n` ranks under `placement`, stacked."""
    assert isinstance(placement, Shard)
    if placement.cut is not None:
        return torch.stack(list(pieces(part, placement, n)))
    dim = placement.dim
    stacked: Tensor = part.unflatten(dim, (n, part.shape[dim] // n))
    return stacked.movedim(dim, 0)


def _joined(stack: Tensor, placement: Placement) -> Tensor:
    """The tensor whose slices under `placement` are stacked in `stack`."""
    assert isinstance(placement, Shard)
    return joined(stack.unbind(), placement)


def _pack(stacks: list[Tensor], scratch: Scratch) -> tuple[Tensor, list[Tensor]]:
    """Stacks of pieces as one matrix with a row for each rank, and the buffers taken from `scratch` for it."""
    shape = stacks[0].shape[0], sum(stack[0].numel() for stack in stacks)
    if len(stacks) == 1 and stacks[0].is_contiguous():
        return stacks[0].view(shape), []
    rows = scratch.take(math.prod(shape), stacks[0]).view(shape)
    for columns, stack in zip(_unpack(rows, [stack.shape[1:] for stack in stacks]), stacks, strict=True):
        columns.copy_(stack)
    return rows, [rows]


def _unpack(matrix: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The stacks of pieces of these shapes that lie side by side in `matrix`."""
    columns = matrix.split([shape.numel() for shape in shapes], 1)
    return [column.view(len(matrix), *shape) for column, shape in zip(columns, shapes, strict=True)]


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: neither backend supports every dtype."""
    return tensor.view(-1).view(torch.uint8)


# -- Windows -----------------------------------------------------------------------------------------------------------

_Messages = Sequence[tuple[int, Strip]]  # for each message the other rank, by position, and its strip


def _messages(window: SliceWindow, position: int) -> tuple[_Messages, _Messages]:
    """The messages that the rank at `position` sends and receives in an exchange, in the order of the other ranks."""
    ranks = range(len(window.spans))
    asked = [(other, strip) for other in ranks for strip in window.strips(other) if strip.source == position != other]
    needed = sorted(
        ((strip.source, strip) for strip in window.strips(position) if strip.source != position),
        key=lambda message: message[0],
    )
    return (needed, asked) if window.adds else (asked, needed)


def _exchange(c: Relayout, seat: Seat) -> Issue:
    window, position = c.window, seat.position
    assert window is not None
    leaving, coming = _messages(window, position)
    return lambda part: _exchanged(c, window, part, position, leaving, coming, seat.group)


def _exchanged(
    c: Relayout, window: SliceWindow, part: Tensor, position: int, leaving: _Messages, coming: _Messages, group: Any
) -> Pending:
    """Send neighbours the rows that their windows need of this rank's slice, or the addends of their slices, and
    receive theirs; this rank's own rows are copied when the others have arrived."""
    note(c, [part])

    def rows(strip: Strip) -> Tensor:
        if window.adds:
            return addends_of(window, strip, part)
        return part.narrow(window.dim, first_row(strip), strip.rows)

    row = part.numel() // part.shape[window.dim]
    sent = [rows(strip).reshape(-1) for _, strip in leaving]
    outgoing = torch.cat(sent) if sent else part.new_empty(0)
    incoming = part.new_empty(row * sum(strip.rows for _, strip in coming))

    def bytes_by_rank(messages: _Messages) -> list[int]:
        counts = [0] * len(window.spans)
        for other, strip in messages:
            counts[other] += strip.rows * row * part.element_size()
        return counts

    work = dist.all_to_all_single(
        as_bytes(incoming),
        as_bytes(outgoing),
        bytes_by_rank(coming),
        bytes_by_rank(leaving),
        group=group,
        async_op=True,
    )

    def finish() -> list[Tensor]:
        shape = list(part.shape)
        received = []
        counts = [strip.rows for _, strip in coming]
        for (_, strip), flat in zip(coming, incoming.split([row * n for n in counts]), strict=True):
            shape[window.dim] = strip.rows
            received.append((strip, flat.view(shape)))
        if window.adds:
            return [slice_of(window, position, part, received)]
        return [window_of(window, position, part, dict(received).__getitem__)]

    return Pending([work], finish, True)


# -- Routed rows -------------------------------------------------------------------------------------------------------


def _all_to_allv(c: Relayout, seat: Seat) -> Issue:
    return lambda part, counts: _rows_sent(c, part, counts, seat.group)


def _rows_sent(c: Relayout, part: Tensor, counts: Tensor, group: Any) -> Pending:
    """Send each rank its rows of `part`, and get its own from each, as many as `counts` says."""
    note(c, [part])
    leaving, coming = counts.tolist()
    sent = part.contiguous()
    arrived = part.new_empty(sum(coming), *part.shape[1:])
    row = math.prod(part.shape[1:]) * part.element_size()
    work = dist.all_to_all_single(
        as_bytes(arrived),
        as_bytes(sent),
        [row * count for count in coming],
        [row * count for count in leaving],
        group=group,
        async_op=True,
    )
    return Pending([work], lambda: [arrived], True)


ISSUERS: Mapping[Kind, Issuer] = {
    Kind.ALL_REDUCE: _Together(_all_reduce, adds=True),
    Kind.ALL_GATHER: _Together(_all_gather),
    Kind.REDUCE_SCATTER: _Together(_reduce_scatter),
    Kind.ALL_TO_ALL: _Together(_all_to_all, coalesces=False),
    Kind.ALL_TO_ALLV: _all_to_allv,
    Kind.EXCHANGE: _exchange,
}
"""For each kind what makes, of a conversion and a rank's seat, the function that issues it."""
