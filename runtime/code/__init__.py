"""A graph as code, and what a rank does to its own part of a tensor.

In comes a graph of a `Step`; out comes a Python function of tensors, which an executor calls.

    instructions.py     a graph as instructions: assemble.py, memory.py, region.py, written.py
    straight_line.py    instructions as a Python function; loaded.py: for an executor and a backend; inductor.py
    slices.py, strides.py, local_conversions.py     parts, how they lie in memory, conversions without other ranks
    sections.py         the parts of a program between two meetings of ranks
    recorders.py        what ran, and when
"""
