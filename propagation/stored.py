"""Programs as bytes, and back for the same graph.

A program refers to the ports of the Graph that it was made of; they are left out, and found again in a graph of equal
text. Operators are written by name, fake tensors by what they are like, and constants whole.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .graph import Graph, Port, Text
from .torch_internals import FakeTensor, FakeTensorMode, OpOverload

_FAKE = FakeTensorMode()


def dump(value: Any, graph: Graph) -> bytes:
    """The bytes of `value`, such as a Program, made of `graph`. Raises what pickle raises for what has no bytes."""
    file = io.BytesIO()
    _Writer(file, graph).dump(value)
    return file.getvalue()


def load(data: bytes, graph: Graph) -> Any:
    """What `dump` was given, with the ports of `graph`. The bytes must be ours: pickle runs what they say."""
    return _Reader(io.BytesIO(data), graph).load()


class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, graph: Graph) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._ports = {id(port): place for place, port in _ports(graph).items()}

    def persistent_id(self, obj: Any) -> Any:
        return self._ports.get(id(obj)) if isinstance(obj, Port) else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, fx.GraphModule):
            constants = {str(n.target): getattr(obj, str(n.target)) for n in obj.graph.find_nodes(op="get_attr")}
            return _module, (constants, _nodes(obj.graph))
        if isinstance(obj, OpOverload):
            return _operator, (obj._schema.name, obj._overloadname)
        if isinstance(obj, FakeTensor):
            return _fake, (tuple(obj.shape), obj.stride(), obj.dtype, obj.device)
        return NotImplemented


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, graph: Graph) -> None:
        super().__init__(file)
        self._ports = _ports(graph)

    def persistent_load(self, pid: Any) -> Port:
        return self._ports[pid]


def _ports(graph: Graph) -> dict[tuple[str, int], Port]:
    found = {("input", i): port for i, port in enumerate(graph.inputs)}
    return found | {("output", i): port for i, port in enumerate(graph.outputs)}


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of a graph; in arguments, `place` alone stands for the node at that place."""

    place: int
    op: str = ""
    name: str = ""
    target: Any = None
    args: Any = ()
    kwargs: Any = None
    value: Any = None


def _nodes(graph: fx.Graph) -> list[_Node]:
    place = {node: _Node(i) for i, node in enumerate(graph.nodes)}
    written = []
    for i, node in enumerate(graph.nodes):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), place.__getitem__)  # type: ignore[arg-type]
        written.append(_Node(i, node.op, node.name, node.target, args, kwargs, node.meta.get("val")))
    return written


def _module(constants: dict[str, Any], nodes: list[_Node]) -> fx.GraphModule:
    graph, made = fx.Graph(), list[fx.Node]()

    def argument(value: Any) -> Any:
        if isinstance(value, _Node):
            return made[value.place]
        if isinstance(value, list | tuple):
            return type(value)(map(argument, value))
        return {key: argument(v) for key, v in value.items()} if isinstance(value, dict) else value

    for node in nodes:
        new = graph.create_node(
            node.op, node.target, argument(tuple(node.args)), argument(dict(node.kwargs)), node.name
        )
        if node.value is not None:
            new.meta["val"] = node.value
        made.append(new)
    return Text(constants, graph)


def _operator(name: str, overload: str) -> Any:
    namespace, _, base = name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


def _fake(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with _FAKE:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
