"""The bytes that one device holds during the backward, operator by operator, under one choice and its fates.

Operators 1, 2 and 3 form a chain, and their results have 4, 2 and 1 bytes. The backward of 2 reads the result of 1, and
that of 3 the result of 2; both are kept:

    the backward is at                       3       2       1
    kept                                   4 + 2     4       0
    gradients of the results of 1 and 2      2     4 + 2     4
    sum                                      8      10       4

Each tensor is held for an interval of vertices, which the backward visits from the last to the first:

    kept               from the first moment of the backward to the earliest reader
    computed again     from its last reader, or the last vertex that is recomputed from it, to the earliest
    gradient of a      from its last reader, which computes the first addend, to its producer (gradients.py)
    value
    gradient of a      from its last reader to the end of the step
    parameter

Parameters, states of the optimizer and inputs of the call are held throughout, its results from their producers on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..cost.conversion import Floats
from ..graph.port import Role
from ..problem.problem import VertexKind
from .fates import Stay
from .gradients import gradients
from .keeping import KeepProblem, Kept


@dataclass(frozen=True)
class HeldBytes:
    """Bytes on one device while the backward is at each vertex, by category.

    always    parameters, states of the optimizer, inputs and results, throughout the backward
    forward   all bytes while the forward is at each vertex
    """

    always: Mapping[str, float]
    forward: Floats
    kept: Floats
    again: Floats
    gradients: Floats
    parameter_gradients: Floats

    @property
    def peak(self) -> float:
        """The largest number of bytes at any time."""
        return float(max(self.total.max(initial=0.0), self.forward.max(initial=0.0)))

    @property
    def moment(self) -> tuple[str, int]:
        """The time of the peak: "forward" or "backward", and the vertex."""
        forward = float(self.forward.max()) > float(self.total.max())
        return ("forward", int(self.forward.argmax())) if forward else ("backward", int(self.total.argmax()))

    @property
    def total(self) -> Floats:
        """The bytes at each vertex of the backward."""
        return sum(self.always.values()) + self.kept + self.again + self.gradients + self.parameter_gradients


def timeline(problem: KeepProblem, choice: Sequence[int], kept: Kept) -> HeldBytes:
    """The bytes held under `choice`, an option for each vertex of `problem`, with the fates of `kept`."""
    return _Timeline(problem, choice, kept).made()


class _Timeline:
    def __init__(self, problem: KeepProblem, choice: Sequence[int], kept: Kept) -> None:
        self.p, self.choice, self.keeping = problem, choice, kept.keeping
        self.vertices, self.edges = problem.problem.vertices, problem.problem.edges
        count = len(self.vertices)
        self.changes = {name: np.zeros(count + 1) for name in ("kept", "again", "gradients", "parameter_gradients")}
        self.always = {"parameters": 0.0, "optimizer": 0.0, "inputs": 0.0, "results": 0.0}
        self.made_so_far = np.zeros(count + 1)
        self.found = [problem.converted(edge, choice) for edge in self.edges]
        self._reached: dict[int, list[int]] = {}
        self.entering: list[list[int]] = [[] for _ in range(count)]  # of each vertex the edges to it
        self.readers: list[list[int]] = [[] for _ in range(count)]  # of each vertex its consumers
        self.producers: list[list[int]] = [[] for _ in range(count)]
        self.reading: list[list[int]] = [[] for _ in range(count)]  # of these, those whose backward reads its result
        self.viewed = [False] * count  # of each vertex whether a backward reads a view of its result
        for number, edge in enumerate(self.edges):
            self.entering[edge.consumer].append(number)
            self.readers[edge.producer].append(edge.consumer)
            self.producers[edge.consumer].append(edge.producer)
            if problem.reads[number]:
                self.reading[edge.producer].append(edge.consumer)

    def _add(self, what: str, first: int, last: int, size: float) -> None:
        self.changes[what][first] += size
        self.changes[what][last + 1] -= size

    def made(self) -> HeldBytes:
        """Add up all intervals."""
        self._values()
        self._conversions()
        self._gradients()
        sums = {name: np.cumsum(change[:-1]) for name, change in self.changes.items()}
        self._forward()
        before = sum(self.always.values()) - self.always["results"]  # each result counts from its producer on
        return HeldBytes(self.always, np.cumsum(self.made_so_far[:-1]) + before, **sums)

    def _values(self) -> None:
        self._read_through()
        starts = self._starts()
        for i, vertex in enumerate(self.vertices):
            if vertex.kind is VertexKind.INPUT:
                self._input(i)
            elif vertex.kind is VertexKind.OUTPUT:
                self.always["results"] += float(self.p.at_rest(i)[1][self.choice[i]])
            else:
                self._made(i, starts[i])

    def _read_through(self) -> None:
        """Attribute reads through views, and hubs without memory of their own, to the producer of the memory."""
        for i in reversed(range(len(self.vertices))):
            hub = self.vertices[i].kind is VertexKind.HUB and not self.keeping.fates[i].keeps
            view = self.p.facts[i].view
            if hub or view or self._lies_in_what_is_kept(i):
                for producer in self.producers[i]:
                    self.reading[producer] += self.reading[i]
                    self.viewed[producer] = self.viewed[producer] or (view and bool(self.reading[i]))

    def _input(self, i: int) -> None:
        vertex, option = self.vertices[i], self.choice[i]
        gradient, throughout = (float(column[option]) for column in self.p.at_rest(i))
        own = float(vertex.options.held[option])
        is_parameter = vertex.port is not None and vertex.port.role is Role.PARAMETER
        self.always["parameters" if is_parameter else "inputs"] += own
        self.always["optimizer"] += throughout - own
        if gradient:
            self._add("parameter_gradients", 0, max(self.readers[i], default=0), gradient)

    def _made(self, i: int, start: int) -> None:
        """Add the results of an operator or a hub."""
        last, facts, fate = len(self.vertices) - 1, self.p.facts[i], self.keeping.fates[i]
        made = float(self.vertices[i].options.made[self.choice[i]])
        beside = float(self.p.beside(i)[self.choice[i]])
        readers = [*self.reading[i], *([i] if facts.own else [])]
        earliest = min(readers) if readers else None
        if fate.beside is Stay.BACK:
            self._add("again", i, max(start, i), beside)
        elif fate.beside is Stay.THROUGHOUT:
            self._add("kept", i, last, beside)
        if fate.results is Stay.BACK and (facts.read or self.viewed[i]) and earliest is not None:
            self._add("again", earliest, max(start, earliest), made)
        elif fate.keeps and not self._lies_in_what_is_kept(i):
            self._add("kept", i if earliest is None else earliest, last, made)

    def _lies_in_what_is_kept(self, i: int) -> bool:
        """Whether vertex i is a hub without a conversion whose producer's result is kept."""
        (number,) = self.entering[i] if self.vertices[i].kind is VertexKind.HUB else (None,)
        if number is None or not self.keeping.fates[self.edges[number].producer].keeps:
            return False
        return self.found[number].same

    def _starts(self) -> list[int]:
        """The vertex of the backward at which each vertex would be recomputed; -1 if nothing needs it."""
        starts = [-1] * len(self.vertices)
        for i in reversed(range(len(self.vertices))):
            again = (starts[reader] for reader in self.readers[i] if self.keeping.fates[reader].runs)
            own = [i] if self.p.facts[i].own else []
            starts[i] = max([*self.reading[i], *again, *own], default=-1)
        return starts

    def _conversions(self) -> None:
        for number, edge in enumerate(self.edges):
            size = self.found[number].after
            if self.keeping.kept[number]:
                self._add("kept", edge.consumer, len(self.vertices) - 1, size)
            elif self.keeping.again[number] and self.p.reads[number] and self.found[number].moves:
                self._add("again", edge.consumer, edge.consumer, size)

    def _forward(self) -> None:
        """Add up the forward: kept results stay from their producers on, others until their last reader has run."""
        last, kept_as = len(self.vertices) - 1, self._kept_as_another()
        for i in reversed(range(len(self.vertices))):
            vertex, option = self.vertices[i], self.choice[i]
            if vertex.kind is not VertexKind.OPERATOR:
                continue
            made, beside = float(vertex.options.made[option]), float(self.p.beside(i)[option])
            fate = self.keeping.fates[i]
            stays = fate.keeps or i in kept_as
            until = max(self._through(i), default=i)
            for size, end in (
                (made, last if stays else until),
                (beside, last if fate.beside is Stay.THROUGHOUT else i),
            ):
                self.made_so_far[i] += size
                self.made_so_far[end + 1] -= size
        for number, edge in enumerate(self.edges):
            if self.found[number].moves:
                size, stays = self.found[number].after, self.keeping.kept[number]
                hub = self.vertices[edge.consumer].kind is VertexKind.HUB
                until = max(self._through(edge.consumer), default=edge.consumer) if hub else edge.consumer
                stays = stays or (hub and self.keeping.fates[edge.consumer].keeps)
                self.made_so_far[edge.consumer] += size
                self.made_so_far[(last if stays else until) + 1] -= size

    def _kept_as_another(self) -> set[int]:
        """The vertices whose memory a kept hub or view shares."""
        found: set[int] = set()
        for i in reversed(range(len(self.vertices))):
            hub = self.vertices[i].kind is VertexKind.HUB
            if (hub and self.keeping.fates[i].keeps) or (i in found and (hub or self.p.facts[i].view)):
                found |= {self.edges[number].producer for number in self.entering[i] if self.found[number].same}
        return found

    def _through(self, i: int) -> list[int]:
        """The readers of the result of vertex i, including those that read it through hubs and views."""
        if i not in self._reached:
            found: list[int] = []
            for reader in self.readers[i]:
                found.append(reader)
                vertex = self.vertices[reader]
                if vertex.kind is VertexKind.HUB or self.p.facts[reader].view:
                    found += self._through(reader)
            self._reached[i] = found
        return self._reached[i]

    def _gradients(self) -> None:
        for gradient in gradients(self.p, self.found):
            self._add("gradients", gradient.end, gradient.start, gradient.size)
