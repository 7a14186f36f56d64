"""Who reads whose results in a search problem, and how gradients come back: the same for every choice.

A view, a hub and an addition pass on the gradient of their result. For most elementwise operators the runtime writes
the gradient of an operand over that of the result, if nothing else reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch

from ..cost.conversion import Mask
from ..graph.nodes import is_view
from ..graph.port import Role
from ..problem.problem import SearchProblem, Vertex, VertexKind
from .held import Moment

_aten = torch.ops.aten

# Operators whose backward the runtime may let write over the gradient of the result.
_IN_PLACE = {
    _aten.div.Scalar, _aten.div.Tensor, _aten.gelu.default, _aten.mul.Scalar, _aten.mul.Tensor, _aten.neg.default,
    _aten.relu.default, _aten.sub.Tensor, _aten.tanh.default,
}  # fmt: skip


class Passing(Enum):
    """What becomes of the gradient of a vertex's result when that of an operand is computed."""

    SAME = "same"  # it is that of the operand
    WRITTEN_OVER = "written over"
    OTHER = "other"  # that of the operand takes memory of its own


@dataclass(frozen=True, eq=False)
class Paths:
    """The edges of a problem by vertex.

    entering     the edges to a vertex, each as its number, its producer, and whether the vertex's backward reads it
    leaving      the edges along which gradients of a vertex's results arrive, the last reader's first: each as its
                 number, its consumer, and the result
    waiting      the number of a vertex's operands that have gradients
    passing      how the gradient of its result is passed on
    multiplies   whether it multiplies
    parameter    whether it is a parameter
    moments      those of the backward and of the forward of every vertex
    """

    entering: tuple[list[tuple[int, int, bool]], ...]
    leaving: tuple[list[tuple[int, int, int]], ...]
    waiting: tuple[int, ...]
    passing: tuple[Passing, ...]
    multiplies: tuple[bool, ...]
    parameter: Mask
    moments: tuple[Moment, ...]


def paths_of(problem: SearchProblem, reads: Sequence[bool]) -> Paths:
    """The paths of `problem`; `reads`: of each edge whether the backward of its consumer reads its tensor."""
    vertices, edges = problem.vertices, problem.edges
    entering: tuple[list[tuple[int, int, bool]], ...] = tuple([] for _ in vertices)
    leaving: tuple[list[tuple[int, int, int]], ...] = tuple([] for _ in vertices)
    for number, edge in enumerate(edges):
        entering[edge.consumer].append((number, edge.producer, reads[number]))
    for number in sorted(range(len(edges)), key=lambda n: -edges[n].consumer):
        edge = edges[number]
        if vertices[edge.consumer].kind is not VertexKind.OUTPUT and edge.value in problem.tensors.flows:
            leaving[edge.producer].append((number, edge.consumer, edge.result))
    waiting = Counter(consumer for every in leaving for _, consumer, _ in every)
    ports = [vertex.port for vertex in vertices]
    return Paths(
        entering,
        leaving,
        tuple(waiting[i] for i in range(len(vertices))),
        tuple(map(_passing, vertices)),
        tuple(v.kind is VertexKind.OPERATOR and v.node.target is _aten.mul.Tensor for v in vertices),
        np.array([port is not None and port.role is Role.PARAMETER for port in ports], dtype=bool),
        tuple(Moment(phase, vertex.name, vertex.name) for phase in ("backward", "forward") for vertex in vertices),
    )


def _passing(vertex: Vertex) -> Passing:
    if vertex.kind is VertexKind.HUB:
        return Passing.SAME
    if vertex.kind is VertexKind.OPERATOR and (is_view(vertex.node) or vertex.node.target is _aten.add.Tensor):
        return Passing.SAME
    return Passing.WRITTEN_OVER if vertex.node.target in _IN_PLACE else Passing.OTHER
