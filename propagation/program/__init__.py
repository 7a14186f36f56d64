"""From a plan's choices to the graphs that every rank runs.

In comes a `SearchProblem` with one option chosen for each vertex; out goes a `Step`: a forward and a backward graph of
local operators and conversions, the same on every rank, in which every collective is visible.

    local_program.py    the program of one rank as data: its conversions, ports, text, and what must hold of it
    lower.py            options to a local program
    collective.py       the collectives that a program runs, with bytes and predicted time
    step.py             a training step as data: a forward and a backward graph
    differentiate.py    a local program to a step; segments.py cuts it into pieces, of which each kind is traced once
    recompute.py        what the backward computes again in place of keeping it
    precision.py        gradients of 16 bits are added up in 32
    accumulate.py       the backwards of steps whose reductions wait for the last one
    apart.py            the backwards of outputs that are differentiated one after another

The operators of conversions are in `ops/collectives.py`, the table of collective kinds in `ops/kinds.py`.
"""
