"""The numbers of a search problem: `costs_of`, all of them written out, and `network_of`, for when they are too many.

For a chain of three operators with two options each, `unary` has the cost of each option, three columns of two numbers;
`pairs` has two tables of 2 x 2: the cost of converting the tensor between two operators from its layout under each
option of one to that under each option of the next. Equal operators, as in repeated layers, share one array.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from ..cost.conversion import Codes, Floats
from ..minsum.network import Between, Converting, Costs, Matrix, Network, network
from .problem import Edge, Options, SearchProblem

MANY_PAIRS = 4e7  # pairs of options above which they are not written out: 320 MB


def costs_of(problem: SearchProblem) -> Costs:
    """The numbers of `problem`; those of parallel edges are summed. Equal structures share one array."""
    shared: dict[object, Floats] = {}

    def once(key: object, make: Callable[[], Floats]) -> Floats:
        if key not in shared:
            shared[key] = make()
        return shared[key]

    pairs: dict[tuple[int, int], Floats] = {}
    for ends, edges in _by_ends(problem).items():
        key = tuple(_structure(problem, edge) for edge in edges)
        pairs[ends] = once(key, partial(_written_out, problem, edges))
    return Costs(tuple(v.options.unary for v in problem.vertices), pairs)


def network_of(problem: SearchProblem) -> Network:
    """The network of `problem`, with its costs written out only if they are few."""
    if is_written_out(problem):
        return network(costs_of(problem))
    unary = tuple(v.options.unary for v in problem.vertices)
    return Network(unary, tuple((ends, _between(problem, edges)) for ends, edges in _by_ends(problem).items()))


def is_written_out(problem: SearchProblem) -> bool:
    """Whether its costs are few enough to be written out."""
    return are_few(pairs_of(problem))


def are_few(pairs: int) -> bool:
    """Whether the costs of this number of pairs of options may be written out."""
    return pairs <= MANY_PAIRS


def pairs_of(problem: SearchProblem) -> int:
    """The number of pairs of options of all edges, counting each structure once."""
    sizes = {_structure(problem, edge): math.prod(map(len, edge.codes(problem.vertices))) for edge in problem.edges}
    return sum(sizes.values())


def restricted(problem: SearchProblem, kept: list[Codes]) -> SearchProblem:
    """`problem` with only some options of each vertex, by number."""
    shared: dict[tuple[int, bytes], Options] = {}
    vertices = []
    for vertex, rows in zip(problem.vertices, kept, strict=True):
        key = (id(vertex.options), rows.tobytes())
        if key not in shared:
            shared[key] = vertex.options.take(rows)
        vertices.append(replace(vertex, options=shared[key]))
    return replace(problem, vertices=tuple(vertices))


def _by_ends(problem: SearchProblem) -> dict[tuple[int, int], list[Edge]]:
    """The edges between the same two vertices."""
    edges: dict[tuple[int, int], list[Edge]] = {}
    for edge in problem.edges:
        edges.setdefault((edge.producer, edge.consumer), []).append(edge)
    return edges


def _structure(problem: SearchProblem, edge: Edge) -> tuple[int, ...]:
    """A key for the costs of an edge: edges with equal keys have the same costs."""
    ends = id(problem.vertices[edge.producer].options), id(problem.vertices[edge.consumer].options)
    return id(edge.table), *ends, edge.result, edge.operand


def _between(problem: SearchProblem, edges: list[Edge]) -> Between:
    if len(edges) == 1:
        return Converting(edges[0].table, *edges[0].codes(problem.vertices))
    return Matrix(_written_out(problem, edges))


def _written_out(problem: SearchProblem, edges: list[Edge]) -> Floats:
    """The sum of the costs of parallel edges."""
    matrices = [edge.matrix(problem.vertices) for edge in edges]
    if len(matrices) == 1:
        return matrices[0]
    total: Floats = np.sum(matrices, axis=0)
    return total
