"""Problems for benchmarks/min_sum.py, drawn by a seed: random graphs, and graphs as other planners have them.

Costs are whole numbers, so that all solvers have the same optimum. Each problem has a choice that is finite and keeps
to every limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from min_sum_limits import Resource
from numpy.typing import NDArray

from partway.propagation.minsum.network import Costs

Floats = NDArray[np.float64]
LAYOUTS = 5  # that the options of a vertex stand for, where tables are prices of conversions


@dataclass(frozen=True)
class Problem:
    """Costs, and what is limited."""

    costs: Costs
    resources: tuple[Resource, ...] = ()


@dataclass(frozen=True)
class Case:
    """How a problem is drawn.

    kind       "random": any numbers; "layouts": prices of conversions between layouts; "foreign": a graph of the
               second kind, the core, with vertices around that follow from others or add up
    width      how many earlier vertices a vertex hangs on at most (random k-trees without some edges, whose treewidth
               is at most this); of the core of a foreign graph the span of its edges, which its treewidth comes near
    options    of a vertex, at least and at most
    coupling   the largest cost of a pair, where a vertex costs up to 100
    infinite   the share of the tables in which a fifth is infinite
    resources  how many there are; the last counts only a stretch of the vertices, as a time of a step does
    core       vertices of the core of a foreign graph
    """

    kind: str
    nodes: int
    width: int
    options: tuple[int, int]
    coupling: int = 100
    infinite: float = 0.2
    resources: int = 0
    core: int = 0
    seed: int = 0

    @property
    def name(self) -> str:
        low, high = self.options
        more = f" {self.resources} resources" if self.resources else ""
        inside = f" core {self.core}" if self.core else ""
        return f"{self.kind} {self.nodes}x{low}-{high} width {self.width}{inside} coupling {self.coupling}{more}"


class _Drawing:
    """A problem under way: sizes and unary costs, tables, and a choice that is finite."""

    def __init__(self, case: Case) -> None:
        self.case, self.random = case, np.random.default_rng(case.seed)
        self.unary: list[Floats] = []
        self.pairs: dict[tuple[int, int], Floats] = {}
        self.chosen: list[int] = []
        self.layouts: list[NDArray[np.int64]] = []

    def vertex(self, size: int | None = None) -> int:
        """A vertex more."""
        low, high = self.case.options
        many = size or int(self.random.integers(low, high + 1))
        self.unary.append(self.random.integers(0, 101, many).astype(float))
        self.chosen.append(int(self.random.integers(many)))
        self.layouts.append(self.random.integers(0, LAYOUTS, many))
        return len(self.unary) - 1

    def put(self, a: int, b: int, table: Floats) -> None:
        """A table [option of a, option of b], in place of one that there may be."""
        self.pairs[min(a, b), max(a, b)] = table if a < b else table.T

    def edge(self, a: int, b: int) -> None:
        """A table of the case's kind."""
        case, shape = self.case, (len(self.unary[a]), len(self.unary[b]))
        if case.kind == "random":
            table = self.random.integers(0, case.coupling + 1, shape).astype(float)
        else:
            prices = self.random.integers(case.coupling // 10, case.coupling + 1, (LAYOUTS, LAYOUTS)).astype(float)
            np.fill_diagonal(prices, 0.0)
            table = prices[self.layouts[a]][:, self.layouts[b]]
        if self.random.random() < case.infinite:
            kept = table[self.chosen[a], self.chosen[b]]
            table[self.random.random(shape) < 0.2] = np.inf
            table[self.chosen[a], self.chosen[b]] = kept
        self.put(a, b, table)

    def follower(self, of: int) -> int:
        """A vertex whose option follows from that of another."""
        many = len(self.unary[of])
        size = int(self.random.integers(2, many + 1)) if many > 1 else 1
        v, seats = self.vertex(size), self.random.integers(0, size, many)
        seats[:size] = np.arange(size)
        table = np.full((many, size), np.inf)
        table[np.arange(many), seats] = self.random.integers(0, 20, many)
        self.chosen[v] = int(seats[self.chosen[of]])
        self.put(of, v, table)
        return v

    def added(self, a: int, b: int) -> None:
        """A table that is a row plus a column."""
        row, column = (self.random.integers(0, 50, len(self.unary[v])).astype(float) for v in (b, a))
        if (min(a, b), max(a, b)) not in self.pairs:
            self.put(a, b, column[:, None] + row)

    def done(self) -> Problem:
        """The problem, with its limits."""
        costs = Costs(tuple(self.unary), self.pairs)
        return Problem(costs, tuple(self._resource(number) for number in range(self.case.resources)))

    def _resource(self, number: int) -> Resource:
        """What costs little uses much, and the choice that is known uses little."""
        uses, count = [], len(self.unary)
        part = (count // 4, count // 2) if number and number == self.case.resources - 1 else (0, count)
        for v, own in enumerate(self.unary):
            use = np.round(
                20 + 0.8 * (100 - own) * self.random.random(len(own)) + self.random.integers(0, 20, len(own))
            )
            use[self.chosen[v]] = round(0.6 * float(use[self.chosen[v]]))
            uses.append(use if part[0] <= v < part[1] else np.zeros(len(own)))
        least = sum(float(use[c]) for use, c in zip(uses, self.chosen, strict=True))
        return Resource(tuple(uses), round(1.1 * least))


def drawn(case: Case) -> Problem:
    """The problem of a case."""
    drawing = _Drawing(case)
    if case.kind == "foreign":
        _foreign(drawing)
    else:
        _k_tree(drawing, case.nodes)
    return drawing.done()


def _k_tree(drawing: _Drawing, nodes: int) -> None:
    """Each vertex next to a clique among the last ones, a quarter of the edges left out."""
    width, random = drawing.case.width, drawing.random
    first = [drawing.vertex() for _ in range(min(width, nodes))]
    cliques = [first]
    for place, a in enumerate(first):
        for b in first[place + 1 :]:
            drawing.edge(a, b)
    for _ in range(len(first), nodes):
        clique = cliques[int(random.integers(max(0, len(cliques) - 8), len(cliques)))]
        v = drawing.vertex()
        for u in clique:
            if u == clique[-1] or random.random() < 0.75:
                drawing.edge(u, v)
        drop = int(random.integers(len(clique)))
        cliques.append([u for place, u in enumerate(clique) if place != drop] + [v])


def _foreign(drawing: _Drawing) -> None:
    """A core of vertices next to a few of the `width` before each, and around it chains of vertices that follow from
    one of the core, some of them next to others by tables that add up or that say the same again."""
    case, random = drawing.case, drawing.random
    core: list[int] = []
    for place in range(case.core):
        v = drawing.vertex()
        if place:
            near = random.choice(min(case.width, place), size=min(3, case.width, place), replace=False)
            for back in {0, *near.tolist()}:
                drawing.edge(core[place - 1 - back], v)
        core.append(v)
    around = list(core)
    while len(drawing.unary) < case.nodes:
        of = around[int(random.integers(len(around)))]
        v = drawing.follower(of)
        around.append(v)
        if random.random() < 0.5:
            drawing.added(around[int(random.integers(len(around) - 1))], v)


def _random(nodes: int, width: int, options: tuple[int, int], coupling: int, **more: int) -> Case:
    return Case("random", nodes, width, options, coupling, **more)


def _layouts(nodes: int, width: int, options: tuple[int, int], coupling: int, **more: int) -> Case:
    return Case("layouts", nodes, width, options, coupling, **more)


CASES: Mapping[str, tuple[Case, ...]] = {
    "random": (
        *(_random(50, width, (4, 10), 100) for width in (3, 5, 8)),
        *(_random(nodes, 3, (4, 30), 100) for nodes in (50, 500, 5000)),
        *(_random(nodes, 5, (4, 10), coupling) for nodes in (500, 5000) for coupling in (10, 100)),
        *(
            _random(nodes, width, (4, 30), 10)
            for nodes, width in ((50, 15), (500, 8), (500, 15), (5000, 8), (5000, 15))
        ),
        *(_layouts(nodes, 3, (4, 30), 60) for nodes in (50, 500, 5000)),
        *(_layouts(nodes, width, (4, 30), 20) for nodes, width in ((50, 8), (50, 15), (500, 8), (500, 15), (5000, 5))),
    ),
    "foreign": (
        Case("foreign", 800, 10, (4, 12), 60, core=200),
        Case("foreign", 3000, 30, (4, 12), 60, core=300),
        Case("foreign", 10_000, 80, (4, 12), 40, core=400),
        Case("foreign", 30_000, 150, (4, 12), 30, core=500),
        Case("foreign", 65_000, 280, (4, 12), 20, core=700),
    ),
    "resources": (
        _random(50, 3, (4, 10), 50, resources=2),
        _random(100, 5, (4, 10), 20, resources=3),
        _layouts(200, 3, (4, 10), 30, resources=2),
        _layouts(500, 3, (4, 10), 30, resources=4),
        Case("foreign", 800, 10, (4, 12), 30, core=200, resources=3),
        Case("foreign", 3000, 20, (4, 12), 20, core=300, resources=4),
    ),
}
