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

from ..cost.conversion import Codes, Floats, Mask
from .gradients import gradients
from .held import Held, Lives, Purpose, summed
from .keeping import KeepProblem
from .reader import Conversions, Kept


def timeline(problem: KeepProblem, kept: Kept) -> Held:
    """The bytes held under a choice of `problem` and its fates: at the moments of the backward of each vertex, and then
    at those of the forward of each."""
    found = _Timeline(problem, kept)
    every = [summed(lives, len(kept.choice)) for lives in (found.backward, found.forward)]
    return Held(
        problem.paths.moments, {purpose: np.concatenate([each[purpose] for each in every]) for purpose in Purpose}
    )


def at_vertices(held: Held) -> Floats:
    """The most bytes at the two moments of each vertex, of a `timeline`."""
    most: Floats = held.total.reshape(2, -1).max(axis=0)
    return most


@dataclass(slots=True)
class _Readers:
    """Of each vertex's result, who reads its memory.

    until              the last reader in the forward, through hubs and views
    nearest            the last one that reads the result itself
    earliest, latest   of those in the backward; the number of vertices, and -1, if there are none
    start              the vertex of the backward at which it would be computed again; -1 if nothing needs it
    viewed             a backward reads a view of it
    stays              the memory is kept as that of a hub or a view
    inside             the memory is that of its producer's result, which is kept: of a hub without a conversion
    """

    until: Codes
    earliest: Codes
    nearest: Codes
    latest: Codes
    start: Codes
    viewed: Mask
    stays: Mask
    inside: Mask


def _readers(problem: KeepProblem, fates: Codes, found: Conversions) -> _Readers:
    """Follow reads, from the last vertex to the first: those of a view, and of a hub without memory of its own, are
    reads of the memory of their producer."""
    paths, count = problem.paths, len(fates)
    reader = problem.reader
    keeps, runs, same = reader.keeps[fates].tolist(), reader.runs[fates].tolist(), found.same.tolist()
    hubs, views, owns = reader.hub.tolist(), reader.view.tolist(), reader.own.tolist()
    until, nearest, earliest = list(range(count)), [0] * count, [count] * count
    latest, start = [-1] * count, [-1] * count
    viewed, stays, inside = ([False] * count for _ in range(3))
    for i in reversed(range(count)):
        hub, view, entering = hubs[i], views[i], paths.entering[i]
        if hub:
            ((number, producer, _),) = entering
            inside[i] = keeps[producer] and same[number]
        start[i] = max(start[i], latest[i], i if owns[i] else -1)
        passes = view or inside[i] or (hub and not keeps[i])
        staying = (hub and keeps[i]) or (stays[i] and (hub or view))
        seen = until[i] if hub or view else i
        for number, producer, read in entering:
            nearest[producer] = max(nearest[producer], i)
            until[producer] = max(until[producer], seen)
            if read:
                earliest[producer] = min(earliest[producer], i)
                latest[producer] = max(latest[producer], i)
            if passes:
                earliest[producer] = min(earliest[producer], earliest[i])
                latest[producer] = max(latest[producer], latest[i])
                viewed[producer] |= view and latest[i] >= 0
            if runs[i]:
                start[producer] = max(start[producer], start[i])
            if staying and same[number]:
                stays[producer] = True

    def codes(of_vertices: list[int]) -> Codes:
        return np.array(of_vertices, dtype=np.intp)

    def flags(of_vertices: list[bool]) -> Mask:
        return np.array(of_vertices, dtype=bool)

    return _Readers(
        codes(until),
        codes(earliest),
        codes(nearest),
        codes(latest),
        codes(start),
        flags(viewed),
        flags(stays),
        flags(inside),
    )


