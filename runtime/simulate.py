"""All ranks in lock-step in one process: a value is a list with one tensor per rank, and a conversion is a
function of lists. No process group, no second device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..propagation.lower import PlacedPort
from ..strategy.layout import Layout
from ..strategy.mesh import Mesh
from ..strategy.placement import Kind, Partial, Shard
from .instructions import Code, Conversion
from .record import Event, listening, note

Parts = list[Tensor]


class Simulator:
    """Runs the program of every rank of `mesh`."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._groups = {axis: mesh.groups(axis) for axis in mesh.axes}

    def enter(self, tensors: Sequence[Tensor], placed: Sequence[PlacedPort]) -> list[Parts]:
        """Cut whole tensors into the parts of every rank."""
        return [split(t, p.layout) for t, p in zip(tensors, placed, strict=True)]

    def leave(self, values: Sequence[Parts], layouts: Sequence[Layout]) -> list[Tensor]:
        """Put the parts of every rank together."""
        return [join(parts, layout) for parts, layout in zip(values, layouts, strict=True)]

    def pack(self, values: Sequence[Parts]) -> list[Tensor]:
        """Values as a flat list of tensors, and `unpack` back."""
        return [part for parts in values for part in parts]

    def unpack(self, tensors: Sequence[Tensor]) -> list[Parts]:
        n = self.mesh.device_num
        return [list(tensors[i : i + n]) for i in range(0, len(tensors), n)]

    def run(self, code: Code, inputs: Sequence[Parts]) -> list[Any]:
        """The outputs of `code` on every rank. `inputs` is left as it is."""
        slots: list[Any] = [None] * code.slots
        slots[: code.inputs] = inputs
        ranks = range(self.mesh.device_num)
        for step in code.instructions:
            operands = [slots[i] for i in step.operands]
            if step.conversion is not None:
                result: Any = self._convert(step.conversion, operands)
            elif not operands or step.once:  # the same on every rank
                one = step.call(*[parts[0] for parts in operands])  # type: ignore[misc]
                result = [one for _ in ranks]
            else:
                call = step.call
                result = [call(*values) for values in zip(*operands, strict=True)]  # type: ignore[misc]
            for i in step.dead:
                slots[i] = None
            slots[step.out] = result
        return [None if i is None else slots[i] for i in code.outputs]

    def _convert(self, c: Conversion, operands: list[Parts]) -> Any:
        if listening() and c.kind.communicates:
            payload = sum(c.payload(parts[0].numel(), parts[0].element_size()) for parts in operands)
            note(Event(c.kind, (c.axis,), c.size, payload, c.phase, c.tags))
        converted = [self._convert_one(c, parts) for parts in operands]
        if not c.grouped:
            return converted[0]
        return [list(tensors) for tensors in zip(*converted, strict=True)]

    def _convert_one(self, c: Conversion, parts: Parts) -> Parts:
        out: Parts = list(parts)
        for group in self._groups[c.axis]:
            results = convert_group_of(c, [parts[rank] for rank in group])
            for rank, result in zip(group, results, strict=True):
                out[rank] = result
        return out


def convert_group_of(c: Conversion, parts: Parts) -> Parts:
    """One conversion among the ranks of one group, in rank order."""
    n = len(parts)
    before, after = c.dims
    match c.kind:
        case Kind.ALL_REDUCE:
            return [_total(parts)] * n
        case Kind.ALL_GATHER:
            return [torch.cat(parts, before)] * n
        case Kind.REDUCE_SCATTER:
            return [part.contiguous() for part in _total(parts).chunk(n, after)]
        case Kind.ALL_TO_ALL:
            return [part.contiguous() for part in torch.cat(parts, before).chunk(n, after)]
        case _:
            return [local_conversion(c, part, i) for i, part in enumerate(parts)]


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


def _total(parts: Parts) -> Tensor:
    total = parts[0] + parts[1] if len(parts) > 1 else parts[0]
    for part in parts[2:]:
        total = total + part
    return total


def split(tensor: Tensor, layout: Layout) -> Parts:
    """The part of every rank, contiguous as the graphs were traced; a view of `tensor` where it can be."""
    shape = tuple(tensor.shape)
    if not any(isinstance(p, Shard) for p in layout.placements):
        return [tensor.contiguous()] * layout.mesh.device_num
    cut: dict[tuple[tuple[int, int], ...], Tensor] = {}
    parts = []
    for rank in range(layout.mesh.device_num):
        where = layout.slices(shape, rank)
        key = tuple((s.start, s.stop) for s in where)
        if key not in cut:
            cut[key] = tensor[where].contiguous()
        parts.append(cut[key])
    return parts


def join(parts: Parts, layout: Layout) -> Tensor:
    """The whole tensor of which every rank holds a part: addends are summed, copies are taken once."""
    if not any(isinstance(p, Shard | Partial) for p in layout.placements):
        return parts[0]
    shape = layout.global_shape(tuple(parts[0].shape))
    whole = parts[0].new_zeros(shape)
    for rank, part in enumerate(parts):
        coordinate = layout.mesh.coordinate(rank)
        first = all(
            position == 0 or isinstance(p, Shard | Partial)
            for position, p in zip(coordinate, layout.placements, strict=True)
        )
        if first:
            whole[layout.slices(shape, rank)] += part
    return whole
