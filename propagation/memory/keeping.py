"""Results that are kept for the backward, results that are recomputed, and the cost of both, as part of every choice.

An operator takes 3 s and has a result of 100 bytes, which the backward reads; its operands are kept. At a price p per
byte held between the forward and the backward:

    fate     cost     p = 0.02    p = 0.05
    kept     100 p    2           5
    again    3        3           3

So the result is kept at 0.02 and computed again at 0.05. A result that nothing reads is gone, and costs nothing.

An option of a vertex has a fate of its results (fates.py): kept, computed again, or gone. Computing a result again
costs the seconds of one more forward, and requires its operands at that time. A tensor that is converted for a reader
in the backward is converted again (the collective runs once more), or kept in its converted form. All of this involves
only the two ends of an edge, so the width of the problem does not grow.

Time in the backward is counted in stretches (stretches.py), the last one first. While the backward is in stretch s a
device holds the parameters and their optimizer states, everything kept by stretches up to s, the recomputed tensors of
s, the gradients of the parameters that s and later stretches read, and the operands and results of the running
operator. A byte may have another price at each of these times.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import fx

from ..cost.conversion import Codes, Floats, once_more
from ..graph.graph import recomputed
from ..graph.nodes import draws_random_numbers, is_pointwise, is_view, rearranges
from ..graph.port import Role
from ..minsum.network import Costs, among, originals
from ..ops.random_numbers import draw
from ..problem.problem import Edge, Options, Recompute, SearchProblem, Vertex, VertexKind, restricted
from ..torch_internals import OpOverload
from .fates import AGAIN, Candidate, Fate, Stay, fates_of
from .needs import NOTHING, Needs
from .paths import Paths, paths_of
from .reader import ChoiceReader, Keeping, Kept, VertexBytes, VertexFacts, conversion, moving
from .stretches import at_hand, stretches_of

FREE = 1e-3  # the weight of a second of recomputation that counts as free
CHEAP = 16.0 * FREE  # the passes over a value that may be made to have it again for free


@dataclass(frozen=True, eq=False)
class KeepProblem:
    """A search problem in which every option has its fates.

    stretches   the stretch of each vertex
    facts       the facts of each vertex about its fates
    reads       of each edge whether the backward of its consumer reads its tensor
    at_hand     of each vertex whether it is an input or the hub of one
    barred      of each edge whether its conversion may not run again, and whether its result may not be kept
    paths       its edges by vertex
    rows        of each vertex the numbers that the options of `problem` have in the whole problem; None: all of them
    """

    problem: SearchProblem
    stretches: tuple[int, ...]
    facts: tuple[VertexFacts, ...]
    reads: tuple[bool, ...]
    at_hand: tuple[bool, ...]
    barred: tuple[tuple[bool, bool], ...] = field(repr=False)
    paths: Paths = field(repr=False)
    rows: tuple[Codes, ...] | None = field(default=None, repr=False)
    _alike: dict[object, tuple[VertexBytes, list[tuple[Floats, Floats, Floats]]]] = field(
        default_factory=dict, repr=False
    )

    @property
    def count(self) -> int:
        """The number of stretches."""
        return max(self.stretches, default=0) + 1

    def at(self, choice: tuple[int, ...]) -> KeepProblem:
        """This whole problem with the strategies of `choice`: only fates are left to choose."""
        rows = {c: np.array([c]) for c in set(choice)}
        return self.among([rows[c] for c in choice])

    def among(self, rows: list[Codes]) -> KeepProblem:
        """This whole problem with some options of each vertex, by number."""
        only = restricted(self.problem, rows)
        return replace(self, problem=only, rows=tuple(rows), _alike={})

    def original(self, choice: tuple[int, ...]) -> tuple[int, ...]:
        """`choice` with the numbers of options in the whole problem."""
        if self.rows is None:
            return choice
        return originals(self.rows, choice)

    # -- as numbers

    def costs(self, at: Floats, between: float = 0.0) -> Costs:
        """The costs of all options with all fates, with a price `at[i]` for a byte that is held while vertex i runs,
        and one for a byte that is held `between` the forward and the backward."""
        prices = self._by_stretch(at)
        later, earlier = _until(prices) + between, np.cumsum(prices)
        shared: dict[object, Floats] = {}
        unary = []
        for i, vertex in enumerate(self.problem.vertices):
            facts, s = self.facts[i], self.stretches[i]
            alike: object = (id(vertex.options), facts, later[s], prices[s], earlier[s], at[i])
            if alike not in shared:
                alone = self._alone(i, later[s], prices[s], earlier[s], prices.sum())
                work = np.tile(at[i] * self.figures(i)[0].work, len(facts.fates)) if at[i] else 0.0
                shared[alike] = alone + work
            unary.append(shared[alike])
        edges: dict[tuple[int, int], list[tuple[int, object]]] = {}
        for number, edge in enumerate(self.problem.edges):
            a, b, s = edge.producer, edge.consumer, self.stretches[edge.consumer]
            structure = (
                id(edge.table), id(self.problem.vertices[a].options), id(self.problem.vertices[b].options), edge.result,
                edge.operand, self.facts[a].fates, self.facts[b].fates, self.reads[number], self.barred[number],
                self.near(edge), self._is_hub(b), later[s], prices[s], at[b],
            )  # fmt: skip
            edges.setdefault((a, b), []).append((number, structure))
        pairs = {}
        for ends, parallel in edges.items():
            alike = tuple(structure for _, structure in parallel)
            if alike not in shared:
                s = self.stretches[ends[1]]
                every = [self._between(number, later[s], prices[s], at[ends[1]]) for number, _ in parallel]
                shared[alike] = every[0] if len(every) == 1 else np.sum(every, axis=0)
            pairs[ends] = shared[alike]
        return Costs(tuple(unary), pairs)

    def numbers(self, choice: Sequence[int], fates: Sequence[Fate]) -> tuple[int, ...]:
        """The numbers of options, given by their numbers in the whole problem, with these fates. An option that is not
        here counts as the first, and so does a fate that a vertex may not have."""
        if self.rows is not None:
            choice = among(self.rows, choice)
        places = [f.fates.index(fate) if fate in f.fates else 0 for f, fate in zip(self.facts, fates, strict=True)]
        sizes = [len(vertex.options) for vertex in self.problem.vertices]
        return tuple(place * size + c for place, size, c in zip(places, sizes, choice, strict=True))

    def _by_stretch(self, at: Floats) -> Floats:
        return np.bincount(self._places, weights=at, minlength=self.count).astype(np.float64)

    @cached_property
    def _places(self) -> Codes:
        return np.array(self.stretches, dtype=np.intp)

    def figures(self, i: int) -> tuple[VertexBytes, list[tuple[Floats, Floats, Floats]]]:
        """The sizes of vertex i, and its figures by fate; vertices that are alike share them."""
        key = id(self.problem.vertices[i].options), self.facts[i]
        if key not in self._alike:
            sizes = self._sizes(i)
            self._alike[key] = sizes, self._by_fate(i, sizes)
        return self._alike[key]

    def _sizes(self, i: int) -> VertexBytes:
        vertex, facts = self.problem.vertices[i], self.facts[i]
        options, port = vertex.options, vertex.port
        none: Floats = np.zeros(len(options))
        made, work, gradient, always = options.made, none, none, none
        if vertex.kind is VertexKind.OPERATOR and not facts.view:
            operands = zip(options.tables[0], options.operands, strict=True)
            work = options.made + sum(table.held[codes] for table, codes in operands if table is not None)
        elif port is not None and port.role is Role.RESULT:
            (table,), (codes,) = options.tables[0], options.operands
            always = table.held[codes] if table else none
        elif vertex.kind is VertexKind.INPUT:
            made = none
            gradient = options.held * (port is not None and port.role is Role.PARAMETER and port.requires_grad)
            always = options.memory - gradient
        beside = facts.beside * _share(options) if facts.beside else none
        return VertexBytes(made, beside, work, gradient, always, options.arrived, options.saved)

    def _alone(self, i: int, kept: float, again: float, before: float, always: float) -> Floats:
        """The costs of each option with each fate, fate by fate. A kept byte costs `kept`, a recomputed one `again`,
        one of a gradient `before`, and one that is there throughout `always`."""
        sizes, by_fate = self.figures(i)
        own: Floats = self.problem.vertices[i].options.unary + before * sizes.gradient + always * sizes.always
        return np.concatenate([own + longer + kept * stays + again * back for longer, stays, back in by_fate])

    def _by_fate(self, i: int, sizes: VertexBytes) -> list[tuple[Floats, Floats, Floats]]:
        """For each fate of vertex i, the weighted additional time of the backward, the bytes that stay, and those that
        are back in its stretch, for each option."""
        options, settings, facts = self.problem.vertices[i].options, self.problem.settings, self.facts[i]
        # the options of what a user marked already include one more forward
        weight = 0.0 if facts.fates == (AGAIN,) else settings.weights.compute
        found = []
        for fate in facts.fates:
            longer = weight * (FREE if fate.runs and facts.free else 1.0) * fate.seconds(options, settings)
            stays, back = fate.bytes_of(sizes.made, sizes.beside, facts.read)
            found.append((longer, stays + sizes.stays(fate), back))
        return found

    def near(self, edge: Edge) -> bool:
        """Whether the backward of the consumer has the producer at hand, or in its own stretch."""
        return self.at_hand[edge.producer] or self.stretches[edge.producer] == self.stretches[edge.consumer]

    def _between(self, number: int, kept: float, again: float, now: float) -> Floats:
        """The costs of edge `number` [fate and option of the producer, fate and option of the consumer]. A byte costs
        `now` while the consumer runs, when the tensor before the conversion is held as well."""
        edge = self.problem.edges[number]
        once = edge.matrix(self.problem.vertices)
        twice, keep = self._ways(number, once, kept, again)
        if now:
            codes, _ = edge.codes(self.problem.vertices)
            work = now * edge.table.held[codes][:, None] * moving(once, twice)
            once, twice, keep = once + work, twice + work, keep + work
        best, in_one = np.minimum(twice, keep), kept * self._in_one(edge)

        def way(fate: Fate, reader: Fate) -> Floats:
            there = best if self._is_there(fate, edge) else keep
            costs = there if self.reads[number] or reader.runs else once
            return costs - in_one if fate.keeps and reader.keeps else costs

        readers = self.facts[edge.consumer].fates
        return np.block([[way(fate, reader) for reader in readers] for fate in self.facts[edge.producer].fates])

    def _is_hub(self, i: int) -> bool:
        return self.problem.vertices[i].kind is VertexKind.HUB

    def _in_one(self, edge: Edge) -> Any:
        """The bytes that a hub shares with its producer [option of the producer, option of the consumer], which are
        kept once if both are kept."""
        if not self._is_hub(edge.consumer):
            return 0.0
        rows, columns = edge.codes(self.problem.vertices)
        return edge.table.held[rows][:, None] * (rows[:, None] == columns)

    def _is_there(self, fate: Fate, edge: Edge) -> bool:
        """Whether the results of a producer with this fate are there when the backward reaches the consumer."""
        return fate.keeps or (fate.results is Stay.BACK and self.near(edge))

    def _ways(self, number: int, once: Floats, kept: float, again: float) -> tuple[Floats, Floats]:
        """The costs of an edge whose converted tensor the backward reads: if it is converted once more, and if the
        converted tensor is kept. A conversion that moves nothing between ranks is never worth keeping."""
        edge = self.problem.edges[number]
        never_again, never_kept = self.barred[number]
        twice = replace(edge, table=once_more(edge.table)).matrix(self.problem.vertices)
        _, codes = edge.codes(self.problem.vertices)
        made = edge.table.held[codes] * self.reads[number]
        moves = moving(once, twice)
        keep = np.where(moves & (not never_kept), once + kept * edge.table.held[codes], np.inf)
        return np.where(moves & never_again, np.inf, twice + np.where(moves, again * made, 0.0)), keep

    # -- of a choice

    @cached_property
    def reader(self) -> ChoiceReader:
        """The figures of all options in single arrays."""
        near = [self.near(edge) for edge in self.problem.edges]
        figures = [self.figures(i) for i in range(len(self.facts))]
        return ChoiceReader(self.problem, self.stretches, self.facts, figures, self.reads, self.barred, near)

    def read_off(self, numbers: Sequence[int], at: Floats, between: float | Floats = 0.0) -> Kept:
        """The choice and fates that the options of `costs(at, between)` with these numbers stand for, and their costs
        without prices. `between` may differ from vertex to vertex."""
        prices = self._by_stretch(at)
        return self.reader.read_off(numbers, prices, _until(prices)[self._places] + between)


def keep_problem(problem: SearchProblem, needs: Mapping[fx.Node, Needs], *, only_free: bool) -> KeepProblem:
    """`problem` with the fates that its settings leave; `needs`: what the backward of each call reads. `only_free`:
    only free results are computed again."""
    marked = recomputed(problem.graph)
    facts: list[VertexFacts] = []
    reads = tuple(_reads(problem, edge, needs) for edge in problem.edges)
    read = {(edge.producer, edge.result) for edge in itertools.compress(problem.edges, reads)}
    for i, vertex in enumerate(problem.vertices):
        its = needs.get(vertex.node, NOTHING) if vertex.kind is VertexKind.OPERATOR else NOTHING
        facts.append(
            VertexFacts(
                _fates(vertex, its, marked, problem.settings.recompute, only_free),
                _is_free(vertex),
                bool(its.results) or any((i, r) in read for r in range(len(vertex.options.results))),
                bool(its.results),
                vertex.kind is VertexKind.OPERATOR and is_view(vertex.node),
                float(its.beside),
            )
        )
    barred = tuple(_barred(problem, edge) for edge in problem.edges)
    return KeepProblem(
        problem, stretches_of(problem), tuple(facts), reads, tuple(at_hand(problem)), barred, paths_of(problem, reads)
    )


def _until(prices: Floats) -> Floats:
    """The cost of keeping a byte until the backward reaches each stretch, given the price of a byte in each."""
    until: Floats = np.cumsum(prices[::-1])[::-1]
    return until


def _share(options: Options) -> Floats:
    """The share of the operator's largest tensor that one device holds, under each option."""
    tensors = zip((*options.tables[0], *options.tables[1]), (*options.operands, *options.results), strict=True)
    table, codes = max(((t, c) for t, c in tensors if t), key=lambda pair: float(pair[0].held.max()))
    share: Floats = table.held[codes] / table.held.max()
    return share


