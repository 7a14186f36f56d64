"""The search under a memory limit: strategies, kept results and recomputed results are one decision.

There are three plans, and the limit is 4 bytes:

    plan    cost    bytes    cost + 0.5 * bytes
    A         10        8    14
    B         12        4    14
    C         16        3    17.5

At the price 0.5 of a byte no plan costs less than 14, so a plan within the limit costs at least 14 - 0.5 * 4 = 12. B
costs 12 and is proven optimal.

If the limit is not binding, the strategies are those of the cheapest plan, and results that cost nothing to recompute
are not kept. Otherwise the search chooses strategies and fates together, at a price per byte.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import networkx
import numpy as np
from torch import fx

from ...strategy.basics.blocks import tell
from ...strategy.basics.units import human
from ...strategy.errors import DoesNotFitError, StrategyError
from ..cost.conversion import Codes, Floats
from ..memory.backward_memory import at_vertices, timeline
from ..memory.held import Held
from ..memory.keeping import CHEAP, KeepProblem, keep_problem
from ..memory.needs import Needs, needs_of
from ..memory.reader import Keeping, Kept
from ..memory.stretches import SHORTEST, stretches_of
from ..minsum.eliminate import TABLE_LIMIT, EliminationOrder, affordable, eliminate_in, elimination_order, order_like
from ..minsum.narrow import Narrowing
from ..minsum.network import Costs, Found
from ..minsum.optimum import optimum
from ..minsum.reduce import reduced
from ..problem.problem import AMONG, Recompute, SearchProblem, Settings, network_of
from .solution import Solution

ROUNDS = 8  # prices that are tried between one that is too low and one that is high enough
CURVE_FROM, CURVE_BY, CURVE_STEP, CURVE_IDLE = 1e-3, 4.0, 1e-2, 6  # prices of a curve, the distance of points, the end
LITTLE_WORK = 1e8  # sums of an elimination that may run for many prices
FEW_OPTIONS = 40  # of every vertex: with no more, leaving options out saves little work
MANY_OPTIONS = (64, 32, 16, 8, 4)  # options of a vertex to keep, while all are too much work
PRICES = (0.1, 1.0)  # of all bytes within the limit, relative to the cost of the cheapest plan
SWEEPS, MOST = 4, 8.0  # sweeps to find promising options; the cap on costs, relative to the cheapest plan
GAP = 5e-3  # the gap between a plan and its bound above which fates are chosen alone too
CLOSE = 1e-4  # the gap at which a plan is close enough to its bound
WIDE_GAP = 1e-2  # the gap above which other stretches are tried
FEW_VERTICES = 400  # up to which a graph is cut into short stretches too
LADDER, STEEP = 8, 12.0  # prices that are tried until one is high enough; the factor from one to the next


@dataclass(frozen=True)
class Point:
    """A plan with its fates: its cost, and the bytes that a device holds while each vertex runs, `modelled` as the
    prices count them and `held` by the timeline.

    numbers       its options with fates, as `KeepProblem.costs` numbers them
    kept_prices   the price at each vertex of a byte that is kept for it, by which the plan decides whether a conversion
                  runs again
    """

    numbers: tuple[int, ...]
    choice: tuple[int, ...]
    keeping: Keeping
    cost: float
    modelled: Floats
    held: Floats
    when: Held
    kept_prices: Floats = field(repr=False)

    @property
    def peak(self) -> float:
        """The most bytes that a device holds at any time."""
        return float(self.held.max(initial=0.0))


def kept_for_free(problem: SearchProblem, choice: tuple[int, ...], needs: Mapping[fx.Node, Needs]) -> Point:
    """The strategies of `choice` with the fewest bytes kept at next to no cost; under `Recompute.ALL` with the fewest
    of all."""
    everything = problem.settings.recompute is Recompute.ALL
    own = keep_problem(problem, needs, only_free=not everything).at(choice)
    prices = np.zeros(len(problem.vertices))
    price = _outweighing(problem) if everything else _next_to_nothing(problem.settings)
    prices[-1:] = 2 * price  # a stretch that is recomputed at once is there together with its operands
    return _read(own, _cheapest_fates(own.costs(prices, price)), prices, price)


def _cheapest_fates(costs: Costs) -> tuple[int, ...]:
    """The least of `costs`; reductions leave next to nothing of them if strategies are given."""
    try:
        rest = reduced(costs)
    except StrategyError:  # the strategies are impossible, whatever is kept
        return (0,) * len(costs.unary)
    order = elimination_order(rest.costs, TABLE_LIMIT)
    return rest.whole(eliminate_in(rest.costs, affordable(rest.costs, order)).choice)


def with_fates(problem: SearchProblem, found: Solution) -> Solution:
    """`found`, with the cheapest fates that keep to the memory limit; its strategies stay. Raises DoesNotFitError if
    there are none."""
    needs = needs_of(problem.graph, problem.tensors.flows)
    first, limit = kept_for_free(problem, found.choice, needs), problem.settings.memory_limit
    if limit is not None and first.peak > limit:
        first = _Search(keep_problem(problem, needs, only_free=False).at(found.choice), limit, first).best(found)[0]
        return replace(_solution(found, first, found.bound), binding=True)
    return _solution(found, first, found.bound)


def within_memory(problem: SearchProblem, free: Solution) -> Solution:
    """The cheapest plan found that keeps to the memory limit of `problem`, with a bound on the cost of any such plan.
    `free`: the cheapest one without a limit. Raises DoesNotFitError if none is found.

    Lagrangian relaxation: for any price p per byte the minimum of `cost + p * (memory - limit)` is a bound. The best
    price is where the cheapest plan changes from one that fits to one that does not: the search tries the price at
    which the last two plans cost the same, until neither is beaten (Handler & Zang, "A dual algorithm for the
    constrained shortest path problem", 1980). Equal layers change together, so parts of the two plans are mixed as
    far as they fit. If a gap is left, only fates are chosen, with the strategies of either plan.

    All recomputed values of a stretch are held at once, and values between stretches are kept. So if no plan is found,
    or a gap is left, pairs of stretches are joined, or a graph of few operators is cut more often. If a search is much
    work, only promising options are considered (`_promising`).
    """
    needs = needs_of(problem.graph, problem.tensors.flows)
    first, limit = kept_for_free(problem, free.choice, needs), problem.settings.memory_limit
    if limit is None or first.peak <= limit:
        return _solution(free, first, free.bound)
    whole = keep_problem(problem, needs, only_free=False)
    found: list[tuple[Point, float]] = []
    refused: list[DoesNotFitError] = []
    tell(math.inf, free.bound)  # the known plan does not fit
    some, ceiling = _promising(whole, free, limit)
    for stretches in _cuts(whole):
        if any(point.cost <= bound * (1 + WIDE_GAP) for point, bound in found):
            break
        tried = _Search(replace(some, stretches=stretches), limit, first)
        try:
            point, bound = _cheapest(replace(whole, stretches=stretches), tried, free)
            found.append((point, max(free.bound, min(bound, ceiling))))
            tell(min(found, key=_cost)[0].cost, min(found, key=_cost)[1])
        except DoesNotFitError as error:
            refused.append(error)
    if not found:
        raise min(refused, key=lambda error: error.least)
    return replace(_solution(free, *min(found, key=_cost)), binding=True)


def has_room(problem: SearchProblem, choice: tuple[int, ...]) -> bool:
    """Whether a plan with these strategies certainly fits, whatever it keeps: three times the bytes of all its tensors
    and converted tensors are within the limit."""
    limit, vertices = problem.settings.memory_limit, problem.vertices
    if limit is None:
        return True
    total = sum(float(v.options.memory[c] + v.options.made[c]) for v, c in zip(vertices, choice, strict=True))
    for edge in problem.edges:
        total += float(edge.table.held[edge.between(vertices, choice)[1]])
    return 3 * total <= limit


def _cost(found: tuple[Point, float]) -> float:
    return found[0].cost


def _cuts(whole: KeepProblem) -> Iterator[tuple[int, ...]]:
    """The ways to cut a graph into stretches, in the order in which they are tried."""
    yield whole.stretches
    yield tuple(number // 2 for number in whole.stretches)
    if len(whole.problem.vertices) <= FEW_VERTICES:
        yield stretches_of(whole.problem, SHORTEST // 2)


def _promising(whole: KeepProblem, free: Solution, limit: float) -> tuple[KeepProblem, float]:
    """`whole` with so few options of each vertex that finding the cheapest plan at a price is little work, and a lower
    bound on the cost of a plan with another option. (Keeping less never saves time, so a bound without a limit holds
    under any limit.) The options of `free` are kept, and the most promising ones with and without a price per byte.
    """
    few = max(len(vertex.options) for vertex in whole.problem.vertices) <= FEW_OPTIONS
    if few or _is_little_work(whole):
        return whole, math.inf
    worth = [_worth(whole.problem, free, price / limit) for price in (0.0, *PRICES)]

    @cache
    def among(many: int) -> tuple[KeepProblem, float]:
        rows, dropped = _most_worth(whole.problem, free, worth, many)
        return whole.among(rows), dropped

    fewest = bisect_left(MANY_OPTIONS[:-1], True, key=lambda many: _is_little_work(among(many)[0]))
    return among(MANY_OPTIONS[fewest])


def _most_worth(
    problem: SearchProblem, free: Solution, worth: list[list[Floats]], many: int
) -> tuple[list[Codes], float]:
    """For each vertex, the option of `free` and the `many` best ones by each of `worth`; and a lower bound on the cost
    of a plan with another option, by the first of `worth`. Vertices that share options keep the same."""
    alike: dict[int, set[int]] = {}
    for i, vertex in enumerate(problem.vertices):
        best = [np.argsort(each[i], kind="stable")[:many].tolist() for each in worth]
        alike.setdefault(id(vertex.options), set()).update([free.choice[i]], *best)
    dropped = MOST * free.cost
    rows = {key: np.array(sorted(kept)) for key, kept in alike.items()}
    for vertex, costs in zip(problem.vertices, worth[0], strict=True):
        dropped = min(dropped, float(np.delete(costs, rows[id(vertex.options)]).min(initial=math.inf)))
    return [rows[id(vertex.options)] for vertex in problem.vertices], dropped


def _worth(problem: SearchProblem, free: Solution, price: float) -> list[Floats]:
    """A lower bound on the cost of a plan with each option, if a byte that waits for the backward costs `price` times
    the cost of `free`."""
    written = network_of(problem)
    extra = (price * free.cost * vertex.options.memory for vertex in problem.vertices)
    unary = tuple(costs + more for costs, more in zip(written.unary, extra, strict=True))
    chosen = zip(problem.vertices, free.choice, strict=True)
    most = MOST * free.cost * (1 + price * sum(float(v.options.memory[c]) for v, c in chosen))
    narrowing = Narrowing(replace(written, unary=unary).at_most(most), most)
    for sweep in range(SWEEPS):
        narrowing.sweep(forward=sweep % 2 == 0)
    return narrowing.worth


def _is_little_work(problem: KeepProblem) -> bool:
    """Whether the elimination that finds the cheapest plan at a price may run for many prices."""
    costs = problem.costs(np.zeros(len(problem.stretches)))
    return elimination_order(costs, give_up=LITTLE_WORK).work <= LITTLE_WORK


def _cheapest(whole: KeepProblem, search: _Search, free: Solution) -> tuple[Point, float]:
    """The cheapest plan of `search` with its bound, or a cheaper one with the strategies of a plan on its way."""
    point, bound = search.best(free)
    if point.cost > bound * (1 + GAP):
        for choice in dict.fromkeys((free.choice, search.above.choice, point.choice)):
            with contextlib.suppress(DoesNotFitError):
                own = _Search(whole.at(choice), search.limit, search.first).best(free)[0]
                point = min(point, own, key=lambda p: p.cost)
    return point, search.bound(free, point)


def trade_offs(problem: SearchProblem, free: Solution) -> Iterator[Solution]:
    """Plans that each hold less at their peak than the one before, and cost more: `free`, the cheapest, with its free
    fates, then the optimum at each of a rising series of prices per byte."""
    needs = needs_of(problem.graph, problem.tensors.flows)
    first = kept_for_free(problem, free.choice, needs)
    yield _solution(free, first, free.bound)
    some, ceiling = _promising(keep_problem(problem, needs, only_free=False), free, first.peak)
    tried, least, idle = _Search(some, 0.0, first), first.peak, 0
    price = CURVE_FROM * max(free.cost, 1e-12) / max(first.peak, 1.0)
    while idle < CURVE_IDLE:
        point = tried.at_price(price)
        tried.look_at(point)
        idle = idle + 1 if point.peak >= least * (1 - CURVE_STEP) else 0
        if not idle:
            least = point.peak
            yield _solution(free, point, max(free.bound, min(point.cost, ceiling)))
        price *= CURVE_BY


class _Search:
    """The state of a search: the prices tried, and their results."""

    def __init__(self, problem: KeepProblem, limit: float, first: Point) -> None:
        self.problem, self.limit = problem, limit
        self.tried: list[tuple[Floats, float]] = []  # prices, and the least of cost and priced bytes
        self.first = self.above = first
        self.order: EliminationOrder | None = None
        self.known = problem.numbers(first.choice, first.keeping.fates)
        self._start()

    def best(self, free: Solution) -> tuple[Point, float]:
        """The cheapest plan found, and a bound."""
        above, below = self._bracket(free)
        best = below
        for _ in range(ROUNDS):
            saved = float(self.weights @ (above.modelled - below.modelled))
            if saved <= 0 or below.cost <= above.cost:
                break
            price = (below.cost - above.cost) / saved
            point = self.at_price(price)
            dual = point.cost + price * float(self.weights @ point.modelled)
            if dual >= (below.cost + price * float(self.weights @ below.modelled)) * (1 - 1e-9):
                break
            if point.peak <= self.limit:
                below = point
                best = min(best, point, key=lambda p: p.cost)
            else:
                above = point
        self.above = above
        stretches = np.array(self.problem.stretches)
        for parts in (stretches, self.problem.count - 1 - stretches, None):
            if best.cost <= self.bound(free, best) * (1 + CLOSE):
                break
            mixed = self._mixed(above, below, self._apart(above, below) if parts is None else parts)
            best = min([best, *mixed], key=lambda p: p.cost)
        return best, self.bound(free, best)

    def _bracket(self, free: Solution) -> tuple[Point, Point]:
        """A plan that does not fit, and one that does. The price of a byte rises at the times at which the last plan
        held too many; if that finds no plan that fits, at those of all plans so far."""
        least = self.first
        for forgetting in (True, False):
            above, price = self.first, 1e-2 * free.cost / self.limit
            self._start()
            for _ in range(LADDER):
                point = self.at_price(price)
                least = min(least, point, key=lambda p: p.peak)
                if point.peak <= self.limit:
                    return above, point
                above = point
                self.look_at(point, forgetting)
                price *= STEEP
        raise _too_little(self.problem, least, self.limit)

    def _start(self) -> None:
        """Start with a price at the peak of the first plan only."""
        self.weights = np.zeros(len(self.problem.stretches))
        self.weights[int(self.first.held.argmax())] = 1.0

    def at_price(self, price: float) -> Point:
        """The cheapest plan at `price` per byte, spread over the times in `weights`."""
        prices = price * self.weights
        point, found, self.order = _solved(self.problem, prices, self.order, self.known)
        self.known = point.numbers
        self.tried.append((prices, found.bound))
        return point

    def look_at(self, point: Point, forgetting: bool = False) -> None:
        """Put a price on a byte at the peak of `point` too; `forgetting`: remove the prices from times at which `point`
        is within the limit."""
        if forgetting:
            self.weights = np.where(point.held > self.limit, self.weights, 0.0)
        when = int(point.held.argmax())
        self.weights[when] = self.weights[when] or self.weights.max() or 1.0
        self.weights /= self.weights.sum()

    def _mixed(self, above: Point, below: Point, parts: Codes) -> Iterator[Point]:
        """Plans that equal `above` in the first parts, as many as fit, and `below` in the others. `parts`: the number
        of each vertex's part."""
        low, high = 0, int(parts.max(initial=0)) + 1  # numbers of parts of `above` that fit, and that do not
        while high - low > 1:
            many = (low + high) // 2
            numbers = np.where(parts < many, above.numbers, below.numbers)
            prices = np.where(parts < many, above.kept_prices, below.kept_prices)
            point = _read(self.problem, tuple(int(n) for n in numbers), np.zeros(len(parts)), prices)
            if math.isfinite(point.cost) and point.peak <= self.limit:
                low = many
                yield point
            else:
                high = many

    def _apart(self, above: Point, below: Point) -> Codes:
        """The connected parts in which the two plans differ, numbered in their order."""
        graph = networkx.Graph()
        graph.add_nodes_from(np.flatnonzero(np.array(above.numbers) != np.array(below.numbers)).tolist())
        ends = ((edge.producer, edge.consumer) for edge in self.problem.problem.edges)
        graph.add_edges_from((a, b) for a, b in ends if a in graph and b in graph)
        parts = np.zeros(len(self.problem.stretches), dtype=np.intp)
        for number, part in enumerate(sorted(map(sorted, networkx.connected_components(graph)))):
            parts[part] = number
        return parts

    def bound(self, free: Solution, point: Point) -> float:
        """A lower bound on the cost of any plan that fits, if the bytes that the search does not count are those of
        `point`."""
        room = self.limit - (point.held - point.modelled)
        bound = max([free.bound, *(dual - float(prices @ room) for prices, dual in self.tried)])
        return min(bound, point.cost)


def _solved(
    problem: KeepProblem,
    prices: Floats,
    like: EliminationOrder | None = None,
    known: tuple[int, ...] | None = None,
) -> tuple[Point, Found, EliminationOrder]:
    """The cheapest plan at these prices, its `Found`, and the elimination order; `like`: the order for other prices;
    `known`: the numbers of a known plan."""
    costs = problem.costs(prices)
    order = (like and order_like(like, costs)) or elimination_order(costs, TABLE_LIMIT)
    if order.quick or known is None:
        found = eliminate_in(costs, affordable(costs, order))
    else:
        start = known
        found = optimum(costs, TABLE_LIMIT, lambda: start)
    return _read(problem, found.choice, prices), found, order


def _read(problem: KeepProblem, numbers: tuple[int, ...], at: Floats, between: float | Floats = 0.0) -> Point:
    kept: Kept = problem.read_off(numbers, at, between)
    when = timeline(problem, kept)
    held = at_vertices(when) + problem.problem.beside
    choice = problem.original(kept.choice)
    return Point(numbers, choice, kept.keeping, kept.cost, kept.held, held, when, kept.prices)


def _next_to_nothing(settings: Settings) -> float:
    """A price per byte at which only free results are computed again."""
    return CHEAP * settings.weights.compute / settings.profile.memory_bandwidth


def _outweighing(problem: SearchProblem) -> float:
    """A price per byte that outweighs everything else, within the precision of floats."""
    heaviest = sum(float(v.options.memory.max()) for v in problem.vertices)
    return 1e6 / max(heaviest, 1.0)


def _solution(free: Solution, point: Point, bound: float) -> Solution:
    return replace(free, choice=point.choice, cost=point.cost, bound=bound, keeping=point.keeping, held=point.when)


def _too_little(problem: KeepProblem, least: Point, limit: float) -> DoesNotFitError:
    """The error that no plan keeps to the limit; `least`: the plan with the lowest peak."""
    heaviest = sorted(((size, purpose) for purpose, size in least.when.at_peak.items()), reverse=True)
    phase, at, _ = least.when.moments[least.when.when]
    what = ", ".join(f"{purpose} {human(size)}" for size, purpose in heaviest[:5] if size)
    where = f"on the mesh {problem.problem.settings.mesh}{AMONG if problem.problem.approximate else ''}"
    return DoesNotFitError(where, least.peak, limit, f"{what}, in the {phase} of {at}")
