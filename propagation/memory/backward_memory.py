"""The bytes that one device holds under one choice and its fates, in the forward and in the backward of each vertex.

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
    in the forward     from its producer to its last reader, or to the end if it is kept

Parameters, states of the optimizer and inputs of the call are held throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..cost.conversion import Floats
from ..graph.port import Role
from ..problem.problem import VertexKind
from .fates import Stay
from .gradients import gradients
from .held import Held, Life, Moment, Purpose, added_up
from .keeping import KeepProblem, Kept


def timeline(problem: KeepProblem, kept: Kept) -> Held:
    """The bytes held under a choice of `problem` and its fates: at the moments of the backward of each vertex, and then
    at those of the forward of each."""
    found = _Lives(problem, kept)
    names = [vertex.name for vertex in problem.problem.vertices]
    phases = {"backward": found.backward, "forward": found.forward}
    every = [added_up(lives, len(names)) for lives in phases.values()]
    return Held(
        [Moment(phase, name, name) for phase in phases for name in names],
        {purpose: np.concatenate([each[purpose] for each in every]) for purpose in Purpose},
    )


def at_vertices(held: Held) -> Floats:
    """The most bytes at the two moments of each vertex, of a `timeline`."""
    most: Floats = held.total.reshape(2, -1).max(axis=0)
    return most


@dataclass(slots=True)
class _Reads:
    """The readers of the memory of a vertex's result.

    until              the last one in the forward, through hubs and views
    nearest            the last one that reads the result itself
    earliest, latest   of those in the backward; the number of vertices, and -1, if there are none
    start              the vertex of the backward at which it would be computed again; -1 if nothing needs it
    viewed             a backward reads a view of it
    stays              the memory is kept as that of a hub or a view
    inside             the memory is that of its producer's result, which is kept: of a hub without a conversion
    """

    until: int
    earliest: int
    nearest: int = 0
    latest: int = -1
    start: int = -1
    viewed: bool = False
    stays: bool = False
    inside: bool = False


class _Lives:
    """The lives of all tensors under a choice, in the backward and in the forward."""

    def __init__(self, problem: KeepProblem, kept: Kept) -> None:
        self.p, self.choice, self.keeping = problem, kept.choice, kept.keeping
        self.vertices, self.edges = problem.problem.vertices, problem.problem.edges
        self.found = [problem.converted(edge, kept.choice) for edge in self.edges]
        self.reads = [_Reads(until=i, earliest=len(self.vertices)) for i in range(len(self.vertices))]
        self._read()
        self.forward: list[Life] = []
        values = gradients(problem, self.found)
        self.backward = [Life(Purpose.VALUES, value.end, value.start, value.size) for value in values]
        for i, vertex in enumerate(self.vertices):
            if vertex.kind in (VertexKind.INPUT, VertexKind.OUTPUT):
                self._port(i)
            else:
                self._made(i)
        for number in range(len(self.edges)):
            self._converted(number)

    def _read(self) -> None:
        """Follow reads, from the last vertex to the first: those of a view, and of a hub without memory of its own, are
        reads of the memory of their producer."""
        entering: list[list[int]] = [[] for _ in self.vertices]
        for number, edge in enumerate(self.edges):
            entering[edge.consumer].append(number)
        for i in reversed(range(len(self.vertices))):
            fate, facts, own = self.keeping.fates[i], self.p.facts[i], self.reads[i]
            hub = self.vertices[i].kind is VertexKind.HUB
            if hub:
                (number,) = entering[i]
                own.inside = self.keeping.fates[self.edges[number].producer].keeps and self.found[number].same
            own.start = max(own.start, own.latest, i if facts.own else -1)
            for number in entering[i]:
                producer = self.reads[self.edges[number].producer]
                producer.nearest = max(producer.nearest, i)
                producer.until = max(producer.until, own.until if hub or facts.view else i)
                if self.p.reads[number]:
                    producer.earliest, producer.latest = min(producer.earliest, i), max(producer.latest, i)
                if facts.view or own.inside or (hub and not fate.keeps):
                    producer.earliest = min(producer.earliest, own.earliest)
                    producer.latest = max(producer.latest, own.latest)
                    producer.viewed |= facts.view and own.latest >= 0
                if fate.runs:
                    producer.start = max(producer.start, own.start)
                if ((hub and fate.keeps) or (own.stays and (hub or facts.view))) and self.found[number].same:
                    producer.stays = True

    def _port(self, i: int) -> None:
        """Add an input of the call, or a result, which counts in the forward as the result of its operator."""
        vertex, option, sizes = self.vertices[i], self.choice[i], self.p.sizes(i)
        held, always = float(vertex.options.held[option]), float(sizes.always[option])
        if vertex.kind is VertexKind.OUTPUT:
            self.backward.append(Life(Purpose.RESULTS, 0, None, always))
            return
        is_parameter = vertex.port is not None and vertex.port.role is Role.PARAMETER
        throughout = [
            Life(Purpose.PARAMETERS if is_parameter else Purpose.INPUTS, 0, None, held),
            Life(Purpose.OPTIMIZER, 0, None, always - held),
        ]
        self.forward += throughout
        self.backward += throughout
        self.backward.append(Life(Purpose.GRADIENTS, 0, self.reads[i].nearest, float(sizes.gradient[option])))

    def _made(self, i: int) -> None:
        """Add the results of an operator or a hub, and what its forward keeps beside them."""
        facts, fate, reads, sizes = self.p.facts[i], self.keeping.fates[i], self.reads[i], self.p.sizes(i)
        made, beside = float(sizes.made[self.choice[i]]), float(sizes.beside[self.choice[i]])
        earliest = min(reads.earliest, i) if facts.own else reads.earliest
        if fate.beside is Stay.BACK:
            self.backward.append(Life(Purpose.AGAIN, i, max(reads.start, i), beside))
        elif fate.beside is Stay.THROUGHOUT:
            self.backward.append(Life(Purpose.KEPT, i, None, beside))
        read = earliest < len(self.vertices)
        if fate.results is Stay.BACK and (facts.read or reads.viewed) and read:
            self.backward.append(Life(Purpose.AGAIN, earliest, max(reads.start, earliest), made))
        elif fate.keeps and not reads.inside:
            self.backward.append(Life(Purpose.KEPT, earliest if read else i, None, made))
        if self.vertices[i].kind is VertexKind.OPERATOR:
            stays = fate.keeps or reads.stays
            self.forward.append(Life(Purpose.WORKING, i, None if stays else reads.until, made))
            self.forward.append(Life(Purpose.WORKING, i, None if fate.beside is Stay.THROUGHOUT else i, beside))

    def _converted(self, number: int) -> None:
        """Add the result of a conversion."""
        found, i = self.found[number], self.edges[number].consumer
        if self.keeping.kept[number]:
            self.backward.append(Life(Purpose.KEPT, i, None, found.after))
        elif self.keeping.again[number] and self.p.reads[number] and found.moves:
            self.backward.append(Life(Purpose.AGAIN, i, i, found.after))
        if found.moves:
            hub = self.vertices[i].kind is VertexKind.HUB
            stays = self.keeping.kept[number] or (hub and self.keeping.fates[i].keeps)
            until = self.reads[i].until if hub else i
            self.forward.append(Life(Purpose.WORKING, i, None if stays else until, found.after))
