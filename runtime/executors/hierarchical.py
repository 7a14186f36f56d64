"""A large all_reduce over units of ranks, such as hosts, in three steps, for process groups of gloo.

A row of a chunk of the tensor belongs to each rank of a unit:

    reduce_scatter   each rank sends its addends of other rows to their ranks, and adds up what it receives of its own
    all_reduce       the ranks of all units that have one row add it up
    all_gather       each rank sends its row to the others of its unit

Chunks follow each other: while one is between the units, the next is added up inside, and the one before sent round. A
thread issues the messages in the order of the all_reduces, which overlap with what the caller does meanwhile. (Messages
in place of gloo's collectives: its reduce_scatter of 16 MB between 2 ranks of a host took 319 ms, where its all_reduce
over 2 hosts of 2 ranks at 1 Gbit/s took 225.) `Hierarchy` in propagation/cost/cost.py tells when it is faster.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ...propagation.cost.cost import CHUNK

_ADDENDS, _SUMS = 1, 2  # the tags of messages


class Issued:
    """An issued all_reduce, to wait for like a Work of PyTorch."""

    def __init__(self) -> None:
        self._done: Future[None] = Future()

    def wait(self) -> None:
        """Wait until the tensor holds the result. Raises what a step of it raised."""
        self._done.result()

    def run(self, steps: Iterator[None]) -> None:
        """Take all steps."""
        try:
            for _ in steps:
                pass
        except BaseException as error:
            self._done.set_exception(error)
        else:
            self._done.set_result(None)


Asked = SimpleQueue[tuple[Issued, Iterator[None]] | None]


class HierarchicalReducer:
    """The all_reduces of one group of ranks. `inside`: the process group of this rank's unit; `between`: that of the
    ranks at its place in all units. Nothing else uses these process groups."""

    def __init__(self, inside: Any, between: Any) -> None:
        self._inside, self._between = inside, between
        self._own, self._ranks = dist.get_rank(inside), dist.get_world_size(inside)
        self._others = [rank for rank in range(self._ranks) if rank != self._own]
        self._asked: Asked = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._asked,), name="partway all_reduce", daemon=True)
        weakref.finalize(self, self._asked.put, None)

    def all_reduce(self, tensor: Tensor, reduction: Any) -> Issued:
        """Reduce a contiguous `tensor` on the CPU over the group, in place."""
        if self._thread.ident is None:
            self._thread.start()
        issued = Issued()
        self._asked.put((issued, self._chunks(tensor, reduction)))
        return issued

    def _chunks(self, tensor: Tensor, reduction: Any) -> Iterator[None]:
        """The steps of all chunks: each step of a chunk follows the step before of the next one."""
        count = max(1, CHUNK // tensor.element_size() // self._ranks) * self._ranks
        with torch.inference_mode(tensor.is_inference()):
            waiting = [self._steps(chunk, reduction) for chunk in tensor.view(-1).split(count)][::-1]
            under_way: list[Iterator[None]] = []
            while waiting or under_way:
                if waiting:
                    under_way.insert(0, waiting.pop())
                under_way = [steps for steps in under_way if next(steps, True) is None]
                yield

    def _steps(self, chunk: Tensor, reduction: Any) -> Iterator[None]:
        """The steps of one chunk. Each is issued, and waited for where the generator goes on."""
        add = torch.maximum if reduction == dist.ReduceOp.MAX else torch.add
        missing = -len(chunk) % self._ranks
        whole = pad(chunk, (0, missing)) if missing else chunk
        rows = whole.view(self._ranks, -1)
        own = rows[self._own]
        addends = [torch.empty_like(own) for _ in self._others]
        works = [self._send(rows[rank], rank, _ADDENDS) for rank in self._others]
        works += [self._receive(room, rank, _ADDENDS) for room, rank in zip(addends, self._others, strict=True)]
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

    def _send(self, row: Tensor, rank: int, tag: int) -> Any:
        return dist.isend(row, group=self._inside, group_dst=rank, tag=tag)

    def _receive(self, room: Tensor, rank: int, tag: int) -> Any:
        return dist.irecv(room, group=self._inside, group_src=rank, tag=tag)


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
