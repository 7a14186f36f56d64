"""A plan of another run, or for other sizes, on the problem of this one: their differences, and the plan's choice.

Operators are matched in order, by operator, result and module: names of nodes and lines of code may change. A plan does
not mention hubs: each gets the cheapest layout between the strategies of the plan.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

import numpy as np
from torch import fx

from ...strategy.errors import Problem, StrategyError
from ...strategy.layout import Layout, layout
from ...strategy.placement import placement_from_code
from ..cost.conversion import Codes, ConversionTable, Mask
from ..graph.graph import Graph, constant_nodes
from ..graph.nodes import describe, is_tensor, module_path, operator_name
from ..graph.port import Port
from ..minsum.network import originals
from ..problem.problem import Edge, Options, SearchProblem, Vertex, VertexKind, restricted
from ..search.exact import dynamic_programming
from ..search.solution import Solution
from ..search.within_memory import with_fates
from .data import OperatorPlan, PlanData, TensorPlan

Identity = tuple[str, str, str]  # operator, result, module


def differences(graph: Graph, plan: PlanData) -> list[Problem]:
    """The differences between `plan` and `graph`; empty if it fits."""
    problems = [
        *_tensor_differences("input", graph.inputs, plan.inputs),
        *_tensor_differences("output", graph.outputs, plan.outputs),
    ]
    here = [(operator_name(n), describe(n) if is_tensor(n) else "", module_path(n)) for n in _planned(graph)]
    there = [(o.operator, o.result, o.module) for o in plan.operators]
    return problems + list(_operator_differences(here, there))


def _planned(graph: Graph) -> list[fx.Node]:
    constants = constant_nodes(graph)
    return [node for node in graph.nodes if node not in constants and node.target is not operator.getitem]


def _tensor_differences(kind: str, ports: Sequence[Port], planned: Sequence[TensorPlan]) -> Iterator[Problem]:
    here = {port.name: f"{port.role} {describe(port.node)}" for port in ports}
    there = {t.name: f"{t.role} {t.dtype}{list(t.shape)}" for t in planned}
    for name in dict.fromkeys([*there, *here]):
        if here.get(name) != there.get(name):
            what = f"is {there.get(name, 'nothing')} in the plan, and {here.get(name, 'nothing')} here"
            yield Problem(f"{kind} {name!r}", what, _FIX)


_FIX = "save a plan of this call"


def _operator_differences(here: Sequence[Identity], there: Sequence[Identity]) -> Iterator[Problem]:
    if here == there:
        return
    for what, a, b, c, d in SequenceMatcher(None, there, here, autojunk=False).get_opcodes():
        if what != "equal":
            place = f"operators from {a}" if b - a != 1 else f"operator {a}"
            yield Problem(f"{place} of the plan", f"{_listed(there[a:b])} there, and {_listed(here[c:d])} here", _FIX)


def _listed(operators: Sequence[Identity]) -> str:
    words = [
        " ".join(filter(None, (name, result, f"in {path}" if path else ""))) for name, result, path in operators[:3]
    ]
    return (", ".join(words) + (f" and {len(operators) - 3} more" if operators[3:] else "")) or "none"


def replay(problem: SearchProblem, plan: PlanData) -> Solution:
    """The choice of `plan`, which fits the graph of `problem`. Raises StrategyError, with all reasons, if one of its
    strategies is not an option here."""
    problems: list[Problem] = []
    choice: list[int | None] = []
    for vertex, rows, (name, done) in _planned_options(problem, plan):
        if rows is None:
            choice.append(None)
            continue
        choice.append(int(rows[0]) if len(rows) else 0)
        if not len(rows):
            why = f"which {vertex.annotation} does not allow" if vertex.annotation else "which is not an option here"
            problems.append(Problem(name, f"the plan has {done}, {why}", "drop what forbids it, or search again"))
    if problems:
        raise StrategyError("the plan cannot be followed:", problems)
    edges: dict[int, list[Edge]] = {}
    for edge in problem.edges:
        edges.setdefault(edge.producer, []).append(edge)
        edges.setdefault(edge.consumer, []).append(edge)
    chosen = tuple(_hub(problem, i, edges[i], choice) if option is None else option for i, option in enumerate(choice))
    return with_fates(problem, Solution(chosen, problem.cost(chosen), float("-inf"), 0, replayed=True))


def follow(problem: SearchProblem, plan: PlanData) -> Solution:
    """The choice of `plan`, which was made for the same operators with tensors of other sizes. Where its strategy is
    not an option here, such as a split of a dim that the axis does not divide, the cheapest other option is searched
    for. Raises StrategyError if its operators or mesh are others, or if nothing fits the rest."""
    kept = [
        np.arange(len(vertex.options)) if rows is None or not len(rows) else rows
        for vertex, rows, _ in _planned_options(problem, plan)
    ]
    found = dynamic_programming(restricted(problem, kept))
    if math.isinf(found.cost):
        raise StrategyError("the plan cannot be followed: the layouts of two operators cannot be converted")
    chosen = originals(kept, found.choice)
    solution = Solution(chosen, problem.cost(chosen), float("-inf"), found.width, replayed=True, of_other_sizes=True)
    return with_fates(problem, solution)


def _planned_options(problem: SearchProblem, plan: PlanData) -> Iterator[tuple[Vertex, Codes | None, tuple[str, str]]]:
    """For each vertex the options that agree with `plan` (None for a hub, which it does not mention), and in words the
    operator or tensor and its strategy. Raises StrategyError if the plan has another mesh, or other operators."""
    mesh = problem.settings.mesh
    if plan.mesh != mesh:
        fix = "leave the mesh out, or save a plan on this one"
        raise StrategyError(
            "the plan cannot be followed:", [Problem("mesh", f"it is {mesh}, the plan's {plan.mesh}", fix)]
        )
    nodes = _planned(problem.graph)
    if [*map(operator_name, nodes)] != [planned.operator for planned in plan.operators]:
        raise StrategyError("the plan cannot be followed: it is of other operators")
    operators = dict(zip(nodes, plan.operators, strict=True))
    tensors = {
        (kind, t.name): t
        for kind, every in ((VertexKind.INPUT, plan.inputs), (VertexKind.OUTPUT, plan.outputs))
        for t in every
    }
    for vertex in problem.vertices:
        if vertex.kind is VertexKind.HUB:
            yield vertex, None, ("", "")
        elif vertex.kind is VertexKind.OPERATOR:
            operator = operators[vertex.node]
            rows = np.flatnonzero(_of_operator(vertex.options, operator, plan))
            yield vertex, rows, (f"operator {operator.name}", operator.strategy)
        else:
            tensor = tensors[vertex.kind, vertex.name]
            rows = np.flatnonzero(_of_tensor(vertex, tensor, plan))
            yield vertex, rows, (f"{vertex.kind} {vertex.name!r}", " ".join(tensor.codes))


def _layout(codes: Sequence[str], plan: PlanData) -> Layout:
    return layout(plan.mesh, tuple(map(placement_from_code, codes)))


def _of_operator(options: Options, planned: OperatorPlan, plan: PlanData) -> Mask:
    """The options with the strategy and layouts of `planned`."""
    if (len(planned.operands), len(planned.results)) != (len(options.operands), len(options.results)):
        return np.zeros(len(options), dtype=bool)
    keep = np.ones(len(options), dtype=bool)
    names = {name: i for i, name in enumerate(options.names)} | {None: -1}
    for axis, factor in enumerate(planned.factors):
        keep &= options.factors[:, axis] == names.get(factor, -2)
    sides = zip(options.tables, (options.operands, options.results), (planned.operands, planned.results), strict=True)
    for tables, columns, written in sides:
        for table, codes, wanted in zip(tables, columns, written, strict=True):
            if table is not None:
                keep &= codes == _code(table, wanted, plan)
    return keep


def _of_tensor(vertex: Vertex, planned: TensorPlan, plan: PlanData) -> Mask:
    of, columns = vertex.options, (vertex.options.results or vertex.options.operands)
    (table,) = of.tables[1] or of.tables[0]
    assert table is not None
    keep: Mask = columns[0] == _code(table, planned.codes, plan)
    return keep


def _code(table: ConversionTable, codes: Sequence[str], plan: PlanData) -> int:
    return table.index.get(_layout(codes, plan), -1)


def _hub(problem: SearchProblem, hub: int, edges: Sequence[Edge], choice: Sequence[int | None]) -> int:
    """The cheapest option of a hub, whose neighbours are not hubs."""
    cost = problem.vertices[hub].options.unary.copy()
    for edge in edges:
        rows, columns = edge.codes(problem.vertices)
        if edge.consumer == hub:
            cost += edge.table.rows([int(rows[choice[edge.producer]])])[0, columns]
        else:
            cost += edge.table.rows(rows.tolist())[:, int(columns[choice[edge.consumer]])]
    return int(np.argmin(cost))
