"""A graph as a list of instructions, made once per graph and run by both executors.

`simulate` runs an instruction on a list with one tensor per rank, `execute` on one rank's tensor; what differs
is how a conversion moves data, and that is the executor's. Conversions that move nothing are here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..propagation.collectives import convert, convert_group
from ..propagation.graph import draws_random_numbers
from ..propagation.indexing import position
from ..strategy.placement import Kind, Placement, Shard, kind, placement_from_code


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion of one or several tensors along `axes`."""

    kind: Kind
    source: Placement
    target: Placement
    axes: tuple[str, ...]
    size: int
    phase: str
    tags: tuple[int, ...]
    grouped: bool

    def payload(self, elements: int, itemsize: int) -> int:
        """The payload of a local tensor of `elements` elements: see `Collective.payload_bytes`."""
        return elements * itemsize * (self.size if self.kind is Kind.ALL_GATHER else 1)

    @property
    def dims(self) -> tuple[int, int]:
        """The dims that are put together and cut apart (0 where a side is whole)."""
        before = self.source.dim if isinstance(self.source, Shard) else 0
        after = self.target.dim if isinstance(self.target, Shard) else 0
        return before, after


@dataclass(frozen=True, slots=True)
class Instruction:
    """Compute slot `out` from the slots `operands`; `dead` slots are read for the last time. With `along` it is the
    rank's position on these axes."""

    out: int
    operands: tuple[int, ...]
    dead: tuple[int, ...]
    call: Callable[..., Any] | None
    conversion: Conversion | None
    once: bool  # draws random numbers: every rank must see the same ones
    name: str
    along: tuple[str, ...] = ()


@dataclass(frozen=True)
class Code:
    """A graph ready to run: inputs fill the first slots."""

    instructions: tuple[Instruction, ...]
    inputs: int
    slots: int
    outputs: tuple[int | None, ...]
    unused: tuple[int, ...]  # inputs that nothing reads


def interpret(code: Code, inputs: Sequence[Any], apply: Callable[[Instruction, list[Any]], Any]) -> list[Any]:
    """The outputs of `code`; `apply` computes the result of one instruction from the values of its operands.

    A value is whatever the executor takes for one tensor. `inputs` is left as it is; each value is let go after its
    last use.
    """
    slots: list[Any] = [None] * code.slots
    slots[: code.inputs] = inputs
    for instruction in code.instructions:
        result = apply(instruction, [slots[i] for i in instruction.operands])
        for i in instruction.dead:
            slots[i] = None
        slots[instruction.out] = result
    return [None if i is None else slots[i] for i in code.outputs]


def local_conversion(c: Conversion, part: Tensor, position: int) -> Tensor:
    """A conversion that needs no other rank, for the rank at `position` of its group."""
    before, after = c.dims
    match c.kind:
        case Kind.SLICE:
            size = part.shape[after] // c.size
            return part.narrow(after, position * size, size).contiguous()
        case Kind.PAD:
            shape = list(part.shape)
            shape[before] *= c.size
            whole = part.new_zeros(shape)
            whole.narrow(before, position * part.shape[before], part.shape[before]).copy_(part)
            return whole
        case Kind.KEEP:
            return part if position == 0 else torch.zeros_like(part)
        case _:
            return part


# The strides of a real part may differ from those of the fake one that was traced: a view may need a copy.
_STRIDE_FREE: dict[Any, Any] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}


def assemble_code(module: fx.GraphModule, phase: str) -> Code:
    """The instructions of a flat graph. Constants of the module are inputs of none: they are bound here."""
    slots: dict[fx.Node, int] = {}
    nodes = _members_late(list(module.graph.nodes))
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for operand in node.all_input_nodes:
            last[operand] = node
    for node in nodes:
        if node.op == "placeholder":
            slots[node] = len(slots)
    inputs = len(slots)
    returned: Any = ()
    instructions: list[Instruction] = []
    for node in nodes:
        if node.op == "output":
            (returned,) = node.args
        elif node.op == "get_attr":
            slots[node] = len(slots)
            constant = getattr(module, str(node.target))
            instructions.append(Instruction(slots[node], (), (), lambda c=constant: c, None, False, node.name))
        elif node.op == "call_function":
            slots[node] = len(slots)
            used = tuple(node.all_input_nodes)
            dead = tuple(slots[operand] for operand in used if last[operand] is node)
            instructions.append(
                Instruction(
                    slots[node], tuple(slots[o] for o in used), dead,
                    None if node.target in (convert, convert_group, position) else _caller(node, used),
                    _conversion(node, phase), draws_random_numbers(node),
                    node.name, _along(node),
                )
            )  # fmt: skip
    outputs = tuple(slots[o] if isinstance(o, fx.Node) else None for o in returned)
    unused = tuple(slots[n] for n in nodes if n.op == "placeholder" and n not in last)
    return Code(tuple(instructions), inputs, len(slots), outputs, unused)


def _members_late(nodes: list[fx.Node]) -> list[fx.Node]:
    """`nodes` with what takes one tensor out of a group of conversions moved to just before its first use: an
    executor may go on while the group is under way, and waits where a result is read."""
    place = {node: i for i, node in enumerate(nodes)}

    def when(node: fx.Node) -> tuple[int, int]:
        if node.target is operator.getitem and node.all_input_nodes[0].target is convert_group and node.users:
            return min(place[user] for user in node.users), 0
        return place[node], 1

    return sorted(nodes, key=when)


def _conversion(node: fx.Node, phase: str) -> Conversion | None:
    if node.target not in (convert, convert_group):
        return None
    arguments: tuple[Any, ...] = node.args
    _, source, target, axes, size, tags = arguments
    before, after = placement_from_code(source), placement_from_code(target)
    grouped = node.target is convert_group
    tags = tuple(tags) if grouped else (tags,)
    return Conversion(kind(before, after), before, after, tuple(axes), size, phase, tags, grouped)


def _along(node: fx.Node) -> tuple[str, ...]:
    arguments: tuple[Any, ...] = node.args
    return tuple(arguments[0]) if node.target is position else ()


def _caller(node: fx.Node, used: tuple[fx.Node, ...]) -> Callable[..., Any]:
    """A function of the values of `used` that calls the operator."""
    place = {operand: i for i, operand in enumerate(used)}
    target: Any = _STRIDE_FREE.get(node.target, node.target)
    flat = all(not isinstance(a, list | tuple | dict | slice) or not _holds_node(a) for a in node.args)
    if flat and not any(_holds_node(a) for a in node.kwargs.values()):
        template = [(place[a], None) if isinstance(a, fx.Node) else (-1, a) for a in node.args]
        kwargs = dict(node.kwargs)
        if kwargs:
            return lambda *v: target(*[v[i] if i >= 0 else c for i, c in template], **kwargs)
        if [i for i, _ in template] == list(range(len(used))):
            return target  # type: ignore[no-any-return]
        return lambda *v: target(*[v[i] if i >= 0 else c for i, c in template])

    def call(*values: Any) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda operand: values[place[operand]])
        return target(*args, **kwargs)

    return call


def _holds_node(argument: Any) -> bool:
    found: list[fx.Node] = []

    def see(node: fx.Node) -> fx.Node:
        found.append(node)
        return node

    fx.node.map_arg(argument, see)
    return bool(found)
