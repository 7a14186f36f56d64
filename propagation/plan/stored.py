"""Plans and programs as data, and back for the same graph.

The form is JSON: a list of rows, each of which may refer to rows before it, and the value itself. A row makes one value
of a kind that is listed here or that the reader names, and nothing else: no name is looked up in a module, nothing is
called that the file chooses, and what becomes part of a program's text is checked to be a name. Operators are written
by name, fake tensors by what they are like, and constants by their bytes. A program refers to the ports of the Graph
that it was made of; they are left out, and found again in a graph of equal text.
"""

from __future__ import annotations

import base64
import json
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from pydantic import BaseModel
from torch import Tensor, fx

from ...strategy.cut import SliceWindow
from ...strategy.layout import Layout, layout
from ...strategy.mesh import Mesh
from ...strategy.placement import Broadcast, Kind, Partial, Placement, Replicate, Shard, placement_from_code
from ..cost.profile import DeviceProfile
from ..graph.graph import Graph, Text
from ..graph.port import Port, Role
from ..program.collective import Collective
from ..program.local_program import Conversion, LocalProgram, PlacedPort
from ..program.step import Step
from ..torch_internals import FakeTensor, FakeTensorMode, OpOverload
from .plan import Plan

_RECORDS = (Collective, Conversion, LocalProgram, PlacedPort, Step)  # what a row may hold, field by field
_MODELS = (DeviceProfile, Plan)
_ENUMS = (Kind, Role)
_PLACEMENTS = (Broadcast, Partial, Replicate, Shard, SliceWindow)
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_NAMESPACES = ("aten", "partway", "prims")
_OPERATIONS = ("placeholder", "get_attr", "call_function", "output")
_PLAIN = (NoneType, bool, int, float, str)
_FAKE = FakeTensorMode()


class NoFormError(Exception):
    """A value that has no form as data."""


class WrongFormError(Exception):
    """Data that no value has."""


def dump(value: Any, graph: Graph, kinds: Iterable[type] = ()) -> bytes:
    """The bytes of `value`, such as a Program, made of `graph`; `kinds`: further dataclasses in it. Raises NoFormError
    for what is not listed here."""
    return _Writer(graph, kinds).written(value)


def load(data: bytes, graph: Graph, kinds: Iterable[type] = ()) -> Any:
    """What `dump` was given, with the ports of `graph`. Raises WrongFormError, or what a constructor raises, for other
    data; none of it is run."""
    return _Reader(graph, kinds).read(data)


def _ports(graph: Graph) -> dict[tuple[str, int], Port]:
    found = {("input", i): port for i, port in enumerate(graph.inputs)}
    return found | {("output", i): port for i, port in enumerate(graph.outputs)}


# -- Writing: a plain value is itself, a tuple a list, and all others are an object of one letter ----------------------


