"""How long collectives take, alone and while operators run: measured among processes, and fitted to a few numbers.

Each comes after some computation, as it does in training: processes that only wait for each other are much faster,
because none has to be woken and all arrive at once.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from partway.measure.clock import mean_but_longest, seconds_of, wait_for
from partway.measure.operators import nonnegative
from partway.propagation.cost.cost import steps
from partway.propagation.cost.profile import ALONE, ByKind, Together
from partway.runtime.issue import all_gather, reduce_scatter
from partway.strategy.placement import Kind

KINDS = tuple(Kind(field.name) for field in fields(ByKind))
MB = 1 << 20
SMALL, SMALL_REPEATS = MB // 4, 4  # a payload, and how often smaller ones are repeated, which vary most
STRETCH = 512  # rows and columns of the matrices that are multiplied before a collective
LARGE, BESIDE = 4 * MB, 3.0  # a payload, and how much longer what runs beside it takes
SLOWEST = 0.05  # the least share of what a lane does alone


@dataclass(frozen=True, slots=True)
class Sample:
    """One collective over `size` ranks and the seconds that it took; `payload` is that of `wire_bytes`."""

    kind: Kind
    size: int
    payload: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Overlap:
    """A collective that took `communicating` seconds while operators ran that took `computing` seconds, and what each
    of the two takes alone."""

    communicating: float
    communicating_alone: float
    computing: float
    computing_alone: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Seconds of a launch, seconds of a step by kind, and algorithm bandwidth by kind and group size."""

    launch: float
    latency: Mapping[Kind, float]
    bandwidth: Mapping[tuple[Kind, int], float]

    def seconds(self, kind: Kind, size: int, payload: float) -> float:
        """The fitted time of a collective."""
        return self.launch + steps(kind, size) * self.latency[kind] + payload / self.bandwidth[kind, size]


# -- Measuring ----------------------------------------------------------------------------------------------------


def group_sizes(processes: int) -> tuple[int, ...]:
    """The powers of 2 below `processes`, and `processes`; none for one process."""
    powers = [1 << k for k in range(1, processes.bit_length()) if 1 << k < processes]
    return (*powers, processes) if processes > 1 else ()


def collectives(size: int, group: Any, device: str, payloads: Sequence[int], repeats: int) -> Iterator[Sample]:
    """What each kind takes among the `size` ranks of `group`, of which this is one, by payload."""
    a = torch.ones(STRETCH, STRETCH, device=device)

    def ready() -> None:
        dist.barrier(group=group)
        torch.mm(a, a)

    for kind in KINDS:
        for payload in payloads:
            count = math.ceil(payload / 4 / size) * size
            run = _collective(kind, count, size, group, device)
            often = repeats * (SMALL_REPEATS if payload < SMALL else 1)
            seconds = seconds_of(run, device, often, ready, mean_but_longest)
            yield Sample(kind, size, 4 * count, seconds)


