"""One rank of torch.distributed: a value is this rank's tensor, and a conversion is a collective of a process group.

A collective is issued when its operands are ready and waited for where its result is read (`issue.py`).

Operators that draw from a generator (the keys of a call's random numbers, or the numbers themselves) do so on every
rank, each from its own: the numbers are the same as long as the generators agree (`random_state.py`, `agreement.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...propagation.program.program import PlacedPort
from ...strategy.errors import RuntimeStateError
from ...strategy.layout import Layout
from ...strategy.mesh import Mesh
from ...strategy.torch_mesh import has_nccl, nested_groups, own_group, own_rank, to_device_mesh
from ..code.instructions import CallOperator, Code, ConvertLayout, Instruction, Mark, Relayout, TellPosition
from ..code.slices import LOCAL, Placed, full_part, part_of, short_part
from ..code.straight_line import Bind, Run, compile_code
from ..code.strides import laid_out
from ..launching.process import device_type
from ..ranks.replicas import ledger_of
from ..ranks.watch import told, watch
from ..ranks.world import of_world
from ..torch_internals import local_part_of, timeout_of
from .hierarchical import HierarchicalGroup
from .issue import ISSUERS, Scratch, Seat, as_bytes


class _MadeMeshes:
    """The DeviceMeshes of one process group, and the process groups along their axes."""

    def __init__(self) -> None:
        self.device_meshes: dict[Mesh, DeviceMesh] = {}
        self.groups: dict[tuple[Mesh, tuple[str, ...]], Any] = {}
        self.in_steps: dict[tuple[Mesh, tuple[str, ...], int], HierarchicalGroup] = {}


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """The DeviceMesh of `mesh`, created once per process group; every rank must call it, in the same order.

    Raises RuntimeStateError without a process group, or with another number of ranks than the mesh has devices.
    """
    if not dist.is_initialized():
        raise RuntimeStateError("there is no process group; call init() in a process that a launcher started")
    made = of_world(_MadeMeshes).device_meshes
    if mesh not in made:
        made[mesh] = to_device_mesh(mesh, device_type(), timeout_of(dist.group.WORLD))
    return made[mesh]


def process_group(mesh: Mesh, axes: tuple[str, ...]) -> Any:
    """The process group of this rank along `axes`, its ranks in the order of `mesh.group`. Only programs use it: in a
    shared group, such as that of a DeviceMesh, a collective that one rank alone calls (`full_tensor`, to print a
    parameter) would meet a collective of a program on another rank.

    It is created at the first request; every rank must request groups in the same order. Raises RuntimeStateError as
    `device_mesh` does, and StrategyError as `mesh.group` does.
    """
    device_mesh(mesh)
    made = of_world(_MadeMeshes).groups
    if (mesh, axes) not in made:
        made[mesh, axes] = own_group(mesh, axes, timeout_of(dist.group.WORLD), ",".join(axes))
    return made[mesh, axes]


def hierarchical_group(mesh: Mesh, axes: tuple[str, ...], within: int) -> HierarchicalGroup:
    """The collectives in steps over units of `within` ranks; every rank must request them in the same order."""
    made = of_world(_MadeMeshes).in_steps
    if (mesh, axes, within) not in made:
        groups = nested_groups(mesh, axes, within, timeout_of(dist.group.WORLD), ",".join(axes))
        made[mesh, axes, within] = HierarchicalGroup(*groups)
    return made[mesh, axes, within]


class Worker:
    """Runs the program of this process's rank of `mesh`; every rank creates its workers in the same order.

    Raises RuntimeStateError without a process group, or with another number of ranks than the mesh has devices.
    """

    late = True

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.device_mesh = device_mesh(mesh)
        self.rank = own_rank(mesh)
        self._scratch = Scratch()

    def cut(self, tensor: Tensor, layout: Layout) -> Tensor:
        """This rank's part of a `tensor` that every rank holds whole, with zeros where its slices are short."""
        return part_of(tensor, layout, self.rank)

    def enter(
        self, tensors: Sequence[Tensor], placed: Sequence[PlacedPort], views: frozenset[int] = frozenset()
    ) -> list[Tensor]:
        """This rank's parts: the local parts of DTensors; plain tensors are parts already. Raises RuntimeStateError if
        one has a wrong shape."""
        parts = []
        for i, (tensor, port) in enumerate(zip(tensors, placed, strict=True)):
            part = local_part_of(tensor) if isinstance(tensor, DTensor) else tensor
            if part.shape != port.local_shape and part.shape == Placed(port.layout, port.shape).held(self.rank):
                part = full_part(part, port.local_shape)
            if part.shape != port.local_shape:
                raise RuntimeStateError(
                    f"rank {self.rank} got {port.port.name} of shape {list(part.shape)}; its part under "
                    f"{port.layout} has the shape {list(port.local_shape)}: cut whole tensors with Worker.cut"
                )
            parts.append(part if i in views else part.contiguous())
        return parts

    def leave(self, values: Sequence[Tensor], placed: Sequence[Placed], shared: Sequence[bool]) -> list[Tensor]:
        """The values as this rank's parts, without the padding of short slices. Those in `shared` are copied."""
        parts = [
            short_part(value, place, self.rank)
            if place.strides is None or place.layout.cuts or place.layout.adds
            else laid_out(value, place.strides)
            for value, place in zip(values, placed, strict=True)
        ]
        return [part.clone() if held else part for part, held in zip(parts, shared, strict=True)]

    def zeros(self, placed: PlacedPort, device: torch.device) -> Tensor:
        """This rank's part of a zero tensor placed like `placed`."""
        return torch.zeros(placed.local_shape, dtype=placed.dtype, device=device)

    def pack(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Values are tensors already."""
        return list(values)

    unpack = pack

    def load(self, code: Code, mark: Mark | None = None) -> Run:
        """`code` as a function, from this rank's part of every input to that of every output."""
        run, own = compile_code(code, self, mark), watch()
        if self.mesh.device_num == 1:
            return run
        ledger = ledger_of(tuple(self.mesh.ranks))
        identity, draws = code.identity, any(step.once for step in code.instructions)
        where = next((code.describe(step) for step in code.instructions if step.communicates), "")
        noted = draws or bool(where) or code.phase == "backward"  # other code may run on some ranks only
        where = where or f"the {code.phase}"

        def watched(inputs: list[Any]) -> list[Any]:
            own.check()
            if noted:
                ledger.ran(identity, where, draws)
            try:
                return run(inputs)
            except Exception as error:
                if (explained := told(error)) is error:
                    raise
                raise explained from error

        return watched

    def run(self, code: Code, inputs: Sequence[Tensor]) -> list[Any]:
        """The outputs of `code` on this rank."""
        return self.load(code)(list(inputs))

    def express(self, step: Instruction, bind: Bind) -> str:
        """`step` for this rank, with conversions as functions of their operands."""
        match step:
            case CallOperator():
                return step.expression(in_place=True, late=True)
            case ConvertLayout():
                return f"{bind(self._converter(step.relayout))}({', '.join(f'v{slot}' for slot in step.operands)})"
            case TellPosition():
                return bind(torch.tensor(self.mesh.position(self.rank, *step.axes)))

    def ranks(self, c: Relayout) -> tuple[int, ...]:
        """The ranks of the job that take part in a conversion."""
        return self.mesh.processes(self.mesh.ranks[self.rank], *c.axes)

    def _converter(self, c: Relayout) -> Callable[..., Any]:
        position = self.mesh.position(self.rank, *c.axes)
        if c.kind.communicates:
            group, steps = process_group(self.mesh, c.axes), c.hierarchy
            seat = Seat(group, position, self._scratch)
            if steps is not None and not has_nccl(group):
                in_steps = hierarchical_group(self.mesh, c.axes, steps.within)
                seat = replace(seat, in_steps=in_steps, large=steps.least)
            return ISSUERS[c.kind](c, seat)
        local = LOCAL[c.kind]
        if c.grouped:
            return lambda *parts: [local(c, part, position) for part in parts]
        return lambda part: local(c, part, position)


# -- The same values on every rank -----------------------------------------------------------------------------------


def broadcast(tensors: Sequence[Tensor], mesh: Mesh | None = None) -> None:
    """Write the first rank's values into `tensors` on every rank of the job, or of `mesh`, in place; each of these
    ranks must call it."""
    part = mesh if mesh is not None and mesh.is_part else None
    group = process_group(part, part.axes) if part else None
    with torch.no_grad():
        for tensor in tensors:
            whole = tensor.contiguous()
            dist.broadcast(as_bytes(whole), part.ranks[0] if part else 0, group=group)
            if whole is not tensor:
                tensor.copy_(whole)
