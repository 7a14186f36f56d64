"""From a plan's choices to the graphs that every rank runs.

Input: a `SearchProblem` with one option chosen for each vertex. Output: a `Step`: a forward and a backward graph of
local operators and conversions, the same on every rank, in which every collective is visible.

    local_program.py    the program of one rank as data: its conversions, ports, text, and invariants
    lower.py            from options to a local program
    collective.py       the collectives that a program runs, with bytes and predicted time
    step.py             a training step as data: a forward and a backward graph
    differentiate.py    from a local program to a step; segments.py cuts it into pieces, and each kind is traced once
    derivative.py       the gradients of a program as a program, to differentiate them again
    recompute.py        the values that the backward computes again instead of keeping them
    precision.py        sums of 16-bit gradients in 32 bits
    accumulate.py       the backwards of steps whose reductions wait for the last one
    apart.py            the backwards of outputs that are differentiated one after another

The operators of conversions are in `ops/collectives.py`, the table of collective kinds in `ops/kinds.py`.
"""

from __future__ import annotations

from .collective import PHASES, Collective

__all__ = [
    "PHASES",
    "Collective",
]
