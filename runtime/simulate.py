"""All ranks in lock-step in one process: a value is a list with one tensor per rank, and a conversion is a
function of lists. No process group, no second device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..propagation.lower import PlacedPort
from ..strategy.layout import Layout
from ..strategy.mesh import Mesh
from ..strategy.placement import PARTIAL_MAX, Kind, Partial, Placement, Shard
from .instructions import Bind, Code, Conversion, Instruction, Mark, Run, compile_code, local_conversion
from .record import note

Parts = list[Tensor]


class Simulator:
    """Runs the program of every rank of `mesh`."""

    late = False

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._groups: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}

    def enter(self, tensors: Sequence[Tensor], placed: Sequence[PlacedPort]) -> list[Parts]:
        """Cut whole tensors into the parts of every rank."""
        return [split(t, p.layout) for t, p in zip(tensors, placed, strict=True)]

    def leave(self, values: Sequence[Parts], layouts: Sequence[Layout], shared: Sequence[bool]) -> list[Tensor]:
        """Put the parts of every rank together."""
        joined = []
        for parts, layout, held in zip(values, layouts, shared, strict=True):
            whole = join(parts, layout)
            joined.append(whole.clone() if held and whole is parts[0] else whole)
        return joined

    def pack(self, values: Sequence[Parts]) -> list[Tensor]:
        """Values as a flat list of tensors, and `unpack` back."""
        return [part for parts in values for part in parts]

    def unpack(self, tensors: Sequence[Tensor]) -> list[Parts]:
        n = self.mesh.device_num
        return [list(tensors[i : i + n]) for i in range(0, len(tensors), n)]

    def zeros(self, placed: PlacedPort, device: torch.device) -> Parts:
        """The value of a tensor placed like `placed` that is zero."""
        return [torch.zeros(placed.local_shape, dtype=placed.dtype, device=device)] * self.mesh.device_num

    def load(self, code: Code, mark: Mark | None = None) -> Run:
        """`code` as a function, from the parts of every input to those of every output."""
        return compile_code(code, self, mark)

    def run(self, code: Code, inputs: Sequence[Parts]) -> list[Any]:
        """The outputs of `code` on every rank."""
        return self.load(code)(list(inputs))

    def express(self, step: Instruction, bind: Bind) -> str:
        """`step` for every rank: a call becomes a list of calls, whose variables are those of one rank."""
        operands = [f"v{slot}" for slot in step.operands]
        if step.conversion is not None:
            return f"{bind(functools.partial(self._convert, step.conversion))}({', '.join(operands)})"
        if step.along:
            ranks = range(self.mesh.device_num)
            return bind([torch.tensor(self.mesh.position(rank, *step.along)) for rank in ranks])
        if not operands:  # the same on every rank
            return f"[{step.text}] * {self.mesh.device_num}"
        first = "[:1]" if step.once else ""
        every = f" * {self.mesh.device_num}" if step.once else ""
        if len(operands) == 1:
            return f"[{step.text} for {operands[0]} in {operands[0]}{first}]{every}"
        lists = ", ".join(f"{operand}{first}" for operand in operands)
        return f"[{step.text} for {', '.join(operands)} in zip({lists})]{every}"

    def _convert(self, c: Conversion, *operands: Parts) -> Any:
        note(c, [parts[0] for parts in operands])
        converted = [self._convert_one(c, parts) for parts in operands]
        if not c.grouped:
            return converted[0]
        return [list(tensors) for tensors in zip(*converted, strict=True)]

    def _convert_one(self, c: Conversion, parts: Parts) -> Parts:
        out: Parts = list(parts)
        if c.axes not in self._groups:
            self._groups[c.axes] = self.mesh.groups(*c.axes)
        for group in self._groups[c.axes]:
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
            return [_total(parts, c.source)] * n
        case Kind.ALL_GATHER:
            return [torch.cat(parts, before)] * n
        case Kind.REDUCE_SCATTER:
            return [part.contiguous() for part in _total(parts, c.source).chunk(n, after)]
        case Kind.ALL_TO_ALL:
            return [part.contiguous() for part in torch.cat(parts, before).chunk(n, after)]
        case _:
            return [local_conversion(c, part, i) for i, part in enumerate(parts)]


def _total(parts: Parts, source: Placement) -> Tensor:
    """The value of which the ranks hold `parts` under the Partial `source`, in memory of its own."""
    if len(parts) == 1:
        return parts[0].clone()
    return functools.reduce(torch.maximum if source == PARTIAL_MAX else torch.add, parts)


def split(tensor: Tensor, layout: Layout) -> Parts:
    """The part of every rank, contiguous as the graphs were traced; a view of `tensor` where it can be."""
    if not layout.cuts:
        return [tensor.contiguous()] * layout.mesh.device_num
    shape = tuple(tensor.shape)
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
    """The whole tensor of which every rank holds a part: addends are summed (of candidates the largest is
    taken), copies are taken once."""
    if not any(isinstance(p, Shard | Partial) for p in layout.placements):
        return parts[0]
    shape = layout.global_shape(tuple(parts[0].shape))
    largest = PARTIAL_MAX in layout.placements
    whole = parts[0].new_full(shape, _least(parts[0].dtype) if largest else 0)
    for rank, part in enumerate(parts):
        coordinate = layout.mesh.coordinate(rank)
        first = all(
            position == 0 or isinstance(p, Shard | Partial)
            for position, p in zip(coordinate, layout.placements, strict=True)
        )
        if first:
            where = layout.slices(shape, rank)
            whole[where] = torch.maximum(whole[where], part) if largest else whole[where] + part
    return whole


def _least(dtype: torch.dtype) -> float | int:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min
