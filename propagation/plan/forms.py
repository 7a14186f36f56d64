"""The table of forms: how each kind of value is written as a row of data, and read back.

A row is the name of its form and the cells of the value. Reading makes a value of the kind that the form is for, and
does nothing else: it looks up no name in a module, calls nothing that the data chooses, and checks that everything that
becomes part of a program's text is a name. Operators are written by name, fake tensors by shape, strides, dtype and
device, and constants by their bytes.
"""

from __future__ import annotations

import base64
import operator
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
from pydantic import BaseModel
from torch import Tensor, fx

from ...strategy.cut import SliceWindow
from ...strategy.layout import Layout, layout
from ...strategy.mesh import Mesh
from ...strategy.placement import Broadcast, Kind, Partial, Replicate, Routed, Shard, placement_from_code
from ..cost.profile import DeviceProfile
from ..graph.graph import Text
from ..graph.nodes import (
    compute_again,
    computed_again,
    has_any_strides,
    is_unsized,
    mark,
    note_unsized,
    region_of,
    unsized_dims,
)
from ..graph.port import Port, Role
from ..torch_internals import FakeTensor, FakeTensorMode, OpOverload, overload_name_of, schema_of
from .plan import Plan

_MODELS = (DeviceProfile, Plan)
_ENUMS = (Kind, Role)
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_NAMESPACES = ("aten", "partway", "prims")
_NODES = ("placeholder", "get_attr", "call_function", "output")
_FAKE = FakeTensorMode()


class NoFormError(Exception):
    """A value has no form as data."""


class WrongFormError(Exception):
    """Data is not that of any value."""


class Writer(Protocol):
    """Writes the parts of a value into its cells."""

    @property
    def own(self) -> Set[Any]:
        """The operators of the captured graph."""
        ...

    def data(self, value: Any, places: Mapping[fx.Node, int] | None = None) -> Any:
        """The data of a part of the value; `places`: those of the nodes of the graph that it is in."""
        ...

    def place_of(self, port: Port) -> tuple[str, int]:
        """The side of the captured graph that a port is on, and its place there."""
        ...


class Reader(Protocol):
    """Reads the parts of a value from its cells."""

    @property
    def own(self) -> Set[Any]:
        """The operators of the captured graph."""
        ...

    def value(self, data: Any, nodes: list[fx.Node] | None = None) -> Any:
        """A part of the value; `nodes`: the nodes read so far of the graph that it is in."""
        ...

    def port_at(self, side: str, place: int) -> Port:
        """The port at `place` on a side of the captured graph."""
        ...


@dataclass(frozen=True)
class StoredForm:
    """How values of some classes are written as data.

    classes   instances of these have this form, unless an earlier form in the table applies
    write     the cells of a value; raises NoFormError for a value without a form
    read      the value of the cells; raises WrongFormError, or what a constructor raises
    """

    classes: tuple[type, ...]
    write: Callable[[Writer, Any], list[Any]]
    read: Callable[..., Any]


def no_form(value: Any) -> NoFormError:
    """The error for a value without a form."""
    return NoFormError(f"a {type(value).__name__} has no form as data: {value!r:.80}")


def name(value: Any) -> str:
    """Return `value`, a name that may stand in the text of a function. Raises WrongFormError for anything else."""
    if not isinstance(value, str) or not value.isidentifier():
        raise WrongFormError(f"{value!r:.80} is not a name")
    return value


# -- Operators ---------------------------------------------------------------------------------------------------------


def _write_operator(writer: Writer, value: OpOverload) -> list[Any]:
    if value not in writer.own and not _only_computes(value):
        raise NoFormError(f"{value} is not an operator of a program")
    return [schema_of(value).name, overload_name_of(value)]


def _read_operator(reader: Reader, full_name: str, overload: str) -> OpOverload:
    namespace, _, base = full_name.partition("::")
    value: Any = getattr(torch.ops, name(namespace))
    for part in (base, overload or "default"):
        value = getattr(value, name(part))
    if not isinstance(value, OpOverload) or (value not in reader.own and not _only_computes(value)):
        raise WrongFormError(f"{full_name} is not an operator of a program")
    return value


def _only_computes(value: OpOverload) -> bool:
    """Whether an operator is ours, or only computes tensors (and their sizes) from its operands: it does not write to
    them, and its result does not depend on a text alone, as that of `aten::from_file` does."""
    if value.namespace == "partway":
        return True
    schema = schema_of(value)
    texts = any("str" in str(a.type) for a in schema.arguments)
    tensors = any("Tensor" in str(a.type) for a in schema.arguments)
    made = [str(returned.type) for returned in schema.returns]
    makes = bool(made) and "Tensor" in made[0] and all("Tensor" in kind or "int" in kind.lower() for kind in made)
    return value.namespace in _NAMESPACES and makes and not schema.is_mutable and (tensors or not texts)


def _write_getitem(writer: Writer, value: Any) -> list[Any]:
    if value is not operator.getitem:
        raise no_form(value)
    return []


# -- Graphs ------------------------------------------------------------------------------------------------------------


def _write_graph(writer: Writer, module: fx.GraphModule) -> list[Any]:
    place = {node: i for i, node in enumerate(module.graph.nodes)}
    nodes = [
        [
            node.op,
            node.name,
            writer.data(node.target),
            writer.data(tuple(node.args), place),
            {key: writer.data(value, place) for key, value in node.kwargs.items()},
            writer.data(node.meta.get("val")),
            computed_again(node),
            region_of(node),
            [*unsized_dims(node), has_any_strides(node)] if is_unsized(node) else None,
        ]
        for node in place
    ]
    constants = [str(node.target) for node in module.graph.find_nodes(op="get_attr")]
    return [{key: writer.data(getattr(module, key)) for key in constants}, nodes]


