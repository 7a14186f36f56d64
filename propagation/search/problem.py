"""The one description that every search takes: vertices with options, edges with conversion costs.

A vertex is an input of the graph, an operator, an output, or a *hub*: the identity that stands after each
tensor with several consumers, so that one conversion into it is paid once and the problem stays pairwise. An
option of a vertex fixes the layouts of its operands and results; an edge prices the conversion between the
producer's and the consumer's layout of one tensor, forward and backward. Annotations remove options.

Values that depend on no parameter and no input of the call (masks, rotary tables, constants) have no vertex:
every rank has them whole, and cutting a part costs nothing, so they tie nothing together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import fx

from ...strategy.choice import Choice
from ...strategy.layout import Layout
from ...strategy.mesh import Mesh
from ...strategy.placement import REPLICATE
from ..cost.conversion import Codes, ConversionTable, Floats, conversion_table
from ..cost.cost import Weights
from ..cost.profile import DeviceProfile
from ..graph.graph import Graph
from ..graph.nodes import Value, tensor_of
from ..graph.port import Port
from ..rules.custom import Rows
from ..rules.reductions import MAXIMA
from ..rules.rule import Rule

AMONG = " among the strategies that enable_algo_approxi leaves"  # what the bound of an approximate problem holds for


class Fallback(Choice):
    """What to do with an operator that has no rule."""

    WARN = "warn"
    ERROR = "error"


@dataclass(frozen=True)
class Settings:
    """What a search needs to know beside the graph and the annotations.

    fully_use_devices   an operator that does matrix products or convolutions uses all devices where it can
    stay_split          what is split stays split: no operator's operands or results are gathered or exchanged
    batch_by_default    operators next to no annotation split their leading dim (semi_auto_parallel)
    elementwise_follow  no conversion follows an elementwise operator: it has the layout that its consumer takes, or the
                        hub of its consumers
    keep_cheapest       of an operator only so many options are kept, those that cost least by themselves; None: all
    slice_align         contractions keep slices of the last dim to multiples of this (1: no limit)
    shard_parameters    parameters of at least this many bytes are split at rest on every axis that can
                        (enable_parallel_optimizer); None: the search decides
    optimizer_states    how many copies of each parameter the optimizer keeps (Adam: 2)
    memory_limit        bytes that a device may hold: parameters, gradients, optimizer states, activations
    regather            weights that the forward gathers are not kept: the backward gathers them again
    short               sizes of dims that may be split over more devices than they have elements: a person did so
    rules               the rows that people gave to operators
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
    optimizer_states: float = 2.0
    memory_limit: float | None = None
    regather: bool = False
    short: frozenset[int] = frozenset()
    on_unknown_op: Fallback = Fallback.WARN
    rules: Rows = field(default_factory=dict)


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
    factors             what each axis splits: a number into `names`, -1 for nothing
    unary               the cost of the option by itself
    seconds, flops      of the operator on one device, forward and backward
    held                bytes on one device: what stays for the backward; of an input, itself
    memory              bytes that count against the memory limit
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

    def __len__(self) -> int:
        return len(self.factors)

    def __getitem__(self, i: int) -> Option:
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        if i not in self._made:
            self._made[i] = self._option(i)
        return self._made[i]

    @cached_property
    def _made(self) -> dict[int, Option]:
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
            held=self.held[rows], memory=self.memory[rows],
        )  # fmt: skip

    def placed(self, of: str, i: int) -> Codes:
        """The states of tensor i of the "operands" or "results", one row per option and one column per axis."""
        tables = self.tables[0] if of == "operands" else self.tables[1]
        codes = self.operands[i] if of == "operands" else self.results[i]
        table = tables[i]
        return table.digits[codes] if table else np.zeros((len(self), len(self.mesh.axes)), dtype=np.intp)

    def whole(self, of: str, i: int) -> int:
        """The state of tensor i that is whole on every rank."""
        table = (self.tables[0] if of == "operands" else self.tables[1])[i]
        return table.states.index(REPLICATE) if table else 0


class VertexKind(StrEnum):
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
        return self.options.unary

    @property
    def seconds(self) -> Floats:
        return self.options.seconds

    @property
    def held(self) -> Floats:
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
        return vertices[self.producer].options.results[self.result], vertices[self.consumer].options.operands[
            self.operand
        ]

    def matrix(self, vertices: tuple[Vertex, ...]) -> Floats:
        """The conversion costs [option of the producer, option of the consumer]."""
        rows, columns = self.codes(vertices)
        return between(self.table, rows, columns)


def between(table: ConversionTable, rows: Codes, columns: Codes) -> Floats:
    """`table.cost[rows][:, columns]`, of which only the rows that are needed are computed."""
    needed, places = np.unique(rows, return_inverse=True)
    found: Floats = table.rows(needed.tolist())[:, columns][places]
    return found


@dataclass(frozen=True)
class SearchProblem:
    """All choices of one graph on one mesh. `flows` holds the values that a gradient reaches, `weights` what is kept of
    the parameters for the backward; `allowed` and `as_it_lies` are what `formulate` was given; `approximate`:
    `keep_cheapest` left options out."""

    graph: Graph
    settings: Settings
    vertices: tuple[Vertex, ...]
    edges: tuple[Edge, ...]
    constants: frozenset[fx.Node]
    flows: frozenset[Value]
    unknown: tuple[str, ...]
    allowed: Allowed = field(repr=False)
    as_it_lies: frozenset[str] = field(repr=False)
    approximate: bool = False
    weights: frozenset[Value] = frozenset()

    def cost(self, choice: tuple[int, ...]) -> float:
        """The cost of one option per vertex."""
        total = sum(float(v.unary[c]) for v, c in zip(self.vertices, choice, strict=True))
        for edge in self.edges:
            rows, columns = edge.codes(self.vertices)
            total += float(edge.table.rows([int(rows[choice[edge.producer]])])[0, columns[choice[edge.consumer]]])
        return total

    def memory(self, choice: tuple[int, ...]) -> float:
        """The bytes on one device under one option per vertex: parameters, gradients, optimizer, activations."""
        return sum(float(v.options.memory[c]) for v, c in zip(self.vertices, choice, strict=True))


Allowed = Mapping[str, tuple[tuple[Layout, ...], str]]  # port or constraint name -> (layouts, what the person wrote)


def table_of(
    v: Value, gradient: bool, differentiable: bool, s: Settings, *, free: bool, weight: bool
) -> ConversionTable:
    """The costs of converting the tensor `v`. `gradient`: that of its gradient counts too; `differentiable`: it may
    have one; `free`: its parts may go to other ranks even where the settings say that what is split stays split, as
    results have to, and parameters that the parallel optimizer keeps in parts; `weight`: it is one that the backward
    reads."""
    tensor = tensor_of(v)
    return conversion_table(
        tuple(tensor.shape),
        tensor.element_size(),
        _partial_of(v, differentiable),
        gradient,
        s.mesh,
        s.profile,
        s.weights,
        s.stay_split and not free,
        s.regather and weight,
        s.short.intersection(tensor.shape),
    )


def _partial_of(v: Value, differentiable: bool) -> str | None:
    """How parts of `v` under Partial make its value: None where there are none, "max" for a maximum without a
    gradient (Partial(max) has no dual)."""
    if tensor_of(v).dtype is torch.bool:
        return None
    return "max" if v.node.target in MAXIMA and not differentiable else "sum"