def _reads(problem: SearchProblem, edge: Edge, needs: Mapping[fx.Node, Needs]) -> bool:
    """Whether the backward of an edge's consumer reads its tensor."""
    consumer = problem.vertices[edge.consumer]
    return consumer.kind is VertexKind.OPERATOR and edge.operand in needs.get(consumer.node, NOTHING).operands


def _barred(problem: SearchProblem, edge: Edge) -> tuple[bool, bool]:
    """Whether the settings forbid gathering a weight again, and keeping it gathered."""
    if edge.value not in problem.tensors.weights or problem.settings.regather is None:
        return False, False
    return not problem.settings.regather, problem.settings.regather


def _is_free(vertex: Vertex) -> bool:
    """Whether recomputing a vertex costs next to nothing: views, casts, and elementwise operators."""
    if vertex.kind is not VertexKind.OPERATOR:
        return True
    if draws_random_numbers(vertex.node):
        return False
    return rearranges(vertex.node) or is_pointwise(vertex.node.target)


def _fates(
    vertex: Vertex, needs: Needs, marked: frozenset[fx.Node], recompute: Recompute, only_free: bool
) -> tuple[Fate, ...]:
    """The fates that a vertex may have."""
    node, operator = vertex.node, vertex.kind is VertexKind.OPERATOR
    able = vertex.kind is VertexKind.HUB or node.target is draw
    able = able or (isinstance(node.target, OpOverload) and not draws_random_numbers(node))
    return fates_of(
        Candidate(
            fixed=vertex.kind in (VertexKind.INPUT, VertexKind.OUTPUT),
            marked=operator and node in marked,
            view=operator and is_view(node),
            able=able,
            allowed=recompute is not Recompute.NONE and (not only_free or _is_free(vertex)),
            read=bool(needs.results),
        )
    )


def cost_with_fates(problem: SearchProblem, choice: tuple[int, ...], keeping: Keeping) -> float:
    """The cost of a choice, with its fates and the conversions that the backward repeats."""
    total = keeping.cost + sum(float(v.unary[c]) for v, c in zip(problem.vertices, choice, strict=True))
    for edge, again in zip(problem.edges, keeping.again, strict=True):
        once, twice, *_, moves, _ = conversion(edge.table, *edge.between(problem.vertices, choice))
        total += twice if again and moves else once
    return total


def seconds_again(problem: SearchProblem, choice: tuple[int, ...], keeping: Keeping) -> float:
    """The additional seconds of the backward for results that are not kept."""
    every = zip(problem.vertices, choice, keeping.fates, strict=True)
    return sum(float(fate.seconds(v.options, problem.settings)[c]) for v, c, fate in every)
