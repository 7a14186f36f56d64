"""From Python to a plan: capture a call, search for its splits, and write the program that each rank runs.

Input: a function, one call of it, and the layouts that annotations allow. Output: a Plan, and the graphs that every
rank runs, with collectives not yet grouped (fusion). The rooms, each of which imports only those before it:

    ops        our own operators, which programs are made of
    graph      the graph of one call, and queries of it
    rules      how each operator splits, and its expansion
    capture    from Python to a graph
    cost       the costs of operators, collectives and conversions
    minsum     the least of a sum of costs by vertex and by pair of vertices
    problem    the search space: options, and the prices of conversions
    memory     what a device holds, what it keeps for the backward and what it recomputes
    search     the search modes, also under a memory limit
    program    from the choices of a search to the forward and backward of one rank
    plan       decisions and their reasons, for people and files
    pipeline   where a model is cut into stages, and their schedules

`torch_internals.py` stands below them all.
"""

from __future__ import annotations

from .torch_internals import TorchDispatchMode, schema_of, sequence_number, sequence_number_now, tree_flatten, tree_map

__all__ = [
    "TorchDispatchMode",
    "schema_of",
    "sequence_number",
    "sequence_number_now",
    "tree_flatten",
    "tree_map",
]
