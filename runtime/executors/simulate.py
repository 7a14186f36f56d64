"""Simulates all ranks in one process: a value is a list with one tensor per rank, and a conversion is a function of
lists. It needs no process group and no second device.

Ranks run one after another from one conversion to the next (`stretches_of`), each through the same straight-line code
as a process, so that only one rank's intermediate values exist at a time. In a reduction, a rank's part is added to the
total of its group when it is handed in (`meetings.py`): in data parallelism a gradient exists twice, not once for each
rank. Ranks share values that are the same on several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ...propagation.program.program import PlacedPort
from ...strategy.layout import Layout
from ...strategy.mesh import Mesh
from ...strategy.placement import PARTIAL_MAX, Partial, Shard
from ..code.instructions import CallOperator, Code, ConvertLayout, Instruction, Mark, Relayout, TellPosition
from ..code.recorders import resume
from ..code.sections import Stretch, is_common, stretches_of
from ..code.slices import LOCAL, Placed, full_part
from ..code.straight_line import Bind, Run, compile_steps
from ..code.strides import Strides, contiguous_strides, laid_out
from ..torch_internals import base_of
from .meetings import Meeting

Parts = list[Tensor]


class Simulator:
    """Runs the program of every rank of `mesh`."""

    late = False

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._groups: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}

    def enter(
        self, tensors: Sequence[Tensor], placed: Sequence[PlacedPort], views: frozenset[int] = frozenset()
    ) -> list[Parts]:
        """Cut whole tensors into the parts of every rank."""
        return [split(t, p.layout, i in views) for i, (t, p) in enumerate(zip(tensors, placed, strict=True))]

    def leave(self, values: Sequence[Parts], placed: Sequence[Placed], shared: Sequence[bool]) -> list[Tensor]:
        """Join the parts of all ranks."""
        results = []
        for parts, place, held in zip(values, placed, shared, strict=True):
            whole = join(parts, place.layout, place.shape, place.strides)
            whole = whole if place.strides is None else laid_out(whole, place.strides)
            same = whole is parts[0] or (whole.layout is torch.strided and whole.data_ptr() == parts[0].data_ptr())
            results.append(whole.clone() if held and same else whole)
        return results

    def pack(self, values: Sequence[Parts]) -> list[Tensor]:
        """Values as a flat list of tensors."""
        return [part for parts in values for part in parts]

    def unpack(self, tensors: Sequence[Tensor]) -> list[Parts]:
        """The values of a flat list that `pack` made."""
        return [list(parts) for parts in zip(*[iter(tensors)] * self.mesh.device_num, strict=True)]

    def zeros(self, placed: PlacedPort, device: torch.device) -> Parts:
        """The value of a zero tensor placed like `placed`."""
        return [torch.zeros(placed.local_shape, dtype=placed.dtype, device=device)] * self.mesh.device_num

    def load(self, code: Code, mark: Mark | None = None) -> Run:
        """`code` as a function, from the parts of every input to those of every output. `mark` is called for the first
        rank's instructions, and for conversions when their results are available."""
        stretches = [self._load(code, stretch, mark) for stretch in stretches_of(code)]
        return partial(self._run, stretches, code.outputs, mark)

    def run(self, code: Code, inputs: Sequence[Parts]) -> list[Any]:
        """The outputs of `code` on every rank."""
        return self.load(code)(list(inputs))

    def ranks(self, c: Relayout) -> tuple[int, ...]:
        """None: all ranks are in this process."""
        return ()

    def express(self, step: Instruction, bind: Bind) -> str:
        """`step` for the rank in the variable `rank`; in a conversion for which ranks meet, it hands in its parts."""
        match step:
            case CallOperator():
                return step.expression(in_place=step.private, late=False)
            case ConvertLayout():
                operands = ", ".join(f"v{slot}" for slot in step.operands)
                meets = step.communicates
                return f"{f'meetings[{step.out}]' if meets else bind(self._local(step.relayout))}(rank, {operands})"
            case TellPosition():
                ranks = range(self.mesh.device_num)
                return f"{bind([torch.tensor(self.mesh.position(rank, *step.axes)) for rank in ranks])}[rank]"

    def _load(self, code: Code, stretch: Stretch, mark: Mark | None) -> _Loaded:
        """`stretch` as two functions, of the first rank, which also computes the common values, and of the others."""
        common = stretch.common
        own = [step for step in stretch.steps if not is_common(step)]
        gives = [slot for slot in stretch.gives if slot not in common]
        takes = (*stretch.frees, *stretch.keeps)
        every = compile_steps(code, own, (*takes, *common), gives, self, None, _NAMES)
        if not common and mark is None:
            return _Loaded(stretch, gives, every, every)
        heard = None if mark is None else _of_operators(mark)
        first = compile_steps(code, stretch.steps, takes, (*gives, *common), self, heard, _NAMES)
        return _Loaded(stretch, gives, first, every)

    def _run(
        self, stretches: Sequence[_Loaded], outputs: Sequence[int | None], mark: Mark | None, inputs: list[Any]
    ) -> list[Any]:
        values = dict(enumerate(inputs))
        inputs.clear()
        for loaded in stretches:
            meetings = {step.out: self._meeting(step) for step in loaded.stretch.meetings}
            self._run_ranks(loaded, meetings, values)
            if mark:
                resume()
            for step in loaded.stretch.meetings:
                values[step.out] = meetings.pop(step.out).results()
                if mark:
                    mark(step, values[step.out], False)
        return [None if slot is None else values[slot] for slot in outputs]

    def _run_ranks(self, loaded: _Loaded, meetings: Mapping[int, Meeting], values: dict[int, list[Any]]) -> None:
        """Run a stretch on one rank after another. A part without later readers is freed when its rank has run."""
        stretch, ranks = loaded.stretch, range(self.mesh.device_num)
        freed = [values.pop(slot)[::-1] for slot in stretch.frees]  # reversed: each rank pops its part off the end
        kept = [values[slot] for slot in stretch.keeps]
        by_rank: list[list[Any]] = []
        common: list[Any] = []
        for rank in ranks:
            run = loaded.every if rank else loaded.first
            by_rank.append(
                run([rank, meetings, *[parts.pop() for parts in freed], *[parts[rank] for parts in kept], *common])
            )
            if rank == 0:
                common = by_rank[0][len(loaded.gives) :]
        values.update(zip(loaded.gives, map(list, zip(*by_rank, strict=False)), strict=False))
        for slot, part in zip(stretch.common, common, strict=True):
            if slot in stretch.gives:
                values[slot] = [part] * len(ranks)

    def _local(self, c: Relayout) -> Callable[..., Any]:
        """A function for a conversion that needs no other rank; its first argument is the rank."""
        positions = [self.mesh.position(rank, *c.axes) for rank in range(self.mesh.device_num)]
        local = LOCAL[c.kind]
        if c.grouped:
            return lambda rank, *parts: [local(c, part, positions[rank]) for part in parts]
        return lambda rank, part: local(c, part, positions[rank])

    def _meeting(self, step: ConvertLayout) -> Meeting:
        axes = step.relayout.axes
        if axes not in self._groups:
            self._groups[axes] = self.mesh.groups(*axes)
        return Meeting(step.relayout, self._groups[axes])


