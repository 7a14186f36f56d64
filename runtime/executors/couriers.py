"""Values that cross from one mesh to another (`strategy/transfer.py`): in one process, or from process to process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...strategy.layout import Layout
from ...strategy.transfer import Transfer, transfers, within
from ..code.strides import contiguous


@dataclass(frozen=True)
class Route:
    """The route of a value between meshes: a tensor of global `shape`, with the layout `source` on one mesh and
    `target` on the other."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Layout
    target: Layout

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The blocks that go from rank to rank."""
        return transfers(self.source, self.target, self.shape)

    def cut(self, part: Tensor, transfer: Transfer) -> Tensor:
        """The block of a transfer in the source's `part`."""
        return part[within(transfer.block, self.source.slices(self.shape, transfer.source))]

    def place(self, part: Tensor, transfer: Transfer) -> Tensor:
        """The block of a transfer in the target's `part`."""
        return part[within(transfer.block, self.target.slices(self.shape, transfer.target))]

    def empty(self, device: torch.device) -> Tensor:
        """An uninitialised part of the target, or one of zeros if slices may be short."""
        local = self.target.local_shape(self.shape)
        full = self.target.divides(self.shape) if self.target.cuts else True
        return (torch.empty if full else torch.zeros)(local, dtype=self.dtype, device=device)


class Courier(Protocol):
    """Carries values from stage to stage. A value sent on a route for a microbatch is received once, in any order of
    microbatches."""

    def send(self, route: Route, microbatch: int, value: Any) -> None:
        """Send a value; it may not be written to until it is received."""
        ...

    def ready(self, route: Route, microbatch: int) -> bool:
        """Whether `receive` would find the value, or can wait for it. False: this process has yet to send it."""
        ...

    def receive(self, route: Route, microbatch: int, device: torch.device) -> Any:
        """The value in the layout of the target."""
        ...

    def finish(self) -> None:
        """Wait until all sent values have left: a value that is freed before does not arrive."""
        ...


class InProcess:
    """All ranks of both meshes are in this process: a value is a list with one part for each rank."""

    def __init__(self) -> None:
        self._sent: dict[tuple[Route, int], deque[Sequence[Tensor]]] = {}

    def send(self, route: Route, microbatch: int, value: Sequence[Tensor]) -> None:
        self._sent.setdefault((route, microbatch), deque()).append(value)

    def ready(self, route: Route, microbatch: int) -> bool:
        return bool(self._sent.get((route, microbatch)))

    def receive(self, route: Route, microbatch: int, device: torch.device) -> list[Tensor]:
        parts = self._sent[route, microbatch].popleft()
        results = [route.empty(device) for _ in range(route.target.mesh.device_num)]
        for each in route.transfers:
            route.place(results[each.target], each).copy_(route.cut(parts[each.source], each))
        return results

    def finish(self) -> None:
        return None


class BetweenProcesses:
    """Each rank is a process: a value is this rank's part."""

    def __init__(self) -> None:
        self._process = dist.get_rank()
        self._under_way: list[tuple[Any, Tensor]] = []
        self._kept: dict[tuple[Route, int], Tensor] = {}  # parts that this rank sends to itself

    def send(self, route: Route, microbatch: int, value: Tensor) -> None:
        self._under_way = [(work, sent) for work, sent in self._under_way if not work.is_completed()]
        source, target = route.source.mesh.ranks, route.target.mesh.ranks
        for each in route.transfers:
            if source[each.source] != self._process:
                continue
            if target[each.target] == self._process:
                self._kept[route, microbatch] = value
                continue
            sent = contiguous(route.cut(value, each))
            self._under_way.append((dist.isend(sent, target[each.target], tag=microbatch), sent))

    def ready(self, route: Route, microbatch: int) -> bool:
        return True

    def receive(self, route: Route, microbatch: int, device: torch.device) -> Tensor:
        part, kept = route.empty(device), self._kept.pop((route, microbatch), None)
        source, target = route.source.mesh.ranks, route.target.mesh.ranks
        arriving = []
        for each in route.transfers:
            if target[each.target] != self._process:
                continue
            place = route.place(part, each)
            if source[each.source] == self._process:
                assert kept is not None
                place.copy_(route.cut(kept, each))
                continue
            block = torch.empty(place.shape, dtype=route.dtype, device=device)
            work: Any = dist.irecv(block, source[each.source], tag=microbatch)
            arriving.append((work, block, place))
        for work, block, place in arriving:
            work.wait()
            place.copy_(block)
        return part

    def finish(self) -> None:
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()
