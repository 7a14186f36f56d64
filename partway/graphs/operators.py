"""The lines of a graph: one for each node, with what it makes, its bytes, and where it comes from.

    # up: net.py:14, in forward: return self.down(torch.relu(self.up(x)))
    linear: float32[4, 16] = aten.linear.default(x, up.weight, up.bias)    # 256 B

A line that begins with `#` says of the operators below it in which module they are, and which line of code wrote them.
Any operator is written in the same way; only collectives have words of their own.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from partway.propagation.graph.nodes import module_path, operator_name, source_line
from partway.propagation.graph.port import Port
from partway.propagation.ops.collectives import convert, convert_group, kind_of
from partway.propagation.program.collective import Collective
from partway.propagation.program.step import calls_of
from partway.strategy.layout import Layout
from partway.strategy.mesh import Mesh
from partway.strategy.notation import to_names
from partway.strategy.placement import BROADCAST, REPLICATE, Kind, Partial
from partway.strategy.units import human, lasting

_OWN = re.compile(r" at 0x[0-9a-f]+")  # what a text may have that is of this process
_KEY = re.compile(r"[0-9a-f]{40,}")  # the digest of something, of which the beginning tells enough
_LONGEST = 100  # characters of an argument that is neither a tensor nor a number
_NAMED = 4  # tensors of a group that are named

Below = Callable[[fx.Node], Iterable[str]]


@dataclass(frozen=True)
class Shown:
    """A graph, and what its nodes are called.

    names         of its inputs
    collectives   those that it issues, by node
    returns       what it returns, by what that is called
    """

    graph: fx.Graph
    names: Mapping[fx.Node, str] = field(default_factory=dict)
    collectives: Mapping[fx.Node, Collective] = field(default_factory=dict)
    returns: Mapping[str, Any] = field(default_factory=dict)

    def name(self, node: fx.Node) -> str:
        """What a node is called."""
        return self.names.get(node, node.name)

    def lines(self, below: Below = lambda _: ()) -> Iterator[str]:
        """The operators in order; `below` gives more lines for some."""
        before = ""
        for node in calls_of(self.graph):
            where = place_of(node)
            if where != before:
                yield f"# {where}" if where else "#"
                before = where
            yield self.line(node)
            if c := self.collectives.get(node):
                yield from (f"    # {line}" for line in _causes(c, where))
            yield from (f"    {line}" for line in below(node))

    def line(self, node: fx.Node) -> str:
        """An operator, with what it makes."""
        made, size = type_of(node.meta.get("val")), bytes_of(node.meta.get("val"))
        notes = [human(size)] if size else []
        if node.target in (convert, convert_group):
            called = f"{word_of(node)}({self.written(node.args[0])}) over {','.join(node.args[3])}, "  # type: ignore[arg-type]
            called += f"{node.args[1]} -> {node.args[2]}"
            if c := self.collectives.get(node):
                notes.append(f"{c.group_size} ranks send {human(c.wire_bytes)} each, {lasting(c.predicted_time)}")
        elif node.target is operator.getitem:
            called = f"{self.written(node.args[0])}[{node.args[1]}]"
        elif node.op == "get_attr":
            called = f"the constant {node.target}"
        else:
            arguments = [self.written(argument) for argument in node.args]
            arguments += [f"{key}={self.written(value)}" for key, value in node.kwargs.items()]
            called = f"{operator_name(node)}({', '.join(arguments)})"
        return f"{node.name}{made and ': '}{made} = {called}" + (f"    # {'; '.join(notes)}" if notes else "")

    def written(self, value: Any) -> str:
        """An argument of a call."""
        if isinstance(value, fx.Node):
            return self.name(value)
        if isinstance(value, list | tuple):
            inside = ", ".join(map(self.written, value))
            return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self.written(one)}" for key, one in value.items()) + "}"
        text = repr(value) if isinstance(value, str) else _OWN.sub("", str(value)).removeprefix("torch.")
        text = _KEY.sub(lambda found: f"{found[0][:8]}...", text)
        half = _LONGEST // 2
        return text if len(text) <= _LONGEST else f"{text[:half]}...{text[-half:]}"


def word_of(node: fx.Node) -> str:
    """What a conversion does: the kind of its collective, or of what a rank does alone."""
    kind = kind_of(str(node.args[1]), str(node.args[2]))
    return "unchanged" if kind is Kind.NOTHING else str(kind)


def _causes(c: Collective, where: str) -> Iterator[str]:
    """Why a collective is there; `where`: the place that is said already."""
    if len(c.members) > 1:
        more = f" and {len(c.members) - _NAMED} more" if len(c.members) > _NAMED else ""
        yield f"of {', '.join(c.members[:_NAMED])}{more}"
        return
    yield f"of {c.tensor}: {c.producer} meets {c.consumer}"
    at = ": ".join(filter(None, (c.path, c.source)))
    if at and at != where:
        yield f"at {at}"


def names_of(ports: Iterable[Port], graph: fx.Graph, nodes: Iterable[fx.Node] = ()) -> dict[fx.Node, str]:
    """The names by which people know the inputs of a graph, but for those that an operator has or several inputs;
    `nodes`: those that stand for the ports in `graph` (default: the ports' own)."""
    ports = list(ports)
    pairs = list(zip(nodes or [port.node for port in ports], ports, strict=True))
    count = Counter(port.name for port in ports)
    taken = {node.name for node in calls_of(graph)}
    return {node: port.name for node, port in pairs if count[port.name] == 1 and port.name not in taken}


def place_of(node: fx.Node) -> str:
    """The module that a node was captured in, and the line of code."""
    return ": ".join(filter(None, (module_path(node), source_line(node))))


def type_of(value: Any) -> str:
    """`float32[4, 16]`; of several results each."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(type_of, value))})"
    return "" if value is None else type(value).__name__


def bytes_of(value: Any) -> int:
    """The bytes of a tensor's elements; of several results those of all."""
    if isinstance(value, torch.Tensor):
        return int(value.numel()) * value.element_size()
    return sum(map(bytes_of, value)) if isinstance(value, list | tuple) else 0


def strategy_text(layout: Layout, ndim: int) -> str:
    """A layout as one writes it for `shard`: what splits each dim; where ranks hold addends, a placement for each axis.
    Of a tensor that ranks hold whole it does not say whose gradient they will have."""
    placements = tuple(REPLICATE if placement == BROADCAST else placement for placement in layout.placements)
    if any(isinstance(placement, Partial) for placement in placements):
        return f"[{', '.join(map(_placement_text, placements))}]"
    return repr(to_names(Layout(layout.mesh, placements), ndim)).replace("'", '"')


def _placement_text(placement: Any) -> str:
    return "Partial()" if placement == Partial() else repr(placement).replace("dim=", "")


def codes_text(mesh: Mesh, codes: Iterable[str]) -> str:
    """A layout by its codes: `[dp:S0 tp:R]`."""
    return "[" + " ".join(f"{axis}:{code}" for axis, code in zip(mesh.axes, codes, strict=True)) + "]"
