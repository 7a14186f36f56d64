"""What the devices of a pipeline do, as data: for each device the order of its actions.

A model is cut into stages, and a batch into microbatches, which go through the stages forward (F) and then backward:
I computes the gradients of a stage's inputs, W those of its weights, and B both. With two stages and microbatches:

    device 0    F0 F1    .  B0    B1
    device 1    .  F0 B0 F1 B1    .

A device may have several stages, its chunks: every p-th one ("loop"), or those on which a V goes down and up ("vee"),
so that the first and the last stage are on one device. With two devices and two chunks:

    loop    0 and 2, 1 and 3
    vee     0 and 3, 1 and 2
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class ActionKind(StrEnum):
    """The kinds of actions."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUTS = "I"
    WEIGHTS = "W"


# By how many microbatches a device holds more after it.
HOLDS = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.INPUTS: 0, ActionKind.WEIGHTS: -1}


class StageAction(NamedTuple):
    """One action: a stage runs on a microbatch."""

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"

    def needs(self, stages: int) -> tuple[StageAction, ...]:
        """The actions that it waits for; for a BACKWARD stands its INPUTS."""
        if self.kind is ActionKind.FORWARD:
            return (self._replace(stage=self.stage - 1),) if self.stage else ()
        if self.kind is ActionKind.WEIGHTS:
            return (self._replace(kind=ActionKind.INPUTS),)
        own = self._replace(kind=ActionKind.FORWARD)
        later = self._replace(kind=ActionKind.INPUTS, stage=self.stage + 1)
        return (own, later) if self.stage + 1 < stages else (own,)

    def readers(self, stages: int) -> tuple[int, ...]:
        """The other stages that may wait for it."""
        there = self.stage + 1 if self.kind is ActionKind.FORWARD else self.stage - 1
        return (there,) if 0 <= there < stages and self.kind is not ActionKind.WEIGHTS else ()


@dataclass(frozen=True)
class Stages:
    """The stages of each of `devices` devices, with `chunks` stages each; `vee`: as a V."""

    devices: int
    chunks: int = 1
    vee: bool = False

    @property
    def stages(self) -> int:
        """Their number."""
        return self.devices * self.chunks

    def device(self, stage: int) -> int:
        """The device of a stage."""
        chunk, place = divmod(stage, self.devices)
        return self.devices - 1 - place if self.vee and chunk % 2 else place

    def of(self, device: int) -> tuple[int, ...]:
        """The stages of a device, in the order of the model."""
        return tuple(stage for stage in range(self.stages) if self.device(stage) == device)


@dataclass(frozen=True)
class PipelineSchedule:
    """The actions of each device, in order. Whether all of it can run, `played` (play.py) tells."""

    placed: Stages
    microbatches: int
    orders: tuple[tuple[StageAction, ...], ...]
