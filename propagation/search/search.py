"""The searches: from a SearchProblem to one option per vertex.

One problem, three ways:

    dynamic_programming    exact: elimination (`eliminate.py`), after options that no optimal plan takes were left out
                           (`narrow.py`) where there are many
    sharding_propagation   breadth-first from the annotations, each vertex taking its cheapest option given its
                           visited neighbours; then vertices are revisited while it pays
    recursive_programming  one mesh axis after another, each solved exactly given the axes before it
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ...strategy.choice import Choice
from ...strategy.errors import StrategyError, VerifyError
from ..cost.conversion import Codes, Floats, tie
from .eliminate import TABLE_LIMIT, Costs, EliminationOrder, Solution, eliminate, eliminate_in, elimination_order
from .narrow import Between, Converting, Matrix, Narrowing, narrow
from .problem import Edge, Options, SearchProblem, VertexKind

MUCH_WORK = 1.2e9  # sums of an elimination above which options are left out first
SMALL_TABLES = 2**24  # the limit where all tables together are far too much work
MANY_PAIRS = 4e7  # pairs of options above which they are not written out: 320 MB
FEW_PAIRS = 1.5e7  # pairs of options that are left when narrowing may stop
AMONG = " among the strategies that enable_algo_approxi leaves"


class SearchMode(Choice):
    """How a plan is searched for."""

    SHARDING_PROPAGATION = "sharding_propagation"
    DYNAMIC_PROGRAMMING = "dynamic_programming"
    RECURSIVE_PROGRAMMING = "recursive_programming"


def search(problem: SearchProblem, mode: SearchMode, below: float = math.inf) -> Solution:
    """The plan that `mode` finds. Its cost is that of the whole problem, whatever the mode looked at, and stands beside
    the bound that the exact search proves. Where another mesh has a plan that costs `below`, any plan will do once no
    cheaper one is in sight, or were too much work to find.

    Raises StrategyError where no plan keeps to the memory limit of the problem's settings, or where there is none.
    """
    limit = problem.settings.memory_limit
    if limit is None:
        exact, price = dynamic_programming(problem, below=below), 0.0
    else:
        exact, price = within_memory(problem, limit)
    if math.isinf(exact.cost):
        raise StrategyError(_impossible(problem, exact))
    if mode is SearchMode.DYNAMIC_PROGRAMMING:
        return exact
    other = sharding_propagation if mode is SearchMode.SHARDING_PROPAGATION else recursive_programming
    found = other(problem, price)
    found = replace(found, cost=problem.cost(found.choice), bound=exact.bound, attained=exact.proven)
    # at the price of memory that suits the optimum, another plan may still hold more; and vertices that choose one
    # after another may come to conversions that `elementwise_follow` makes impossible
    fits = limit is None or problem.memory(found.choice) <= limit
    return found if fits and math.isfinite(found.cost) else exact


def costs_of(problem: SearchProblem, price: float = 0.0) -> Costs:
    """The numbers of `problem`, with `price` for each byte of memory; those of parallel edges are added up. What has
    the same structure is the same array."""
    shared: dict[object, Floats] = {}

    def once(key: object, make: Callable[[], Floats]) -> Floats:
        if key not in shared:
            shared[key] = make()
        return shared[key]

    def alone(options: Options) -> Floats:
        return once(id(options), lambda: options.unary + price * options.memory if price else options.unary)

    parallel: dict[tuple[int, int], list[tuple[object, Edge]]] = {}
    for edge in problem.edges:
        ends = id(problem.vertices[edge.producer].options), id(problem.vertices[edge.consumer].options)
        key = (id(edge.table), *ends, edge.result, edge.operand)
        parallel.setdefault((edge.producer, edge.consumer), []).append((key, edge))
    pairs: dict[tuple[int, int], Floats] = {}
    for ends, several in parallel.items():
        matrices = [partial(edge.matrix, problem.vertices) for _, edge in several]
        added = matrices[0] if len(matrices) == 1 else partial(_added, matrices)
        pairs[ends] = once(tuple(key for key, _ in several), added)
    return Costs(tuple(alone(v.options) for v in problem.vertices), pairs)


def _added(matrices: Sequence[Callable[[], Floats]]) -> Floats:
    total: Floats = np.sum([matrix() for matrix in matrices], axis=0)
    return total


@dataclass(frozen=True)
class Network:
    """A problem as `narrow`, `propagate` and `revisit` look at it: unary costs, and what stands between vertices."""

    unary: tuple[Floats, ...]
    edges: tuple[tuple[tuple[int, int], Between], ...]

    def of(self, choice: tuple[int, ...]) -> float:
        """The cost of one option per vertex."""
        alone = sum(float(costs[c]) for costs, c in zip(self.unary, choice, strict=True))
        return alone + sum(float(between.given(choice[a], 0)[choice[b]]) for (a, b), between in self.edges)

    def at_most(self, most: float) -> Network:
        """The network in which no pair costs more than `most`; edges that are equal stay one."""
        cut = {id(between): between.at_most(most) for _, between in self.edges}
        return Network(self.unary, tuple((ends, cut[id(between)]) for ends, between in self.edges))


def network(costs: Costs) -> Network:
    """The network of costs that are written out."""
    matrices = {id(array): Matrix(array) for array in costs.pairs.values()}
    return Network(costs.unary, tuple((ends, matrices[id(array)]) for ends, array in costs.pairs.items()))


def network_of(problem: SearchProblem, price: float = 0.0) -> Network:
    """The network of `problem`, whose costs are written out only where they are few."""
    if pairs_of(problem) <= MANY_PAIRS:
        return network(costs_of(problem, price))
    parallel: dict[tuple[int, int], list[Edge]] = {}
    for edge in problem.edges:
        parallel.setdefault((edge.producer, edge.consumer), []).append(edge)
    edges: list[tuple[tuple[int, int], Between]] = []
    for ends, several in parallel.items():
        if len(several) == 1:
            edges.append((ends, Converting(several[0].table, *several[0].codes(problem.vertices))))
        else:
            matrices = [edge.matrix(problem.vertices) for edge in several]
            edges.append((ends, Matrix(np.sum(matrices, axis=0))))
    unary = tuple(v.options.unary + price * v.options.memory for v in problem.vertices)
    return Network(unary, tuple(edges))


def pairs_of(problem: SearchProblem) -> int:
    """How many pairs of options all edges have, those of the same structure counted once."""
    sizes = {
        (id(edge.table), id(a), edge.result, id(b), edge.operand): len(a) * len(b)
        for edge in problem.edges
        for a, b in [(problem.vertices[edge.producer].options, problem.vertices[edge.consumer].options)]
    }
    return sum(sizes.values())


def dynamic_programming(
    problem: SearchProblem, table_limit: float = TABLE_LIMIT, price: float = 0.0, below: float = math.inf
) -> Solution:
    """The optimum, proven; or, where tables would pass `table_limit` entries, a plan and how far off it may be.
    `price`: what a byte of memory costs; the cost of the solution has it in. `below`: as for `search`."""
    if pairs_of(problem) <= MANY_PAIRS:
        return optimum(
            costs_of(problem, price), table_limit, lambda: recursive_programming(problem, price).choice, below
        )
    known = recursive_programming(problem, price)
    known = replace(known, cost=known.cost + price * problem.memory(known.choice))
    if math.isinf(known.cost):
        return known
    whole = network_of(problem, price).at_most(2 * known.cost)
    left = narrow(whole.unary, whole.edges, min(known.cost, below), lambda found: found.pairs <= FEW_PAIRS)
    if left.bound >= below:
        return replace(known, bound=left.bound)
    known = _cheaper(known, left)
    found = known
    if left.pairs <= MANY_PAIRS:
        rest = restricted(problem, left.kept)
        found = optimum(costs_of(rest, price), table_limit, lambda: _among(left.kept, known.choice))
        choice = tuple(int(kept[c]) for kept, c in zip(left.kept, found.choice, strict=True))
        found = replace(found, choice=choice)
    return _better(found, known, left.bound, left.upper)


def _among(kept: list[Codes], choice: tuple[int, ...]) -> tuple[int, ...]:
    """The numbers of the options of `choice` among those kept; where one was left out, the first."""
    return tuple(int(np.argmax(rows == c)) for rows, c in zip(kept, choice, strict=True))


def _cheaper(known: Solution, left: Narrowing) -> Solution:
    """The plan that was known, or a cheaper one that was met by the way."""
    return known if left.best is None else replace(known, choice=left.best, cost=left.upper)


def _better(found: Solution, known: Solution, bound: float, upper: float) -> Solution:
    """The cheaper of the best plan among some options, with its bound, and a plan that was known, when every plan
    with another option costs at least `upper`. `bound`: what is known of all plans."""
    best = min(found, known, key=lambda solution: solution.cost)
    proven = max(bound, min(found.bound, upper)) if found is not known else bound
    return replace(best, bound=min(best.cost, proven), width=found.width)


def optimum(
    costs: Costs, table_limit: float, start: Callable[[], tuple[int, ...]], below: float = math.inf
) -> Solution:
    """`eliminate`; where that were much work, what no optimal plan takes is left out first. `start`: a plan."""
    order = elimination_order(costs, table_limit)
    if order.work <= MUCH_WORK:
        return eliminate_in(costs, order)
    first = start()
    known = revisit(costs, Solution(first, costs.of(first), -math.inf, 1))
    if math.isinf(known.cost):
        return eliminate_in(costs, order)
    whole = network(costs).at_most(2 * known.cost)
    upper = min(known.cost, below)
    left = narrow(whole.unary, whole.edges, upper, lambda found: elimination_order(_rest(found)).work <= MUCH_WORK)
    if left.bound >= below:
        return replace(known, bound=left.bound)
    known = _cheaper(known, left)
    rest = _rest(left)
    order = elimination_order(rest, table_limit)
    if order.work > 10 * MUCH_WORK and math.isfinite(below):
        return replace(known, bound=left.bound)
    found = eliminate_in(rest, _affordable(rest, order))
    choice = tuple(int(kept[c]) for kept, c in zip(left.kept, found.choice, strict=True))
    best = revisit(costs, replace(found, choice=choice, cost=costs.of(choice)))
    found = replace(best, bound=found.bound, width=found.width)
    return _better(found, known, left.bound, left.upper)


def _affordable(costs: Costs, order: EliminationOrder) -> EliminationOrder:
    """`order`, or where it is far too much work one of small tables, whose plan may not be the best."""
    return order if order.work <= 10 * MUCH_WORK else elimination_order(costs, SMALL_TABLES)


def _rest(left: Narrowing) -> Costs:
    """The problem of the options that are left."""
    return Costs(tuple(left.unary), {e.ends: e.costs.costs for e in left.edges if isinstance(e.costs, Matrix)})


def within_memory(problem: SearchProblem, limit: float) -> tuple[Solution, float]:
    """The cheapest plan found that holds at most `limit` bytes on a device, with a bound on what any such plan costs,
    and the price of a byte that it was found with.

    Lagrange: for any price p of a byte the least of `cost + p * (memory - limit)` is a bound. The best price is where
    the cheapest plan changes from one that fits to one that does not: the price at which the two last found cost the
    same is tried until neither is beaten (Handler & Zang, "A dual algorithm for the constrained shortest path
    problem", 1980).
    """
    free = dynamic_programming(problem)
    if math.isinf(free.cost) or problem.memory(free.choice) <= limit:
        return free, 0.0
    fits = _least_memory(problem)
    if problem.memory(fits.choice) > limit:
        raise StrategyError(_too_little(problem, fits, limit))
    above, bound, best_price = free, free.bound, 0.0
    while True:
        price = (fits.cost - above.cost) / (problem.memory(above.choice) - problem.memory(fits.choice))
        if price <= 0.0:
            break
        priced = dynamic_programming(problem, price=price)
        found = replace(priced, cost=problem.cost(priced.choice))
        bound, best_price = max(bound, priced.bound - price * limit), price
        held = problem.memory(found.choice)
        now = found.cost + price * held
        if now >= (fits.cost + price * problem.memory(fits.choice)) * (1 - 1e-12):
            break  # neither of the two is beaten: no price gives a higher bound
        if held <= limit:
            fits = found
        else:
            above = found
    return replace(fits, bound=bound, width=free.width), best_price


def _least_memory(problem: SearchProblem) -> Solution:
    """A plan that holds the least on a device."""
    if pairs_of(problem) > MANY_PAIRS:  # a price that outweighs all else
        heaviest = sum(float(v.options.memory.max()) for v in problem.vertices)
        priced = dynamic_programming(problem, price=1e6 / max(heaviest, 1.0))
    else:
        costs = costs_of(problem)
        possible = {id(array): np.where(np.isfinite(array), 0.0, np.inf) for array in costs.pairs.values()}
        pairs = {ends: possible[id(array)] for ends, array in costs.pairs.items()}
        memory = {id(v.options): v.options.memory for v in problem.vertices}
        priced = eliminate(Costs(tuple(memory[id(v.options)] for v in problem.vertices), pairs))
    return replace(priced, cost=problem.cost(priced.choice))


def _too_little(problem: SearchProblem, least: Solution, limit: float) -> str:
    needed = problem.memory(least.choice)
    held = sorted(
        ((float(v.options.memory[c]), v.name) for v, c in zip(problem.vertices, least.choice, strict=True)),
        reverse=True,
    )
    heaviest = ", ".join(f"{name} {size / 1e9:.3g} GB" for size, name in held[:5] if size)
    among = AMONG if problem.approximate else ""
    return (
        f"no plan on the mesh {problem.settings.mesh}{among} holds less than {needed / 1e9:.4g} GB on a device "
        f"(parameters, gradients, optimizer states and activations), and memory_limit is {limit / 1e9:.4g} GB; "
        f"a limit of {needed / 1e9 * 1.001:.4g} GB would do, or more devices. The heaviest: {heaviest}"
    )


def _impossible(problem: SearchProblem, found: Solution) -> str:
    """Which conversion of a plan is impossible."""
    for edge in problem.edges:
        producer, consumer = problem.vertices[edge.producer], problem.vertices[edge.consumer]
        before = producer.options[found.choice[edge.producer]].results[edge.result]
        after = consumer.options[found.choice[edge.consumer]].operands[edge.operand]
        if math.isinf(edge.table.rows([edge.table.index[before]])[0, edge.table.index[after]]):
            return (
                f"no plan was found on the mesh {problem.settings.mesh}: {producer.name} gives "
                f"{list(edge.table.shape)} as {before}, {consumer.name} takes it as {after}, and no conversion may "
                "stand between them; set elementwise_op_strategy_follow=False, or drop an annotation near them"
            )
    raise VerifyError("a plan without an impossible conversion costs infinitely much")


def sharding_propagation(problem: SearchProblem, price: float = 0.0) -> Solution:
    """Breadth-first from the annotated vertices (the inputs, if none is annotated), then revisiting while it pays.

    Several starts are tried, and the cheapest plan stands: from the annotations; from the inputs, so that an
    annotation cannot wreck what it has nothing to do with; and from the inputs split by their leading dim, which is
    data parallelism.
    """
    annotated = [i for i, v in enumerate(problem.vertices) if v.annotation]
    inputs = [i for i, v in enumerate(problem.vertices) if v.kind is VertexKind.INPUT]
    costs = network_of(problem, price)
    leading = {i: _most_split(problem.vertices[i].options) for i in inputs}
    starts = [(annotated, {}), (inputs, {}), (inputs, leading)] if annotated else [(inputs, {}), (inputs, leading)]
    plans = [revisit(costs, propagate(costs, sources or [0], given)) for sources, given in starts]
    found = min(plans, key=lambda found: found.cost)
    return replace(found, cost=problem.cost(found.choice))


def _most_split(options: Options) -> int:
    """The option of an input that splits its leading dim into the most parts."""
    table = options.tables[1][0]
    return int(np.argmax(table.parts(0)[options.results[0]])) if table else 0


def propagate(costs: Costs | Network, sources: list[int], given: Mapping[int, int] | None = None) -> Solution:
    """Breadth-first from `sources`, each vertex taking its cheapest option given its visited neighbours; those in
    `given` take the option that it says."""
    whole = network(costs) if isinstance(costs, Costs) else costs
    neighbours = _neighbours(whole)
    choice: dict[int, int] = {}
    queue = deque(sources)
    seen = set(queue)
    rest = iter(range(len(whole.unary)))
    while len(choice) < len(whole.unary):
        if not queue:
            vertex = next(v for v in rest if v not in choice)
            queue.append(vertex)
            seen.add(vertex)
        vertex = queue.popleft()
        total = whole.unary[vertex]
        for other, between, side in neighbours[vertex]:
            # an unvisited neighbour will choose what suits it best
            if other in choice:
                total = total + between.given(choice[other], 1 - side)
            else:
                total = total + between.least(np.zeros(len(whole.unary[other])), 1 - side)
        choice[vertex] = (given or {}).get(vertex, int(np.argmin(total)))
        for other, _, _ in neighbours[vertex]:
            if other not in seen:
                seen.add(other)
                queue.append(other)
    found = tuple(choice[i] for i in range(len(whole.unary)))
    return Solution(found, costs.of(found), -math.inf, 1)


def revisit(costs: Costs | Network, solution: Solution) -> Solution:
    """`solution`, with every vertex looked at again as long as that pays: it may change together with its neighbours,
    each of which then takes what suits it best (for one vertex alone a change of layout seldom pays)."""
    whole = network(costs) if isinstance(costs, Costs) else costs
    neighbours = _neighbours(whole)
    near = [{other for other, _, _ in edges} for edges in neighbours]
    choice = list(solution.choice)

    def given(vertex: int, but: int) -> Floats:
        """The cost of each option of `vertex`, its neighbours but one staying as they are."""
        total = whole.unary[vertex]
        for other, between, side in neighbours[vertex]:
            if other != but:
                total = total + between.given(choice[other], 1 - side)
        return total

    queue = deque(range(len(choice)))
    waiting = set(queue)
    while queue:
        vertex = queue.popleft()
        waiting.discard(vertex)
        # neighbours that are neighbours of each other cannot move at the same time
        moving = {other: given(other, vertex) for other in near[vertex] if not near[vertex] & near[other]}
        total = whole.unary[vertex]
        now = float(total[choice[vertex]])
        for other, between, side in neighbours[vertex]:
            stays = between.given(choice[other], 1 - side)
            now += float(stays[choice[vertex]]) + float(moving[other][choice[other]] if other in moving else 0.0)
            total = total + (between.least(moving[other], 1 - side) if other in moving else stays)
        best = int(np.argmin(total))
        if total[best] >= now * (1 - 1e-12):
            continue
        choice[vertex] = best
        for other, between, side in neighbours[vertex]:
            if other in moving:
                choice[other] = int(np.argmin(between.given(best, side) + moving[other]))
        for other in {vertex, *near[vertex], *(n for o in near[vertex] for n in near[o])} - waiting:
            queue.append(other)
            waiting.add(other)
    found = tuple(choice)
    return Solution(found, costs.of(found), -math.inf, 1)


def _neighbours(whole: Network) -> list[list[tuple[int, Between, int]]]:
    """For each vertex its neighbours, what stands between, and on which side of it the vertex is."""
    neighbours: list[list[tuple[int, Between, int]]] = [[] for _ in whole.unary]
    for (a, b), between in whole.edges:
        neighbours[a].append((b, between, 0))
        neighbours[b].append((a, between, 1))
    return neighbours


def recursive_programming(problem: SearchProblem, price: float = 0.0) -> Solution:
    """Axis by axis: the options that leave later axes whole, given what the earlier axes chose."""
    kept = [np.arange(len(v.options)) for v in problem.vertices]
    chosen: list[int] = []
    width = 0
    for axis in range(len(problem.settings.mesh.axes)):
        part = _Axes(problem, range(axis + 1))
        narrowed = [part.leave_whole(i, rows) for i, rows in enumerate(kept)]
        costs = costs_of(restricted(_tied_up_to(problem, axis), narrowed), price)
        solution = eliminate_in(costs, _affordable(costs, elimination_order(costs, TABLE_LIMIT)))
        chosen = [int(rows[c]) for rows, c in zip(narrowed, solution.choice, strict=True)]
        kept = [part.agree(i, rows, c) for i, (rows, c) in enumerate(zip(kept, chosen, strict=True))]
        width = max(width, solution.width)
    found = tuple(chosen)
    return Solution(found, problem.cost(found), -math.inf, width)


def _tied_up_to(problem: SearchProblem, axis: int) -> SearchProblem:
    """`problem`, in which layouts that must be equal may differ on the axes after `axis`: what these do is open."""
    axes = problem.settings.mesh.axes[: axis + 1]
    if not problem.settings.elementwise_follow:
        return problem
    edges = (replace(edge, table=tie(edge.table, axes)) if edge.table.tied else edge for edge in problem.edges)
    return replace(problem, edges=tuple(edges))


class _Axes:
    """The options of a problem as seen on some axes; those of vertices that share options are one."""

    def __init__(self, problem: SearchProblem, axes: Iterable[int]) -> None:
        self.problem, self.axes = problem, list(axes)
        self.others = [axis for axis in range(len(problem.settings.mesh.axes)) if axis not in self.axes]
        self._seen: dict[int, tuple[NDArray[np.intp], NDArray[np.intp]]] = {}

    def _signatures(self, vertex: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """For every option a number that says what it does on these axes, and how much it uses the others."""
        options = self.problem.vertices[vertex].options
        if id(options) not in self._seen:
            sides = [("operands", i) for i in range(len(options.operands))]
            sides += [("results", i) for i in range(len(options.results))]
            placed = [(options.placed(of, i), options.whole(of, i)) for of, i in sides]
            columns = [states[:, self.axes] for states, _ in placed]
            used = [(states[:, self.others] != whole).sum(axis=1) for states, whole in placed]
            _, names = np.unique(np.concatenate(columns, axis=1), axis=0, return_inverse=True)
            self._seen[id(options)] = names.reshape(-1), np.sum(used, axis=0)
        return self._seen[id(options)]

    def leave_whole(self, vertex: int, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Of `rows`, for each thing to do on these axes, the one that uses the least of the other axes (none, unless
        annotated)."""
        names, used = self._signatures(vertex)
        order = rows[np.lexsort((rows, used[rows]))]
        _, first = np.unique(names[order], return_index=True)
        return np.sort(order[first])

    def agree(self, vertex: int, rows: NDArray[np.intp], chosen: int) -> NDArray[np.intp]:
        """Of `rows`, those that do what `chosen` does on these axes."""
        names, _ = self._signatures(vertex)
        found: NDArray[np.intp] = rows[names[rows] == names[chosen]]
        return found


def restricted(problem: SearchProblem, kept: list[NDArray[np.intp]]) -> SearchProblem:
    """`problem` with only some options of each vertex, by number."""
    shared: dict[tuple[int, bytes], Options] = {}
    vertices = []
    for vertex, rows in zip(problem.vertices, kept, strict=True):
        key = (id(vertex.options), rows.tobytes())
        if key not in shared:
            shared[key] = vertex.options.take(rows)
        vertices.append(replace(vertex, options=shared[key]))
    return replace(problem, vertices=tuple(vertices))


def verify_solution(problem: SearchProblem, solution: Solution) -> Solution:
    """Raise VerifyError unless every vertex has one of its options, at the cost that is claimed."""
    if len(solution.choice) != len(problem.vertices):
        raise VerifyError(f"the plan has {len(solution.choice)} choices for {len(problem.vertices)} vertices")
    for vertex, choice in zip(problem.vertices, solution.choice, strict=True):
        if not 0 <= choice < len(vertex.options):
            raise VerifyError(f"{vertex.name} has no option {choice}")
    cost = problem.cost(solution.choice)
    if not math.isfinite(cost) or abs(cost - solution.cost) > 1e-9 * max(abs(cost), 1e-12):
        raise VerifyError(f"the plan costs {cost}, not {solution.cost}")
    return solution
