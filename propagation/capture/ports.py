"""The inputs and outputs of a graph by role and name, from torch.export's signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind

from ...strategy.errors import CaptureError
from ..graph.port import Port, Role
from ..graph.structure import Call, Structure, name_of, state_of
from .export.tracing import Traced

_WRITTEN = "the function writes to {!r} in place; return the new value, or keep it in a buffer"
_UPDATES = {Role.BUFFER: Role.BUFFER_UPDATE, Role.INPUT: Role.INPUT_UPDATE}


@dataclass(frozen=True)
class InputPorts:
    """The inputs of a graph. `aliases` maps the other names of a tied parameter to the one that is an input."""

    ports: list[Port] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)


def input_ports(traced: Traced, module: fx.GraphModule, call: Call, fn: Callable[..., Any]) -> InputPorts:
    """The ports of the inputs. The inputs of one tied parameter become one (in place).

    Raises CaptureError for an input that is not a tensor.
    """
    placeholders = {node.name: node for node in module.graph.nodes if node.op == "placeholder"}
    inputs, state, first = InputPorts(), state_of(fn), dict[int, Port]()
    arguments = iter(zip(call.tensors, call.names, call.arguments, strict=True))
    for spec in traced.signature.input_specs:
        node = placeholders[spec.arg.name]
        name = _own_name(spec.target)
        match spec.kind:
            case InputKind.PARAMETER | InputKind.BUFFER:
                role = Role.PARAMETER if spec.kind is InputKind.PARAMETER else Role.BUFFER
                tensor = state[name]
                port = Port(node, role, name, requires_grad=tensor.requires_grad)
                if id(tensor) in first:  # tied: two names, one tensor
                    node.replace_all_uses_with(first[id(tensor)].node)
                    inputs.aliases[name] = first[id(tensor)].name
                    module.graph.erase_node(node)
                    continue
                first[id(tensor)] = port
            case InputKind.CONSTANT_TENSOR:
                tensor = inputs.constants[name] = traced.constants[spec.target or ""]
                port = Port(node, Role.CONSTANT, name, requires_grad=tensor.requires_grad)
            case InputKind.USER_INPUT:
                tensor, name, argument = next(arguments)
                port = Port(node, Role.INPUT, name, argument, tensor.requires_grad)
            case InputKind.CUSTOM_OBJ:
                kind = type(traced.constants.get(spec.target or "", None)).__name__
                raise CaptureError(
                    f"{name_of(fn)} uses an object that a graph cannot hold, a {kind}; a torch.Generator is not "
                    "needed: random numbers follow torch.manual_seed, alike on every rank"
                )
            case _:
                raise CaptureError(f"inputs of kind {spec.kind} ({spec.arg.name}) are not supported")
        inputs.ports.append(port)
    return inputs


def output_ports(traced: Traced, module: fx.GraphModule, inputs: InputPorts) -> list[Port]:
    """The ports of the outputs. Raises CaptureError for a parameter or constant that the function writes to."""
    returned = next(node for node in module.graph.nodes if node.op == "output").args[0]
    names = {port.node.name: port.name for port in inputs.ports}
    outputs: list[Port] = []
    results = iter(
        [
            *((Role.RESULT, name) for name in result_names(traced.result)),
            *((Role.LEFT, f"left[{i}]") for i in range(traced.left.count())),
        ]
    )
    for node, spec in zip(returned, traced.signature.output_specs, strict=True):
        target = spec.target or ""
        match spec.kind:
            case OutputKind.USER_OUTPUT:
                outputs.append(Port(node, *next(results)))
            case OutputKind.BUFFER_MUTATION:
                outputs.append(Port(node, Role.BUFFER_UPDATE, _own_name(target)))
            case OutputKind.USER_INPUT_MUTATION:
                outputs.append(Port(node, Role.INPUT_UPDATE, names[target]))
            case _:
                raise CaptureError(_WRITTEN.format(names.get(target, _own_name(target))))
    return outputs


def unseen_updates(
    module: fx.GraphModule, written: Mapping[fx.Node, fx.Node], inputs: list[Port], outputs: list[Port]
) -> list[Port]:
    """The ports of buffers and inputs whose writes only expansion revealed. They become outputs (in place), after all
    others. Raises CaptureError for a write to a parameter or constant."""
    returned = next(node for node in module.graph.nodes if node.op == "output")
    known = {port.name for port in outputs if port.role in _UPDATES.values()}
    updates: list[Port] = []
    for port in inputs:
        if port.node in written and port.role not in _UPDATES:
            raise CaptureError(_WRITTEN.format(port.name))
        if port.node in written and port.name not in known:
            updates.append(Port(written[port.node], _UPDATES[port.role], port.name))
    returned.args = ((*returned.args[0], *(port.node for port in updates)),)
    return updates


def result_names(result: Structure) -> tuple[str, ...]:
    """A name for each tensor of a result: `result`, or `result[0]`, `result[1]`, ..."""
    tensors = result.count()
    return ("result",) if tensors == 1 else tuple(f"result[{i}]" for i in range(tensors))


def _own_name(target: str | None) -> str:
    """The name of a parameter or buffer in the function's module, which is the attribute `fn` of the traced module."""
    return (target or "").removeprefix("fn.")