class _Timeline:
    """The lives of all tensors under a choice, in the backward and in the forward."""

    def __init__(self, problem: KeepProblem, kept: Kept) -> None:
        self.p, self.reader, self.choice = problem, problem.reader, np.array(kept.choice, dtype=np.intp)
        self.fates = self.reader.numbers_of(kept.keeping.fates)
        self.keeps = self.reader.keeps[self.fates]
        self.found = self.reader.conversions(self.choice)
        self.readers = _readers(problem, self.fates, self.found)
        self.kept, self.again = (np.array(each, dtype=bool) for each in (kept.keeping.kept, kept.keeping.again))
        self.at, self.count = self.reader.places + self.choice, len(self.choice)
        self.here, self.to_end = np.arange(self.count), np.full(self.count, self.count)
        self.backward, self.forward = list[Lives](), list[Lives]()
        first, last, size = gradients(problem, self.found)
        self.backward.append(Lives(Purpose.VALUES, first, last, size))
        self._ports()
        self._made()
        self._converted()

    def _add(self, lives: list[Lives], purpose: Purpose, which: Mask, first: Codes, last: Codes, size: Floats) -> None:
        lives.append(Lives(purpose, first[which], last[which], size[which]))

    def _ports(self) -> None:
        """Add the inputs of the call, and the results, which count in the forward as those of their operators."""
        held, always = self.reader.held[self.reader.starts + self.choice], self.reader.always[self.at]
        given, start = self.reader.input, np.zeros(self.count, dtype=np.intp)
        self._add(self.backward, Purpose.RESULTS, self.reader.output, start, self.to_end, always)
        parameters = self.p.paths.parameter
        for lives in (self.forward, self.backward):
            self._add(lives, Purpose.PARAMETERS, given & parameters, start, self.to_end, held)
            self._add(lives, Purpose.INPUTS, given & ~parameters, start, self.to_end, held)
            self._add(lives, Purpose.OPTIMIZER, given, start, self.to_end, always - held)
        self._add(self.backward, Purpose.GRADIENTS, given, start, self.readers.nearest, self.reader.gradient[self.at])

    def _made(self) -> None:
        """Add the results of operators and hubs, and what their forwards keep beside them."""
        reads, here, count = self.readers, self.here, self.count
        inner = ~(self.reader.input | self.reader.output)
        made, beside = self.reader.made[self.at], self.reader.beside[self.at]
        earliest = np.where(self.reader.own, np.minimum(reads.earliest, here), reads.earliest)
        back, stays = inner & self.reader.beside_back[self.fates], inner & self.reader.beside_stays[self.fates]
        self._add(self.backward, Purpose.AGAIN, back, here, np.maximum(reads.start, here), beside)
        self._add(self.backward, Purpose.KEPT, stays, here, self.to_end, beside)
        read = earliest < count
        again = inner & self.reader.back_again[self.fates] & (self.reader.read | reads.viewed) & read
        self._add(self.backward, Purpose.AGAIN, again, earliest, np.maximum(reads.start, earliest), made)
        own = inner & self.keeps & ~reads.inside
        self._add(self.backward, Purpose.KEPT, own, np.where(read, earliest, here), self.to_end, made)
        arrived = np.where(self.reader.runs[self.fates], self.reader.arrived[self.at], self.reader.saved[self.at])
        for lives, purpose in ((self.backward, Purpose.KEPT), (self.forward, Purpose.WORKING)):
            self._add(lives, purpose, inner, here, self.to_end, arrived)
        runs = self.reader.operator
        last = np.where(self.keeps | reads.stays, count, reads.until)
        self._add(self.forward, Purpose.WORKING, runs, here, last, made)
        self._add(self.forward, Purpose.WORKING, runs, here, np.where(stays, count, here), beside)

    def _converted(self) -> None:
        """Add the results of conversions."""
        to, found = self.reader.consumers, self.found
        hub, to_end = self.reader.hub[to], np.full(len(to), self.count)
        self._add(self.backward, Purpose.KEPT, self.kept, to, to_end, found.after)
        again = ~self.kept & self.again & self.reader.reads & found.moves
        self._add(self.backward, Purpose.AGAIN, again, to, to, found.after)
        stays = self.kept | (hub & self.keeps[to])
        last = np.where(stays, self.count, np.where(hub, self.readers.until[to], to))
        self._add(self.forward, Purpose.WORKING, found.moves, to, last, found.after)
