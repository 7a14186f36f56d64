"""The fates of an operator's results after the forward: one row of `FATES` for each.

    fate    held until the backward    held while the backward reads it    its operator
    kept    results and saved          -                                   runs once
    again   -                          results and saved                   runs once more
    gone    saved                      -                                   runs once

"Saved" are the tensors beside the results that autograd saves for the operator's own backward: statistics, masks. The
backward of a relu reads its result, so the result is kept or the relu runs again. The result of an addition that no
backward reads is gone.

keeping.py prices a fate by its row, and backward_memory.py counts its bytes by it. Lowering calls its `note` with each
node that it writes for the operator, and a pass acts on the notes: program/recompute.py reads `compute_again`. So a new
fate, such as offloading to the host, is a row and a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from torch import fx

from ..cost.conversion import Floats
from ..graph.nodes import compute_again
from ..problem.problem import Options, Settings


class Stay(Enum):
    """How long bytes stay on the device."""

    THROUGHOUT = "throughout"  # from the forward until the backward has read them
    BACK = "back"  # gone after the forward, and there again while the backward reads them
    NOWHERE = "nowhere"  # gone after the forward


@dataclass(frozen=True, slots=True)
class Candidate:
    """The properties of a vertex that decide which fates it may have.

    fixed      it is an input or an output
    marked     the user marked its operator for recomputation
    view       its results lie in the memory of an operand
    able       it gives the same result if it runs again
    allowed    the settings allow it to run again
    read       its own backward reads its results
    """

    fixed: bool = False
    marked: bool = False
    view: bool = False
    able: bool = False
    allowed: bool = False
    read: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Fate:
    """One fate.

    name       its name in plans
    may        whether a vertex may have it
    results    how long the results stay
    beside     how long the saved tensors beside them stay
    runs       the operator runs once more in the backward, so that its operands have to be there
    seconds    the additional time of the backward, for each option
    told       its text in a report, with its `seconds` and the `bytes` that stay; "": nothing
    note       called with each node that lowering writes for the operator; None: nothing to note
    """

    name: str
    may: Callable[[Candidate], bool]
    results: Stay
    beside: Stay
    runs: bool
    seconds: Callable[[Options, Settings], Floats]
    told: str = ""
    note: Callable[[fx.Node], None] | None = None

    def __repr__(self) -> str:
        return self.name

    @property
    def keeps(self) -> bool:
        """Whether the results stay until the backward has read them."""
        return self.results is Stay.THROUGHOUT

    def bytes_of(self, made: Floats, beside: Floats, read: bool) -> tuple[Floats, Floats]:
        """The bytes that stay throughout, and those that are held again while the backward reads them, of `made` bytes
        of results and `beside` bytes of saved tensors. `read`: the backward reads the results."""
        kept = made * self.keeps + beside * (self.beside is Stay.THROUGHOUT)
        back = beside * (self.beside is Stay.BACK) + made * (read and self.results is Stay.BACK)
        return kept, back


def _none(options: Options, settings: Settings) -> Floats:
    none: Floats = np.zeros(len(options))
    return none


KEPT = Fate(
    "kept",
    lambda c: c.fixed or not (c.marked or (c.view and c.able)),
    Stay.THROUGHOUT,
    Stay.THROUGHOUT,
    False,
    _none,
    "kept for the backward: {bytes}",
)
AGAIN = Fate(
    "again",
    lambda c: not c.fixed and (c.marked or (c.able and (c.view or c.allowed))),
    Stay.BACK,
    Stay.BACK,
    True,
    lambda options, settings: options.again,
    "computed again in the backward: {seconds}",
    lambda node: compute_again(node, True),
)
GONE = Fate("gone", lambda c: not (c.fixed or c.marked or c.read), Stay.NOWHERE, Stay.THROUGHOUT, False, _none)

FATES = (KEPT, GONE, AGAIN)  # of fates that cost the same the first is taken


def fates_of(candidate: Candidate) -> tuple[Fate, ...]:
    """The fates that a vertex may have, in the order of the table."""
    return tuple(fate for fate in FATES if fate.may(candidate))


def fate_named(name: str) -> Fate | None:
    """The fate called `name` in plans; None if there is none, as in plans without fates."""
    return next((fate for fate in FATES if fate.name == name), None)
