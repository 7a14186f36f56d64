"""The one description that every search takes: vertices with options, edges with conversion costs.

A vertex is an input of the graph, an operator, an output, or a *hub*: the identity that stands after each
tensor with several consumers, so that one conversion into it is paid once and the problem stays pairwise. An
option of a vertex fixes the layouts of its operands and results; an edge prices the conversion between the
producer's and the consumer's layout of one tensor, forward and backward. Annotations remove options.

Values that depend on no parameter and no input of the call (masks, rotary tables, constants) have no vertex:
every rank has them whole, and cutting a part costs nothing, so they tie nothing together.
"""

from __future__ import annotations

import itertools
import math
import operator
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from ..strategy.choice import Choice
from ..strategy.errors import OperatorError, Problem, StrategyError, UnknownOperatorWarning
from ..strategy.layout import Layout, layout
from ..strategy.mesh import Mesh
from ..strategy.placement import BROADCAST, REPLICATE, Shard
from .collectives import constrain
from .conversion import ConversionTable, conversion_table
from .cost import BACKWARD_FACTOR, DeviceProfile, Weights, operator_seconds
from .graph import (
    Graph,
    Port,
    Role,
    Value,
    constant_nodes,
    describe,
    differentiated,
    draws_random_numbers,
    gradient_flow,
    module_path,
    operands,
    operator_name,
    requires_grad,
    source_of,
    tensor_of,
    value,
    values_of,
)
from .rule import AxisOption, Rule, axis_options
from .rules import MAXIMA, rule_of

Floats = NDArray[np.float64]


class Fallback(Choice):
    """What to do with an operator that has no rule."""

    WARN = "warn"
    ERROR = "error"


@dataclass(frozen=True)
class Settings:
    """What a search needs to know beside the graph and the annotations.

    fully_use_devices   an operator that does matrix products or convolutions uses all devices where it can
    batch_by_default    operators next to no annotation split their leading dim (semi_auto_parallel)
    slice_align         contractions keep slices of the last dim to multiples of this (1: no limit)
    shard_parameters    parameters of at least this many bytes are split at rest on every axis that can
                        (enable_parallel_optimizer); None: the search decides
    """

    mesh: Mesh
    profile: DeviceProfile
    weights: Weights
    fully_use_devices: bool = True
    batch_by_default: bool = False
    slice_align: int = 1
    shard_parameters: int | None = None
    on_unknown_op: Fallback = Fallback.WARN


@dataclass(frozen=True, slots=True)
class Option:
    """One strategy of a vertex: the factor split on each axis, and the layouts of its tensors."""

    factors: tuple[str | None, ...]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]


class VertexKind(StrEnum):
    INPUT = "input"
    OPERATOR = "operator"
    HUB = "hub"
    OUTPUT = "output"


@dataclass(frozen=True)
class Vertex:
    """One choice to make. Of option i by itself: its cost `unary[i]`, the predicted `seconds[i]` of the operator
    (forward and backward), and the bytes `held[i]` that stay for the backward (of an input: its own)."""

    name: str
    kind: VertexKind
    node: fx.Node
    options: tuple[Option, ...]
    unary: Floats = field(repr=False)
    seconds: Floats = field(repr=False)
    held: Floats = field(repr=False)
    rule: Rule | None = None
    port: Port | None = None
    annotation: str = ""


@dataclass(frozen=True)
class Edge:
    """The tensor `value` goes from result `result` of vertex `producer` to operand `operand` of `consumer`."""

    value: Value
    producer: int
    result: int
    consumer: int
    operand: int
    table: ConversionTable

    def matrix(self, vertices: tuple[Vertex, ...]) -> Floats:
        """The conversion costs [option of the producer, option of the consumer]."""
        rows = [self.table.index[o.results[self.result]] for o in vertices[self.producer].options]
        columns = [self.table.index[o.operands[self.operand]] for o in vertices[self.consumer].options]
        found: Floats = self.table.cost[np.ix_(rows, columns)]
        return found


@dataclass(frozen=True)
class SearchProblem:
    """All choices of one graph on one mesh. `flows` holds the values that a gradient reaches."""

    graph: Graph
    settings: Settings
    vertices: tuple[Vertex, ...]
    edges: tuple[Edge, ...]
    constants: frozenset[fx.Node]
    flows: frozenset[Value]
    unknown: tuple[str, ...]

    def cost(self, choice: tuple[int, ...]) -> float:
        """The cost of one option per vertex."""
        total = sum(float(v.unary[c]) for v, c in zip(self.vertices, choice, strict=True))
        for edge in self.edges:
            matrix = edge.matrix(self.vertices)
            total += float(matrix[choice[edge.producer], choice[edge.consumer]])
        return total