_NAMES = ("rank", "meetings")  # the variables of the running rank and of the meetings of its stretch


@dataclass(frozen=True)
class _Loaded:
    """A stretch as two functions: of the first rank, which also returns the common values, and of every other rank,
    which takes these. `gives`: the slots that both return."""

    stretch: Stretch
    gives: Sequence[int]
    first: Run
    every: Run


def _of_operators(mark: Mark) -> Mark:
    """`mark` without the conversions for which ranks meet: their results do not exist yet when a rank has run."""

    def heard(step: Instruction, value: Any, awaited: bool) -> None:
        if not step.communicates:
            mark(step, value, awaited)

    return heard


def split(tensor: Tensor, layout: Layout, view: bool = False) -> Parts:
    """The part of every rank, a view of `tensor` where possible: contiguous, as the graphs were traced, unless any
    strides are allowed (`view`)."""
    if not layout.cuts:
        return [tensor if view else tensor.contiguous()] * layout.mesh.device_num
    places = _places(layout, tuple(tensor.shape))
    parts = [tensor[each] for each in places.distinct]
    if not view or any(part.shape != places.full for part in parts):
        parts = [full_part(part, places.full) for part in parts]
    return [parts[place] for place in places.of_rank]


@dataclass(frozen=True)
class _Places:
    """The places of the parts of a tensor in the whole.

    whole      the shape of the whole
    even       whether all slices are full
    distinct   the different slices
    full       the shape of a full part
    of_rank    the index of each rank's slices
    first      the ranks that hold the first copy of their part, or addends of it
    """

    whole: tuple[int, ...]
    even: bool
    distinct: Sequence[tuple[slice, ...]]
    full: tuple[int, ...]
    of_rank: Sequence[int]
    first: Sequence[int]


