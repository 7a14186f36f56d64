"""A captured graph as data, and back: for an equal call in another process.

The data has the operators, where they come from, the ports, and the structure of the function's result. Values that
exist only in the capturing process, such as hooks, have no form. The type of an object that the function returns is
written by its name, and read if it is one of the types that the reader is given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..graph.graph import Graph, verify
from ..graph.nodes import mark, own_frame, region_of, traced_path
from ..graph.port import Port, Role
from ..graph.structure import Structure
from ..torch_internals import OpOverload, schema_of
from .stored import DataReader, DataWriter, NoFormError, WrongFormError


def _known_here(node: fx.Node) -> bool:
    """Whether a node calls something by a key that only this process knows."""
    arguments = schema_of(node.target).arguments if isinstance(node.target, OpOverload) else ()
    return any(argument.name == "key" and "Tensor" not in str(argument.type) for argument in arguments)


_WITHOUT_FORM: dict[str, Callable[[Graph], object]] = {
    "uses tensors from outside": lambda graph: graph.constants or graph.read,
    "asks for values of tensors": lambda graph: graph.asked,
    "is captured for all values of a number": lambda graph: graph.counts is not None,
    "has hooks": lambda graph: graph.hooks.by_number or graph.hooks.observers,
    "calls functions that are not looked into": lambda graph: any(map(_known_here, graph.nodes)),
}
_CONTAINERS: tuple[type, ...] = (tuple, list, dict, OrderedDict, type(None))
_COPIED = ("__copy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")


@dataclass(frozen=True)
class TypeName:
    """Stands for a type of an object."""

    name: str


def dump_graph(graph: Graph, kinds: Iterable[type] = ()) -> bytes:
    """The bytes of `graph`; `kinds`: the types that objects in the function's result may have. Raises NoFormError for a
    graph without a form."""
    for what, there in _WITHOUT_FORM.items():
        if there(graph):
            raise NoFormError(f"the function {what}")
    known = {*_CONTAINERS, *kinds}
    structures = [structure for structure in (graph.result, graph.left) if structure is not None]
    for kind in (kind for structure in structures for kind in structure.kinds()):
        if any(getattr(kind, name, None) is not getattr(object, name, None) for name in _COPIED):
            raise NoFormError(f"the function returns a {kind.__name__}, which is more than its attributes")

    def named(value: Any) -> Any:
        if not isinstance(value, type):
            return value
        if value not in known:
            raise NoFormError(f"the function returns a {value.__name__}, which its code does not name")
        return TypeName(_name(value))

    nodes = {node: place for place, node in enumerate(graph.module.graph.nodes)}
    result, left = (structure and structure.data(named) for structure in (graph.result, graph.left))
    origins = tuple((traced_path(n), own_frame(n.meta.get("stack_trace") or ""), region_of(n)) for n in nodes)
    inputs, outputs = (
        tuple((nodes[port.node], port.role, port.name, port.argument, port.requires_grad) for port in ports)
        for ports in (graph.inputs, graph.outputs)
    )
    return DataWriter(kinds=(TypeName,)).written(
        (graph.module, origins, inputs, outputs, result, left, graph.aliases, graph.device)
    )


def load_graph(data: bytes, kinds: Iterable[type] = ()) -> Graph:
    """The graph that `dump_graph` wrote. Raises WrongFormError, or what a constructor raises, for other data; none of
    it is run."""
    known = {_name(kind): kind for kind in (*_CONTAINERS, *kinds)}

    def told(value: Any) -> Any:
        if not isinstance(value, TypeName):
            return value
        if value.name not in known:
            raise WrongFormError(f"{value.name} is not a type that the function can reach")
        return known[value.name]

    read = DataReader(kinds=(TypeName,)).read(data)
    if not isinstance(read, tuple):
        raise WrongFormError(f"it holds a {type(read).__name__}")
    module, origins, inputs, outputs, result, left, aliases, device = read
    nodes = list(module.graph.nodes)
    for node, (path, frame, region) in zip(nodes, origins, strict=True):
        node.meta |= {"nn_module_stack": {"": (path, "")}, "stack_trace": frame}
        mark(node, region)
    return verify(
        Graph(
            module, _ports(nodes, inputs), _ports(nodes, outputs), Structure.of_data(result, told), aliases, {}, device,
            left=left and Structure.of_data(left, told),
        )
    )  # fmt: skip


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _ports(nodes: list[fx.Node], rows: Iterable[tuple[Any, ...]]) -> tuple[Port, ...]:
    return tuple(Port(nodes[place], Role(role), name, argument, grad) for place, role, name, argument, grad in rows)