Allowed = Mapping[str, tuple[tuple[Layout, ...], str]]  # port or constraint name -> (layouts, what the person wrote)


def table_of(v: Value, gradient: bool, differentiable: bool, s: Settings) -> ConversionTable:
    """The costs of converting the tensor `v`. `gradient`: that of its gradient counts too; `differentiable`: it may
    have one."""
    tensor = tensor_of(v)
    return conversion_table(
        tuple(tensor.shape),
        tensor.element_size(),
        _partial_of(v, differentiable),
        gradient,
        s.mesh,
        s.profile,
        s.weights,
    )


def _partial_of(v: Value, differentiable: bool) -> str | None:
    """How parts of `v` under Partial make its value: None where there are none, "max" for a maximum without a
    gradient (Partial(max) has no dual)."""
    if tensor_of(v).dtype is torch.bool:
        return None
    return "max" if v.node.target in MAXIMA and not differentiable else "sum"


def formulate(
    graph: Graph, settings: Settings, allowed: Allowed, as_it_lies: frozenset[str] = frozenset()
) -> SearchProblem:
    """The search problem of `graph`. `allowed` restricts the layouts of inputs, outputs and constraints by
    name; outputs in `as_it_lies` may stay split. Raises StrategyError where an annotation leaves no option,
    OperatorError for an operator without a rule under `on_unknown_op="error"`.
    """
    return _Formulation(graph, settings, allowed, as_it_lies).problem()


