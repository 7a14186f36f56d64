"""Where a model is cut into the stages of a pipeline.

A model is a chain of pieces. Of every partition of it a schedule of m microbatches takes at least, for any stage s,

    before(s) + m (F + I + W) + after(s)      where `before` are the seconds in which the first microbatch comes to the
                                              stage, and `after` those in which the last one's gradients go back from it
    first(s) + m (F + I + W) - c F + after(s) where `first` are the seconds until the first gradient can be there, and
                                              until then the stage has done no more than the c forwards that it may hold

seconds, with F, I and W of stage s. Where I and W are apart, its device may do its W after the last I, so `after` does
not count. All of these depend on where the stage begins and ends alone. So partitions are found in the order of the
largest of them, the lowest first (best-first search with exact lower bounds for the rest, by dynamic programming from
the end). Each is played by its schedule, until the bound of the next one is no lower than the fewest seconds: then
these are those of the best of all partitions. Long chains of equal pieces have very many with one bound. There the best
of the first ones is changed, a cut moved by a piece at a time, while that takes fewer seconds, and the bound says how
far it may be from the best.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...strategy.errors import DoesNotFitError
from .actions import PipelineSchedule, Stages
from .play import Played, Times, played

_ROUNDING = 1e-9
MOST = 20  # partitions that are played where the bound does not end the search before


@dataclass(frozen=True)
class ModelPiece:
    """A part of a model that is not cut, as it runs on the devices of one stage.

    forward, inputs, weights   seconds of a microbatch: its forward, the gradients of its input, those of its weights
    sent                       seconds in which its result, or the gradient of it, goes to the next stage, if cut there
    rest                       bytes on a device at all times: parameters, their gradients and the optimizer's states
    kept                       bytes on a device of each microbatch in flight
    """

    forward: float
    inputs: float
    weights: float
    sent: float = 0.0
    rest: float = 0.0
    kept: float = 0.0


@dataclass(frozen=True)
class Partition:
    """The stages of a pipeline: the first piece of each, its schedule with seconds, and a lower bound on those of any
    partition with this schedule."""

    starts: tuple[int, ...]
    schedule: PipelineSchedule
    played: Played
    bound: float


def best_partition(
    pieces: Sequence[ModelPiece],
    placed: Stages,
    microbatches: int,
    order: Callable[[Times], PipelineSchedule],
    in_flight: Callable[[int], float],
    apart: bool = False,
    limit: float = math.inf,
    most: int = MOST,
) -> Partition:
    """The partition of `pieces` into the stages of `placed` that takes the fewest seconds for so many `microbatches`.

    order       the schedule of stages with these times
    in_flight   the most microbatches of which that schedule holds a stage's bytes
    apart       it runs I and W apart
    limit       bytes of a stage on a device, which holds several with several chunks
    most        partitions that are played; the bound tells whether more could be better

    Raises DoesNotFitError if the stages of every partition hold more than `limit`.
    """
    costs = _StageCosts(pieces, microbatches, in_flight, apart, limit)

    def tried(starts: tuple[int, ...], bound: float) -> Partition:
        times = times_of(pieces, starts)
        schedule = order(times)
        return Partition(starts, schedule, played(schedule, times), bound)

    best: Partition | None = None
    bound = math.inf
    for number, (least, starts) in enumerate(partitions(pieces, placed, costs)):
        if best is not None and (least >= _seconds(best) or number >= most):
            bound = least
            break
        best = min(filter(None, (best, tried(starts, least))), key=_seconds)
    if best is None:
        raise DoesNotFitError(f"in {placed.stages} stages", _least(pieces, placed, in_flight), limit, "")
    while bound < _seconds(best):
        others = [tried(starts, bound) for starts in _moved(best.starts, len(pieces)) if costs.fit(starts)]
        better = min(others, key=_seconds, default=best)
        if _seconds(better) >= _seconds(best):
            break
        best = better
    return replace(best, bound=min(bound, _seconds(best)))


def _seconds(partition: Partition) -> float:
    return partition.played.seconds


def _moved(starts: tuple[int, ...], count: int) -> Iterator[tuple[int, ...]]:
    """The partitions of which one cut is a piece earlier or later."""
    for place, step in itertools.product(range(1, len(starts)), (-1, 1)):
        moved = (*starts[:place], starts[place] + step, *starts[place + 1 :])
        if all(here < there for here, there in itertools.pairwise((*moved, count))):
            yield moved


def times_of(pieces: Sequence[ModelPiece], starts: Sequence[int]) -> Times:
    """The seconds of the stages that start at these pieces."""
    stages = [pieces[here:there] for here, there in itertools.pairwise((*starts, len(pieces)))]
    forward, inputs, weights = (
        tuple(sum(getattr(piece, name) for piece in stage) for stage in stages)
        for name in ("forward", "inputs", "weights")
    )
    return Times(forward, inputs, weights, tuple(stage[-1].sent for stage in stages))


def partitions(
    pieces: Sequence[ModelPiece], placed: Stages, costs: Callable[[int, int, int], float]
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """All partitions, with the largest of their `costs` (of a stage from one piece to another), the lowest first. Those
    that cost infinity are left out."""
    count, stages = len(pieces), placed.stages
    # of stages s and later that begin at piece i, the least that the largest of their bounds can be
    rest = [[math.inf] * (count + 1) for _ in range(stages + 1)]
    rest[stages][count] = 0.0
    for s in reversed(range(stages)):
        for i in range(s, count - (stages - 1 - s)):
            rest[s][i] = min(max(costs(s, i, j), rest[s + 1][j]) for j in range(i + 1, count + 1))
    queue: list[tuple[float, tuple[int, ...], float]] = [(0.0, (0,), 0.0)]
    while queue:
        least, starts, so_far = heapq.heappop(queue)
        if starts[-1] == count:
            yield least, starts[:-1]
            continue
        s, i = len(starts) - 1, starts[-1]
        for j in range(i + 1, count + 1):
            own = max(so_far, costs(s, i, j))
            if (worst := max(own, rest[s + 1][j])) < math.inf:
                heapq.heappush(queue, (worst, (*starts, j), own))


class _StageCosts:
    """The bound of the module's docstring of a stage that has the pieces from one to another."""

    def __init__(
        self,
        pieces: Sequence[ModelPiece],
        microbatches: int,
        in_flight: Callable[[int], float],
        apart: bool,
        limit: float,
    ) -> None:
        def sums(name: str) -> list[float]:
            return [0.0, *itertools.accumulate(getattr(piece, name) for piece in pieces)]

        self.forward, self.inputs, self.weights = sums("forward"), sums("inputs"), sums("weights")
        self.rest, self.kept = sums("rest"), sums("kept")
        self.pieces, self.microbatches, self.in_flight = pieces, microbatches, in_flight
        self.apart, self.limit = apart, limit
        self.least_sent = min((piece.sent for piece in pieces), default=0.0)

    def held(self, s: int, i: int, j: int) -> float:
        """The bytes of stage s with pieces i to j."""
        return self.rest[j] - self.rest[i] + self.in_flight(s) * (self.kept[j] - self.kept[i])

    def fit(self, starts: Sequence[int]) -> bool:
        """Whether all stages are within the limit."""
        ends = itertools.pairwise((*starts, len(self.pieces)))
        return all(self(s, i, j) < math.inf for s, (i, j) in enumerate(ends))

    def __call__(self, s: int, i: int, j: int) -> float:
        if self.held(s, i, j) > self.limit * (1 + _ROUNDING):
            return math.inf
        forward, inputs, weights = (sums[j] - sums[i] for sums in (self.forward, self.inputs, self.weights))
        work = self.microbatches * (forward + inputs + weights)
        there = (s - 1) * self.least_sent + self.pieces[i - 1].sent if s else 0.0
        on = self.pieces[j - 1].sent if j < len(self.pieces) else 0.0
        after = 0.0 if self.apart else there + self.inputs[i] + self.weights[i]
        back = self.inputs[-1] - self.inputs[j] + (0.0 if self.apart else self.weights[-1] - self.weights[j])
        first = there + self.forward[-1] + 2 * on + back
        ahead = min(self.in_flight(s), self.microbatches) * forward
        return max(self.forward[i] + there + work, first + work - ahead) + after


def _least(pieces: Sequence[ModelPiece], placed: Stages, in_flight: Callable[[int], float]) -> float:
    """The fewest bytes that the device with most must have."""
    costs, count, stages = _StageCosts(pieces, 1, in_flight, False, math.inf), len(pieces), placed.stages
    least = [math.inf] * (count + 1)
    least[count] = 0.0
    for s in reversed(range(stages)):
        least = [
            min((max(costs.held(s, i, j), least[j]) for j in range(i + 1, count + 1)), default=math.inf)
            for i in range(count + 1)
        ]
    return least[0]
