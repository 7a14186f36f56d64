"""Choices of a `KeepProblem` read off: their fates, costs and bytes.

A search within memory reads off hundreds of plans, of up to ten thousand vertices each. So the figures of all options
stand in single arrays, in which those of a choice are found at once:

    vertex    options    start    choice    its figures are at
    0         3          0        2         2
    1         2          3        0         3
    2         3          0        1         1, as vertex 2 has the options of vertex 0
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..cost.conversion import Codes, ConversionTable, Floats, Mask, once_more
from ..problem.problem import SearchProblem, VertexKind
from .fates import Fate, Stay


class VertexBytes(NamedTuple):
    """Bytes on one device under each option of a vertex.

    made       its results; 0 for an input, a view and an output
    beside     tensors that its forward keeps for its own backward beside its results
    work       of an operator the operands and results: the size of its gradients
    gradient   of an input its gradient
    always     of an input, its gradient apart, or a result of the call: what is there throughout
    arrived    what its own exchanges bring, which stays if it is computed again
    saved      those of it that its backward reads, which stay
    """

    made: Floats
    beside: Floats
    work: Floats
    gradient: Floats
    always: Floats
    arrived: Floats
    saved: Floats

    def stays(self, fate: Fate) -> Floats:
        """What stays for the backward of what its exchanges bring."""
        return self.arrived if fate.runs else self.saved


@dataclass(frozen=True)
class VertexFacts:
    """The fates that one vertex may have, and the facts that price them.

    fates     the fates
    free      recomputing it costs next to nothing
    read      the backward reads its results, so results that are computed again stay until it has
    own       its own backward reads its results
    view      its results lie in the memory of an operand
    beside    bytes that its forward keeps for its own backward, on one device
    """

    fates: tuple[Fate, ...]
    free: bool
    read: bool
    own: bool
    view: bool
    beside: float


@dataclass(frozen=True)
class Keeping:
    """The fates of one plan.

    fates   of each vertex
    again   of each edge whether its conversion runs once more in the backward
    kept    of each edge whether the converted tensor is kept
    cost    the weighted cost of computing operators again, except free ones
    """

    fates: tuple[Fate, ...]
    again: tuple[bool, ...]
    kept: tuple[bool, ...]
    cost: float


@dataclass(frozen=True, eq=False)
class Kept:
    """A choice with its fates, its cost, and the bytes that one device holds while each vertex runs, as the prices
    count them. `prices`: at each vertex, the price of a byte that is kept until the backward reaches it."""

    choice: tuple[int, ...]
    keeping: Keeping
    cost: float
    held: Floats
    prices: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Conversions:
    """The conversions of all edges under a choice: the cost of each once and with a second run, the bytes before and
    after it, whether it communicates, and whether it does nothing."""

    once: Floats
    twice: Floats
    before: Floats
    after: Floats
    moves: Mask
    same: Mask


def conversion(table: ConversionTable, here: int, there: int) -> tuple[float, float, float, float, bool, bool]:
    """The figures of one of `Conversions`."""
    once = float(table.rows([here])[0, there])
    twice = float(once_more(table).rows([here])[0, there])
    return once, twice, float(table.held[here]), float(table.held[there]), bool(moving(once, twice)), here == there


def moving(once: Any, twice: Any) -> Any:
    """Whether a conversion with the costs `once`, and `twice` if it runs again, communicates; slices are free."""
    return twice > once * (1 + 1e-6) + 1e-12


class ChoiceReader:
    """The figures of all options of `problem`, and of its edges, in single arrays. The other arguments are those of a
    KeepProblem; `figures`: of each vertex the bytes, and for each fate what is added to its costs and bytes; `near`: of
    each edge whether the backward of its consumer has the producer at hand."""

    def __init__(
        self,
        problem: SearchProblem,
        stretches: Sequence[int],
        facts: Sequence[VertexFacts],
        figures: Sequence[tuple[VertexBytes, list[tuple[Floats, Floats, Floats]]]],
        reads: Sequence[bool],
        barred: Sequence[tuple[bool, bool]],
        near: Sequence[bool],
    ) -> None:
        vertices, edges = problem.vertices, problem.edges
        self.stretches, self.count = np.array(stretches, dtype=np.intp), max(stretches, default=0) + 1
        kinds = [vertex.kind for vertex in vertices]
        self.hub, self.operator, self.input, self.output = (
            np.array([kind is each for kind in kinds], dtype=bool)
            for each in (VertexKind.HUB, VertexKind.OPERATOR, VertexKind.INPUT, VertexKind.OUTPUT)
        )
        self.free, self.read, self.own, self.view = (
            np.array([getattr(each, name) for each in facts], dtype=bool) for name in ("free", "read", "own", "view")
        )
        # of options, and of options with fates
        self.options = np.array([len(vertex.options) for vertex in vertices], dtype=np.intp)
        self.starts, (self.unary, self.held) = _joined(
            2, [(id(v.options), v.options) for v in vertices], lambda options: (options.unary, options.held)
        )
        every = [(id(found), found) for found in figures]
        self.places, sizes = _joined(len(VertexBytes._fields), every, lambda found: found[0])
        self.made, self.beside, self.work, self.gradient, self.always, self.arrived, self.saved = sizes
        self.by_fate, (self.longer, self.stays, self.back) = _joined(
            3, every, lambda found: np.concatenate(found[1], axis=1)
        )
        self.fates = tuple(dict.fromkeys(fate for each in facts for fate in each.fates))
        self.first_fate, (self.numbers,) = _joined(
            1, [(each.fates, each.fates) for each in facts], lambda fates: (self.numbers_of(fates),)
        )
        self.keeps, self.runs, self.back_again, self.beside_back, self.beside_stays = (
            np.array([holds(fate) for fate in self.fates], dtype=bool)
            for holds in (
                lambda fate: fate.keeps,
                lambda fate: fate.runs,
                lambda fate: fate.results is Stay.BACK,
                lambda fate: fate.beside is Stay.BACK,
                lambda fate: fate.beside is Stay.THROUGHOUT,
            )
        )
        # of edges
        self.producers, self.consumers = (
            np.array([getattr(edge, end) for edge in edges], dtype=np.intp) for end in ("producer", "consumer")
        )
        ends = [edge.codes(vertices) for edge in edges]
        self.from_codes, (self.rows,) = _joined(1, [(id(codes), codes) for codes, _ in ends], lambda codes: (codes,))
        self.to_codes, (self.columns,) = _joined(1, [(id(codes), codes) for _, codes in ends], lambda codes: (codes,))
        tables = {id(edge.table): edge.table for edge in edges}
        self.tables, numbers = list(tables.values()), {key: number for number, key in enumerate(tables)}
        self.widest = 1 + max(int(codes.max(initial=0)) for codes in (self.rows, self.columns))
        self.of_tables = np.array([numbers[id(edge.table)] for edge in edges], dtype=np.int64) * self.widest**2
        self.reads = np.array(reads, dtype=bool)
        self.never_again, self.never_kept = np.array(barred, dtype=bool).reshape(-1, 2).T
        self.near = np.array(near, dtype=bool)
        self.known: dict[int, tuple[float, float, float, float, bool, bool]] = {}

    def numbers_of(self, fates: Iterable[Fate]) -> Codes:
        """The numbers of `fates`, by which the arrays of fates are read."""
        numbers = {fate: number for number, fate in enumerate(self.fates)}
        return np.array([numbers[fate] for fate in fates], dtype=np.intp)

    def conversions(self, choice: Codes) -> Conversions:
        """Those under the strategies of `choice`."""
        before = self.rows[self.from_codes + choice[self.producers]]
        after = self.columns[self.to_codes + choice[self.consumers]]
        keys, places = np.unique(self.of_tables + before * self.widest + after, return_inverse=True)
        figures = np.array([self._conversion(key) for key in keys.tolist()]).reshape(-1, 6)[places].T
        return Conversions(*figures[:4], *(figures[4:] != 0))

    def _conversion(self, key: int) -> tuple[float, float, float, float, bool, bool]:
        if key not in self.known:
            table, ends = divmod(key, self.widest**2)
            self.known[key] = conversion(self.tables[table], *divmod(ends, self.widest))
        return self.known[key]

    def read_off(self, numbers: Sequence[int], prices: Floats, later: Floats) -> Kept:
        """The choice and fates that the options with these `numbers` stand for, and their costs without prices. A byte
        has one of `prices` in each stretch; until the backward reaches a vertex it costs `later`."""
        number = np.asarray(numbers, dtype=np.intp)
        place, option = np.divmod(number, self.options)
        fate = self.numbers[self.first_fate + place]
        at, of_fate = self.places + option, self.by_fate + number
        found, runs = self.conversions(option), self.runs[fate]
        to, own = self.consumers, fate[self.producers]
        stretch, moves, after = self.stretches[to], found.moves, found.after
        # conversions of the backward
        needed = self.reads | runs[to]
        there = (self.keeps[own] | (self.back_again[own] & self.near)) & ~(moves & self.never_again)
        in_backward = np.where(there, found.twice + np.where(moves, prices[stretch] * after * self.reads, 0.0), np.inf)
        keeping = np.where(moves & ~self.never_kept, found.once + later[to] * after, np.inf)
        again = needed & (in_backward <= keeping)
        kept = needed & ~again
        in_one = self.hub[to] & self.keeps[own] & self.keeps[fate[to]] & found.same

        repeated = _sum_in_order(self.longer[of_fate] * ~(runs & self.free))
        sent = np.where(again & moves, found.twice, found.once)
        cost = _sum_in_order(np.concatenate([self.unary[self.starts + option], sent])) + repeated
        stays = self._by_stretch(self.stays[of_fate]) + self._sum(stretch, after * kept - after * in_one)
        back = self._by_stretch(self.back[of_fate]) + self._sum(stretch, after * (again & moves & self.reads))
        gradients = self._by_stretch(self.gradient[at])
        work = self.work[at] + np.bincount(to, weights=found.before * moves, minlength=len(place))
        held_at = self.always[at].sum() + np.cumsum(stays) + back + np.cumsum(gradients[::-1])[::-1]
        fates = tuple(self.fates[each] for each in fate.tolist())
        return Kept(
            tuple(option.tolist()),
            Keeping(fates, tuple(again.tolist()), tuple(kept.tolist()), repeated),
            cost,
            held_at[self.stretches] + work,
            later,
        )

    def _by_stretch(self, of_vertices: Floats) -> Floats:
        return self._sum(self.stretches, of_vertices)

    def _sum(self, stretches: Codes, sizes: Floats) -> Floats:
        return np.bincount(stretches, weights=sizes, minlength=self.count).astype(np.float64)


def _sum_in_order(costs: Floats) -> float:
    """Their sum as a loop computes it: equal plans have equal costs, whoever adds them up."""
    return float(np.cumsum(costs)[-1]) if len(costs) else 0.0


def _joined(columns: int, each: Iterable[tuple[Any, Any]], arrays_of: Any) -> tuple[Codes, tuple[Any, ...]]:
    """The arrays of many things, so many `columns` of each, one behind the other, and where those of each start; things
    with equal keys share theirs. `each`: their keys, and the things."""
    starts, found, place = dict[Any, int](), list[tuple[Any, ...]](), 0
    numbers = []
    for key, thing in each:
        if key not in starts:
            starts[key] = place
            found.append(tuple(arrays_of(thing)))
            place += len(found[-1][0])
        numbers.append(starts[key])
    none = (np.zeros(0, dtype=np.intp),) * columns
    joined = tuple(np.concatenate(arrays) for arrays in zip(*found, strict=True)) if found else none
    return np.array(numbers, dtype=np.intp), joined
