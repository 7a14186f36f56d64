"""Improve a known choice by choosing the options of a random induced forest together, given all other options.

The three operators of __init__.py form a tree. From the choice 1, 1, 0, which costs 6, one forest of all three gives
0, 0, 0, which costs 4. If a and c shared a cost too, a forest would have two of the three: given c=0, a and b take the
cheapest of their four choices.

An induced forest is solved exactly from its leaves to its roots, in time proportional to its tables
(Hamze & de Freitas, "From fields to trees", 2004, sample such forests; here they are minimized).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..cost.conversion import Floats
from .network import Costs

KICKED = 6  # at most one in so many vertices is kicked

Tables = list[dict[int, Floats]]  # by both ends, the first index that of the vertex they are under


def by_ends(costs: Costs) -> Tables:
    """The tables of `costs` under both of their ends."""
    tables: Tables = [{} for _ in costs.unary]
    for (a, b), table in costs.pairs.items():
        tables[a][b], tables[b][a] = table, np.ascontiguousarray(table.T)
    return tables


def improved(costs: Costs, tables: Tables, choice: list[int], random: np.random.Generator) -> list[int]:
    """`choice` with the best options of one random induced forest; it costs no more."""
    parents, order = forest(tables, random)
    best: dict[int, np.ndarray] = {}
    heights: dict[int, Floats] = {}
    for v in order:
        height = costs.unary[v]
        for u, table in tables[v].items():
            if u not in parents:
                height = height + table[:, choice[u]]
        heights[v] = height
    now = list(choice)
    for v in reversed(order):
        parent = parents[v]
        if parent < 0:
            continue
        total = tables[parent][v] + heights[v]
        best[v] = total.argmin(axis=1)
        heights[parent] = heights[parent] + total.min(axis=1)
    for v in order:
        parent = parents[v]
        now[v] = int(heights[v].argmin()) if parent < 0 else int(best[v][now[parent]])
    return now


def kicked(tables: Tables, sizes: Sequence[int], choice: list[int], random: np.random.Generator) -> list[int]:
    """`choice` with random options for a few connected vertices, to escape from a choice that forests cannot improve
    (Lourenço, Martin & Stützle, "Iterated Local Search", 2003)."""
    many = int(random.integers(3, max(4, len(sizes) // KICKED)))
    part = [int(random.integers(len(sizes)))]
    for v in part:
        part += [u for u in tables[v] if u not in part][: many - len(part)]
    now = list(choice)
    for v in part:
        now[v] = int(random.integers(sizes[v]))
    return now


def forest(tables: Sequence[Mapping[int, object]], random: np.random.Generator) -> tuple[dict[int, int], list[int]]:
    """A random induced forest that no vertex can join: the parent of each vertex in it (-1: none), parents first."""
    root: dict[int, int] = {}  # for each vertex in the forest, another one of its tree

    def root_of(v: int) -> int:
        while root[v] != v:
            root[v] = root[root[v]]
            v = root[v]
        return v

    for v in random.permutation(len(tables)).tolist():
        inside = [u for u in tables[v] if u in root]
        trees = {root_of(u) for u in inside}
        if len(trees) == len(inside):
            root[v] = v
            for tree in trees:
                root[tree] = v
    parents: dict[int, int] = {}
    order: list[int] = []
    for start in root:
        if start in parents:
            continue
        parents[start] = -1
        line = [start]
        for v in line:
            for u in tables[v]:
                if u in root and u not in parents:
                    parents[u] = v
                    line.append(u)
        order += line
    return parents, order
