"""From a plan's choices to the graphs that every rank runs.

Input: a `SearchProblem` with one option chosen for each vertex. Output: a `Program`: a forward and a backward graph of
local operators and conversions, the same on every rank, in which every collective is visible.

    program.py          the program as data: its graphs, ports, conversions, text, and invariants
    lower.py            from options to a program with a forward alone
    any_size.py         sizes that are known only at run time, such as numbers of rows
    collective.py       the conversions of a program, and the collectives that they run, with bytes and predicted time
    differentiate.py    adds the backward; segments.py cuts the forward into pieces, and each kind is traced once
    derivative.py       the gradients of a program as a program, to differentiate them again
    recompute.py        the values that the backward computes again instead of keeping them
    gradients.py        sums of 16-bit gradients in 32 bits, and gradients multiplied by a factor
    weights_late.py     a backward in two parts, the gradients of weights last
    accumulate.py       the backwards of programs whose reductions wait for the last one
    apart.py            the backwards of outputs that are differentiated one after another
    schedule.py         the predicted schedule; timeline.py writes it, or a measured one, as a file for Perfetto

The operators of conversions are in `ops/collectives.py`, the table of collective kinds in `ops/collectives.py`.
"""

from __future__ import annotations

from .collective import PHASES, Collective
from .program import Program
from .schedule import Meter
from .timeline import COMMUNICATION, COMPUTE, Span

__all__ = [
    "COMMUNICATION",
    "COMPUTE",
    "PHASES",
    "Collective",
    "Meter",
    "Program",
    "Span",
]