@lru_cache(maxsize=4096)
def _places(layout: Layout, shape: tuple[int, ...]) -> _Places:
    """The places of the parts of a tensor of global `shape`."""
    mesh = layout.mesh
    every = [layout.slices(shape, rank) for rank in range(mesh.device_num)]
    bounds = [tuple((each.start, each.stop) for each in slices) for slices in every]
    distinct = list(dict.fromkeys(bounds))
    copied = [i for i, p in enumerate(layout.placements) if not isinstance(p, Shard | Partial)]
    return _Places(
        whole=shape,
        even=layout.divides(shape),
        distinct=[every[bounds.index(one)] for one in distinct],
        full=layout.local_shape(shape),
        of_rank=[*map(distinct.index, bounds)],
        first=[rank for rank in range(mesh.device_num) if not any(mesh.coordinate(rank)[i] for i in copied)],
    )


def join(parts: Parts, layout: Layout, shape: tuple[int, ...] | None = None, strides: Strides | None = None) -> Tensor:
    """The whole tensor of which every rank holds a part: addends are reduced by sum or maximum, copies are taken once.
    If the parts are views of one whole tensor, it is returned. `shape`: the shape of the whole, needed if slices may be
    short; `strides`: those of new memory."""
    adds = layout.adds
    if not adds and not layout.cuts:
        return parts[0]
    shape = layout.global_shape(tuple(parts[0].shape)) if shape is None else shape
    places = _places(layout, shape)
    largest = PARTIAL_MAX in layout.placements
    cut = base_of(parts[0])
    if cut is not None and not adds and _is_cut(cut, parts, places):
        return cut
    start = _least(parts[0].dtype) if largest else 0
    whole = parts[0].new_empty_strided(shape, contiguous_strides(shape) if strides is None else strides)
    if adds:
        whole.fill_(start)
    for rank in places.first:
        place = whole[places.distinct[places.of_rank[rank]]]
        part = parts[rank][tuple(slice(0, size) for size in place.shape)]
        if largest:
            torch.maximum(place, part, out=place)
        else:
            place.add_(part) if adds else place.copy_(part)
    return whole


def _is_cut(whole: Tensor, parts: Parts, places: _Places) -> bool:
    """Whether every part is a view of its place in `whole`, as after a reduce-scatter."""
    part = parts[0]
    if (tuple(whole.shape), whole.dtype, tuple(part.shape)) != (
        places.whole,
        part.dtype,
        places.full,
    ) or not places.even:
        return False
    held = [(whole[place].data_ptr(), whole[place].stride()) for place in places.distinct]
    return all(
        held[place] == (part.data_ptr(), part.stride()) for place, part in zip(places.of_rank, parts, strict=True)
    )


def _least(dtype: torch.dtype) -> float | int:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min