def overlaps(device: str, payloads: Sequence[int], repeats: int) -> Iterator[Overlap]:
    """Large collectives of those kinds that tell when they are done, while operators run that take longer."""
    a = torch.ones(STRETCH, STRETCH, device=device)
    one = seconds_of(lambda: [torch.mm(a, a) for _ in range(10)], device, repeats, dist.barrier) / 10
    for payload in (size for size in payloads if size >= LARGE):
        whole = torch.zeros(payload // 4, device=device)
        alone = seconds_of(lambda w=whole: dist.all_reduce(w), device, repeats, dist.barrier)  # type: ignore[misc]
        products = max(4, round(BESIDE * alone / one))
        for _ in range(repeats):
            dist.barrier()
            yield _overlap(whole, a, products, alone, products * one, device)


def _overlap(whole: Tensor, a: Tensor, products: int, alone: float, computing: float, device: str) -> Overlap:
    """One of all ranks while each computes `products` of `a` with itself."""
    ended: list[float] = []
    wait_for(device)
    start = time.perf_counter()
    work = dist.all_reduce(whole, async_op=True)
    work.get_future().add_done_callback(lambda _: ended.append(time.perf_counter()))
    for _ in range(products):
        torch.mm(a, a)
    computed = time.perf_counter() - start
    work.wait()
    wait_for(device)
    return Overlap((ended[0] if ended else time.perf_counter()) - start, alone, computed, computing)


def together(overlaps: Sequence[Overlap]) -> Together:
    """What each lane does of what it does alone while the other one runs: the median of what was measured. Operators
    lose what they took longer in the time of the collective."""
    lasted = [o for o in overlaps if o.communicating < o.computing]
    if not lasted:
        return ALONE
    lost = statistics.median((o.computing - o.computing_alone) / o.communicating for o in lasted)
    kept = statistics.median(o.communicating_alone / o.communicating for o in lasted)
    return Together(computing=min(1.0, max(SLOWEST, 1.0 - lost)), communicating=min(1.0, max(SLOWEST, kept)))


def _collective(kind: Kind, count: int, size: int, group: Any, device: str) -> Callable[[], Any]:
    """A call of one collective whose payload is `count` float32 numbers."""
    whole, other, part = (torch.zeros(n, device=device) for n in (count, count, count // size))
    return partial(CALLS[kind], whole, other, part, group)


CALLS: Mapping[Kind, Callable[[Tensor, Tensor, Tensor, Any], Any]] = {
    Kind.ALL_REDUCE: lambda whole, other, part, group: dist.all_reduce(whole, group=group),
    Kind.ALL_GATHER: lambda whole, other, part, group: all_gather(whole, part, group=group),
    Kind.REDUCE_SCATTER: lambda whole, other, part, group: reduce_scatter(part, whole, group=group),
    Kind.ALL_TO_ALL: lambda whole, other, part, group: dist.all_to_all_single(other, whole, group=group),
}
"""For each kind with figures of its own a call, of two whole values and one rank's part, on a group."""


def slowest(ranks: Sequence[Sequence[Sample]]) -> tuple[Sample, ...]:
    """Each sample from the rank that waited longest."""
    found: dict[tuple[Kind, int, int], Sample] = {}
    for sample in (sample for samples in ranks for sample in samples):
        key = sample.kind, sample.size, sample.payload
        found[key] = max(sample, found.get(key, sample), key=lambda s: s.seconds)
    return tuple(found.values())


# -- Fitting ---------------------------------------------------------------------------------------------------------


def fit(samples: Sequence[Sample]) -> Fit:
    """The launch, latencies and bandwidths with the least squares of relative errors, none of them negative.

    With one group size only, launch and latency cannot be told apart; the fit then has the smallest that do.
    """
    kinds = sorted({s.kind for s in samples}, key=KINDS.index)
    rings = sorted({(s.kind, s.size) for s in samples}, key=lambda ring: (KINDS.index(ring[0]), ring[1]))
    matrix = np.zeros((len(samples), 1 + len(kinds) + len(rings)))
    for row, s in zip(matrix, samples, strict=True):
        row[0] = 1
        row[1 + kinds.index(s.kind)] = steps(s.kind, s.size)
        row[1 + len(kinds) + rings.index((s.kind, s.size))] = s.payload
        row /= s.seconds
    solution = nonnegative(matrix, np.ones(len(samples)))
    latency = dict(zip(kinds, solution[1:].tolist(), strict=False))
    bandwidth = {}
    for ring, per_byte in zip(rings, solution[1 + len(kinds) :].tolist(), strict=True):
        largest = max((s for s in samples if (s.kind, s.size) == ring), key=lambda s: s.payload)
        bandwidth[ring] = 1 / per_byte if per_byte > 0 else largest.payload / largest.seconds
    return Fit(float(solution[0]), latency, bandwidth)