class _Writer:
    def __init__(self, graph: Graph, kinds: Iterable[type]) -> None:
        self._records = {*_RECORDS, *kinds}
        self._ports = {id(port): place for place, port in _ports(graph).items()}
        self._own = {node.target for node in graph.nodes}
        self._rows: list[Any] = []
        self._known: dict[Hashable, int] = {}

    def written(self, value: Any) -> bytes:
        found = self._value(value)
        return json.dumps({"rows": self._rows, "value": found}, separators=(",", ":"), check_circular=False).encode()

    def _value(self, value: Any, places: Mapping[fx.Node, int] | None = None) -> Any:
        """`value` in the form of data; `places`: those of the nodes of the graph that it is in."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind in (tuple, torch.Size):
            return [self._value(v, places) for v in value]
        if kind is fx.Node and places is not None:
            return {"n": places[value]}
        if isinstance(value, list):
            return {"l": [self._value(v, places) for v in value]}
        if isinstance(value, dict):
            return {"d": [[self._value(key), self._value(v, places)] for key, v in value.items()]}
        if kind is slice:
            return {"s": [self._value(v, places) for v in (value.start, value.stop, value.step)]}
        if kind is complex:
            return {"c": [value.real, value.imag]}
        return {"r": self._row(value)}

    def _row(self, value: Any) -> int:
        """The place of the row of `value`, one for equal fake tensors, and for others one for each object."""
        key: Hashable = id(value)
        if isinstance(value, FakeTensor):
            key = (value.shape, value.stride(), value.dtype, value.device)
        if key not in self._known:
            row = self._form(value)
            self._known[key] = len(self._rows)
            self._rows.append(row)
        return self._known[key]

    def _form(self, value: Any) -> list[Any]:
        for kinds, form in _FORMS.items():
            if isinstance(value, kinds):
                return form(self, value)
        if value is operator.getitem:
            return ["getitem"]
        if type(value) not in self._records:
            raise NoFormError(f"a {type(value).__name__} has no form as data: {value!r:.80}")
        return ["record", type(value).__name__, [self._value(getattr(value, f.name)) for f in fields(value)]]

    def _operator(self, value: OpOverload) -> list[Any]:
        if value not in self._own and not _only_computes(value):
            raise NoFormError(f"{value} is no operator of a program")
        return ["operator", value._schema.name, value._overloadname]

    def _port(self, port: Port) -> list[Any]:
        return ["port", *self._ports[id(port)]]

    def _layout(self, value: Layout) -> list[Any]:
        return ["layout", self._value(value.mesh), self._value(value.placements)]

    def _module(self, module: fx.GraphModule) -> list[Any]:
        place = {node: i for i, node in enumerate(module.graph.nodes)}
        nodes = [
            [
                node.op,
                node.name,
                self._value(node.target),
                self._value(tuple(node.args), place),
                {name: self._value(value, place) for name, value in node.kwargs.items()},
                self._value(node.meta.get("val")),
            ]
            for node in place
        ]
        names = [str(node.target) for node in module.graph.find_nodes(op="get_attr")]
        return ["graph", {name: self._value(getattr(module, name)) for name in names}, nodes]


def _of_torch(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _tensor_form(value: Tensor) -> list[Any]:
    """A fake tensor by what it is like, and any other by the memory that it reads."""
    form = [list(value.shape), list(value.stride()), _of_torch(value.dtype), str(value.device)]
    if isinstance(value, FakeTensor):
        return ["fake", *form]
    if type(value) is not Tensor:
        raise NoFormError(f"a {type(value).__name__} has no form as data")
    found = value.detach().resolve_conj().resolve_neg()
    span = 1 + sum((size - 1) * step for size, step in zip(found.shape, found.stride(), strict=True))
    flat = found.as_strided((span if found.numel() else 0,), (1,)).cpu().contiguous()
    return ["constant", *form, base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode()]


_FORMS: dict[Any, Callable[[_Writer, Any], list[Any]]] = {
    OpOverload: _Writer._operator,
    Tensor: lambda writer, value: _tensor_form(value),
    fx.GraphModule: lambda writer, value: writer._module(value),
    Port: _Writer._port,
    Layout: _Writer._layout,
    Mesh: lambda writer, value: ["mesh", list(value.axes), list(value.sizes)],
    torch.device: lambda writer, value: ["device", str(value)],
    _PLACEMENTS: lambda writer, value: ["placement", str(value)],
    _OF_TORCH: lambda writer, value: ["torch", _of_torch(value)],
    _ENUMS: lambda writer, value: ["enum", type(value).__name__, value.value],
    _MODELS: lambda writer, value: ["model", type(value).__name__, value.model_dump_json()],
}


# -- Reading -----------------------------------------------------------------------------------------------------------


class _Reader:
    def __init__(self, graph: Graph, kinds: Iterable[type]) -> None:
        self._records = {kind.__name__: kind for kind in (*_RECORDS, *kinds)}
        self._ports = _ports(graph)
        self._own = {node.target for node in graph.nodes}
        self._rows: list[Any] = []

    def read(self, data: bytes) -> Any:
        found = json.loads(data)
        for kind, *row in found["rows"]:
            self._rows.append(_ROWS[kind](self, *row))
        return self._value(found["value"])

    def _value(self, value: Any, nodes: list[fx.Node] | None = None) -> Any:
        if type(value) is list:
            return tuple([self._value(v, nodes) for v in value])
        if type(value) is not dict:
            return value
        ((form, body),) = value.items()
        match form:
            case "r":
                return self._rows[_place(body)]
            case "n" if nodes is not None:
                return nodes[_place(body)]
            case "l":
                return [self._value(v, nodes) for v in body]
            case "d":
                return {self._value(key): self._value(v, nodes) for key, v in body}
            case "s":
                return slice(*(self._value(v, nodes) for v in body))
            case "c":
                return complex(*body)
        raise WrongFormError(f"{form!r} is no form of a value")

    def _graph(self, constants: dict[str, Any], rows: list[Any]) -> fx.GraphModule:
        graph, made = fx.Graph(), list[fx.Node]()
        for op, name, target, args, kwargs, value in rows:
            new = graph.create_node(
                _one_of(_OPERATIONS, op),
                self._target(op, target),
                self._value(args, made),
                {_name(key): self._value(v, made) for key, v in kwargs.items()},
                _name(name),
            )
            if value is not None:
                new.meta["val"] = self._value(value)
            made.append(new)
        return Text({_name(key): self._value(value) for key, value in constants.items()}, graph)

    def _target(self, op: str, target: Any) -> Any:
        found = self._value(target)
        if op != "call_function":
            return _name(found)
        if not isinstance(found, OpOverload) and found is not operator.getitem:
            raise WrongFormError(f"{found!r} is no operator")
        return found

    def _operator(self, name: str, overload: str) -> OpOverload:
        namespace, _, base = name.partition("::")
        found: Any = getattr(torch.ops, _name(namespace))
        for part in (base, overload or "default"):
            found = getattr(found, _name(part))
        if not isinstance(found, OpOverload) or (found not in self._own and not _only_computes(found)):
            raise WrongFormError(f"{name} is no operator of a program")
        return found

    def _record(self, name: str, values: list[Any]) -> Any:
        kind = self._records[name]
        found = [self._value(value) for value in values]
        for (field, accepted), value in zip(_accepted(kind).items(), found, strict=True):
            if not isinstance(value, accepted):
                raise WrongFormError(f"{name}.{field} is a {type(value).__name__}")
        return kind(*found)

    def _port(self, side: str, place: int) -> Port:
        return self._ports[side, place]

    def _layout(self, mesh: Any, placements: Any) -> Layout:
        return layout(self._value(mesh), self._value(placements))


def _place(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise WrongFormError(f"{value!r} is no place")
    return value


def _name(value: Any) -> str:
    """A name that may stand in the text of a function."""
    if not isinstance(value, str) or not value.isidentifier():
        raise WrongFormError(f"{value!r:.80} is no name")
    return value


def _one_of(known: tuple[str, ...], value: Any) -> str:
    if value not in known:
        raise WrongFormError(f"{value!r:.80} is none of {', '.join(known)}")
    found: str = value
    return found


@cache
def _accepted(kind: type) -> dict[str, tuple[type, ...]]:
    """The classes that the fields of a dataclass may have."""
    assert is_dataclass(kind)
    hints = get_type_hints(kind)
    return {field.name: tuple(_classes(hints[field.name])) for field in fields(kind)}


def _classes(hint: Any) -> Iterable[type]:
    if get_origin(hint) in (Union, UnionType):
        for one in get_args(hint):
            yield from _classes(one)
    elif hint is float:
        yield from (int, float)
    else:
        yield get_origin(hint) or hint


def _only_computes(found: OpOverload) -> bool:
    """Whether an operator is ours, or computes tensors of what it is given and does no more: it does not write to its
    operands, and no text alone tells it what to make, as one tells `aten::from_file`."""
    if found.namespace == "partway":
        return True
    schema = found._schema
    texts = any("str" in str(a.type) for a in schema.arguments)
    tensors = any("Tensor" in str(a.type) for a in schema.arguments)
    makes = bool(schema.returns) and all("Tensor" in str(r.type) for r in schema.returns)
    return found.namespace in _NAMESPACES and makes and not schema.is_mutable and (tensors or not texts)


def _torch_value(name: str) -> Any:
    found = getattr(torch, _name(name))
    if not isinstance(found, _OF_TORCH):
        raise WrongFormError(f"torch.{name} is no dtype, layout or memory format")
    return found


def _dtype(name: str) -> torch.dtype:
    found = _torch_value(name)
    if not isinstance(found, torch.dtype):
        raise WrongFormError(f"torch.{name} is no dtype")
    return found


def _fake(shape: list[int], stride: list[int], dtype: str, device: str) -> Tensor:
    with _FAKE:
        return torch.empty_strided(shape, stride, dtype=_dtype(dtype), device=device)


def _tensor(shape: list[int], stride: list[int], dtype: str, device: str, text: str) -> Tensor:
    data = bytearray(base64.b64decode(text, validate=True))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(_dtype(dtype)).to(device).as_strided(shape, stride)


def _enum(name: str, value: str) -> Enum:
    kinds: dict[str, type[Enum]] = {kind.__name__: kind for kind in _ENUMS}
    return kinds[name](value)


def _model(name: str, text: str) -> BaseModel:
    kinds: dict[str, type[BaseModel]] = {kind.__name__: kind for kind in _MODELS}
    return kinds[name].model_validate_json(text)


def _placement(code: str) -> Placement:
    return placement_from_code(code)


def _mesh(axes: list[str], sizes: list[int]) -> Mesh:
    return Mesh(dict(zip(axes, sizes, strict=True)))


_ROWS: dict[str, Callable[..., Any]] = {
    "constant": lambda reader, *row: _tensor(*row),
    "device": lambda reader, name: torch.device(name),
    "enum": lambda reader, *row: _enum(*row),
    "fake": lambda reader, *row: _fake(*row),
    "getitem": lambda reader: operator.getitem,
    "graph": _Reader._graph,
    "layout": _Reader._layout,
    "mesh": lambda reader, *row: _mesh(*row),
    "model": lambda reader, *row: _model(*row),
    "operator": _Reader._operator,
    "placement": lambda reader, code: _placement(code),
    "port": _Reader._port,
    "record": _Reader._record,
    "torch": lambda reader, name: _torch_value(name),
}
