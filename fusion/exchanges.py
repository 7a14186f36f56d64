"""Operators that run while the rows of a mixture of experts are on their way: those of a shared expert, for example,
and gradients of weights.

    shared(x); rows to experts; experts; rows back; sum(rows); add
    rows to experts; shared(x); experts; rows back; sum(rows); add

An exchange is issued as soon as its operands are there: what it needs runs before other operators, unless that waits
for another exchange. A rank waits for an exchange at the first operator that reads it. Before that run later operators
that need nothing that is on its way, in their order, as many as take the time of the exchange by the profile. Both are
looked for among the next AHEAD nodes. All other collectives, and what has an effect beside its value, keep their order,
so that random numbers are drawn as before; ranks have one graph, and so one order of collectives.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from ..propagation.cost.profile import DeviceProfile
from ..propagation.graph.graph import Text
from ..propagation.graph.nodes import draws_random_numbers
from ..propagation.ops.collectives import convert, convert_group, kind_of
from ..propagation.ops.experts import counted
from ..propagation.ops.python.hooked import HOOKS
from ..propagation.program.schedule import work_of
from ..strategy.mesh import Mesh
from ..strategy.placement import Kind

AHEAD = 500  # nodes


def hide_exchanges(module: fx.GraphModule, mesh: Mesh, profile: DeviceProfile) -> fx.GraphModule:
    """`module`, a forward or a backward graph whose nodes have their local values, with operators moved between each
    exchange of rows and its first reader; itself, if it exchanges none."""
    nodes = list(module.graph.nodes)
    kinds = {node: kind_of(*node.args[1:3]) for node in nodes if node.target is convert}
    if Kind.ALL_TO_ALLV not in kinds.values():
        return module
    exchanges = [node for node, kind in kinds.items() if kind in (Kind.ALL_TO_ALLV, Kind.ALL_TO_ALL)]
    seconds = {node: work.seconds for node, work in work_of(module.graph, mesh, profile).items()}
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in _Order(nodes, seconds, exchanges).order:
        new[node] = graph.node_copy(node, new.__getitem__)
    graph.lint()
    made = Text(module, graph)
    made.meta.update(module.meta)
    return made


class _Order:
    """The order in which nodes run, with the clock of the operators and that of the exchanges."""

    def __init__(self, nodes: list[fx.Node], seconds: Mapping[fx.Node, float], exchanges: Sequence[fx.Node]) -> None:
        self.nodes, self.seconds, self.exchanges = nodes, seconds, frozenset(exchanges)
        self.order: dict[fx.Node, None] = {}
        self.arrives: dict[fx.Node, float] = {}
        self.clock = self.lane = 0.0
        place, left = {node: i for i, node in enumerate(nodes)}, deque(exchanges)
        for at, node in enumerate(nodes):
            if node in self.order:
                continue
            due = self._due(node)
            waits = due > self.clock
            if waits:
                self._fill(due, itertools.islice(nodes, at + 1, at + 1 + AHEAD))
                self.clock = max(self.clock, due)
            if waits or node.target is convert or not at or nodes[at - 1].op == "placeholder":
                self._issue_early(left, place, at)
            if node not in self.order:
                self._run(node)

    def _fill(self, due: float, candidates: Iterable[fx.Node]) -> None:
        """Run those of `candidates` that are ready, until `due`."""
        for node in candidates:
            if self.clock >= due:
                return
            if node not in self.order and _may_move(node) and self._is_ready(node):
                self._run(node)

    def _issue_early(self, left: deque[fx.Node], place: Mapping[fx.Node, int], at: int) -> None:
        """Run what the next of the exchanges `left` need, and issue them, while they wait for nothing."""
        while left:
            if left[0] not in self.order:
                if place[left[0]] > at + AHEAD or (needed := self._needed(left[0], place)) is None:
                    return
                for node in (*needed, left[0]):
                    self._run(node)
            left.popleft()

    def _needed(self, exchange: fx.Node, place: Mapping[fx.Node, int]) -> list[fx.Node] | None:
        """What has to run before `exchange`, in order; None if some of it waits, or may not move."""
        found, queue = {exchange}, [exchange]
        while queue:
            node = queue.pop()
            if self._due(node) > self.clock or not (node is exchange or _may_move(node)):
                return None
            missing = {operand for operand in node.all_input_nodes if operand not in self.order} - found
            found |= missing
            queue += missing
        return sorted(found - {exchange}, key=place.__getitem__)

    def _due(self, node: fx.Node) -> float:
        return max((self.arrives.get(operand, 0.0) for operand in node.all_input_nodes), default=0.0)

    def _is_ready(self, node: fx.Node) -> bool:
        """Whether all operands are there."""
        return self._due(node) <= self.clock and all(operand in self.order for operand in node.all_input_nodes)

    def _run(self, node: fx.Node) -> None:
        self.order[node] = None
        if node in self.exchanges:
            self.lane = self.arrives[node] = max(self.lane, self.clock) + self.seconds[node]
        elif node.target not in (convert, convert_group):
            self.clock += self.seconds[node]


def _may_move(node: fx.Node) -> bool:
    if node.target is convert:
        return not kind_of(*node.args[1:3]).communicates  # type: ignore[arg-type]
    return (
        node.op == "call_function"
        and node.target not in (convert_group, counted)
        and node.target not in HOOKS
        and not draws_random_numbers(node)
    )
