"""A schedule of a pipeline played: when each action runs, and how many microbatches a device holds.

A device runs its actions in its order, each as soon as those that it needs have ended, and what they made has come.
With an F and a B of one second, the schedule of actions.py is played so:

    second      0  1  2  3  4  5
    device 0    F0 F1 .  B0 .  B1
    device 1    .  F0 B0 F1 B1 .

Its 6 seconds are 4 of work and 2 of waiting, the bubble.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from ...strategy.errors import VerifyError
from .actions import HOLDS, ActionKind, PipelineSchedule, StageAction, Stages


@dataclass(frozen=True)
class Times:
    """The seconds of each stage's actions, and of sending to another device what the next stage reads.

    forward, inputs, weights   of a microbatch, by stage; a BACKWARD takes those of inputs and of weights
    sent                       by stage, of its result; its gradient takes as long
    """

    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    sent: tuple[float, ...] = ()

    @classmethod
    def equal(cls, stages: int, forward: float = 1.0, inputs: float = 1.0, weights: float = 1.0) -> Times:
        """Those of stages that are alike, which send in no time."""
        return cls((forward,) * stages, (inputs,) * stages, (weights,) * stages)

    def of(self, action: StageAction) -> float:
        """Those of an action."""
        at = action.stage
        if action.kind is ActionKind.FORWARD:
            return self.forward[at]
        if action.kind is ActionKind.BACKWARD:
            return self.inputs[at] + self.weights[at]
        return self.inputs[at] if action.kind is ActionKind.INPUTS else self.weights[at]

    def between(self, producer: int, consumer: int) -> float:
        """The seconds from the end of one stage to the start of the next, on another device."""
        return self.sent[min(producer, consumer)] if self.sent else 0.0


class ActionRun(NamedTuple):
    """An action with the second at which it starts, and that at which it has ended."""

    action: StageAction
    start: float
    end: float


@dataclass(frozen=True)
class Played:
    """A schedule with its seconds.

    runs        the actions of each device, in order
    in_flight   the most microbatches of which each device holds what its backward reads; with c chunks the part of one
                chunk counts 1 / c
    """

    runs: tuple[tuple[ActionRun, ...], ...]
    in_flight: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Those of the whole batch."""
        return max(run.end for runs in self.runs for run in runs)

    @property
    def bubble(self) -> float:
        """The seconds in which the device with most work waits."""
        return self.seconds - max(sum(run.end - run.start for run in runs) for runs in self.runs)


class Clock:
    """The state of playing: when actions have ended, and from which second on each device is free.

    held    of each device the parts of microbatches that its backward still reads
    """

    def __init__(self, placed: Stages, times: Times) -> None:
        self.placed, self.times = placed, times
        self.ended: dict[StageAction, float] = {}
        self.free = [0.0] * placed.devices
        self.runs: list[list[ActionRun]] = [[] for _ in range(placed.devices)]
        self.held, self.most = [0] * placed.devices, [0] * placed.devices
        self._devices = tuple(map(placed.device, range(placed.stages)))

    def start(self, action: StageAction) -> float | None:
        """The earliest second at which an action can start; None if something that it needs has not run yet."""
        start = self.free[self._devices[action.stage]]
        for need in action.needs(self.placed.stages):
            if need not in self.ended:
                return None
            apart = self._devices[need.stage] != self._devices[action.stage]
            sent = self.times.between(need.stage, action.stage) if apart else 0.0
            start = max(start, self.ended[need] + sent)
        return start

    def run(self, action: StageAction, start: float) -> None:
        """Run it, from second `start` on."""
        device, end = self._devices[action.stage], start + self.times.of(action)
        self.free[device] = end
        self.ended[action._replace(kind=ActionKind.INPUTS) if action.kind is ActionKind.BACKWARD else action] = end
        self.runs[device].append(ActionRun(action, start, end))
        self.held[device] += HOLDS[action.kind]
        self.most[device] = max(self.most[device], self.held[device])

    @property
    def played(self) -> Played:
        """All that has run."""
        return Played(tuple(map(tuple, self.runs)), tuple(most / self.placed.chunks for most in self.most))


def played(schedule: PipelineSchedule, times: Times) -> Played:
    """`schedule` with its seconds. Raises VerifyError if a device waits for what never comes."""
    clock, placed = Clock(schedule.placed, times), schedule.placed
    left = [deque(order) for order in schedule.orders]
    ready = deque(range(placed.devices))
    while ready:
        device = ready.popleft()
        while left[device] and (start := clock.start(left[device][0])) is not None:
            action = left[device].popleft()
            clock.run(action, start)
            ready.extend(placed.device(stage) for stage in action.readers(placed.stages))
    for device, order in enumerate(left):
        if order:
            missing = next(need for need in order[0].needs(placed.stages) if need not in clock.ended)
            raise VerifyError(
                f"device {device} waits at {order[0]} for {missing}, which device {placed.device(missing.stage)} does "
                "not run before it waits itself: no order of messages helps, change the order of actions"
            )
    return clock.played
