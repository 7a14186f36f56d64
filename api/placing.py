"""Where a call runs: all ranks simulated in this process, or this rank of a process group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from partway.context import DatasetMode, ParallelContext
from partway.dtensors import drop_hooks, is_dtensor, plain
from partway.propagation.graph import Role
from partway.propagation.lower import PlacedPort
from partway.propagation.structure import Call
from partway.runtime.parameters import hold
from partway.runtime.process import get_group_size, get_rank, init, launched
from partway.runtime.simulate import Simulator
from partway.runtime.step import Executor
from partway.strategy import Layout, Mesh, Replicate, StrategyError

Change = Callable[[Tensor], Tensor]


class Placing(Protocol):
    """What differs between simulation and a process group, around the step itself."""

    @property
    def processes(self) -> int | None:
        """How many processes a launcher started, or None in simulation."""

    def executor(self, mesh: Mesh) -> Executor:
        """What runs a step on `mesh`."""

    def adopt(self, module: torch.nn.Module, context: ParallelContext, mesh: Mesh | None) -> None:
        """A module was sharded, over `mesh` if one was given: before anyone asks for its parameters."""

    def whole_call(self, call: Call, context: ParallelContext, local: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with tensors of their global shapes. `local`: a rank is given its part."""

    def settle(self, module: torch.nn.Module, layouts: Mapping[str, Layout]) -> None:
        """A plan gave parameters their layouts at rest: put them there."""

    def hold(self, module: torch.nn.Module, name: str, part: Tensor) -> None:
        """Give a parameter or buffer of the meta device values: this process's `part`."""

    def part(self, whole: Tensor, layout: Layout) -> Tensor:
        """This process's part of a tensor under `layout`, in memory of its own."""

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor of which processes may hold parts."""

    def enter(self, placed: PlacedPort, local: bool) -> Change | None:
        """What makes of a tensor of a call what the executor takes, or None if it takes the tensor itself."""

    def leave(self, placed: PlacedPort) -> Change | None:
        """What makes of a result of the executor what the caller gets, or None if that is the result itself."""

    def write(self, placed: PlacedPort, local: bool, given: Tensor, result: Tensor) -> None:
        """Write a result of the executor into a tensor of the call, `given`, of which it is the new value."""


class Simulated:
    """Every rank in this process: tensors are whole on both sides, parameters stay ordinary parameters."""

    @property
    def processes(self) -> int | None:
        return None

    def executor(self, mesh: Mesh) -> Executor:
        return _simulator(mesh)

    def adopt(self, module: torch.nn.Module, context: ParallelContext, mesh: Mesh | None) -> None:
        return None

    def whole_call(self, call: Call, context: ParallelContext, local: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = call.structure.build(list(call.tensors))
        return args, kwargs

    def settle(self, module: torch.nn.Module, layouts: Mapping[str, Layout]) -> None:
        return None

    def hold(self, module: torch.nn.Module, name: str, part: Tensor) -> None:
        hold(module, name, part)

    def part(self, whole: Tensor, layout: Layout) -> Tensor:
        return whole

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor

    def enter(self, placed: PlacedPort, local: bool) -> Change | None:
        return None

    def leave(self, placed: PlacedPort) -> Change | None:
        return None

    def write(self, placed: PlacedPort, local: bool, given: Tensor, result: Tensor) -> None:
        given.copy_(result)


class Launched:
    """One rank of a process group. Parameters are DTensors, so that optimizers and checkpoints of the ecosystem take
    them; plain inputs are whole on every rank (or, where the dataset_strategy was set, this rank's part); results are
    plain where they are whole, DTensors where they are split."""

    def __init__(self) -> None:
        init()

    @property
    def processes(self) -> int:
        return get_group_size()

    def executor(self, mesh: Mesh) -> Executor:
        from partway.runtime.execute import Worker

        return Worker(mesh)

    def adopt(self, module: torch.nn.Module, context: ParallelContext, mesh: Mesh | None) -> None:
        """Parameters become DTensors now, whole on every rank, so that an optimizer made next holds the objects that
        stay; the first plan splits them in place."""
        from torch.distributed.tensor import DTensor

        from partway.runtime.execute import broadcast, check_agreement, generators, share_generators
        from partway.runtime.parameters import distribute
        from partway.strategy.torch_mesh import check_ranks

        if mesh is not None:
            check_ranks(mesh, self.processes)
        held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        # those of a module inside that was sharded before agree already
        named = {name: t for name, t in held.items() if not isinstance(t, DTensor) and not t.is_meta}
        if context.parameter_broadcast:
            broadcast([tensor.detach() for tensor in named.values()])
            share_generators()  # ranks whose parameters differ were seeded differently
        else:
            check_agreement(named)
            check_agreement(generators(), "seed every rank alike with torch.manual_seed")
        distribute(module)
        drop_hooks(module)

    def whole_call(self, call: Call, context: ParallelContext, local: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        from partway.runtime.execute import check_agreement

        if not local:  # once for each plan: the other calls are not worth a collective
            whole = {
                f"input {name!r}": t for name, t in zip(call.names, call.tensors, strict=True) if not is_dtensor(t)
            }
            check_agreement(
                whole, "give every rank the same whole batch, or set dataset_strategy where each has its own part"
            )
        tensors = [plain(tensor) for tensor in call.tensors]
        if local:
            parts = _dataset_parts(tensors, context, self.processes)
            tensors = [_enlarged(tensor, splits) for tensor, splits in zip(tensors, parts, strict=True)]
        args, kwargs = call.structure.build(tensors)
        return args, kwargs

    def settle(self, module: torch.nn.Module, layouts: Mapping[str, Layout]) -> None:
        from partway.runtime.parameters import redistribute

        redistribute(module, layouts)

    def hold(self, module: torch.nn.Module, name: str, part: Tensor) -> None:
        hold(module, name, part)

    def part(self, whole: Tensor, layout: Layout) -> Tensor:
        own = whole[layout.slices(tuple(whole.shape), get_rank())]
        return own.clone(memory_format=torch.contiguous_format)

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]

    def enter(self, placed: PlacedPort, local: bool) -> Change | None:
        from partway.runtime.parameters import placed_part

        given_part = local and placed.port.role is Role.INPUT
        return functools.partial(placed_part, layout=placed.layout, whole=not given_part)

    def leave(self, placed: PlacedPort) -> Change | None:
        from partway.runtime.execute import device_mesh
        from partway.runtime.parameters import as_dtensor

        layout = placed.layout
        if all(isinstance(p, Replicate) for p in layout.placements):
            return None
        return functools.partial(as_dtensor, layout=layout, shape=placed.shape, mesh=device_mesh(layout.mesh))

    def write(self, placed: PlacedPort, local: bool, given: Tensor, result: Tensor) -> None:
        from partway.runtime.execute import device_mesh
        from partway.runtime.parameters import as_dtensor

        if local and not is_dtensor(given):  # this rank's part, whose slice may be short
            given.copy_(result[tuple(slice(0, size) for size in given.shape)])
            return
        new: Any = as_dtensor(result, placed.layout, placed.shape, device_mesh(placed.layout.mesh))
        if is_dtensor(given):
            given.copy_(new.redistribute(placements=given.placements))  # type: ignore[attr-defined]
        else:
            given.copy_(new.full_tensor())


def _dataset_parts(tensors: list[Tensor], context: ParallelContext, devices: int) -> list[tuple[int, ...]]:
    """Into how many parts the dataset_strategy splits each dim of each input."""
    value = context.dataset_strategy
    if isinstance(value, DatasetMode):
        first = devices if value is DatasetMode.DATA_PARALLEL else 1
        return [(first, *(1,) * (tensor.dim() - 1)) if tensor.dim() else () for tensor in tensors]
    if len(value) != len(tensors) or any(len(s) != t.dim() for s, t in zip(value, tensors, strict=False)):
        raise StrategyError(
            f"dataset_strategy {value} does not fit {len(tensors)} inputs of ranks {[t.dim() for t in tensors]}; "
            "write one tuple per input with one split count per dim"
        )
    return list(value)


def _enlarged(tensor: Tensor, splits: tuple[int, ...]) -> Tensor:
    shape = [size * parts for size, parts in zip(tensor.shape, splits, strict=True)]
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad)


@functools.cache
def _simulator(mesh: Mesh) -> Simulator:
    return Simulator(mesh)


def placing() -> Placing:
    """The Placing of this process. Where a launcher started it, the process group is started if there is none."""
    return Launched() if launched() else Simulated()
