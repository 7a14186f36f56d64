"""Measure the times of collectives among processes, alone and while operators run, and fit a few numbers to them.

Each comes after some computation, as in training: processes that only wait for each other are much faster, because none
has to be woken and all arrive at once. The measure is the time that it adds to the computation alone. So waiting for
the slowest rank is part of it, but not the computation of other ranks on the same core. Short ones vary from half a
millisecond to a tick of the scheduler, and a step has many: the mean counts, over all ranks and many repeats. Payloads
take turns, so that a disturbance affects all of them.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from partway.measure.clock import mean_but_longest, seconds_of, seconds_of_one, wait_for
from partway.measure.operators import nonnegative
from partway.propagation.cost import (
    ALONE,
    ByKind,
    NetworkLevel,
    Together,
    costs_over,
    messages_by_level,
    sent_by_level,
    wire_bytes,
)
from partway.runtime.executors import all_gather, reduce_scatter
from partway.strategy import Kind

Family = tuple[tuple[int, ...], ...]  # groups of ranks that share none
Call = Callable[[Tensor, int, Any, bool], Any]
KINDS = tuple(Kind(field.name) for field in fields(ByKind))
MB = 1 << 20
SMALL, SMALL_REPEATS = 2 * MB, 10  # a payload, and the repeats of smaller ones, which vary most
IN_A_ROW = 4  # collectives; the last three have queued
STRETCH = 512  # rows and columns of the matrices that are multiplied before a collective
LARGE, BESIDE = 4 * MB, 3.0  # a payload, and the factor by which the work beside it is longer
WARM = 2  # turns that do not count
LEAST = 1e-6  # seconds of a collective
UNEVEN = 1.25  # times the mean that a rank takes if its link is slower
ROUNDS = 8  # fits of a level, until it is known which samples it bounds
SLOWEST = 0.05  # the least speed of a lane, relative to its speed alone


@dataclass(frozen=True, slots=True)
class Sample:
    """One collective and the seconds that it adds.

    sizes     the ranks of its group on each level, inside out: (2,) on one level; (2, 4) of 2 on each of 4 hosts
    payload   that of `wire_bytes`
    """

    kind: Kind
    sizes: tuple[int, ...]
    payload: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Overlap:
    """A collective that took `communicating` seconds while operators took `computing` seconds, and the times of both
    alone."""

    communicating: float
    communicating_alone: float
    computing: float
    computing_alone: float


@dataclass(frozen=True, slots=True)
class InARow:
    """The seconds that a small collective adds alone, and the seconds that each of several adds, after the first, if
    they are issued at once."""

    alone: float
    queued: float


@dataclass(frozen=True, slots=True)
class Fit:
    """The figures of one level: seconds of a launch, seconds of a step by kind, algorithm bandwidth by kind and group
    size, and whether an all_reduce goes by trees."""

    launch: float
    latency: Mapping[Kind, float]
    bandwidth: Mapping[tuple[Kind, int], float]
    trees: bool = False

    def level(self, name: str, source: str, devices: int | None) -> NetworkLevel:
        """The level of a profile with these figures."""
        bandwidth = {
            kind.value: {str(n): rate for (k, n), rate in self.bandwidth.items() if k is kind} for kind in KINDS
        }
        latency = {kind.value: seconds for kind, seconds in self.latency.items()}
        return NetworkLevel(
            name=name,
            source=source,
            devices=devices,
            launch=self.launch,
            bandwidth=bandwidth,  # type: ignore[arg-type]
            latency=latency,  # type: ignore[arg-type]
            trees=self.trees,
        )


# -- Measuring ----------------------------------------------------------------------------------------------------


def group_sizes(processes: int) -> tuple[int, ...]:
    """The powers of 2 below `processes`, and `processes`; none for one process."""
    powers = [1 << k for k in range(1, processes.bit_length()) if 1 << k < processes]
    return (*powers, processes) if processes > 1 else ()


def groups_of(size: int, processes: int) -> tuple[Family, ...]:
    """The groups of `size` ranks that the axes of a mesh have: neighbours, and, if they divide `processes`, those that
    are as far apart as possible."""
    near = tuple(tuple(range(i, i + size)) for i in range(0, processes - size + 1, size))
    apart = processes // size
    far = tuple(tuple(range(i, processes, apart)) for i in range(apart))
    return (near,) if processes % size or near == far else (near, far)


def groups_on(hosts: int, each: int) -> Iterator[tuple[tuple[int, ...], tuple[Family, ...]]]:
    """The groups to measure on `hosts` hosts with `each` ranks, by their sizes on each level (`Sample`): those of one
    host, those with one rank a host, and all ranks. There is one level if there is one host, or one rank on each.

    The groups of a family share no rank and communicate at once, so that all devices of a host send at once.
    """
    if hosts == 1 or each == 1:
        for size in group_sizes(hosts * each):
            yield (size,), groups_of(size, hosts * each)
        return
    for size in group_sizes(each):
        inside = groups_of(size, each)
        yield (
            (size, 1),
            tuple(
                tuple(tuple(host * each + rank for rank in ranks) for host in range(hosts) for ranks in family)
                for family in inside
            ),
        )
    for size in group_sizes(hosts):
        between = groups_of(size, hosts)
        yield (
            (1, size),
            tuple(
                tuple(tuple(host * each + rank for host in some) for some in family for rank in range(each))
                for family in between
            ),
        )
    yield (each, hosts), ((tuple(range(hosts * each)),),)


def collectives(
    sizes: tuple[int, ...], groups: Sequence[Any], device: str, payloads: Sequence[int], repeats: int
) -> Iterator[Sample]:
    """The time of each kind among the ranks of `groups`, which have these sizes and all contain this rank, by payload.
    The groups take turns, like the axes of a mesh."""
    size = math.prod(sizes)
    counts = [math.ceil(payload / 4 / size) * size for payload in payloads]
    dist.barrier(group=groups[0])
    alone = _in_turns({n: partial(_computed, n, device) for c in counts for n in (c, c // size)}, device, repeats)
    turn = itertools.cycle(groups)
    for kind in KINDS:
        given = {count: count // size if kind is Kind.ALL_GATHER else count for count in counts}
        dist.barrier(group=groups[0])
        both = _in_turns(
            {count: partial(_communicated, CALLS[kind], given[count], size, turn, device) for count in counts},
            device,
            repeats,
        )
        for count in counts:
            yield Sample(kind, sizes, 4 * count, max(both[count] - alone[given[count]], LEAST))


def _in_turns(runs: Mapping[int, Callable[[], Any]], device: str, repeats: int) -> dict[int, float]:
    """The seconds of each of `runs`, by its number of elements; small ones run more often."""
    times: dict[int, list[float]] = {count: [] for count in runs}
    for turn in range(WARM + repeats * SMALL_REPEATS):
        for count, run in runs.items():
            if 4 * count < SMALL or turn < WARM + repeats:
                times[count].append(seconds_of_one(run, device))
    return {count: mean_but_longest(seconds[WARM:]) for count, seconds in times.items()}


def _communicated(call: Call, count: int, size: int, groups: Iterator[Any], device: str) -> None:
    call(_computed(count, device), size, next(groups), False)


def _computed(count: int, device: str) -> Tensor:
    """`count` numbers that a product has just left in memory, after another one."""
    a = torch.ones(STRETCH, STRETCH, device=device)
    torch.mm(a, a)
    inner = STRETCH if 4 * count < SMALL else STRETCH // 8
    return torch.mm(a[:, :inner], a.new_ones(inner, math.ceil(count / STRETCH))).view(-1)[:count]


def in_a_row(size: int, group: Any, device: str, payload: int, repeats: int) -> Iterator[InARow]:
    """A small collective alone, and one issued before others are over, for the kinds that a step often has in a row."""
    count = payload // 4
    dist.barrier(group=group)
    alone = _in_turns({1: partial(_computed, count, device)}, device, repeats)[1]
    for kind in (Kind.ALL_REDUCE, Kind.ALL_GATHER):
        dist.barrier(group=group)
        runs = {many: partial(_issued, CALLS[kind], many, count, size, group, device) for many in (1, IN_A_ROW)}
        one, several = _in_turns(runs, device, repeats).values()
        yield InARow(max(one - alone, LEAST), max(several - one, LEAST) / (IN_A_ROW - 1))


def _issued(call: Call, many: int, count: int, size: int, group: Any, device: str) -> None:
    given = _computed(count, device)
    for work in [call(given, size, group, True) for _ in range(many)]:
        work.wait()


def overlaps(device: str, payloads: Sequence[int], repeats: int) -> Iterator[Overlap]:
    """Large collectives of the kinds that report their end, while longer operators run."""
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
    """An AllReduce of all ranks while each computes `products` of `a` with itself."""
    ended: list[float] = []
    wait_for(device)
    start = time.perf_counter()
    work: Any = dist.all_reduce(whole, async_op=True)
    work.get_future().add_done_callback(lambda _: ended.append(time.perf_counter()))
    for _ in range(products):
        torch.mm(a, a)
    computed = time.perf_counter() - start
    work.wait()
    wait_for(device)
    return Overlap((ended[0] if ended else time.perf_counter()) - start, alone, computed, computing)


def together(overlaps: Sequence[Overlap], rows: Sequence[InARow] = ()) -> Together:
    """The speed of each lane while the other one runs, relative to its speed alone: the median of the measurements. The
    extra time of operators counts relative to the time of the collective. For small collectives in a row the means
    count."""
    queued = sum(row.queued for row in rows) / sum(row.alone for row in rows) if rows else 1.0
    queued = min(1.0, max(SLOWEST, queued))
    lasted = [o for o in overlaps if o.communicating < o.computing]
    if not lasted:
        return ALONE.model_copy(update={"queued": queued})
    lost = statistics.median((o.computing - o.computing_alone) / o.communicating for o in lasted)
    kept = statistics.median(o.communicating_alone / o.communicating for o in lasted)
    computing, communicating = (min(1.0, max(SLOWEST, share)) for share in (1.0 - lost, kept))
    return Together(computing=computing, communicating=communicating, queued=queued)


CALLS: Mapping[Kind, Call] = {
    Kind.ALL_REDUCE: lambda given, size, group, later: dist.all_reduce(given, group=group, async_op=later),
    Kind.ALL_GATHER: lambda given, size, group, later: all_gather(
        given.new_empty(given.numel() * size), given, group=group, async_op=later
    ),
    Kind.REDUCE_SCATTER: lambda given, size, group, later: reduce_scatter(
        given.new_empty(given.numel() // size), given, group=group, async_op=later
    ),
    Kind.ALL_TO_ALL: lambda given, size, group, later: dist.all_to_all_single(
        torch.empty_like(given), given, group=group, async_op=later
    ),
}
"""For each kind with figures of its own a call: of what a rank gives to a group of some size, waited for or not."""


def over_ranks(ranks: Sequence[Sequence[Sample]]) -> tuple[Sample, ...]:
    """Each sample with the mean of the ranks: the first to arrive waits for as long as the last one computes longer. If
    of large payloads the slowest rank takes UNEVEN times the mean, its link is slower than those of others, and its
    times count: all groups of an axis wait for the slowest."""
    found: dict[tuple[Kind, tuple[int, ...]], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in (sample for samples in ranks for sample in samples):
        found[sample.kind, sample.sizes][sample.payload].append(sample.seconds)
    every = []
    for (kind, sizes), by_payload in found.items():
        largest = by_payload[max(by_payload)]
        uneven = max(largest) > UNEVEN * statistics.fmean(largest)
        for payload, seconds in by_payload.items():
            every.append(Sample(kind, sizes, payload, max(seconds) if uneven else statistics.fmean(seconds)))
    return tuple(every)


# -- Fitting ---------------------------------------------------------------------------------------------------------


def fit(samples: Sequence[Sample], inside: NetworkLevel | None = None, trees: bool = False) -> Fit:
    """The launch, latencies and bandwidths of a level, none of them negative, with the least squares of errors over the
    roots of times: a time is a sum of delays, whose variance grows as it does. Relative errors would let the small
    payloads, which pass at once where a link may burst, say how fast the large ones are.

    The level is the outermost of the samples; `inside` is the level in it, if they have two. Its latencies are part of
    a sample's time, and so are its bytes if they take longer than those of this level (`costs_over`). `trees`: whether
    an all_reduce goes by trees on the level, as between hosts with NCCL.

    With one group size only, launch and latency cannot be told apart; the fit then has the smallest that do.
    """
    kinds = sorted({s.kind for s in samples}, key=KINDS.index)
    rings = sorted({(s.kind, s.sizes[-1]) for s in samples}, key=lambda ring: (KINDS.index(ring[0]), ring[1]))
    known = [_inside(s, inside, trees) for s in samples]
    inner = np.zeros(len(samples), dtype=bool)  # the samples whose bytes take longer inside
    for _ in range(ROUNDS):
        matrix = np.zeros((len(samples), 1 + len(kinds) + len(rings)))
        rest = np.array([s.seconds for s in samples])
        for i, (s, (waiting, per_byte)) in enumerate(zip(samples, known, strict=True)):
            matrix[i, 0] = 1
            (messages,) = messages_by_level(s.kind, s.sizes[-1:], (trees,))
            matrix[i, 1 + kinds.index(s.kind)] = messages
            here = 0 if inner[i] else _at_this_level(s, trees)
            matrix[i, 1 + len(kinds) + rings.index((s.kind, s.sizes[-1]))] = here
            rest[i] -= waiting + per_byte * s.payload * inner[i]
        seconds = np.array([s.seconds for s in samples])
        weight = 1 / np.sqrt(seconds * seconds.min())  # targets of 1 or more, as `nonnegative` needs
        solution = nonnegative(matrix * weight[:, None], rest * weight)
        latency = dict(zip(kinds, solution[1:].tolist(), strict=False))
        bandwidth = {}
        for ring, per_byte in zip(rings, solution[1 + len(kinds) :].tolist(), strict=True):
            largest = max((s for s in samples if (s.kind, s.sizes[-1]) == ring), key=lambda s: _at_this_level(s, trees))
            bandwidth[ring] = 1 / per_byte if per_byte > 0 else _at_this_level(largest, trees) / largest.seconds
        before = inner
        inner = np.array(
            [
                per_byte * s.payload > _at_this_level(s, trees) / bandwidth[s.kind, s.sizes[-1]]
                for s, (_, per_byte) in zip(samples, known, strict=True)
            ]
        )
        if (inner == before).all():
            break
    return Fit(float(solution[0]), latency, bandwidth, trees)


def _inside(sample: Sample, inside: NetworkLevel | None, trees: bool) -> tuple[float, float]:
    """The seconds that a collective waits on the level inside, without a launch, and the seconds per byte there."""
    if inside is None or sample.sizes[0] == 1:
        return 0.0, 0.0
    _, per_byte = costs_over([inside], sample.sizes[:1])[sample.kind]
    return messages_by_level(sample.kind, sample.sizes, (False, trees))[0] * inside.latency.of(sample.kind), per_byte


def _at_this_level(sample: Sample, trees: bool) -> float:
    """The payload with which a group with one rank in each unit of the outermost level sends as many bytes there."""
    sent = sent_by_level(sample.kind, sample.sizes, (*(False for _ in sample.sizes[1:]), trees))[-1]
    return sample.payload * sent / wire_bytes(sample.kind, 1, sample.sizes[-1])
