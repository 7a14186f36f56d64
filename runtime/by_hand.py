"""Collectives that people call by hand, on the process group of this rank: the kernels of `propagation/ops/by_hand.py`.

Sums, maxima and even gathers are issued like those of a program (`issue.py`). Everything else is one exchange, in which
each rank sends bytes to every other one: pieces of different sizes, permutations, messages; reductions of these are
then computed here.

The calls of a rank are recorded like the programs that it runs (`watch.py`), so that an error names a rank that calls
something else or never arrives. With PARTWAY_VERIFY=1 ranks compare each call before they make it. Ranks whose tensors
may differ in size first tell each other how many elements they send.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..propagation.ops import by_hand
from ..strategy.errors import RuntimeStateError
from ..strategy.placement import PARTIAL, PARTIAL_MAX, REPLICATE, Kind, Placement, Shard, kind
from .code.instructions import Relayout
from .code.recorders import note
from .executors.issue import ISSUERS, Scratch, Seat, as_bytes
from .groups import ledger_name, place, process_group
from .launching.process import device_type
from .ranks.watch import failed_in, watch
from .ranks.world import of_world

# -- A call


class _Call:
    """One collective of this rank: its place and its group. `told`: the call with its arguments, for messages."""

    def __init__(self, name: str, axes: Sequence[str], told: str) -> None:
        here = place()
        self.told = told
        self.name, self.axes = name, here.axes(tuple(axes))
        self.position, self.ranks = here.index(self.axes), here.ranks(self.axes)
        self.size = len(self.ranks)
        self.group = process_group(self.axes)
        self.ledger = ledger_name(self.axes, self.ranks)

    def seat(self) -> Seat:
        """The position of this rank in its group."""
        return Seat(self.group, self.position, of_world(Scratch))

    def relayout(self, source: Placement, target: Placement, what: Kind | None = None) -> Relayout:
        """The collective as an instruction of a program."""
        what = what or kind(source, target)
        return Relayout(
            kind=what,
            source=source,
            target=target,
            axes=self.axes,
            size=self.size,
            phase="by hand",
            tags=(0,),
            grouped=False,
            owned=(False,),
            private=(False,),
        )

    def converted(self, x: Tensor, source: Placement, target: Placement) -> Tensor:
        """This rank's `x` after the conversion from `source` to `target`."""
        c = self.relayout(source, target)
        pending = ISSUERS[c.kind](c, self.seat())(x.contiguous())
        for work in pending.works:
            self.wait(work)
        result: Tensor = pending.wait()
        return result

    def wait(self, work: Any, purpose: str = "") -> None:
        """Wait for an issued collective. Raises RuntimeStateError if others of the group cannot come."""
        watch().wait_for(work, self.group, purpose or self.told)

    def exchanged(
        self, outgoing: Sequence[Tensor], counts: Sequence[int], like: Tensor, known: bool = False
    ) -> list[Tensor]:
        """Exchange flat tensors with all ranks of the group: send each its tensor of `outgoing`, and return one from
        each, with `counts` elements. Raises RuntimeStateError if a rank sends another count; not checked if the counts
        are `known` to match."""
        sent = torch.cat([x.reshape(-1) for x in outgoing])
        if not known:
            self._check_counts([x.numel() for x in outgoing], counts)
        note(self.relayout(Shard(1), Shard(0)), [sent.new_empty((self.size, sent.numel() // self.size))])
        received = like.new_empty(sum(counts))
        width = like.element_size()
        going = as_bytes(sent.contiguous())
        self.wait(dist.all_to_all_single(
            as_bytes(received), going, [n * width for n in counts], [x.numel() * width for x in outgoing],
            group=self.group, async_op=True,
        ))  # fmt: skip
        return list(received.split(list(counts)))

    def _check_counts(self, sent: Sequence[int], expected: Sequence[int]) -> None:
        """Raise RuntimeStateError if a rank sends a count that another does not expect: a transport may not report
        it."""
        told = torch.tensor(sent, dtype=torch.int64, device=device_type())
        coming = torch.empty_like(told)
        self.wait(dist.all_to_all_single(coming, told, group=self.group, async_op=True))
        for position, (count, wanted) in enumerate(zip(coming.tolist(), expected, strict=True)):
            if count != wanted:
                raise RuntimeStateError(
                    f"{self.name} over {','.join(self.axes)}: rank {self.ranks[position]} sends {count} elements to "
                    f"rank {self.ranks[self.position]}, which expects {wanted}; let both say the same"
                )


def _kernel(operator: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of a call and the operator's arguments as the kernel of `operator`."""
    name: str = operator.name().removeprefix("partway::")

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(x: Any, *arguments: Any) -> Any:
            axes = arguments[_AXES[name]]
            about = _told(name, arguments)
            call = _Call(_NAMES.get(name, name), axes, f"{about} of {_kind_of(name, x, arguments)}")
            own = watch()
            own.check()
            try:
                if os.environ.get("PARTWAY_VERIFY") == "1":
                    _compare(call)
                own.ledger(call.ledger, call.ranks).called(call.told)
                return run(call, x, *arguments)
            except RuntimeStateError:
                raise
            except RuntimeError as error:
                raise failed_in(about, error) from error

        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        return run

    return decorate


_LONGEST = 512  # bytes of the text of a call that ranks compare
_LIBRARY = torch.library.Library("partway", "IMPL")
_AXES = {
    "all_reduce": 1, "all_gather": 1, "reduce_scatter": 2, "broadcast": 1, "reduce": 1, "all_to_all": 2, "permute": 1,
    "send_receive": 6,
}  # fmt: skip  # which argument after the tensor has the axes
_NAMES = {"send_receive": "neighbor_exchange"}  # the public name


def _told(name: str, arguments: Sequence[Any]) -> str:
    """The text of a call in messages, the same on all ranks."""
    at = _AXES[name]
    told = [] if name == "send_receive" else list(arguments[:at])
    if name in ("all_gather", "reduce_scatter") and not _even(arguments[at + 1]):
        told.append(arguments[at + 1])
    if name == "all_to_all" and not _even(*arguments[at + 1 : at + 3]):
        told.append("uneven")
    return f"{_NAMES.get(name, name)}({', '.join(map(str, told))}) over {','.join(arguments[at])}"


def _kind_of(name: str, x: Any, arguments: Sequence[Any]) -> str:
    """The dtype and the shape that all ranks have to pass, with None for sizes that may differ."""
    if name == "send_receive":
        return "messages"
    shape = list(x.shape)
    for dim in _own_dims(name, arguments):
        shape[dim] = None
    return f"{str(x.dtype).removeprefix('torch.')}{shape}"


def _own_dims(name: str, arguments: Sequence[Any]) -> Sequence[int]:
    """The dims whose sizes may differ from rank to rank."""
    if name == "all_gather":
        return arguments[:1]
    if name == "all_to_all" and not _even(arguments[3], arguments[4]):
        return arguments[:2]
    return ()


def _even(*sizes: Sequence[int]) -> bool:
    return all(len(set(each)) == 1 for each in sizes)


def _compare(call: _Call) -> None:
    """Raise RuntimeStateError unless all ranks of the group make the same call."""
    told = torch.zeros(_LONGEST, dtype=torch.uint8, device=device_type())
    text = call.told.encode()[:_LONGEST]
    told[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    every = [torch.empty_like(told) for _ in call.ranks]
    call.wait(
        dist.all_gather(every, told, group=call.group, async_op=True), f"compare calls over {','.join(call.axes)}"
    )
    first, *others = [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in every]
    for rank, other in zip(call.ranks[1:], others, strict=True):
        if other != first:
            raise RuntimeStateError(
                f"rank {call.ranks[0]} calls {first} where rank {rank} calls {other}; let all ranks call collectives "
                "in one order, on tensors of one shape and dtype"
            )


# -- The kernels

_BY_DIST = {"prod": dist.ReduceOp.PRODUCT, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
_STACKED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0, dtype=x.dtype),
    "mean": lambda x: x.mean(0),
    "prod": lambda x: x.prod(0, dtype=x.dtype),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
}


@_kernel(by_hand.all_reduce)
def _all_reduce(c: _Call, x: Tensor, op: str, axes: list[str], size: int) -> Tensor:
    if op in ("sum", "mean"):
        total = c.converted(x, PARTIAL, REPLICATE)
        return total / c.size if op == "mean" else total
    if op == "max" and x.dtype is not torch.bool:
        return c.converted(x, PARTIAL_MAX, REPLICATE)
    note(c.relayout(PARTIAL_MAX, REPLICATE), [x])
    if x.is_complex() or x.dtype in (torch.bool, torch.int16):
        return _STACKED[op](_stacked(c, x))
    buffer = x.clone(memory_format=torch.contiguous_format)
    c.wait(dist.all_reduce(buffer, _BY_DIST[op], group=c.group, async_op=True))
    return buffer


def _stacked(c: _Call, x: Tensor) -> Tensor:
    """The tensors of all ranks, stacked."""
    every = c.exchanged([x.contiguous()] * c.size, [x.numel()] * c.size, x, known=True)
    return torch.stack([one.view(x.shape) for one in every])


@_kernel(by_hand.all_gather)
def _all_gather(c: _Call, x: Tensor, dim: int, axes: list[str], sizes: list[int]) -> Tensor:
    if _even(sizes):
        return c.converted(x, Shard(dim), REPLICATE)
    shapes = [[*x.shape[:dim], size, *x.shape[dim + 1 :]] for size in sizes]
    counts = [torch.Size(shape).numel() for shape in shapes]
    every = c.exchanged([x.contiguous()] * c.size, counts, x)
    return torch.cat([one.view(shape) for one, shape in zip(every, shapes, strict=True)], dim)


@_kernel(by_hand.reduce_scatter)
def _reduce_scatter(c: _Call, x: Tensor, op: str, dim: int, axes: list[str], sizes: list[int], own: int) -> Tensor:
    if op in ("sum", "mean") and _even(sizes):
        total = c.converted(x, PARTIAL, Shard(dim))
        return total / c.size if op == "mean" else total
    pieces = [piece.contiguous() for piece in x.split(sizes, dim)]
    shape = pieces[c.position].shape
    every = c.exchanged(pieces, [shape.numel()] * c.size, x)
    return _STACKED[op](torch.stack([one.view(shape) for one in every]))


@_kernel(by_hand.broadcast)
def _broadcast(c: _Call, x: Tensor, root: int, axes: list[str], size: int) -> Tensor:
    note(c.relayout(PARTIAL, REPLICATE), [x])
    buffer = x.clone(memory_format=torch.contiguous_format)
    c.wait(dist.broadcast(as_bytes(buffer), c.ranks[root], group=c.group, async_op=True))
    return buffer


@_kernel(by_hand.reduce)
def _reduce(c: _Call, x: Tensor, root: int, axes: list[str], size: int) -> Tensor:
    total = c.converted(x, PARTIAL, REPLICATE)
    return total if c.position == root else torch.zeros_like(total)


@_kernel(by_hand.all_to_all)
def _all_to_all(
    c: _Call, x: Tensor, split_dim: int, concat_dim: int, axes: list[str], sends: list[int], receives: list[int],
    own: int,
) -> Tensor:  # fmt: skip
    pieces = [piece.contiguous() for piece in x.split(sends, split_dim)]
    shapes = []
    for size in receives:
        shape = list(x.shape)
        shape[split_dim] = own
        shape[concat_dim] = size
        shapes.append(shape)
    every = c.exchanged(pieces, [torch.Size(shape).numel() for shape in shapes], x, _even(sends, receives))
    return torch.cat([one.view(shape) for one, shape in zip(every, shapes, strict=True)], concat_dim)


@_kernel(by_hand.permute)
def _permute(c: _Call, x: Tensor, pairs: list[int], axes: list[str], size: int) -> Tensor:
    to = dict(zip(pairs[::2], pairs[1::2], strict=True)).get(c.position)
    source = dict(zip(pairs[1::2], pairs[::2], strict=True)).get(c.position)
    nothing = x.new_empty(0)
    outgoing = [x.contiguous() if rank == to else nothing for rank in range(c.size)]
    came = c.exchanged(outgoing, [x.numel() if rank == source else 0 for rank in range(c.size)], x)
    return (
        torch.zeros(x.shape, dtype=x.dtype, device=x.device) if source is None else came[source].clone().view(x.shape)
    )


@_kernel(by_hand.send_receive)
def _send_receive(
    c: _Call, xs: list[Tensor], targets: list[int], sources: list[int], sizes: list[int], ndims: list[int],
    dtype: torch.dtype, device: torch.device, axes: list[str], size: int,
) -> list[Tensor]:  # fmt: skip
    like = torch.empty(0, dtype=dtype, device=device)
    shapes = by_hand.shapes_of(sizes, ndims)
    outgoing, counts = [], []
    for rank in range(c.size):
        mine = [x.reshape(-1) for x, target in zip(xs, targets, strict=True) if target == rank]
        outgoing.append(torch.cat([like, *mine]))
        counts.append(sum(torch.Size(s).numel() for s, source in zip(shapes, sources, strict=True) if source == rank))
    came = c.exchanged(outgoing, counts, like)
    taken = [0] * c.size
    results = []
    for source, shape in zip(sources, shapes, strict=True):
        start, count = taken[source], torch.Size(shape).numel()
        results.append(came[source][start : start + count].clone().view(shape))
        taken[source] += count
    return results
