"""How a search problem is made of a graph: its vertices in graph order, their options, the edges between them."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import fx

from ...strategy.cut import Cut
from ...strategy.errors import OperatorError, Problem, StrategyError, UnknownOperatorWarning
from ...strategy.layout import Layout
from ...strategy.mesh import Mesh
from ...strategy.placement import BROADCAST, REPLICATE, Kind, Partial, Placement, Shard
from ..cost.conversion import Codes, ConversionTable, Floats, Mask, digits_of, tie
from ..cost.cost import BACKWARD_FACTOR, collective_cost, operator_seconds
from ..graph.graph import Graph
from ..graph.nodes import (
    Value,
    draws_random_numbers,
    is_view,
    name_of_call,
    operands,
    source_of,
    tensor_of,
    value,
    values_of,
)
from ..graph.port import Port, Role
from ..graph.queries import constant_nodes, differentiated, gradient_flow, recomputed
from ..ops.collectives import constrain
from ..rules.custom import without_rule
from ..rules.rule import AxisOption, Rule, axis_options
from ..rules.table import is_elementwise, rule_of
from .problem import Allowed, Edge, Fallback, Options, SearchProblem, Settings, Vertex, VertexKind, table_of
from .weights_read import weights_read


def formulate(
    graph: Graph, settings: Settings, allowed: Allowed, as_it_lies: frozenset[str] = frozenset()
) -> SearchProblem:
    """The search problem of `graph`. `allowed` restricts the layouts of inputs, outputs and constraints by
    name; outputs in `as_it_lies` may stay split. Raises StrategyError where an annotation leaves no option,
    OperatorError for an operator without a rule under `on_unknown_op="error"`.
    """
    return _Formulation(graph, settings, allowed, as_it_lies).problem()


def _short_dims(graph: Graph, allowed: Allowed) -> frozenset[int]:
    """The sizes of dims that annotations split over more devices than they have elements."""
    nodes = {port.name: port.node for port in (*graph.inputs, *graph.outputs)}
    nodes |= {f"constraint:{node.name}": node for node in graph.nodes if node.target is constrain}
    named = ((nodes[name], layouts) for name, (layouts, _) in allowed.items() if name in nodes)
    annotated = [(tuple(tensor_of(source_of(node)).shape), found) for node, layouts in named for found in layouts]
    return frozenset(
        size for size_of, found in annotated for size, parts in zip(size_of, found.splits(len(size_of)), strict=True)
        if 1 < size < parts
    )  # fmt: skip


class _Formulation:
    """The state of building one problem: vertices in graph order, and where each value comes from."""

    def __init__(self, graph: Graph, settings: Settings, allowed: Allowed, as_it_lies: frozenset[str]) -> None:
        self.graph, self.allowed, self.as_it_lies = graph, allowed, as_it_lies
        self.settings = replace(settings, short=_short_dims(graph, allowed))
        self.constants = constant_nodes(graph)
        self.flows = gradient_flow(graph, differentiated(graph))
        self.weights = weights_read(graph, self.flows, settings.rules)
        self.recomputed = recomputed(graph)
        self.differentiable = graph.differentiable
        self.vertices: list[Vertex] = []
        self.edges: list[Edge] = []
        self.producer: dict[Value, tuple[int, int]] = {}
        self.unknown: dict[str, fx.Node] = {}
        self.uses = self._count_uses()
        self.near_annotation: set[Value] = set()
        self.tables: dict[tuple[Value, bool], ConversionTable] = {}
        self.resting: dict[tuple[Placement, ...], Codes] = {}
        self.shared: dict[object, tuple[Rule | None, Options]] = {}
        self.approximate = False
        self.batched = {Value(port.node) for port in graph.inputs if port.role is Role.INPUT}
        self.parameters = {port.node for port in graph.inputs if port.role is Role.PARAMETER}

    def problem(self) -> SearchProblem:
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
            self.graph, self.settings, tuple(self.vertices), tuple(self.edges), self.constants, self.flows,
            tuple(self.unknown), self.allowed, self.as_it_lies, self.approximate, self.weights,
        )  # fmt: skip

    def _count_uses(self) -> dict[Value, int]:
        uses: dict[Value, int] = {}
        consumers = [operands(n) for n in self.graph.nodes if n.target is not operator.getitem]
        for used in [*consumers, tuple(port.node for port in self.graph.outputs)]:
            for operand in used:
                uses[source_of(operand)] = uses.get(source_of(operand), 0) + 1
        return uses

    def _table(self, v: Value, result: bool = False) -> ConversionTable:
        found = self.tables.get((v, result))
        if found is None:
            free = result or (self.settings.shard_parameters is not None and v.node in self.parameters)
            found = table_of(
                v, v in self.flows, v in self.differentiable, self.settings, free=free, weight=v in self.weights
            )
            self.tables[v, result] = found
        return found

    def _add_input(self, port: Port) -> None:
        v = Value(port.node)
        table = self._table(v)
        allowed: tuple[Layout, ...] = (Layout.replicated(self.settings.mesh),)
        if port.role in (Role.PARAMETER, Role.INPUT):
            allowed = self._at_rest(table)
        if port.role is Role.PARAMETER and self.settings.shard_parameters is not None and port.requires_grad:
            allowed = self._split_at_rest(table, allowed)
        layouts, annotation = self._restrict(port.name, allowed)
        if annotation:
            self.near_annotation.add(v)
        limited = layouts if port.name in self.allowed else None  # other inputs like this one have the same layouts
        options = self._plain(
            ("input", table, limited, port.role, port.requires_grad), lambda: self._input_options(port, table, layouts)
        )
        self._append(Vertex(port.name, VertexKind.INPUT, port.node, options, None, port, annotation), (v,))

    def _input_options(self, port: Port, table: ConversionTable, layouts: tuple[Layout, ...]) -> Options:
        codes = np.array([table.index[found] for found in layouts], dtype=np.intp)
        held = table.held[codes]
        s = self.settings
        copies = 2.0 + s.optimizer_states if port.role is Role.PARAMETER and port.requires_grad else 1.0
        return _identity(s.mesh, (), ((table, codes),), s.weights.memory * copies * held / 1e9, held, copies * held)

    def _at_rest(self, table: ConversionTable) -> tuple[Layout, ...]:
        """The layouts that an input or output may have: split or whole."""
        if table.states not in self.resting:
            whole = [isinstance(p, Shard) or p == REPLICATE for p in table.states]
            at_rest = np.array(whole)[table.digits].all(axis=1)
            self.resting[table.states] = np.flatnonzero(at_rest)
        codes = self.resting[table.states]
        return tuple(table.layouts[code] for code in codes[table.nearly_even[codes]])

    def _split_at_rest(self, table: ConversionTable, layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        """The layouts under enable_parallel_optimizer: as far split as can be, or whole where it is small."""
        whole = Layout.replicated(self.settings.mesh)
        if table.local_bytes(whole) < (self.settings.shard_parameters or 0):
            return (whole,)
        least = min(table.local_bytes(found) for found in layouts)
        return tuple(found for found in layouts if table.local_bytes(found) == least)

    def _restrict(self, name: str, layouts: tuple[Layout, ...]) -> tuple[tuple[Layout, ...], str]:
        if name not in self.allowed:
            return layouts, ""
        wanted, annotation = self.allowed[name]
        kept = tuple(found for found in layouts if found in wanted)
        return kept or tuple(wanted), annotation

    def _plain(self, key: object, make: Callable[[], Options]) -> Options:
        if key not in self.shared:
            self.shared[key] = (None, make())
        return self.shared[key][1]

    def _add_operator(self, node: fx.Node) -> None:
        inputs = operands(node)
        sources = tuple(map(source_of, inputs))
        produced = values_of(node)
        near = any(source in self.near_annotation for source in sources)
        batched, again = tuple(source in self.batched for source in sources), node in self.recomputed
        tables = tuple(map(self._table_or_none, (*sources, *produced)))
        key = _signature(node, self.constants), tables, near, batched, again
        annotation = ""
        if node.target is constrain:
            rule, options, annotation = self._constraint(node, sources, produced)
            self.near_annotation.add(produced[0])
        else:
            if key not in self.shared:
                rule = rule_of(node, self.settings.rules)
                by_batch = not near and rule is not None and any(rule.carries_leading(batched)[:1])
                options = self._operator_options(node, rule, sources, produced, by_batch)
                self.shared[key] = (rule, options if self._follows(node, rule) else self._cheapest(options))
            rule, options = self.shared[key]
            if rule is None:
                self._note_unknown(node)
            else:
                carried = zip(produced, rule.carries_leading(batched), strict=False)
                self.batched |= {v for v, carries in carried if carries}
        index = self._append(Vertex(node.name, VertexKind.OPERATOR, node, options, rule, None, annotation), produced)
        for i, source in enumerate(sources):
            self._connect(source, index, i)

    def _table_or_none(self, v: Value) -> ConversionTable | None:
        return self._table(v) if isinstance(tensor_of(v), torch.Tensor) else None

    def _constraint(
        self, node: fx.Node, sources: tuple[Value, ...], produced: tuple[Value, ...]
    ) -> tuple[Rule | None, Options, str]:
        """An identity whose layouts are those that the person allows. Whole on every rank may be Broadcast as well as
        Replicate, so that the addends of its gradient need not be added up here."""
        table = self._table(produced[0])
        layouts = tuple(table.layouts[code] for code in np.flatnonzero(table.valid))
        layouts, annotation = self._restrict(f"constraint:{node.name}", layouts)
        if produced[0] in self.flows:
            layouts = tuple(dict.fromkeys(same for found in layouts for same in found.with_broadcasts()))
        codes = np.array([table.index[found] for found in layouts], dtype=np.intp)
        free = np.zeros(len(codes))
        options = _identity(self.settings.mesh, ((table, codes),), ((table, codes),), free, free, free)
        return rule_of(node), options, annotation or str(node.args[2])

    def _operator_options(
        self, node: fx.Node, rule: Rule | None, sources: tuple[Value, ...], produced: tuple[Value, ...], by_batch: bool
    ) -> Options:
        """All options of an operator that divide evenly, less those that the settings leave out."""
        if rule is None:
            rule = Rule(tuple(() for _ in sources), tuple(() for _ in produced), {})
            single = tuple(AxisOption(None, (p,) * len(sources), (p,) * len(produced)) for p in (REPLICATE, BROADCAST))
        else:
            single = axis_options(rule)
        constant = [source.node in self.constants for source in sources]
        tables = tuple(map(self._table_or_none, sources)), tuple(map(self._table_or_none, produced))
        single = tuple(option for option in single if _exists(option, tables, constant))
        picks = digits_of(len(single), len(self.settings.mesh.axes))
        sizes = np.array(self.settings.mesh.sizes)
        keep = np.ones(len(picks), dtype=bool)
        used, busy = np.ones(len(picks)), np.ones(len(picks))  # devices; one whose slice is short is less busy
        for factor, size in rule.sizes.items():
            splits = np.array([option.factor == factor for option in single])[picks]
            parts = np.where(splits, sizes, 1).prod(axis=1)
            filled = (parts <= size) | (size in self.settings.short)
            keep &= (size % parts == 0) | (filled & (factor in rule.uneven))
            used *= parts
            busy *= max(size, 1) / -(-max(size, 1) // parts)
        columns = (
            [_codes_of(table, [option.operands[i] for option in single], picks) for i, table in enumerate(tables[0])],
            [_codes_of(table, [option.results[i] for option in single], picks) for i, table in enumerate(tables[1])],
        )
        for table, codes in zip((*tables[0], *tables[1]), (*columns[0], *columns[1]), strict=True):
            if table:
                keep &= table.valid[codes]
        names = tuple(rule.sizes)
        split = np.array([names.index(option.factor) if option.factor else -1 for option in single], dtype=np.intp)
        factors = split[picks]
        keep = self._prefer(rule, keep, used, tables, columns, by_batch)
        operand_codes, result_codes = (tuple(codes[keep] for codes in side) for side in columns)
        work = self._work(node, rule, busy[keep], sources, produced, tables, (operand_codes, result_codes))
        seconds, flops, held = work
        s = self.settings
        unary = s.weights.compute * seconds + s.weights.memory * held / 1e9
        unary = unary + self._exchanges(rule, factors[keep], names, sources, tables[0], operand_codes)
        return Options(
            tables, operand_codes, result_codes, factors[keep], names, s.mesh, unary, seconds, flops, held, held
        )

    def _follows(self, node: fx.Node, rule: Rule | None) -> bool:
        """Whether an operator takes the strategy of what consumes it."""
        return self.settings.elementwise_follow and rule is not None and is_elementwise(node)

    def _cheapest(self, options: Options) -> Options:
        """The options that `keep_cheapest` leaves; of those that cost the same the first."""
        count = self.settings.keep_cheapest
        if count is None or len(options) <= count:
            return options
        self.approximate = True
        return options.take(np.sort(np.argsort(options.unary, kind="stable")[:count]))

    def _prefer(self, rule: Rule, keep: Mask, used: Floats, tables: Any, columns: Any, by_batch: bool) -> Mask:
        """Of the options in `keep`, those that the settings leave: even use of the devices, aligned slices, the batch
        by default."""
        s = self.settings
        if rule.flops and s.slice_align > 1:
            aligned = keep.copy()
            for table, codes in zip((*tables[0], *tables[1]), (*columns[0], *columns[1]), strict=True):
                if table and table.shape:
                    last = table.parts(len(table.shape) - 1)[codes]
                    aligned &= (last == 1) | (-(-table.shape[-1] // last) % s.slice_align == 0)
            keep = aligned if aligned.any() else keep
        if s.batch_by_default and by_batch and columns[1] and tables[1][0]:
            even = keep & tables[1][0].even[columns[1][0]]
            keep = _most(even if even.any() else keep, tables[1][0].parts(0)[columns[1][0]])
        if rule.flops and s.fully_use_devices:
            keep = _most(keep, used)
        return keep

    def _work(
        self, node: fx.Node, rule: Rule, busy: Floats, sources: tuple[Value, ...], produced: tuple[Value, ...],
        tables: Any, columns: Any,
    ) -> tuple[Floats, Floats, Floats]:  # fmt: skip
        """Of every option the seconds and the flops of the operator on one device, forward and backward, and the
        bytes of its results that are kept. The backward of a contraction computes a product for each operand that
        needs a gradient; that of another operator reads and writes as much as the forward does."""
        results = sum((t.held[c] for t, c in zip(tables[1], columns[1], strict=True) if t), np.zeros(len(busy)))
        if is_view(node):
            return np.zeros(len(busy)), np.zeros(len(busy)), np.zeros(len(busy))
        moved = results + sum(t.held[c] for t, c in zip(tables[0], columns[0], strict=True) if t)
        backward = any(v in self.flows for v in produced)
        passes = 0.0
        if backward:
            wanted = [v in self.flows and i not in rule.additive for i, v in enumerate(sources)]
            passes = float(max(sum(wanted), 1)) if rule.flops else BACKWARD_FACTOR
            passes += 1.0 if node in self.recomputed else 0.0
        flops = rule.flops / busy
        dtypes = [tensor_of(v).dtype for v, table in zip(produced, tables[1], strict=True) if table] or [torch.float32]
        seconds = (1.0 + passes) * operator_seconds(flops, moved, dtypes[0], self.settings.profile)
        if node in self.recomputed:  # but the sum of addends is kept, so that no collective runs twice for it
            results = results * _has_addends(tables[1], columns[1])
        return seconds, (1.0 + passes) * flops, results if backward else np.zeros(len(busy))

    def _exchanges(
        self, rule: Rule, factors: Codes, names: tuple[str, ...], sources: tuple[Value, ...],
        tables: tuple[ConversionTable | None, ...], columns: tuple[Codes, ...],
    ) -> Floats:  # fmt: skip
        """What the exchanges cost under every option that make the windows of operands, and add up their gradients."""
        s, cost = self.settings, np.zeros(len(factors))
        for halo in rule.windows:
            table = tables[halo.operand]
            split = factors == names.index(halo.factor)
            if table is None or not split.any():
                continue
            dim = rule.dim_of(halo)
            for pattern in np.unique(split[split.any(axis=1)], axis=0):
                axes = tuple(axis for axis, found in zip(s.mesh.axes, pattern, strict=True) if found)
                counts = tuple(map(s.mesh.size, axes))
                held = Cut(table.shape[dim], counts)
                window = halo.window(dim, held, Cut(rule.sizes[halo.factor], counts))
                if window.local is not None:
                    continue
                rows = (split == pattern).all(axis=1)
                sent, returned = window.rows
                waiting, per_byte = collective_cost(Kind.EXCHANGE, s.mesh, axes, s.profile)
                passes = [sent, returned] if sources[halo.operand] in self.flows else [sent]
                for count in passes:
                    moved = table.held[columns[halo.operand][rows]] / held.width * count
                    cost[rows] += s.weights.latency * waiting + s.weights.wire * per_byte * moved
        return cost

    def _add_output(self, port: Port) -> None:
        v = source_of(port.node)
        table = self._table(v)
        layouts = self._at_rest(table) if port.name in self.as_it_lies else (Layout.replicated(self.settings.mesh),)
        layouts, annotation = self._restrict(port.name, layouts)
        codes = np.array([table.index[found] for found in layouts], dtype=np.intp)
        free = np.zeros(len(codes))
        options = _identity(self.settings.mesh, ((table, codes),), (), free, free, free)
        self.vertices.append(Vertex(port.name, VertexKind.OUTPUT, port.node, options, None, port, annotation))
        self._connect(v, len(self.vertices) - 1, 0)

    def _append(self, vertex: Vertex, produced: tuple[Value, ...]) -> int:
        if not vertex.options:
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

        def make() -> Options:
            codes = np.flatnonzero(table.valid)
            free = np.zeros(len(codes))
            return _identity(self.settings.mesh, ((table, codes),), ((table, codes),), free, free, free)

        options = self._plain(("hub", table), make)
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

    def _note_unknown(self, node: fx.Node) -> None:
        if not draws_random_numbers(node):
            self.unknown.setdefault(name_of_call(node), node)

    def _refuse_unknown(self) -> None:
        if self.unknown and self.settings.on_unknown_op is Fallback.ERROR:
            so = "and on_unknown_op='error' forbids to run it replicated"
            raise OperatorError(without_rule([*self.unknown.values()], f", {so}"))


def warn_of_unknown(graph: Graph, unknown: Sequence[str]) -> None:
    """One UnknownOperatorWarning that names the operators `unknown` of `graph`, which have no rule, and the rows to
    add."""
    nodes = {name_of_call(node): node for node in reversed(graph.nodes)}
    if unknown:
        text = without_rule([nodes[name] for name in unknown], "; its operands are gathered and it runs replicated")
        warnings.warn(text, UnknownOperatorWarning, stacklevel=2)


def _identity(
    mesh: Mesh,
    operands: tuple[tuple[ConversionTable, Codes], ...],
    results: tuple[tuple[ConversionTable, Codes], ...],
    unary: Floats,
    held: Floats,
    memory: Floats,
) -> Options:
    """Options of a vertex that splits no factor."""
    tables = tuple(table for table, _ in operands), tuple(table for table, _ in results)
    factors = np.full((len(unary), len(mesh.axes)), -1, dtype=np.intp)
    free = np.zeros(len(unary))
    return Options(
        tables, tuple(codes for _, codes in operands), tuple(codes for _, codes in results), factors, (), mesh,
        unary, free, free, held, memory,
    )  # fmt: skip


def _exists(option: AxisOption, tables: tuple[tuple[ConversionTable | None, ...], ...], constant: list[bool]) -> bool:
    """Whether the tensors of an operator can be placed so. Addends of constants alone would be work done twice."""
    placed = zip((*tables[0], *tables[1]), (*option.operands, *option.results), strict=True)
    addends = [c for c, p in zip(constant, option.operands, strict=True) if isinstance(p, Partial)]
    if addends and all(addends):
        return False
    return all(table is None or placement in table.states for table, placement in placed)


def _codes_of(table: ConversionTable | None, placements: list[Placement], picks: Codes) -> Codes:
    """The layouts of one tensor, given its placement on an axis under each option of that axis."""
    if table is None:
        return np.zeros(len(picks), dtype=np.intp)
    states = np.array([table.states.index(p) for p in placements], dtype=np.intp)[picks]
    found: Codes = states @ len(table.states) ** np.arange(picks.shape[1] - 1, -1, -1)
    return found


def _has_addends(tables: Any, columns: Any) -> Any:
    """Of every option whether a result of it is Partial on some axis."""
    placed = [(t, t.digits[codes]) for t, codes in zip(tables, columns, strict=True) if t and t.partial]
    return sum(((digits == len(t.states) - 1).any(axis=1) for t, digits in placed), np.False_)


def _most(keep: Mask, score: Any) -> Mask:
    """Of the rows in `keep` those with the highest score."""
    found: Mask = keep & (score == score[keep].max()) if keep.any() else keep
    return found


def _signature(node: fx.Node, constants: frozenset[fx.Node]) -> tuple[object, ...]:
    """What the options of a call depend on, beside the tables of its tensors."""

    def frozen(argument: Any) -> object:
        if isinstance(argument, fx.Node):
            found = value(argument)
            return argument in constants, str(getattr(found, "dtype", found))
        if isinstance(argument, list | tuple):
            return tuple(map(frozen, argument))
        return argument if isinstance(argument, int | float | str | None) else repr(argument)

    return node.target, frozen(node.args), tuple((key, frozen(a)) for key, a in node.kwargs.items())
