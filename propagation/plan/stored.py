"""Plans and programs as data, and back for the same graph.

The data is JSON: a list of rows, each of which may refer to rows before it, and the value itself. A plain value is
itself, a tuple is a list, and any other value is an object of one letter, such as a reference to a row. A row is a
dataclass, field by field, or has one of the forms of forms.py. A program refers to the ports of the Graph that it was
made from; they are left out, and looked up in a graph of equal text.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Set
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import fx

from ..cost.cost import Hierarchy
from ..graph.graph import Graph
from ..graph.port import Port
from ..program.collective import Conversion
from ..program.program import PlacedPort, Program
from ..torch_internals import FakeTensor
from .forms import FORMS, NoFormError, WrongFormError, no_form

__all__ = ["DataReader", "DataWriter", "NoFormError", "WrongFormError", "dump", "load"]

_RECORDS = (Conversion, Hierarchy, PlacedPort, Program)  # what a row may hold, field by field
_PLAIN = (NoneType, bool, int, float, str)
NO_PORTS: Mapping[tuple[str, int], Port] = {}


def dump(value: Any, graph: Graph, kinds: Iterable[type] = ()) -> bytes:
    """The bytes of `value`, such as a Program, made from `graph`; `kinds`: further dataclasses in it. Raises
    NoFormError for a value without a form."""
    return DataWriter({node.target for node in graph.nodes}, _ports(graph), kinds).written(value)


def load(data: bytes, graph: Graph, kinds: Iterable[type] = ()) -> Any:
    """The value that `dump` wrote, with the ports of `graph`. Raises WrongFormError, or what a constructor raises, for
    other data; none of it is run."""
    return DataReader({node.target for node in graph.nodes}, _ports(graph), kinds).read(data)


def _ports(graph: Graph) -> dict[tuple[str, int], Port]:
    ports = {("input", i): port for i, port in enumerate(graph.inputs)}
    return ports | {("output", i): port for i, port in enumerate(graph.outputs)}


class DataWriter:
    """The rows so far, and the places of the values that have a row; see forms.Writer.

    own     the operators of the captured graph; `ports`: its ports by their places
    kinds   further dataclasses that a row may hold
    """

    def __init__(
        self, own: Set[Any] = frozenset(), ports: Mapping[tuple[str, int], Port] = NO_PORTS, kinds: Iterable[type] = ()
    ) -> None:
        self.own = own
        self._records = {*_RECORDS, *kinds}
        self._ports = {id(port): place for place, port in ports.items()}
        self._rows: list[Any] = []
        self._known: dict[Hashable, int] = {}

    def written(self, value: Any) -> bytes:
        """The data of `value` as bytes."""
        data = self.data(value)
        return json.dumps({"rows": self._rows, "value": data}, separators=(",", ":"), check_circular=False).encode()

    def data(self, value: Any, places: Mapping[fx.Node, int] | None = None) -> Any:
        """`value` in the form of data; `places`: those of the nodes of the graph that it is in."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind in (tuple, torch.Size):
            return [self.data(v, places) for v in value]
        if kind is fx.Node and places is not None:
            return {"n": places[value]}
        if isinstance(value, list):
            return {"l": [self.data(v, places) for v in value]}
        if isinstance(value, dict):
            return {"d": [[self.data(key), self.data(v, places)] for key, v in value.items()]}
        if kind is slice:
            return {"s": [self.data(v, places) for v in (value.start, value.stop, value.step)]}
        if kind is complex:
            return {"c": [value.real, value.imag]}
        return {"r": self._row(value)}

    def place_of(self, port: Port) -> tuple[str, int]:
        """The side of the graph that a port is on, and its place there."""
        return self._ports[id(port)]

    def _row(self, value: Any) -> int:
        """The place of the row of `value`; equal fake tensors share one, other objects have one each."""
        key: Hashable = id(value)
        if isinstance(value, FakeTensor):
            key = (value.shape, value.stride(), value.dtype, value.device)
        if key not in self._known:
            row = self._cells(value)
            self._known[key] = len(self._rows)
            self._rows.append(row)
        return self._known[key]

    def _cells(self, value: Any) -> list[Any]:
        for name, form in FORMS.items():
            if isinstance(value, form.classes):
                return [name, *form.write(self, value)]
        if type(value) not in self._records:
            raise no_form(value)
        return ["record", type(value).__name__, [self.data(getattr(value, f.name)) for f in fields(value)]]


class DataReader:
    """The values of the rows so far; see forms.Reader, and DataWriter for its arguments."""

    def __init__(
        self, own: Set[Any] = frozenset(), ports: Mapping[tuple[str, int], Port] = NO_PORTS, kinds: Iterable[type] = ()
    ) -> None:
        self.own = own
        self._records = {kind.__name__: kind for kind in (*_RECORDS, *kinds)}
        self._ports = ports
        self._rows: list[Any] = []

    def read(self, data: bytes) -> Any:
        """The value in `data`."""
        tree = json.loads(data)
        for name, *cells in tree["rows"]:
            self._rows.append(self._record(*cells) if name == "record" else FORMS[name].read(self, *cells))
        return self.value(tree["value"])

    def value(self, data: Any, nodes: list[fx.Node] | None = None) -> Any:
        """The value of `data`; `nodes`: the nodes read so far of the graph that it is in."""
        if type(data) is list:
            return tuple([self.value(v, nodes) for v in data])
        if type(data) is not dict:
            return data
        ((letter, body),) = data.items()
        match letter:
            case "r":
                return self._rows[_place(body)]
            case "n" if nodes is not None:
                return nodes[_place(body)]
            case "l":
                return [self.value(v, nodes) for v in body]
            case "d":
                return {self.value(key): self.value(v, nodes) for key, v in body}
            case "s":
                return slice(*(self.value(v, nodes) for v in body))
            case "c":
                return complex(*body)
        raise WrongFormError(f"{letter!r} is not a form of a value")

    def port_at(self, side: str, place: int) -> Port:
        """The port at `place` on a side of the graph."""
        return self._ports[side, place]

    def _record(self, name: str, cells: list[Any]) -> Any:
        kind = self._records[name]
        values = [self.value(cell) for cell in cells]
        for (field, accepted), value in zip(_accepted(kind).items(), values, strict=True):
            if not isinstance(value, accepted):
                raise WrongFormError(f"{name}.{field} is a {type(value).__name__}")
        return kind(*values)


def _place(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise WrongFormError(f"{value!r} is not a place")
    return value


@lru_cache(maxsize=4096)
def _accepted(kind: type) -> dict[str, tuple[type, ...]]:
    """The classes that each field of a dataclass accepts."""
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
