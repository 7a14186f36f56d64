"""From a flat graph to instructions: a slot for each value, and each call of an operator as Python text."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ...propagation.graph.nodes import has_any_strides, is_identity, is_unsized
from ...propagation.ops.collectives import TAG, convert, convert_group, kind_of
from ...propagation.ops.indexing import position
from ...propagation.program.collective import Conversion
from ...strategy.placement import Kind, kind, placement_from_code
from .instructions import AS_TRACED, CallOperator, Code, ConvertLayout, InputsAs, Instruction, Relayout, TellPosition
from .memory import is_awaited, is_private, may_share, overwriting, owner_of, runs_once
from .strides import follows, is_loose


def assemble_code(
    module: fx.GraphModule, phase: str, reasons: Sequence[Conversion] = (), inputs_as: InputsAs = AS_TRACED
) -> Code:
    """The instructions of a flat graph. Constants of the module are bound here, and are not inputs. `reasons`: its
    planned conversions."""
    nodes = members_late(list(module.graph.nodes))
    placeholders = [node for node in nodes if node.op == "placeholder"]
    written = {placeholders[place] for place in inputs_as.written}
    views = {placeholders[place] for place in inputs_as.views}
    same = {node: node.all_input_nodes[0] for node in nodes if is_identity(node)}
    slots = {node: i for i, node in enumerate(placeholders)}
    inputs = len(slots)
    returned: Any = ()
    instructions: list[Instruction] = []
    constants = _Constants()
    for node in nodes:
        if node.op == "output":
            (returned,) = node.args
        if node in same:
            slots[node] = slots[same[node]]
        if node.op not in ("get_attr", "call_function") or node in same:
            continue
        slots[node] = len(slots)
        operands = tuple(slots[o] for o in operands_of(node))
        if (relayout := relayout_of(node, phase)) is not None:
            if relayout.tags[0] < len(reasons):
                relayout = replace(relayout, hierarchy=reasons[relayout.tags[0]].hierarchy(relayout.kind))
            instructions.append(ConvertLayout(slots[node], operands, node.name, relayout))
            continue
        if node.target is position:
            instructions.append(TellPosition(slots[node], node.name, _axes(node)))
            continue
        if node.op == "get_attr":
            text = constants.name(getattr(module, str(node.target)))
        else:
            text = _written(node.target, node.args, node.kwargs, slots, constants)
        in_place, private = "", False
        if overwrite := overwriting(node, written):
            in_place = _written(overwrite.target, overwrite.args, overwrite.kwargs, slots, constants)
            private = overwrite.private
        instructions.append(
            CallOperator(
                slots[node],
                tuple(dict.fromkeys(operands)),
                node.name,
                text,
                in_place,
                private,
                once=runs_once(node),
                follows=follows(node),
                awaited=is_awaited(node),
            )
        )
    outputs = tuple(slots[o] if isinstance(o, fx.Node) else None for o in returned)
    traced = {
        slot: val
        for node, slot in slots.items()
        if node not in views
        and not (_may_be_view(node) or has_any_strides(node))
        and isinstance(val := node.meta.get("val"), Tensor)
    }
    unsized = frozenset(slot for node, slot in slots.items() if is_unsized(node))
    return Code(
        tuple(instructions), inputs, outputs, may_share(returned), constants.values, phase, traced, reasons, unsized
    )


def members_late(nodes: list[fx.Node]) -> list[fx.Node]:
    """`nodes` with each getitem of a group of conversions moved to just before its first use: an executor may go on
    while the group is under way, and waits where a result is read."""
    place = {node: i for i, node in enumerate(nodes)}

    def when(node: fx.Node) -> tuple[int, int]:
        if node.target is operator.getitem and node.all_input_nodes[0].target is convert_group and node.users:
            return min(place[user] for user in node.users), 0
        return place[node], 1

    return sorted(nodes, key=when)


def operands_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """The operands of a call; for a group of conversions one for each tensor, even if repeated."""
    arguments: tuple[Any, ...] = node.args
    return tuple(arguments[0]) if node.target is convert_group else tuple(node.all_input_nodes)


class _Constants:
    """The named constants of a text: operators, and arguments without a literal. Infinities and devices have one name
    per value: a graph read from disk may have more objects for them, and the text must be the same on every rank."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._names: dict[Hashable, str] = {}

    def name(self, value: Any) -> str:
        key = repr(value) if isinstance(value, float | torch.device) else id(value)
        if key not in self._names:
            self._names[key] = name = f"k{len(self.values)}"
            self.values[name] = value
        return self._names[key]


def _written(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], slots: Mapping[fx.Node, int], constants: _Constants
) -> str:
    """The Python text of a call."""
    texts = [_argument(a, slots, constants) for a in args]
    if target is operator.getitem:
        return f"{texts[0]}[{texts[1]}]"
    texts += [f"{name}={_argument(a, slots, constants)}" for name, a in kwargs.items()]
    return f"{constants.name(target)}({', '.join(texts)})"


def _argument(value: Any, slots: Mapping[fx.Node, int], constants: _Constants) -> str:
    if isinstance(value, fx.Node):
        return f"v{slots[value]}"
    if isinstance(value, list | tuple):
        inside = [_argument(v, slots, constants) for v in value]
        return f"[{', '.join(inside)}]" if isinstance(value, list) else f"({''.join(f'{v}, ' for v in inside)})"
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return repr(value)
    assert not isinstance(value, slice | dict), f"an argument is a {type(value).__name__}: {value}"
    return constants.name(value)


def relayout_of(node: fx.Node, phase: str) -> Relayout | None:
    """The conversion that `node` performs; None if it is no conversion."""
    if node.target not in (convert, convert_group):
        return None
    arguments: tuple[Any, ...] = node.args
    _, source, target, axes, size, tags = arguments[: TAG + 1]
    before, after = placement_from_code(source), placement_from_code(target)
    grouped = node.target is convert_group
    converted = operands_of(node) if grouped else operands_of(node)[:1]  # another operand counts routed rows
    owners = [owner_of(operand, node) for operand in converted]
    owned = tuple(owner is not None for owner in owners)
    private = tuple(map(is_private, owners))
    tags = tuple(tags) if grouped else (tags,)
    return Relayout(
        kind=kind(before, after),
        source=before,
        target=after,
        axes=tuple(axes),
        size=size,
        phase=phase,
        tags=tags,
        grouped=grouped,
        owned=owned,
        private=private,
        loose=_may_be_view(node),
    )


def _may_be_view(node: fx.Node) -> bool:
    """Whether a conversion is a slice whose readers do not need it contiguous, such as a weight of a product."""
    if node.target is not convert or not is_loose(node):
        return False
    return kind_of(str(node.args[1]), str(node.args[2])) is Kind.SLICE


def _axes(node: fx.Node) -> tuple[str, ...]:
    arguments: tuple[Any, ...] = node.args
    return tuple(arguments[0])
