"""One rank of torch.distributed: a value is this rank's tensor, and a conversion is a collective of a process group.

A collective is issued when its operands are ready and waited for where its result is read. What only moves data
is sent as bytes, so every dtype can be; gloo and NCCL add up all dtypes but 16-bit ints (done here as 32-bit ones)
and 8-bit floats (an error of the backend).

What draws from a generator (the keys of a call's random numbers, or the numbers themselves) does so on every rank,
each from its own: the ranks see the same as long as their generators agree (`generators`, `agreement.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..propagation.program.local_program import PlacedPort
from ..strategy.cut import SliceWindow, Strip
from ..strategy.errors import RuntimeStateError
from ..strategy.layout import Layout
from ..strategy.mesh import Mesh
from ..strategy.placement import PARTIAL_MAX, Kind, Placement, Shard
from ..strategy.torch_mesh import own_group, to_device_mesh
from .instructions import Bind, Code, Conversion, Instruction, Mark, Run, compile_code, local_conversion
from .process import device_type
from .record import note
from .slices import Placed, addends_of, first_row, full_part, joined, part_of, pieces, short_part, slice_of, window_of
from .strides import contiguous, laid_out
from .torch_internals import coalescing_manager, timeout_of
from .watch import told, watch

# torch 2.13 renamed these two and warns about the old names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_WORTH_A_CALL = 2**20  # bytes: copying that much into a buffer and out again takes as long as a call of gloo's

_COALESCING = ("nccl",)  # backends that run several collectives as one without a copy
_ADDED_AS = {torch.int16: torch.int32}  # neither backend adds these

_world: Any = None
_device_meshes: dict[Mesh, DeviceMesh] = {}
_groups: dict[tuple[Mesh, tuple[str, ...]], Any] = {}


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """The DeviceMesh of `mesh`, made once for a process group; every rank calls it, in the same order.

    Raises RuntimeStateError without a process group, or with another number of ranks than the mesh has devices.
    """
    global _world  # noqa: PLW0603 - meshes of a group that has ended are of no use
    if not dist.is_initialized():
        raise RuntimeStateError("there is no process group; call init() in a process that a launcher started")
    if _world is not dist.group.WORLD:
        _device_meshes.clear()
        _groups.clear()
        _world = dist.group.WORLD
    if mesh not in _device_meshes:
        _device_meshes[mesh] = to_device_mesh(mesh, device_type(), timeout_of(dist.group.WORLD))
    return _device_meshes[mesh]


def process_group(mesh: Mesh, axes: tuple[str, ...]) -> Any:
    """The process group of this rank along `axes`, its ranks in the order of `mesh.group`: for programs only. In
    a group that others use too, such as that of a DeviceMesh, a collective that one rank alone calls (`full_tensor`, to
    print a parameter) would meet one of a program's on another rank.

    They are made when they are first asked for, once; every rank asks, in the same order. Raises RuntimeStateError as
    `device_mesh` does, and StrategyError as `mesh.group` does.
    """
    device_mesh(mesh)
    if (mesh, axes) not in _groups:
        _groups[mesh, axes] = own_group(mesh.groups(*axes), timeout_of(dist.group.WORLD))
    return _groups[mesh, axes]


class Worker:
    """Runs the program of this process's rank of `mesh`; every rank makes one, in the same order.

    Raises RuntimeStateError without a process group, or with another number of ranks than the mesh has devices.
    """

    late = True

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.device_mesh = device_mesh(mesh)
        self.rank = dist.get_rank()
        self._scratch = _Scratch()

    def cut(self, tensor: Tensor, layout: Layout) -> Tensor:
        """This rank's part of a `tensor` that every rank holds whole; zeros where its slices are short."""
        return part_of(tensor, layout, self.rank)

    def enter(self, tensors: Sequence[Tensor], placed: Sequence[PlacedPort]) -> list[Tensor]:
        """This rank's parts: of DTensors those that they hold, and plain tensors are parts already. Raises
        RuntimeStateError if one has another shape."""
        parts = []
        for tensor, port in zip(tensors, placed, strict=True):
            part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if part.shape != port.local_shape and part.shape == Placed(port.layout, port.shape).held(self.rank):
                part = full_part(part, port.local_shape)
            if part.shape != port.local_shape:
                raise RuntimeStateError(
                    f"rank {self.rank} got {port.port.name} of shape {list(part.shape)}; its part under "
                    f"{port.layout} has the shape {list(port.local_shape)}: cut whole tensors with Worker.cut"
                )
            parts.append(part.contiguous())
        return parts

    def leave(self, values: Sequence[Tensor], placed: Sequence[Placed], shared: Sequence[bool]) -> list[Tensor]:
        """The values: they stay this rank's parts, as far as its slices go. What may share memory is copied."""
        parts = [
            short_part(value, place, self.rank) if place.strides is None or place.layout.cuts or place.layout.adds
            else laid_out(value, place.strides)
            for value, place in zip(values, placed, strict=True)
        ]  # fmt: skip
        return [part.clone() if held else part for part, held in zip(parts, shared, strict=True)]

    def zeros(self, placed: PlacedPort, device: torch.device) -> Tensor:
        """The part of a tensor placed like `placed` that is zero."""
        return torch.zeros(placed.local_shape, dtype=placed.dtype, device=device)

    def pack(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Values are tensors already."""
        return list(values)

    unpack = pack

    def load(self, code: Code, mark: Mark | None = None) -> Run:
        """`code` as a function, from this rank's part of every input to that of every output."""
        run, own = compile_code(code, self, mark), watch()
        if own.size == 1:
            return run
        identity, draws = code.identity, any(step.once for step in code.instructions)
        where = next((code.describe(step) for step in code.instructions if step.communicates), "")
        noted = draws or bool(where) or code.phase == "backward"  # what a rank may do for itself is its own affair
        where = where or f"the {code.phase}"

        def watched(inputs: list[Any]) -> list[Any]:
            own.check()
            if noted:
                own.ran(identity, where, draws)
            try:
                return run(inputs)
            except Exception as error:
                if (said := told(error)) is error:
                    raise
                raise said from error

        return watched

    def run(self, code: Code, inputs: Sequence[Tensor]) -> list[Any]:
        """The outputs of `code` on this rank."""
        return self.load(code)(list(inputs))

    def express(self, step: Instruction, bind: Bind) -> str:
        """`step` for this rank, with conversions as functions of their operands."""
        c = step.conversion
        if c is not None:
            return f"{bind(self._converter(c))}({', '.join(f'v{slot}' for slot in step.operands)})"
        if step.along:
            return bind(torch.tensor(self.mesh.position(self.rank, *step.along)))
        return step.in_place or step.text

    def ranks(self, c: Conversion) -> tuple[int, ...]:
        """The ranks that a conversion is among."""
        return next(tuple(ranks) for ranks in self.mesh.groups(*c.axes) if self.rank in ranks)

    def _converter(self, c: Conversion) -> Callable[..., Any]:
        if c.kind.communicates:
            group, scratch = process_group(self.mesh, c.axes), self._scratch
            if c.window is not None:
                window, place = c.window, self.mesh.position(self.rank, *c.axes)
                leaving, coming = _messages(window, place)
                return lambda part: _exchange(c, window, part, place, leaving, coming, group)
            able = c.kind is not Kind.ALL_TO_ALL and dist.get_backend(group) in _COALESCING
            coalesces = able and len(c.tags) > 1
            return lambda *parts: _started(c, parts, group, scratch, coalesces)
        position = self.mesh.position(self.rank, *c.axes)
        if c.grouped:
            return lambda *parts: [local_conversion(c, part, position) for part in parts]
        return lambda part: local_conversion(c, part, position)


class Pending:
    """Collectives that were issued: what waits for them, and what makes the tensors of their results."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], list[Tensor]], single: bool) -> None:
        self.works, self._finish, self._single = works, finish, single

    def wait(self) -> Any:
        """The result: of a collective of one tensor that tensor, else all of them."""
        for work in self.works:
            work.wait()
        found = self._finish()
        return found[0] if self._single else found


class _Scratch:
    """Memory for what is sent and received, given back when that is over. On a CPU it is kept: new memory has to be
    mapped and cleared, which takes longer than a copy. (The allocator of a GPU keeps it by itself.)"""

    def __init__(self) -> None:
        self._kept: dict[int, list[Tensor]] = {}  # by bytes

    def take(self, count: int, like: Tensor) -> Tensor:
        """A vector of `count` elements like those of `like`, with any values."""
        if like.device.type != "cpu":
            return like.new_empty(count)
        size = count * like.element_size()
        kept = self._kept.get(size)
        return (kept.pop() if kept else torch.empty(size, dtype=torch.uint8)).view(like.dtype)

    def give_back(self, taken: Iterable[Tensor]) -> None:
        """Take these back. Nothing may read them from now on."""
        for tensor in taken:
            if tensor.device.type == "cpu":
                self._kept.setdefault(tensor.nbytes, []).append(_bytes(tensor))


def _started(c: Conversion, parts: Sequence[Tensor], group: Any, scratch: _Scratch, coalesces: bool) -> Pending:
    """Issue the collectives of `c` for all of `parts`: one, or several together where that saves a copy."""
    note(c, parts)
    batches = _batches(c, parts, coalesces)
    with coalescing_manager(group, async_ops=True) if coalesces else nullcontext() as manager:
        issued = [
            _issue(c, [parts[i] for i in batch], [c.owned[i] for i in batch], group, scratch) for batch in batches
        ]
    works = [manager] if coalesces else [work for work, _, _ in issued]

    def finish() -> list[Tensor]:
        results = {i: result for batch, (_, made, _) in zip(batches, issued, strict=True)
                   for i, result in zip(batch, made(), strict=True)}  # fmt: skip
        return [contiguous(results[i]) for i in range(len(parts))]

    return Pending(works, finish, not c.grouped)


def _batches(c: Conversion, parts: Sequence[Tensor], coalesces: bool) -> list[list[int]]:
    """Which of `parts` are copied into one buffer. A backend that coalesces takes each by itself, and so is one that
    can be added up where it is and is so large that the copy would cost more than a call."""
    every = range(len(parts))
    if coalesces:
        return [[i] for i in every]
    adds = c.kind is Kind.ALL_REDUCE
    alone = [i for i in every if adds and _in_place(parts[i], c.owned[i]) and parts[i].nbytes >= _WORTH_A_CALL]
    rest = [i for i in every if i not in alone]
    return [[i] for i in alone] + ([rest] if rest else [])


def _in_place(part: Tensor, owned: bool) -> bool:
    """Whether a part may become its own sum."""
    return owned and part.dtype not in _ADDED_AS and part.is_contiguous()


# The work of a collective, what makes its results when that is done, and the memory that it reads until then.
_Issued = tuple[Any, Callable[[], list[Tensor]], Tensor]


def _issue(c: Conversion, parts: list[Tensor], owned: list[bool], group: Any, scratch: _Scratch) -> _Issued:
    """One collective for all of `parts`. Results have memory of their own."""
    if c.kind is Kind.ALL_REDUCE:
        reduction = dist.ReduceOp.MAX if c.source == PARTIAL_MAX else dist.ReduceOp.SUM
        in_place = len(parts) == 1 and _in_place(parts[0], owned[0])
        return _all_reduce(parts, reduction, in_place, group, scratch)
    gathers, adds = c.kind is Kind.ALL_GATHER, c.kind is Kind.REDUCE_SCATTER
    stacks = [part[None] if gathers else _pieces(part, c.target, c.size) for part in parts]
    rows, taken = _pack(stacks, scratch)
    sent = rows.to(_ADDED_AS.get(rows.dtype, rows.dtype)) if adds else rows
    count = sent.shape[1] * (1 if adds else c.size)
    short = isinstance(c.source, Shard) and c.source.cut is not None
    whole = len(parts) == 1 and (adds or (c.dims[0] == 0 and not short))  # what is received is the result
    out = sent.new_empty(count) if whole else scratch.take(count, sent)
    taken += [] if whole else [out]
    if adds:
        work = _reduce_scatter(out, sent.view(-1), group=group, async_op=True)
    elif gathers:
        work = _all_gather(_bytes(out), _bytes(rows), group=group, async_op=True)
    else:
        work = dist.all_to_all_single(_bytes(out), _bytes(rows), group=group, async_op=True)

    def received() -> list[Tensor]:
        matrix = out.to(rows.dtype).view(1 if adds else c.size, rows.shape[1])
        pieces = _unpack(matrix, [stack.shape[1:] for stack in stacks])
        if whole:
            results = [piece[0] if adds else piece.flatten(0, 1) for piece in pieces]
        else:
            results = [piece[0].clone() if adds else _joined(piece, c.source) for piece in pieces]
        scratch.give_back(taken)
        return results

    return work, received, sent


def _all_reduce(parts: list[Tensor], reduction: Any, in_place: bool, group: Any, scratch: _Scratch) -> _Issued:
    """The sums or maxima of `parts` over the group, `in_place` or of copies in one buffer."""
    dtype = parts[0].dtype
    wide = _ADDED_AS.get(dtype, dtype)
    taken: list[Tensor] = []
    if in_place:
        buffer = parts[0]
    elif len(parts) == 1:
        buffer = parts[0].to(wide, copy=True, memory_format=torch.contiguous_format)
    else:
        rows, taken = _pack([part[None] for part in parts], scratch)
        buffer = rows.view(-1).to(wide)
    shapes = [part.shape for part in parts]

    def reduced() -> list[Tensor]:
        found = buffer.to(dtype)
        if len(shapes) == 1:
            return [found]
        results = [piece[0].clone() for piece in _unpack(found[None], shapes)]
        scratch.give_back(taken)
        return results

    return dist.all_reduce(buffer, reduction, group=group, async_op=True), reduced, buffer


def _pieces(part: Tensor, placement: Placement, n: int) -> Tensor:
    """The slices of `part` that `n` ranks have under `placement`, stacked."""
    assert isinstance(placement, Shard)
    if placement.cut is not None:
        return torch.stack(list(pieces(part, placement, n)))
    dim = placement.dim
    stacked: Tensor = part.unflatten(dim, (n, part.shape[dim] // n))
    return stacked.movedim(dim, 0)


def _joined(stack: Tensor, placement: Placement) -> Tensor:
    """The tensor whose slices under `placement` are stacked in `stack`."""
    assert isinstance(placement, Shard)
    return joined(stack.unbind(), placement)


_Messages = Sequence[tuple[int, Strip]]  # the other rank of each, by position, and what it is of


def _messages(window: SliceWindow, position: int) -> tuple[_Messages, _Messages]:
    """What the rank at `position` sends in an exchange, and what it receives, each in the order of the other ranks."""
    ranks = range(len(window.spans))
    asked = [(other, strip) for other in ranks for strip in window.strips(other) if strip.source == position != other]
    needed = sorted(((strip.source, strip) for strip in window.strips(position) if strip.source != position),
                    key=lambda found: found[0])  # fmt: skip
    return (needed, asked) if window.adds else (asked, needed)


def _exchange(
    c: Conversion, window: SliceWindow, part: Tensor, position: int, leaving: _Messages, coming: _Messages, group: Any
) -> Pending:
    """Send neighbours what they need of this rank's slice for their windows, or what they have to add to their slices,
    and receive theirs; what stays here is copied when the rest has come."""
    note(c, [part])

    def rows(strip: Strip) -> Tensor:
        if window.adds:
            return addends_of(window, strip, part)
        return part.narrow(window.dim, first_row(strip), strip.rows)

    row = part.numel() // part.shape[window.dim]
    sent = [rows(strip).reshape(-1) for _, strip in leaving]
    outgoing = torch.cat(sent) if sent else part.new_empty(0)
    incoming = part.new_empty(row * sum(strip.rows for _, strip in coming))

    def bytes_by_rank(messages: _Messages) -> list[int]:
        found = [0] * len(window.spans)
        for other, strip in messages:
            found[other] += strip.rows * row * part.element_size()
        return found

    work = dist.all_to_all_single(
        _bytes(incoming), _bytes(outgoing), bytes_by_rank(coming), bytes_by_rank(leaving), group=group, async_op=True
    )

    def finish() -> list[Tensor]:
        shape = list(part.shape)
        received = []
        counts = [strip.rows for _, strip in coming]
        for (_, strip), flat in zip(coming, incoming.split([row * n for n in counts]), strict=True):
            shape[window.dim] = strip.rows
            received.append((strip, flat.view(shape)))
        if window.adds:
            return [slice_of(window, position, part, received)]
        return [window_of(window, position, part, dict(received).__getitem__)]

    return Pending([work], finish, True)


def _pack(stacks: list[Tensor], scratch: _Scratch) -> tuple[Tensor, list[Tensor]]:
    """Stacks of pieces as one matrix, a row of which goes to one rank, and what of it was taken from `scratch`."""
    shape = stacks[0].shape[0], sum(stack[0].numel() for stack in stacks)
    if len(stacks) == 1 and stacks[0].is_contiguous():
        return stacks[0].view(shape), []
    rows = scratch.take(math.prod(shape), stacks[0]).view(shape)
    for columns, stack in zip(_unpack(rows, [stack.shape[1:] for stack in stacks]), stacks, strict=True):
        columns.copy_(stack)
    return rows, [rows]


def _unpack(matrix: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The stacks of pieces of these shapes that lie side by side in `matrix`."""
    columns = matrix.split([shape.numel() for shape in shapes], 1)
    return [column.view(len(matrix), *shape) for column, shape in zip(columns, shapes, strict=True)]


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: neither backend moves every dtype."""
    return tensor.view(-1).view(torch.uint8)


# -- The same values on every rank -----------------------------------------------------------------------------------


def broadcast(tensors: Sequence[Tensor]) -> None:
    """Write rank 0's values into `tensors` on every rank, in place; every rank calls it."""
    with torch.no_grad():
        for tensor in tensors:
            whole = tensor.contiguous()
            dist.broadcast(_bytes(whole), 0)
            if whole is not tensor:
                tensor.copy_(whole)


def generators() -> dict[str, Tensor]:
    """The states of the random generators that operators draw from."""
    states = {"the random generator": torch.get_rng_state()}
    if device_type() == "cuda":
        states["the random generator of CUDA"] = torch.cuda.get_rng_state()
    return states


def share_generators() -> None:
    """Give every rank the states of rank 0's random generators; every rank calls it."""
    states: list[Any] = [generators()]
    dist.broadcast_object_list(states, 0)
    cpu, *cuda = states[0].values()
    torch.set_rng_state(cpu)
    for state in cuda:
        torch.cuda.set_rng_state(state)
