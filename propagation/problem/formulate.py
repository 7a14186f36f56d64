"""From a graph to a search problem: its vertices in graph order, their options, and the edges between them.

Three operators, t = x * 2, y = relu(t) and t + y, where t has two readers. The vertices in their order: the input x,
mul, the hub of t, relu, add, the output. The edges: x to mul, mul to the hub, the hub to relu and to add, relu to add,
and add to the output.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import fx

from ...strategy.errors import OperatorError, Problem, StrategyError, UnknownOperatorWarning
from ...strategy.layout import Layout
from ...strategy.mesh import Mesh
from ...strategy.placement import REPLICATE, Placement, Shard
from ..cost.conversion import Codes, ConversionTable, Floats, tie
from ..cost.cost import LOOKUPS, rates_of, update_seconds
from ..graph.graph import Graph, constant_nodes, differentiated, gradient_flow, recomputed, writing_in_place
from ..graph.nodes import (
    Value,
    draws_random_numbers,
    is_view,
    name_of_call,
    operands,
    operator_name,
    rearranges,
    source_of,
    tensor_of,
    value,
    values_of,
)
from ..graph.port import Port, Role
from ..ops.collectives import constrain
from ..ops.experts import dispatch
from ..ops.python.manual import call_manual
from ..rules.custom import Rows, without_rule
from ..rules.layers.experts import Routing, routed, routings_of_dispatch
from ..rules.rule import Rule
from ..rules.table import is_elementwise, rule_of
from .manual_option import option_of_manual
from .operator_options import OperatorCall, cheapest, operator_options
from .problem import (
    NARROW,
    Allowed,
    Edge,
    Fallback,
    Options,
    SearchProblem,
    Settings,
    TensorFacts,
    Vertex,
    VertexKind,
)


def formulate(
    graph: Graph, settings: Settings, allowed: Allowed, as_it_lies: frozenset[str] = frozenset()
) -> SearchProblem:
    """The search problem of `graph`. `allowed` restricts the layouts of inputs, outputs and constraints by
    name; outputs in `as_it_lies` may stay split. Raises StrategyError if annotations leave no option, and
    OperatorError for an operator without a rule under `on_unknown_op="error"`.
    """
    return _Formulation(graph, settings, allowed, as_it_lies).problem()


def warn_of_unknown(graph: Graph, unknown: Sequence[str]) -> None:
    """Issue one UnknownOperatorWarning that names the operators `unknown` of `graph`, which have no rule, and the rows
    to add."""
    nodes = {name_of_call(node): node for node in reversed(graph.nodes)}
    if unknown:
        text = without_rule([nodes[name] for name in unknown], "; its operands are gathered and it runs replicated")
        warnings.warn(text, UnknownOperatorWarning, stacklevel=2)


class _Formulation:
    """The state of building one problem: vertices in graph order, and the producer of each value."""

    def __init__(self, graph: Graph, settings: Settings, allowed: Allowed, as_it_lies: frozenset[str]) -> None:
        self.graph, self.allowed, self.as_it_lies = graph, allowed, as_it_lies
        self.settings = replace(settings, short=_short_dims(graph, allowed))
        self.constants = constant_nodes(graph)
        self.recomputed = recomputed(graph)
        self.in_place = writing_in_place(graph)
        flows = gradient_flow(graph, differentiated(graph))
        self.tensors = TensorFacts(
            flows,
            graph.differentiable,
            weights_read(graph, flows, self.recomputed, settings.rules),
            frozenset(port.node for port in graph.inputs if port.role is Role.PARAMETER),
            summed_wide(graph, flows) if settings.gradient_fp32_sync else frozenset(),
            routings_of(graph, settings.rules),
        )
        self.vertices: list[Vertex] = []
        self.edges: list[Edge] = []
        self.producer: dict[Value, tuple[int, int]] = {}  # of each value the vertex, and the number of the result
        self.unknown: dict[str, fx.Node] = {}
        self.uses = _count_uses(graph)
        self.near_annotation: set[Value] = set()  # annotated inputs and the results of constraints
        self.batched = {Value(port.node) for port in graph.inputs if port.role is Role.INPUT}  # led by the batch
        self.approximate = False
        self.tables: dict[tuple[Value, bool], ConversionTable] = {}
        self.resting: dict[tuple[Placement, ...], Codes] = {}
        self.shared: dict[object, tuple[Rule | None, Options]] = {}

    def problem(self) -> SearchProblem:
        """Go through the graph, and return the problem."""
        for port in self.graph.inputs:
            if port.node not in self.constants:
                self._add_input(port)
        for node in self.graph.nodes:
            if node not in self.constants and node.target is not operator.getitem:
                self._add_operator(node)
        for port in self.graph.outputs:
            if source_of(port.node).node not in self.constants:
                self._add_output(port)
        self._refuse_unknown()
        return SearchProblem(
            graph=self.graph,
            settings=self.settings,
            vertices=tuple(self.vertices),
            edges=tuple(self.edges),
            constants=self.constants,
            tensors=self.tensors,
            unknown=tuple(self.unknown),
            allowed=self.allowed,
            as_it_lies=self.as_it_lies,
            approximate=self.approximate,
        )

    def _table(self, v: Value, output: bool = False) -> ConversionTable:
        table = self.tables.get((v, output))
        if table is None:
            table = self.tables[v, output] = self.tensors.table(v, self.settings, output=output)
        return table

    def _table_or_none(self, v: Value) -> ConversionTable | None:
        known = self.tables.get((v, False))
        return known or (self._table(v) if isinstance(tensor_of(v), torch.Tensor) else None)

    def _once(self, key: object, make: Callable[[], tuple[Rule | None, Options]]) -> tuple[Rule | None, Options]:
        """The result of `make`, shared by vertices with the same key."""
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]

    # -- inputs and outputs

    def _add_input(self, port: Port) -> None:
        v = Value(port.node)
        table = self._table(v)
        layouts: tuple[Layout, ...] = (Layout.replicated(self.settings.mesh),)
        if port.role in (Role.PARAMETER, Role.INPUT):
            layouts = self._at_rest(table)
        if port.role is Role.PARAMETER and self.settings.shard_parameters is not None and port.requires_grad:
            layouts = self._split_at_rest(table, layouts)
        layouts, annotation = self._restrict(port.name, layouts)
        if annotation:
            self.near_annotation.add(v)
        own = layouts if port.name in self.allowed else None  # other inputs like this one have the same layouts
        key = ("input", table, own, port.role, port.requires_grad)
        _, options = self._once(key, lambda: (None, self._input_options(port, table, layouts)))
        self._append(Vertex(port.name, VertexKind.INPUT, port.node, options, None, port, annotation), (v,))

    def _input_options(self, port: Port, table: ConversionTable, layouts: tuple[Layout, ...]) -> Options:
        codes = _codes(table, layouts)
        held = table.held[codes]
        s = self.settings
        trained = port.role is Role.PARAMETER and port.requires_grad
        copies = 2.0 + s.optimizer_states if trained else 1.0
        updating = update_seconds(held, s.optimizer_states, s.profile) if trained else np.zeros(len(held))
        unary = s.weights.memory * copies * held / 1e9 + s.weights.compute * updating
        options = _unsplit(s.mesh, table, codes, operand=False)
        return replace(options, unary=unary, seconds=updating, held=held, memory=copies * held)

    def _at_rest(self, table: ConversionTable) -> tuple[Layout, ...]:
        """The layouts that an input or output may have: split, or whole on every rank."""
        if table.states not in self.resting:
            rests = [isinstance(p, Shard) or p == REPLICATE for p in table.states]
            self.resting[table.states] = np.flatnonzero(np.array(rests)[table.digits].all(axis=1))
        codes, layouts = self.resting[table.states], table.layouts
        return tuple(layouts[code] for code in codes[table.nearly_even[codes]])

    def _split_at_rest(self, table: ConversionTable, layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        """The layouts under enable_parallel_optimizer: split as far as possible, or whole if the parameter is small."""
        whole = Layout.replicated(self.settings.mesh)
        if table.local_bytes(whole) < (self.settings.shard_parameters or 0):
            return (whole,)
        least = min(table.local_bytes(layout) for layout in layouts)
        return tuple(layout for layout in layouts if table.local_bytes(layout) == least)

    def _restrict(self, name: str, layouts: tuple[Layout, ...]) -> tuple[tuple[Layout, ...], str]:
        """Those of `layouts` that the annotation of `name` allows, and the annotation."""
        if name not in self.allowed:
            return layouts, ""
        wanted, annotation = self.allowed[name]
        kept = tuple(layout for layout in layouts if layout in wanted)
        return kept or tuple(wanted), annotation

    def _add_output(self, port: Port) -> None:
        v = source_of(port.node)
        table = self._table(v)
        layouts = self._at_rest(table) if port.name in self.as_it_lies else (Layout.replicated(self.settings.mesh),)
        layouts, annotation = self._restrict(port.name, layouts)
        options = _unsplit(self.settings.mesh, table, _codes(table, layouts), result=False)
        self.vertices.append(Vertex(port.name, VertexKind.OUTPUT, port.node, options, None, port, annotation))
        self._connect(v, len(self.vertices) - 1, 0)

    # -- operators

    def _add_operator(self, node: fx.Node) -> None:
        sources = tuple(map(source_of, operands(node)))
        produced = values_of(node)
        annotation = ""
        if node.target is constrain:
            rule, options, annotation = self._constraint(node, produced[0])
            self.near_annotation.add(produced[0])
        elif node.target is call_manual:
            tables = tuple(map(self._table, sources)), tuple(map(self._table, produced))
            rule, options = None, option_of_manual(node, *tables, self.tensors.flows, self.settings)
        else:
            rule, options = self._operator(node, sources, produced)
        index = self._append(Vertex(node.name, VertexKind.OPERATOR, node, options, rule, None, annotation), produced)
        for i, source in enumerate(sources):
            self._connect(source, index, i)

    def _constraint(self, node: fx.Node, result: Value) -> tuple[Rule | None, Options, str]:
        """An identity whose layouts are those that the user allows. A value that is whole on every rank may be
        Broadcast as well as Replicate, so that the addends of its gradient need not be summed here."""
        table = self._table(result)
        layouts = tuple(table.layouts[code] for code in np.flatnonzero(table.valid))
        layouts, annotation = self._restrict(f"constraint:{node.name}", layouts)
        if result in self.tensors.flows:
            layouts = tuple(dict.fromkeys(same for layout in layouts for same in layout.with_broadcasts()))
        options = _unsplit(self.settings.mesh, table, _codes(table, layouts))
        return rule_of(node), options, annotation or str(node.args[2])

    def _operator(
        self, node: fx.Node, sources: tuple[Value, ...], produced: tuple[Value, ...]
    ) -> tuple[Rule | None, Options]:
        """The rule of a call, and its options; calls that are alike share them."""
        near = any(source in self.near_annotation for source in sources)
        batched = tuple(source in self.batched for source in sources)
        tables = tuple(map(self._table_or_none, (*sources, *produced)))
        routes = tuple(map(self.tensors.routings.get, sources))
        of_one = len({each.source for each in routes if each}) == 1
        marks = node in self.recomputed, node in self.in_place, of_one
        key = _signature(node, self.constants), tables, near, batched, marks
        rule, options = self._once(
            key, lambda: self._options_of_call(node, sources, produced, tables, None if near else batched, routes)
        )
        if rule is None:
            self._note_unknown(node)
        else:
            carried = zip(produced, rule.carries_leading(batched), strict=False)
            self.batched |= {v for v, carries in carried if carries}
        return rule, options

    def _options_of_call(
        self,
        node: fx.Node,
        sources: tuple[Value, ...],
        produced: tuple[Value, ...],
        tables: tuple[ConversionTable | None, ...],
        batched: tuple[bool, ...] | None,
        routes: tuple[Routing | None, ...],
    ) -> tuple[Rule | None, Options]:
        """The rule and options of a call. `tables`: of its operands, then its results; `batched`: the operands led by
        the batch; None: ignored near annotations; `routes`: the routings of its operands."""
        rule = rule_of(node, self.settings.rules)
        rule = routed(node, rule, routes)[0] if rule and any(routes) else rule
        results = tables[len(sources) :]
        call = OperatorCall(
            rule=rule,
            operands=tables[: len(sources)],
            results=results,
            dtype=next(
                (tensor_of(v).dtype for v, table in zip(produced, results, strict=True) if table), torch.float32
            ),
            constant=tuple(source.node in self.constants for source in sources),
            reached=tuple(source in self.tensors.flows for source in sources),
            differentiated=any(v in self.tensors.flows for v in produced),
            recomputed=node in self.recomputed,
            view=is_view(node),
            in_place=node in self.in_place,
            by_batch=batched is not None and rule is not None and any(rule.carries_leading(batched)[:1]),
            rates=rates_of(node, self.settings.profile),
            looks_up=node.target in LOOKUPS,
            name=operator_name(node),
        )
        options = operator_options(call, self.settings)
        if self._follows(node, rule):
            return rule, options
        kept = cheapest(options, self.settings.keep_cheapest)
        self.approximate |= len(kept) < len(options)
        return rule, kept

    def _follows(self, node: fx.Node, rule: Rule | None) -> bool:
        """Whether an operator takes the strategy of its consumer."""
        return self.settings.elementwise_follow and rule is not None and is_elementwise(node)

    def _note_unknown(self, node: fx.Node) -> None:
        if not draws_random_numbers(node):
            self.unknown.setdefault(name_of_call(node), node)

    def _refuse_unknown(self) -> None:
        if self.unknown and self.settings.on_unknown_op is Fallback.ERROR:
            why = ", and on_unknown_op='error' does not let it run replicated"
            raise OperatorError(without_rule([*self.unknown.values()], why))

    # -- vertices and edges

    def _append(self, vertex: Vertex, produced: tuple[Value, ...]) -> int:
        if not vertex.options.unary.size:
            where = f"operator {vertex.name}"
            raise StrategyError(
                "no strategy is left", [Problem(where, "its annotations contradict each other", "drop one of them")]
            )
        self.vertices.append(vertex)
        index = len(self.vertices) - 1
        for i, v in enumerate(produced):
            self.producer[v] = (index, i)
            if self.uses.get(v, 0) > 1:
                self._add_hub(v)
        return index

    def _add_hub(self, v: Value) -> None:
        table = self._table(v)
        _, options = self._once(
            ("hub", table), lambda: (None, _unsplit(self.settings.mesh, table, np.flatnonzero(table.valid)))
        )
        name = f"{v.node.name}[{v.index}]" if v.index else v.node.name
        self.vertices.append(Vertex(f"hub of {name}", VertexKind.HUB, v.node, options))
        index = len(self.vertices) - 1
        self._connect(v, index, 0)
        self.producer[v] = (index, 0)

    def _connect(self, v: Value, consumer: int, operand: int) -> None:
        if v.node in self.constants:
            return
        producer, result = self.producer[v]
        table = self._table(v, self.vertices[consumer].kind is VertexKind.OUTPUT)
        if self._follows(self.vertices[producer].node, self.vertices[producer].rule):
            table = tie(table, self.settings.mesh.axes)
        self.edges.append(Edge(v, producer, result, consumer, operand, table))


def routings_of(graph: Graph, own: Rows) -> dict[Value, Routing]:
    """The values that belong to the rows of a mixture of experts."""
    routings: dict[Value, Routing] = {}
    for node in graph.nodes:
        if node.target is dispatch:
            routings |= zip(values_of(node), routings_of_dispatch(node), strict=True)
        elif routings and node.target is not operator.getitem:
            given = [routings.get(source_of(operand)) for operand in operands(node)]
            rule = rule_of(node, own) if any(given) else None
            if rule is not None:
                of_results = zip(values_of(node), routed(node, rule, given)[1], strict=False)
                routings |= {v: each for v, each in of_results if each}
    return routings


def _count_uses(graph: Graph) -> dict[Value, int]:
    """The number of uses of each value, as operand or output."""
    uses: dict[Value, int] = {}
    consumers = [operands(n) for n in graph.nodes if n.target is not operator.getitem]
    for nodes in [*consumers, tuple(port.node for port in graph.outputs)]:
        for source in map(source_of, nodes):
            uses[source] = uses.get(source, 0) + 1
    return uses


def _short_dims(graph: Graph, allowed: Allowed) -> frozenset[int]:
    """The sizes of dims that annotations split over more devices than they have elements."""
    nodes = {port.name: port.node for port in (*graph.inputs, *graph.outputs)}
    nodes |= {f"constraint:{node.name}": node for node in graph.nodes if node.target is constrain}
    named = ((nodes[name], layouts) for name, (layouts, _) in allowed.items() if name in nodes)
    annotated = [(tuple(tensor_of(source_of(node)).shape), layout) for node, layouts in named for layout in layouts]
    return frozenset(
        size
        for shape, layout in annotated
        for size, parts in zip(shape, layout.splits(len(shape)), strict=True)
        if 1 < size < parts
    )


def _codes(table: ConversionTable, layouts: Sequence[Layout]) -> Codes:
    return np.array([table.index[layout] for layout in layouts], dtype=np.intp)


def _unsplit(mesh: Mesh, table: ConversionTable, codes: Codes, *, operand: bool = True, result: bool = True) -> Options:
    """Free options for a vertex that splits no factor; its operand and result, if it has them, have the same layout."""
    tables: tuple[ConversionTable, ...] = (table,)
    factors = np.full((len(codes), len(mesh.axes)), -1, dtype=np.intp)
    free: Floats = np.zeros(len(codes))
    return Options(
        tables=(tables * operand, tables * result),
        operands=(codes,) * operand,
        results=(codes,) * result,
        factors=factors,
        names=(),
        mesh=mesh,
        unary=free,
        seconds=free,
        flops=free,
        held=free,
        memory=free,
        again=free,
        made=table.held[codes] * result,
        arrived=free,
        saved=free,
    )


def _signature(node: fx.Node, constants: frozenset[fx.Node]) -> tuple[object, ...]:
    """A key for the options of a call, together with the tables of its tensors."""

    def frozen(argument: Any) -> object:
        if isinstance(argument, fx.Node):
            tensor = value(argument)
            return argument in constants, str(getattr(tensor, "dtype", tensor))
        if isinstance(argument, list | tuple):
            return tuple(map(frozen, argument))
        return argument if isinstance(argument, int | float | str | None) else repr(argument)

    return node.target, frozen(node.args), tuple((key, frozen(a)) for key, a in node.kwargs.items())


# -- The parameters that the backward reads: what was gathered of them is kept, or gathered again. Of three operators,
# embedding(table, ids), linear(x, w, b) and y + e, it reads w, for the gradient of x, and none of table, b and e, which
# only take a gradient


def summed_wide(graph: Graph, flows: frozenset[Value]) -> frozenset[Value]:
    """The parameters in bfloat16 or float16 that a gradient reaches, and values in these dtypes that `rearranges`
    makes from parameters, such as casts."""
    rearranged = {Value(port.node) for port in graph.inputs if port.role is Role.PARAMETER}
    for node in graph.nodes:
        if (rearranges(node) or node.target is constrain) and rearranged.issuperset(map(source_of, operands(node))):
            rearranged.update(values_of(node))
    return frozenset(v for v in rearranged & flows if tensor_of(v).dtype in NARROW)


def weights_read(graph: Graph, flows: frozenset[Value], recomputed: frozenset[fx.Node], own: Rows) -> frozenset[Value]:
    """The parameters, and values made from them by `rearranges` alone, that the backward reads. (A bias or a table of
    embeddings only gets a gradient.) Operators in `recomputed` read all their operands again."""
    weights = {Value(port.node) for port in graph.inputs if port.role is Role.PARAMETER}
    users = []
    for node in graph.nodes:
        sources = [source_of(operand) for operand in operands(node)]
        if node.target is not operator.getitem and not weights.isdisjoint(sources):
            users.append((node, sources))
            if rearranges(node) and weights.issuperset(sources):
                weights.update(values_of(node))
    read: set[Value] = set()
    for node, sources in reversed(users):
        results = values_of(node)
        if weights.issuperset(results):
            read.update(sources if not read.isdisjoint(results) else ())
        elif not flows.isdisjoint(results):
            reads = _reads(node, [source in flows for source in sources], own)
            read.update(s for i, s in enumerate(sources) if s in weights and (node in recomputed or reads(i)))
    return frozenset(read)


def _reads(node: fx.Node, flows: list[bool], own: Rows) -> Callable[[int], bool]:
    """Whether the backward of `node` reads operand i: not if it is linear in it, jointly with all operands to which a
    gradient goes (`flows`)."""
    rule = rule_of(node, own)
    # `convolution_backward` takes all operands for their sizes
    takes_all = operator_name(node).startswith(("aten.conv", "partway.padded_conv"))

    def reads(i: int) -> bool:
        if rule is None:
            return True
        if i in rule.additive:
            return False
        together = max((linear for linear in rule.linear if i in linear), key=len, default=None)
        return takes_all or together is None or any(flow for j, flow in enumerate(flows) if j not in together)

    return reads