def _read_graph(reader: Reader, constants: dict[str, Any], rows: list[Any]) -> fx.GraphModule:
    graph, nodes = fx.Graph(), list[fx.Node]()
    for op, own_name, target, args, kwargs, value, again, region, unsized in rows:
        if op not in _NODES:
            raise WrongFormError(f"{op!r:.80} is none of {', '.join(_NODES)}")
        node = graph.create_node(
            op,
            _target(reader, op, target),
            reader.value(args, nodes),
            {name(key): reader.value(v, nodes) for key, v in kwargs.items()},
            name(own_name),
        )
        if value is not None:
            node.meta["val"] = reader.value(value)
        if not isinstance(again, bool | None) or not isinstance(region, int | None):
            raise WrongFormError(f"{again!r:.80} and {region!r:.80} do not say what is computed again")
        if again is not None:
            compute_again(node, again)
        mark(node, region)
        if unsized is not None:
            *dims, strides = unsized
            note_unsized(node, tuple(map(int, dims)), bool(strides))
        nodes.append(node)
    return Text({name(key): reader.value(value) for key, value in constants.items()}, graph)


def _target(reader: Reader, op: str, data: Any) -> Any:
    target = reader.value(data)
    if op != "call_function":
        return name(target)
    if not isinstance(target, OpOverload) and target is not operator.getitem:
        raise WrongFormError(f"{target!r} is not an operator")
    return target


# -- Tensors, and torch's names of dtypes, layouts and memory formats --------------------------------------------------


def _short(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _like(value: Tensor) -> list[Any]:
    """The shape, strides, dtype and device of a tensor."""
    return [list(value.shape), list(value.stride()), _short(value.dtype), str(value.device)]


def _write_constant(writer: Writer, value: Tensor) -> list[Any]:
    """The shape, strides, dtype and device of a tensor, and the memory that it reads."""
    if type(value) is not Tensor:
        raise NoFormError(f"a {type(value).__name__} has no form as data")
    plain = value.detach().resolve_conj().resolve_neg()
    span = 1 + sum((size - 1) * step for size, step in zip(plain.shape, plain.stride(), strict=True))
    flat = plain.as_strided((span if plain.numel() else 0,), (1,)).cpu().contiguous()
    return [*_like(value), base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode()]


def _read_constant(reader: Reader, shape: list[int], stride: list[int], dtype: str, device: str, text: str) -> Tensor:
    data = bytearray(base64.b64decode(text, validate=True))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(_dtype(dtype)).to(device).as_strided(shape, stride)


def _read_fake(reader: Reader, shape: list[int], stride: list[int], dtype: str, device: str) -> Tensor:
    with _FAKE:
        return torch.empty_strided(shape, stride, dtype=_dtype(dtype), device=device)


def _read_torch(reader: Reader, text: str) -> Any:
    value = getattr(torch, name(text))
    if not isinstance(value, _OF_TORCH):
        raise WrongFormError(f"torch.{text} is not a dtype, layout or memory format")
    return value


def _dtype(text: str) -> torch.dtype:
    value = getattr(torch, name(text))
    if not isinstance(value, torch.dtype):
        raise WrongFormError(f"torch.{text} is not a dtype")
    return value


# -- Partway's own -----------------------------------------------------------------------------------------------------


def _read_enum(reader: Reader, kind: str, value: str) -> Enum:
    kinds: dict[str, type[Enum]] = {each.__name__: each for each in _ENUMS}
    return kinds[kind](value)


def _read_model(reader: Reader, kind: str, text: str) -> BaseModel:
    kinds: dict[str, type[BaseModel]] = {each.__name__: each for each in _MODELS}
    return kinds[kind].model_validate_json(text)


FORMS: Mapping[str, StoredForm] = {
    "operator": StoredForm((OpOverload,), _write_operator, _read_operator),
    "fake": StoredForm((FakeTensor,), lambda writer, value: _like(value), _read_fake),
    "constant": StoredForm((Tensor,), _write_constant, _read_constant),
    "graph": StoredForm((fx.GraphModule,), _write_graph, _read_graph),
    "port": StoredForm(
        (Port,),
        lambda writer, value: list(writer.place_of(value)),
        lambda reader, side, place: reader.port_at(side, place),
    ),
    "layout": StoredForm(
        (Layout,),
        lambda writer, value: [writer.data(value.mesh), writer.data(value.placements)],
        lambda reader, mesh, placements: layout(reader.value(mesh), reader.value(placements)),
    ),
    "mesh": StoredForm(
        (Mesh,),
        lambda writer, value: [list(value.axes), list(value.sizes), *([list(value.ranks)] if value.is_part else [])],
        lambda reader, axes, sizes, ranks=None: Mesh(dict(zip(axes, sizes, strict=True)), ranks),
    ),
    "device": StoredForm((torch.device,), lambda writer, value: [str(value)], lambda reader, text: torch.device(text)),
    "placement": StoredForm(
        (Broadcast, Partial, Replicate, Routed, Shard, SliceWindow),
        lambda writer, value: [str(value)],
        lambda reader, code: placement_from_code(code),
    ),
    "torch": StoredForm(_OF_TORCH, lambda writer, value: [_short(value)], _read_torch),
    "enum": StoredForm(_ENUMS, lambda writer, value: [type(value).__name__, value.value], _read_enum),
    "model": StoredForm(_MODELS, lambda writer, value: [type(value).__name__, value.model_dump_json()], _read_model),
    "getitem": StoredForm((type(operator.getitem),), _write_getitem, lambda reader: operator.getitem),
}
