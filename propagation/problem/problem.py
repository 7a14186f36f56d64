"""The problem that every search takes, as data: vertices with options, edges with conversion costs.

Three operators, x * 2 of 8 rows, y = relu, and a sum over the rows, on an axis of two devices, two options each:

    vertex    option 0: whole on both    option 1: rows split       edge       whole to split    split to whole
    mul       8 rows of work             4 rows of work             mul, relu  free: a slice     an all-gather
    relu      8                          4                          relu, sum  free              an all-gather
    sum       8                          4, a Partial(sum) left

All split cost 12 rows of work and no conversion before the output, which takes an all-reduce of the sum; all whole 24.
With mul split and the others whole it is 20 and an all-gather.

A vertex is an input of the graph, an operator, an output, or a *hub*: the identity that stands after each
tensor with several consumers, so that one conversion into it is paid once and the problem stays pairwise. An
option of a vertex fixes the layouts of its operands and results; an edge prices the conversion between the
producer's and the consumer's layout of one tensor, forward and backward. Annotations remove options.

Values that depend on no parameter and no input of the call (masks, rotary tables, constants) have no vertex:
every rank has them whole and cuts its part at no cost, so they couple nothing.

`costs_of` has the numbers of a problem, all of them written out; `network_of` is for when they are too many. For the
three operators above, `unary` has the cost of each option, three columns of two numbers; `pairs` has two tables of
2 x 2, the costs of converting the tensor between two operators. Equal operators, as in repeated layers, share an array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import fx

from ...strategy.basics.choice import Choice
from ...strategy.basics.units import human, lasting
from ...strategy.layout import Layout
from ...strategy.mesh import Mesh
from ...strategy.notation import counted
from ...strategy.placement import REPLICATE
from ..cost.conversion import Codes, ConversionTable, Floats, conversion_table
from ..cost.cost import Weights
from ..cost.profile import DeviceProfile
from ..graph.graph import Graph
from ..graph.nodes import Value, tensor_of
from ..graph.port import Port
from ..minsum.network import Between, Converting, Costs, Matrix, Network, network
from ..rules.custom import Rows
from ..rules.layers.experts import Routing
from ..rules.rule import Rule
from ..rules.tensors.reductions import MAXIMA

# gradient_fp32_sync: sums over ranks of parameters' gradients in these dtypes are sent in that one
NARROW, SUMMED_IN = (torch.bfloat16, torch.float16), torch.float32
_SHOWN = 6  # strategies of an operator that are printed
AMONG = " among the strategies that enable_algo_approxi leaves"  # the scope of the bound of an approximate problem
Allowed = Mapping[str, tuple[tuple[Layout, ...], str]]  # port or constraint name -> (layouts, the user's text)


class Recompute(Choice):
    """Which values the backward may compute again instead of keeping them."""

    AUTO = "auto"
    NONE = "none"
    ALL = "all"


class Fallback(Choice):
    """The treatment of an operator without a rule."""

    WARN = "warn"
    ERROR = "error"


@dataclass(frozen=True)
class Settings:
    """The inputs of a search beside the graph and the annotations.

    fully_use_devices   an operator that does matrix products or convolutions uses all devices where it can
    stay_split          splits stay: no operator's operands or results are gathered or exchanged
    batch_by_default    operators next to no annotation split their leading dim (semi_auto_parallel)
    elementwise_follow  no conversion follows an elementwise operator: its layout is that of its consumer, or of the hub
                        of its consumers
    keep_cheapest       the number of an operator's options that are kept, the cheapest by themselves; None: all
    slice_align         contractions keep slices of the last dim to multiples of this (1: no limit)
    shard_parameters    parameters of at least this many bytes are split at rest on every axis that can
                        (enable_parallel_optimizer); None: the search decides
    gradient_fp32_sync  sums over ranks of parameters' gradients in bfloat16 and float16 send float32
    expert_load         the most rows that a rank gets for its experts, over the mean of all ranks; None: nobody said
    optimizer_states    copies of each parameter that the optimizer keeps (Adam: 2)
    memory_limit        bytes that a device may hold at a time; None: any number
    recompute           which values the backward may compute again
    regather            whether the backward gathers weights again that the forward gathered; None: whichever is cheaper
    short               sizes of dims that may be split over more devices than they have elements, as an annotation does
    rules               the rows that users gave for operators
    grouped             collectives of parameters are sent in groups, which wait once: each by itself waits for nothing
    """

    mesh: Mesh
    profile: DeviceProfile
    weights: Weights
    fully_use_devices: bool = True
    batch_by_default: bool = False
    stay_split: bool = False
    elementwise_follow: bool = False
    keep_cheapest: int | None = None
    slice_align: int = 1
    shard_parameters: int | None = None
    gradient_fp32_sync: bool = True
    expert_load: float | None = None
    optimizer_states: float = 2.0
    memory_limit: float | None = None
    recompute: Recompute = Recompute.AUTO
    regather: bool | None = None
    short: frozenset[int] = frozenset()
    on_unknown_op: Fallback = Fallback.WARN
    rules: Rows = field(default_factory=dict)
    grouped: bool = False

    @property
    def load(self) -> float:
        """`expert_load`, or what is assumed: that all ranks get equally many."""
        return 1.0 if self.expert_load is None else self.expert_load


@dataclass(frozen=True, slots=True)
class Option:
    """One strategy of a vertex: the factor split on each axis, and the layouts of its tensors."""

    factors: tuple[str | None, ...]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]


@dataclass(frozen=True, eq=False)
class Options:
    """The options of a vertex as columns of numbers, one row each; vertices of the same structure share them.

    operands, results   the code of each tensor's layout, in the ConversionTable of that tensor
    factors             the factor that each axis splits, by its number in `names`; -1 for none
    unary               the cost of the option by itself
    seconds, flops      of the operator on one device, forward and backward
    held                bytes on one device that stay for the backward; for an input, its own
    memory              bytes that count against the memory limit
    again               seconds of the operator's forward by itself
    made                bytes of its results on one device; 0 for a view
    arrived             bytes that its own exchanges bring to one device in the forward: they are not sent again, and so
                        they stay if the operator is computed again
    saved               those of `arrived` that its backward reads
    """

    tables: tuple[tuple[ConversionTable | None, ...], tuple[ConversionTable | None, ...]] = field(repr=False)
    operands: tuple[Codes, ...]
    results: tuple[Codes, ...]
    factors: Codes
    names: tuple[str, ...]
    mesh: Mesh
    unary: Floats = field(repr=False)
    seconds: Floats = field(repr=False)
    flops: Floats = field(repr=False)
    held: Floats = field(repr=False)
    memory: Floats = field(repr=False)
    again: Floats = field(repr=False)
    made: Floats = field(repr=False)
    arrived: Floats = field(repr=False)
    saved: Floats = field(repr=False)

    def __len__(self) -> int:
        return len(self.factors)

    def __getitem__(self, i: int) -> Option:
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        if i not in self._known:
            self._known[i] = self._option(i)
        return self._known[i]

    @cached_property
    def _known(self) -> dict[int, Option]:
        return {}

    def _option(self, i: int) -> Option:
        factors = tuple(self.names[f] if f >= 0 else None for f in self.factors[i])
        operands, results = (
            tuple(self._layout(table, codes[i]) for table, codes in zip(tables, columns, strict=True))
            for tables, columns in zip(self.tables, (self.operands, self.results), strict=True)
        )
        return Option(factors, operands, results)

    def __iter__(self) -> Iterator[Option]:
        return (self[i] for i in range(len(self)))

    def _layout(self, table: ConversionTable | None, code: int) -> Layout:
        return table.layouts[code] if table else Layout.replicated(self.mesh)

    def take(self, rows: Any) -> Options:
        """Some of these options, by number or by a mask."""
        rows = np.asarray(rows)
        rows = rows if rows.dtype == bool else rows.astype(np.intp)
        if len(rows) == len(self) and rows.dtype == bool and rows.all():
            return self
        return replace(
            self,
            operands=tuple(codes[rows] for codes in self.operands),
            results=tuple(codes[rows] for codes in self.results),
            factors=self.factors[rows], unary=self.unary[rows], seconds=self.seconds[rows], flops=self.flops[rows],
            held=self.held[rows], memory=self.memory[rows], again=self.again[rows], made=self.made[rows],
            arrived=self.arrived[rows], saved=self.saved[rows],
        )  # fmt: skip

    def states(self) -> Iterator[tuple[Codes, int]]:
        """For each operand and result its states, one row per option and one column per axis, and the number of the
        state that is whole on every rank."""
        for table, codes in zip((*self.tables[0], *self.tables[1]), (*self.operands, *self.results), strict=True):
            if table:
                yield table.digits[codes], table.states.index(REPLICATE)
            else:
                yield np.zeros((len(self), len(self.mesh.axes)), dtype=np.intp), 0


class VertexKind(StrEnum):
    """The kinds of vertices."""

    INPUT = "input"
    OPERATOR = "operator"
    HUB = "hub"
    OUTPUT = "output"


@dataclass(frozen=True)
class Vertex:
    """One choice to make."""

    name: str
    kind: VertexKind
    node: fx.Node
    options: Options
    rule: Rule | None = None
    port: Port | None = None
    annotation: str = ""

    @property
    def unary(self) -> Floats:
        """The cost of each option by itself."""
        return self.options.unary

    @property
    def seconds(self) -> Floats:
        """The seconds of each option on one device, forward and backward."""
        return self.options.seconds

    @property
    def held(self) -> Floats:
        """The bytes that each option holds on one device."""
        return self.options.held


@dataclass(frozen=True, slots=True)
class Edge:
    """The tensor `value` goes from result `result` of vertex `producer` to operand `operand` of `consumer`."""

    value: Value
    producer: int
    result: int
    consumer: int
    operand: int
    table: ConversionTable

    def codes(self, vertices: tuple[Vertex, ...]) -> tuple[Codes, Codes]:
        """The layouts of the tensor under each option of the producer, and of the consumer."""
        producer, consumer = vertices[self.producer].options, vertices[self.consumer].options
        return producer.results[self.result], consumer.operands[self.operand]

    def between(self, vertices: tuple[Vertex, ...], choice: Sequence[int]) -> tuple[int, int]:
        """The layouts that `choice` converts the tensor from and to."""
        rows, columns = self.codes(vertices)
        return int(rows[choice[self.producer]]), int(columns[choice[self.consumer]])

    def matrix(self, vertices: tuple[Vertex, ...]) -> Floats:
        """The conversion costs [option of the producer, option of the consumer]."""
        rows, columns = self.codes(vertices)
        different, places = np.unique(rows, return_inverse=True)  # each different row is computed once
        costs: Floats = self.table.rows(different.tolist())[:, columns][places]
        return costs


@dataclass(frozen=True)
class TensorFacts:
    """Facts about the tensors of a graph that the costs of conversions depend on, beside shape and dtype.

    flows            values that a gradient reaches
    differentiable   values that may have a gradient
    weights          parameters, and values made from them alone, that the backward reads
    parameters       the inputs that are parameters
    wide             values whose gradients, which are those of parameters, are sent in float32 where they are summed
    routings         values that belong to the rows of a mixture of experts
    """

    flows: frozenset[Value] = frozenset()
    differentiable: frozenset[Value] = frozenset()
    weights: frozenset[Value] = frozenset()
    parameters: frozenset[fx.Node] = frozenset()
    wide: frozenset[Value] = frozenset()
    routings: Mapping[Value, Routing] = field(default_factory=dict)

    def wider(self, v: Value) -> int:
        """How many times as many bytes an element of the tensor `v` has while sums of the backward send it."""
        return SUMMED_IN.itemsize // tensor_of(v).element_size() if v in self.wide else 1

    def table(self, v: Value, settings: Settings, *, output: bool = False) -> ConversionTable:
        """The costs of converting the tensor `v`; `output`: into the layout of an output.

        Outputs, and parameters that the parallel optimizer keeps in parts, may be gathered even if the settings keep
        splits (`stay_split`).
        """
        tensor, partial = tensor_of(v), "sum"
        if v.node.target in MAXIMA and v not in self.differentiable:
            partial = "max"  # which has no dual
        in_parts = settings.shard_parameters is not None and v.node in self.parameters
        weights = settings.weights
        if settings.grouped and v.node in self.parameters:
            weights = replace(weights, latency=0.0)
        return conversion_table(
            tuple(tensor.shape),
            tensor.element_size(),
            None if tensor.dtype is torch.bool else partial,
            v in self.flows,
            settings.mesh,
            settings.profile,
            weights,
            stay_split=settings.stay_split and not (output or in_parts),
            again=bool(settings.regather) and v in self.weights,
            wider=self.wider(v),
            short=settings.short.intersection(tensor.shape),
            routed=self.routings[v].placements if v in self.routings else (),
            load=settings.load if v in self.routings else 1.0,
        )


@dataclass(frozen=True)
class SearchProblem:
    """All choices of one graph on one mesh.

    constants     nodes that depend on no parameter and no input of the call, which have no vertex
    unknown       the names of operators without a rule
    allowed       the layouts that annotations allow, as `formulate` took them
    as_it_lies    the outputs that may stay split, as `formulate` took them
    approximate   `keep_cheapest` left options out
    beside        known bytes that the step holds while each vertex runs, beside those that the search counts
    """

    graph: Graph
    settings: Settings
    vertices: tuple[Vertex, ...]
    edges: tuple[Edge, ...]
    constants: frozenset[fx.Node]
    tensors: TensorFacts
    unknown: tuple[str, ...]
    allowed: Allowed = field(repr=False)
    as_it_lies: frozenset[str] = field(repr=False)
    approximate: bool = False
    beside: Floats | float = field(default=0.0, repr=False)

    def table(self, v: Value, *, output: bool = False) -> ConversionTable:
        """The costs of converting the tensor `v`; `output`: into the layout of an output."""
        return self.tensors.table(v, self.settings, output=output)

    def cost(self, choice: tuple[int, ...]) -> float:
        """The cost of one option per vertex."""
        total = sum(float(v.unary[c]) for v, c in zip(self.vertices, choice, strict=True))
        for edge in self.edges:
            before, after = edge.between(self.vertices, choice)
            total += float(edge.table.rows([before])[0, after])
        return total

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(problem: SearchProblem) -> Iterator[str]:
    """The possible strategies of each operator, the cheapest by themselves first."""
    vertices = [v for v in problem.vertices if v.kind is not VertexKind.HUB]
    strategies = counted(sum(len(v.options) for v in vertices), "strategy", "strategies")
    yield f"{counted(len(vertices), 'choice')} to make, of {strategies}"
    known: dict[int, list[str]] = {}
    for v in vertices:
        annotation = f", annotated {v.annotation}" if v.annotation else ""
        yield f"{v.kind.value} {v.name}: {counted(len(v.options), 'strategy', 'strategies')}{annotation}"
        if v.kind is VertexKind.OPERATOR:
            if id(v.options) not in known:  # equal operators share them
                known[id(v.options)] = list(_cheapest(v.options))
            yield from known[id(v.options)]


def _cheapest(options: Options) -> Iterator[str]:
    for i in options.unary.argsort(kind="stable")[:_SHOWN].tolist():
        option, held = options[i], float(options.held[i])
        split = " ".join(f"{a}:{f}" for a, f in zip(options.mesh.axes, option.factors, strict=True) if f) or "nothing"
        cost = lasting(float(options.seconds[i])) + (f", holds {human(held)}" if held else "")
        yield f"    splits {split} -> {', '.join(map(str, option.results))}    # {cost}"
    if len(options) > _SHOWN:
        yield f"    and {len(options) - _SHOWN} more"


# -- The numbers of a problem

MANY_PAIRS = 4e7  # pairs of options above which they are not written out: 320 MB


def costs_of(problem: SearchProblem) -> Costs:
    """The numbers of `problem`; those of parallel edges are summed. Equal structures share one array."""
    shared: dict[object, Floats] = {}

    def once(key: object, make: Callable[[], Floats]) -> Floats:
        if key not in shared:
            shared[key] = make()
        return shared[key]

    pairs: dict[tuple[int, int], Floats] = {}
    for ends, edges in _by_ends(problem).items():
        key = tuple(_structure(problem, edge) for edge in edges)
        pairs[ends] = once(key, partial(_written_out, problem, edges))
    return Costs(tuple(v.options.unary for v in problem.vertices), pairs)


def network_of(problem: SearchProblem) -> Network:
    """The network of `problem`, with its costs written out only if they are few."""
    if is_written_out(problem):
        return network(costs_of(problem))
    unary = tuple(v.options.unary for v in problem.vertices)
    return Network(unary, tuple((ends, _between(problem, edges)) for ends, edges in _by_ends(problem).items()))


def is_written_out(problem: SearchProblem) -> bool:
    """Whether its costs are few enough to be written out."""
    return are_few(pairs_of(problem))


def are_few(pairs: int) -> bool:
    """Whether the costs of this number of pairs of options may be written out."""
    return pairs <= MANY_PAIRS


def pairs_of(problem: SearchProblem) -> int:
    """The number of pairs of options of all edges, counting each structure once."""
    sizes = {_structure(problem, edge): math.prod(map(len, edge.codes(problem.vertices))) for edge in problem.edges}
    return sum(sizes.values())


def restricted(problem: SearchProblem, kept: list[Codes]) -> SearchProblem:
    """`problem` with only some options of each vertex, by number."""
    shared: dict[tuple[int, bytes], Options] = {}
    vertices = []
    for vertex, rows in zip(problem.vertices, kept, strict=True):
        key = (id(vertex.options), rows.tobytes())
        if key not in shared:
            shared[key] = vertex.options.take(rows)
        vertices.append(replace(vertex, options=shared[key]))
    return replace(problem, vertices=tuple(vertices))


def _by_ends(problem: SearchProblem) -> dict[tuple[int, int], list[Edge]]:
    """The edges between the same two vertices."""
    edges: dict[tuple[int, int], list[Edge]] = {}
    for edge in problem.edges:
        edges.setdefault((edge.producer, edge.consumer), []).append(edge)
    return edges


def _structure(problem: SearchProblem, edge: Edge) -> tuple[int, ...]:
    """A key for the costs of an edge: edges with equal keys have the same costs."""
    ends = id(problem.vertices[edge.producer].options), id(problem.vertices[edge.consumer].options)
    return id(edge.table), *ends, edge.result, edge.operand


def _between(problem: SearchProblem, edges: list[Edge]) -> Between:
    if len(edges) == 1:
        return Converting(edges[0].table, *edges[0].codes(problem.vertices))
    return Matrix(_written_out(problem, edges))


def _written_out(problem: SearchProblem, edges: list[Edge]) -> Floats:
    """The sum of the costs of parallel edges."""
    matrices = [edge.matrix(problem.vertices) for edge in edges]
    if len(matrices) == 1:
        return matrices[0]
    total: Floats = np.sum(matrices, axis=0)
    return total
