"""What one device holds while a step runs: tensors that live from one moment to another, added up by what they are for.

The results of three operators have 4, 2 and 1 bytes. The backward of the second reads the result of the first:

    moment         forward 0    1      2      backward 2    1
    activations    4            4      4      4             4
    working        .            2      2 + 1  .             .
    sum            4            6      7      4             4

There is no other count of memory. Two readers list the lives of tensors: `timeline` (backward_memory.py) those of a
choice, before there is a program, and `held_by` (runtime/executors/peak.py) those of a program. A search keeps the
first within the limit; where the second is larger, replan_within_memory.py searches again with the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..cost.conversion import Codes, Floats


class Purpose(StrEnum):
    """What memory is for, as errors name it."""

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"
    INPUTS = "inputs"
    RESULTS = "results"
    KEPT = "activations"
    AGAIN = "what is computed again"
    VALUES = "gradients of activations"
    GRADIENTS = "gradients of parameters"
    WORKING = "activations and what operators work with"


class Life(NamedTuple):
    """Memory of `size` bytes that is there from moment `first` to moment `last`; None: to the end."""

    purpose: Purpose
    first: int
    last: int | None
    size: float


class Moment(NamedTuple):
    """A moment of the "forward" or the "backward" of a step.

    at    the operator that runs
    of    the same; "" if it is computed again, or sent, for the next one
    """

    phase: str
    at: str
    of: str


@dataclass(frozen=True)
class Held:
    """Bytes on one device at each moment of a step, by what they are for."""

    moments: Sequence[Moment]
    by_purpose: Mapping[Purpose, Floats]

    @cached_property
    def total(self) -> Floats:
        """The bytes at each moment."""
        total: Floats = sum(self.by_purpose.values(), start=np.zeros(len(self.moments)))
        return total

    @property
    def peak(self) -> float:
        """The largest number of bytes at any moment."""
        return float(self.total.max(initial=0.0))

    @property
    def when(self) -> int:
        """The number of the moment of the peak."""
        return int(self.total.argmax())

    @property
    def at_peak(self) -> dict[Purpose, float]:
        """The bytes at the peak, by what they are for."""
        return {purpose: float(sizes[self.when]) for purpose, sizes in self.by_purpose.items()}


class Lives(NamedTuple):
    """The lives of many tensors, as arrays; the `last` moment of what is there to the end is the number of moments."""

    purpose: Purpose
    first: Codes
    last: Codes
    size: Floats


def added_up(lives: Iterable[Life], count: int) -> dict[Purpose, Floats]:
    """The bytes at each of `count` moments, by what they are for."""
    by_purpose: dict[Purpose, list[tuple[int, int, float]]] = {}
    for life in lives:
        last = count if life.last is None else life.last
        by_purpose.setdefault(life.purpose, []).append((life.first, last, life.size))
    every = ((purpose, *np.array(each).T) for purpose, each in by_purpose.items())
    return summed(
        (Lives(p, first.astype(np.intp), last.astype(np.intp), size) for p, first, last, size in every), count
    )


def summed(lives: Iterable[Lives], count: int) -> dict[Purpose, Floats]:
    """The bytes at each of `count` moments, by what they are for."""
    changes = {purpose: np.zeros(count + 2) for purpose in Purpose}
    for purpose, first, last, size in lives:
        changes[purpose] += np.bincount(first, weights=size, minlength=count + 2)
        changes[purpose] -= np.bincount(last + 1, weights=size, minlength=count + 2)
    return {purpose: np.cumsum(change[:count]) for purpose, change in changes.items()}
