"""Large collectives over units of ranks, such as hosts, in steps inside the units and between them, for process groups
of gloo (`Hierarchy` in propagation/cost/cost.py has the steps, and tells when they are faster).

Each place inside a unit has a share of the work between units, which the ranks at that place do. Chunks follow each
other: while one is between the units, the next is sent inside. A thread issues the messages in the order of the
collectives, which overlap with what the caller does meanwhile. (Messages in place of gloo's collectives: its
reduce_scatter of 16 MB between 2 ranks of a host took 319 ms, where its all_reduce over 2 hosts of 2 ranks at 1 Gbit/s
took 225.)
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ...propagation.cost.cost import CHUNK

_INSIDE, _BETWEEN, _SUMS = 1, 2, 3  # the tags of messages
Steps = Iterator[None]  # each is issued, and waited for where the generator goes on


class Issued:
    """An issued collective, to wait for like a Work of PyTorch."""

    def __init__(self) -> None:
        self._done: Future[None] = Future()

    def wait(self) -> None:
        """Wait until the result is there. Raises what a step of it raised."""
        self._done.result()

    def run(self, steps: Steps) -> None:
        """Take all steps."""
        try:
            for _ in steps:
                pass
        except BaseException as error:
            self._done.set_exception(error)
        else:
            self._done.set_result(None)


Asked = SimpleQueue[tuple[Issued, Steps] | None]


class HierarchicalGroup:
    """The collectives in steps of one group of ranks, the units one after another. `inside`: the process group of this
    rank's unit; `between`: that of the ranks at its place in all units. Nothing else uses these process groups."""

    def __init__(self, inside: Any, between: Any) -> None:
        self._inside, self._between = inside, between
        self._place, self._ranks = dist.get_rank(inside), dist.get_world_size(inside)
        self._unit, self._units = dist.get_rank(between), dist.get_world_size(between)
        self._others = [rank for rank in range(self._ranks) if rank != self._place]
        self._other_units = [unit for unit in range(self._units) if unit != self._unit]
        self._asked: Asked = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._asked,), name="partway collectives", daemon=True)
        weakref.finalize(self, self._asked.put, None)

    def all_reduce(self, tensor: Tensor, reduction: Any) -> Issued:
        """Reduce a contiguous `tensor` on the CPU over the group, in place."""
        count = max(1, CHUNK // tensor.element_size() // self._ranks) * self._ranks
        return self._issued(tensor, count, lambda chunks: self._reduce(chunks, reduction), tensor.view(1, -1))

    def all_gather(self, out: Tensor, part: Tensor) -> Issued:
        """Write the `part`, a vector, of every rank into the vector `out`, in the order of the ranks."""
        rows = out.view(self._units * self._ranks, -1)
        return self._issued(out, self._columns(rows), self._gather, rows, part[None])

    def reduce_scatter(self, out: Tensor, addends: Tensor) -> Issued:
        """Write the sum of this rank's rows into the vector `out`; the vector `addends` has a row for each rank."""
        rows = addends.view(self._units * self._ranks, -1)
        return self._issued(out, self._columns(rows), self._scatter, rows, out[None])

    def _columns(self, rows: Tensor) -> int:
        return max(1, CHUNK // rows.element_size() // len(rows))

    def _issued(self, out: Tensor, count: int, steps: Callable[[Sequence[Tensor]], Steps], *matrices: Tensor) -> Issued:
        """Start the steps of all chunks of `count` columns of the `matrices`."""
        if self._thread.ident is None:
            self._thread.start()
        issued, chunks = Issued(), zip(*(matrix.split(count, 1) for matrix in matrices), strict=True)
        self._asked.put((issued, _one_by_one(map(steps, chunks), out.is_inference())))
        return issued

    def _reduce(self, chunks: Sequence[Tensor], reduction: Any) -> Steps:
        """Add up (or take the largest of) a chunk: a row of it at each place of a unit."""
        chunk = chunks[0][0]
        add = torch.maximum if reduction == dist.ReduceOp.MAX else torch.add
        missing = -len(chunk) % self._ranks
        whole = pad(chunk, (0, missing)) if missing else chunk
        rows = whole.view(self._ranks, -1)
        own = rows[self._place]
        addends = [torch.empty_like(own) for _ in self._others]
        works = [self._send(rows[rank], rank, _INSIDE) for rank in self._others]
        works += [self._receive(room, rank, _INSIDE) for room, rank in zip(addends, self._others, strict=True)]
        yield
        _wait(works)
        for addend in addends:
            add(own, addend, out=own)
        works = [dist.all_reduce(own, reduction, group=self._between, async_op=True)]
        yield
        _wait(works)
        works = [self._send(own, rank, _SUMS) for rank in self._others]
        works += [self._receive(rows[rank], rank, _SUMS) for rank in self._others]
        yield
        _wait(works)
        if whole is not chunk:
            chunk.copy_(whole[: len(chunk)])

    def _gather(self, chunks: Sequence[Tensor]) -> Steps:
        """Receive the parts of the ranks at this place of the other units, then those that the others of the unit
        have."""
        out, part = chunks[0].unflatten(0, (self._units, self._ranks)), chunks[1][0]
        out[self._unit, self._place].copy_(part)
        works = [self._send(part, unit, _BETWEEN) for unit in self._other_units]
        works += [self._receive(out[unit, self._place], unit, _BETWEEN) for unit in self._other_units]
        yield
        _wait(works)
        units = range(self._units)
        works = [self._send(out[unit, self._place], rank, _INSIDE) for rank in self._others for unit in units]
        works += [self._receive(out[unit, rank], rank, _INSIDE) for rank in self._others for unit in units]
        yield
        _wait(works)

    def _scatter(self, chunks: Sequence[Tensor]) -> Steps:
        """Add up the addends of this unit for this place of all units, then those of all units for this rank."""
        rows, out, units = chunks[0].unflatten(0, (self._units, self._ranks)), chunks[1][0], range(self._units)
        addends = [torch.empty_like(rows[:, rank]) for rank in self._others]
        works = [self._send(rows[unit, rank], rank, _INSIDE) for rank in self._others for unit in units]
        works += [
            self._receive(room[unit], rank, _INSIDE)
            for room, rank in zip(addends, self._others, strict=True)
            for unit in units
        ]
        yield
        _wait(works)
        sums = rows[:, self._place].clone()
        for addend in addends:
            sums.add_(addend)
        rooms = [torch.empty_like(out) for _ in self._other_units]
        works = [self._send(sums[unit], unit, _BETWEEN) for unit in self._other_units]
        works += [self._receive(room, unit, _BETWEEN) for room, unit in zip(rooms, self._other_units, strict=True)]
        yield
        _wait(works)
        out.copy_(sums[self._unit])
        for room in rooms:
            out.add_(room)

    def _send(self, row: Tensor, rank: int, tag: int) -> Any:
        return dist.isend(row, group=self._between if tag == _BETWEEN else self._inside, group_dst=rank, tag=tag)

    def _receive(self, room: Tensor, rank: int, tag: int) -> Any:
        return dist.irecv(room, group=self._between if tag == _BETWEEN else self._inside, group_src=rank, tag=tag)


def _one_by_one(chunks: Iterable[Steps], inference: bool) -> Steps:
    """The steps of all chunks: each step of a chunk follows the step before of the next one."""
    with torch.inference_mode(inference):
        waiting = list(chunks)[::-1]
        under_way: list[Steps] = []
        while waiting or under_way:
            if waiting:
                under_way.insert(0, waiting.pop())
            under_way = [steps for steps in under_way if next(steps, True) is None]
            yield


def _serve(asked: Asked) -> None:
    """Reduce what is asked for, until None is."""
    with torch.no_grad():
        while (each := asked.get()) is not None:
            issued, steps = each
            issued.run(steps)
            del each, issued, steps


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