class _Formulation:
    """The state of building one problem: vertices in graph order, and where each value comes from."""

    def __init__(self, graph: Graph, settings: Settings, allowed: Allowed, as_it_lies: frozenset[str]) -> None:
        self.graph, self.settings, self.allowed, self.as_it_lies = graph, settings, allowed, as_it_lies
        self.constants = constant_nodes(graph)
        self.flows = gradient_flow(graph, differentiated(graph))
        self.differentiable = requires_grad(graph)
        self.vertices: list[Vertex] = []
        self.edges: list[Edge] = []
        self.producer: dict[Value, tuple[int, int]] = {}
        self.unknown: dict[str, fx.Node] = {}
        self.uses = self._count_uses()
        self.near_annotation: set[Value] = set()

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
        self._report_unknown()
        return SearchProblem(
            self.graph, self.settings, tuple(self.vertices), tuple(self.edges), self.constants, self.flows,
            tuple(self.unknown),
        )  # fmt: skip

    def _count_uses(self) -> dict[Value, int]:
        uses: dict[Value, int] = {}
        consumers = [operands(n) for n in self.graph.nodes if n.target is not operator.getitem]
        for used in [*consumers, tuple(port.node for port in self.graph.outputs)]:
            for operand in used:
                uses[source_of(operand)] = uses.get(source_of(operand), 0) + 1
        return uses

    def _table(self, v: Value) -> ConversionTable:
        return table_of(v, v in self.flows, v in self.differentiable, self.settings)

    def _add_input(self, port: Port) -> None:
        table = self._table(Value(port.node))
        layouts = [
            found
            for found, valid in zip(table.layouts, table.valid, strict=True)
            if valid and all(isinstance(p, Shard) or p == REPLICATE for p in found.placements)
        ]
        if port.role not in (Role.PARAMETER, Role.INPUT):
            layouts = [Layout.replicated(self.settings.mesh)]
        if port.role is Role.PARAMETER and self.settings.shard_parameters is not None:
            layouts = self._split_at_rest(port, table, layouts)
        layouts, annotation = self._restrict(port.name, layouts)
        if annotation:
            self.near_annotation.add(Value(port.node))
        copies = 3.0 if port.role is Role.PARAMETER and port.requires_grad else 1.0  # itself, gradient, momentum
        held = np.array([table.local_bytes(found) for found in layouts])
        unary = self.settings.weights.memory * copies * held / 1e9
        options = tuple(Option(_no_factors(found), (), (found,)) for found in layouts)
        vertex = Vertex(
            port.name, VertexKind.INPUT, port.node, options, unary, np.zeros(len(options)), held, None, port, annotation
        )
        self._append(vertex, (Value(port.node),))

    def _split_at_rest(self, port: Port, table: ConversionTable, layouts: list[Layout]) -> list[Layout]:
        """The layouts under enable_parallel_optimizer: as far split as can be, or whole where it is small."""
        whole = Layout.replicated(self.settings.mesh)
        if not port.requires_grad:
            return layouts
        if table.local_bytes(whole) < (self.settings.shard_parameters or 0):
            return [whole]
        least = min(table.local_bytes(found) for found in layouts)
        return [found for found in layouts if table.local_bytes(found) == least]

    def _restrict(self, name: str, layouts: list[Layout]) -> tuple[list[Layout], str]:
        if name not in self.allowed:
            return layouts, ""
        wanted, annotation = self.allowed[name]
        kept = [found for found in layouts if found in wanted]
        return kept or list(wanted), annotation

    def _add_operator(self, node: fx.Node) -> None:
        inputs = operands(node)
        sources = tuple(map(source_of, inputs))
        produced = values_of(node)
        rule = rule_of(node)
        annotation = ""
        if rule is None:
            self._note_unknown(node)
            single = tuple(AxisOption(None, (p,) * len(inputs), (p,) * len(produced)) for p in (REPLICATE, BROADCAST))
            rule = Rule(tuple(() for _ in inputs), tuple(() for _ in produced), {})
        else:
            single = axis_options(rule)
        options = self._combine(rule, single, sources, produced)
        if node.target is constrain:
            name = str(node.args[2])
            layouts, annotation = self._restrict(f"constraint:{node.name}", [o.results[0] for o in options])
            options = [Option(_no_factors(found), (found,), (found,)) for found in layouts]
            self.near_annotation.add(produced[0])
            annotation = annotation or name
        options = self._prefer(node, rule, options, sources, produced)
        work = np.array([self._operator_work(node, rule, option, sources, produced) for option in options])
        seconds, held = work.reshape(-1, 2).T
        unary = self.settings.weights.compute * seconds + self.settings.weights.memory * held / 1e9
        vertex = Vertex(
            node.name, VertexKind.OPERATOR, node, tuple(options), unary, seconds, held, rule, None, annotation
        )
        index = self._append(vertex, produced)
        for i, source in enumerate(sources):
            self._connect(source, index, i)

    def _combine(
        self, rule: Rule, single: tuple[AxisOption, ...], sources: tuple[Value, ...], produced: tuple[Value, ...]
    ) -> list[Option]:
        """One option per axis, all combinations that divide evenly."""
        mesh = self.settings.mesh
        unique: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], Option] = {}
        for chosen in itertools.product(single, repeat=len(mesh.axes)):
            split: dict[str, int] = {}
            for option, size in zip(chosen, mesh.sizes, strict=True):
                if option.factor:
                    split[option.factor] = split.get(option.factor, 1) * size
            if any(rule.sizes[factor] % parts for factor, parts in split.items()):
                continue
            ins = tuple(layout(mesh, tuple(o.operands[i] for o in chosen)) for i in range(len(sources)))
            outs = tuple(layout(mesh, tuple(o.results[i] for o in chosen)) for i in range(len(produced)))
            if any(not self._exists(v, found) for v, found in zip((*sources, *produced), (*ins, *outs), strict=True)):
                continue
            unique.setdefault((ins, outs), Option(tuple(o.factor for o in chosen), ins, outs))
        return list(unique.values())

    def _exists(self, v: Value, found: Layout) -> bool:
        if not isinstance(tensor_of(v), torch.Tensor):
            return True
        table = self._table(v)
        index = table.index.get(found)
        return index is not None and bool(table.valid[index])

    def _prefer(
        self, node: fx.Node, rule: Rule, options: list[Option], sources: tuple[Value, ...], produced: tuple[Value, ...]
    ) -> list[Option]:
        """The options that the settings leave: even use of the devices, aligned slices, the batch by default."""
        s = self.settings
        if rule.flops and s.slice_align > 1:
            options = [o for o in options if self._aligned(o, sources, produced)] or options
        if s.batch_by_default and not any(source in self.near_annotation for source in sources):
            options = self._most(options, lambda option: _split_of(option.results[0], 0) if option.results else 1)
        if rule.flops and s.fully_use_devices:
            options = self._most(options, lambda option: _used(option, s.mesh))
        return options

    @staticmethod
    def _most(options: list[Option], score: Any) -> list[Option]:
        best = max(map(score, options), default=1)
        return [option for option in options if score(option) == best]

    def _aligned(self, option: Option, sources: tuple[Value, ...], produced: tuple[Value, ...]) -> bool:
        for v, found in zip((*sources, *produced), (*option.operands, *option.results), strict=True):
            size = tuple(tensor_of(v).shape)
            if size and found.axes_of(len(size) - 1) and found.local_shape(size)[-1] % self.settings.slice_align:
                return False
        return True

    def _operator_work(
        self, node: fx.Node, rule: Rule, option: Option, sources: tuple[Value, ...], produced: tuple[Value, ...]
    ) -> tuple[float, float]:
        """The seconds of the operator, forward and backward, and the bytes of its results that are kept."""
        s = self.settings
        tensors = [v for v in produced if isinstance(tensor_of(v), torch.Tensor)]
        held = sum(self._table(v).local_bytes(o) for v, o in zip(produced, option.results, strict=True) if v in tensors)
        if is_view(node):
            return 0.0, 0.0
        moved = held + sum(self._table(v).local_bytes(o) for v, o in zip(sources, option.operands, strict=True))
        backward = any(v in self.flows for v in produced)
        passes = 1.0 + (BACKWARD_FACTOR if backward else 0.0)
        seconds = operator_seconds(rule.flops / _used(option, s.mesh), moved, s.profile)
        return passes * seconds, held if backward else 0.0

    def _add_output(self, port: Port) -> None:
        v = source_of(port.node)
        table = self._table(v)
        layouts = [Layout.replicated(self.settings.mesh)]
        if port.name in self.as_it_lies:
            layouts = [
                found
                for found, valid in zip(table.layouts, table.valid, strict=True)
                if valid and all(isinstance(p, Shard) or p == REPLICATE for p in found.placements)
            ]
        layouts, annotation = self._restrict(port.name, layouts)
        options = tuple(Option(_no_factors(found), (found,), ()) for found in layouts)
        free = np.zeros(len(options))
        self.vertices.append(
            Vertex(port.name, VertexKind.OUTPUT, port.node, options, free, free, free, None, port, annotation)
        )
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
        layouts = [found for found, valid in zip(table.layouts, table.valid, strict=True) if valid]
        options = tuple(Option(_no_factors(found), (found,), (found,)) for found in layouts)
        name = f"{v.node.name}[{v.index}]" if v.index else v.node.name
        free = np.zeros(len(options))
        self.vertices.append(Vertex(f"hub of {name}", VertexKind.HUB, v.node, options, free, free, free))
        index = len(self.vertices) - 1
        self._connect(v, index, 0)
        self.producer[v] = (index, 0)

    def _connect(self, v: Value, consumer: int, operand: int) -> None:
        if v.node in self.constants:
            return
        producer, result = self.producer[v]
        self.edges.append(Edge(v, producer, result, consumer, operand, self._table(v)))

    def _note_unknown(self, node: fx.Node) -> None:
        if not draws_random_numbers(node):
            self.unknown.setdefault(operator_name(node), node)

    def _report_unknown(self) -> None:
        forbidden = self.settings.on_unknown_op is Fallback.ERROR
        so = (
            ", and on_unknown_op='error' forbids to run it replicated"
            if forbidden
            else "; its operands are gathered and it runs replicated"
        )
        lines = [
            f"{name} (node {node.name}, {describe(node)}, in {module_path(node) or 'the function'}) has no rule{so}. "
            f'Add a row to propagation/rules.py: {name}: Row("{_sketch(node)}")'
            for name, node in self.unknown.items()
        ]
        if lines and forbidden:
            raise OperatorError("\n".join(lines))
        if lines:
            warnings.warn("\n".join(lines), UnknownOperatorWarning, stacklevel=2)


def _sketch(node: fx.Node) -> str:
    """A row to start from: a letter for each dim, for the operator's own shapes."""

    def letters(tensor: Any) -> str:
        return " ".join("abcdefgh"[d] for d in range(len(tensor.shape))) if isinstance(tensor, torch.Tensor) else ""

    found = value(node)
    results = found if isinstance(found, tuple | list) else (found,)
    return f"{', '.join(letters(value(o)) for o in operands(node))} -> {', '.join(map(letters, results))}"


def _no_factors(found: Layout) -> tuple[None, ...]:
    return (None,) * len(found.placements)


def _split_of(found: Layout, dim: int) -> int:
    return math.prod(found.mesh.size(axis) for axis in found.axes_of(dim))


def _used(option: Option, mesh: Mesh) -> int:
    """Over how many devices the work of an operator is spread."""
    return math.prod(size for factor, size in zip(option.factors, mesh.sizes, strict=True) if factor)


def is_view(node: fx.Node) -> bool:
    """Whether the operator only looks at its operand's memory."""
    schema = getattr(node.target, "_schema", None)
    aliases = schema is not None and any(a.alias_info is not None for a in schema.arguments)
    return aliases or node.target is constrain
