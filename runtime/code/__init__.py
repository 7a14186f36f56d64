"""Code generation from a graph, and operations of a rank on its own part of a tensor.

The input is a graph of a `Program`; the output is a Python function of tensors, which an executor calls.

    instructions.py     a graph as instructions: assemble.py, memory.py, region.py, written.py
    straight_line.py    instructions as a Python function; loaded_graph.py: for an executor and a backend; inductor.py
    slices.py, strides.py   parts, their strides, and conversions that need no other rank
    sections.py         the stretches of a program between meetings of ranks
    recorders.py        records of collectives and timelines
"""

from __future__ import annotations

from .slices import part_of

__all__ = [
    "part_of",
]
