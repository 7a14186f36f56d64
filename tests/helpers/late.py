"""Collectives that finish as late as possible, for tests of the time between issue and wait.

On a GPU a collective runs on its own stream, beside the kernels that the host has issued before and after it: it may
read its operand and write its result at any moment until it is waited for. `late` makes these the worst moments:

    on a CPU    it reads and writes when it is waited for, and its result is garbage before that
    on a GPU    each rank in turn is delayed by a kernel before a collective and by one after it, for longer than the
                collective takes, so that a rank that does not wait reads data that the other one has not sent
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partway.runtime.executors import issue
from partway.runtime.tensors import gather

CYCLES = 3_000_000  # of a GPU: 1.5 to 2 ms


class Late:
    """The work of a collective that has not started."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin, self._over = begin, False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._over:
            self._begin().wait()
            self._over = True
        return True

    def is_completed(self) -> bool:
        return self._over


@contextlib.contextmanager
def late(counts: list[int]) -> Iterator[None]:
    """Make collectives late inside the block. `counts[0]` is the number of late ones."""
    turns = itertools.count(dist.get_rank())
    found = [(issue, "all_gather"), (issue, "reduce_scatter"), (gather, "all_gather")]
    found += [(dist, "all_reduce"), (dist, "all_to_all_single")]
    before = [(module, name, getattr(module, name)) for module, name in found]

    def made(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(out: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            if not async_op:
                return plain(out, *args, **kwargs)
            counts[0] += 1
            if out.is_cuda:
                return held_up(lambda: plain(out, *args, async_op=True, **kwargs), next(turns))
            if name != "all_reduce":  # which sends the content of `out`
                out.view(torch.uint8).fill_(0xFF)
            return Late(lambda: plain(out, *args, async_op=True, **kwargs))

        return call

    try:
        for module, name, plain in before:
            setattr(module, name, made(name, plain))
        yield
    finally:
        for module, name, plain in before:
            setattr(module, name, plain)


def held_up(begin: Callable[[], Any], turn: int) -> Any:
    """The result of `begin`, with a long kernel before it on this or the other rank, and one after it on the other
    rank."""
    if turn % 2:
        torch.cuda._sleep(CYCLES)
    work = begin()
    if not turn % 2:
        torch.cuda._sleep(CYCLES)
    return work
