"""Conversions between our mesh and torch's DeviceMesh. The only module of this stage that imports torch at its top."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .errors import RuntimeStateError, StrategyError
from .mesh import Mesh


def to_device_mesh(mesh: Mesh, device_type: str, timeout: timedelta | None = None) -> DeviceMesh:
    """The DeviceMesh with the axes and ranks of `mesh`; every rank of it calls this. `timeout`: that of collectives
    along an axis (None: PyTorch's default).

    Raises RuntimeStateError without a process group, or with one that does not have one rank per device.
    """
    if not dist.is_initialized():
        raise RuntimeStateError("there is no process group; call torch.distributed.init_process_group first")
    check_ranks(mesh, dist.get_world_size())
    # made here, because init_device_mesh takes no timeout
    world: Any = dist.group.WORLD
    groups = [
        world
        if not mesh.is_part and size == mesh.device_num
        else own_group(mesh, (axis,), timeout, f"DeviceMesh {axis}")
        for axis, size in zip(mesh.axes, mesh.sizes, strict=True)
    ]
    with torch.device("cpu"):  # the default may be meta, to make a model that is larger than a device
        ranks = torch.tensor(list(mesh.ranks)).view(mesh.sizes)
        return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=mesh.axes)


def has_nccl(group: Any = None) -> bool:
    """Whether a process group (None: the default one) uses NCCL, also beside gloo for the CPU or as the default
    backend."""
    return "nccl" in str(dist.get_backend_config(group))


def new_group(ranks: Sequence[int], timeout: timedelta | None, name: str, *, members_only: bool = False) -> Any:
    """A process group of `ranks`, called "partway: name" in messages of PyTorch and NCCL; every rank of the job calls
    this, or with `members_only` each of `ranks`.

    NCCL connects its ranks here, by the current GPU, and not at their first collectives, which ranks may reach in
    different orders. (Binding the GPU to the default group would do so for every group; but then `new_group` splits
    NCCL's default group, and with a gloo group of only some ranks it waits forever: pytorch#145376.)
    """
    device = torch.device("cuda", torch.cuda.current_device()) if has_nccl() else None
    return dist.new_group(
        list(ranks),
        timeout=timeout,
        group_desc=f"partway: {name}",
        device_id=device,
        use_local_synchronization=members_only,
    )


def own_group(mesh: Mesh, axes: tuple[str, ...], timeout: timedelta | None, name: str) -> Any:
    """This rank's process group along `axes`; every rank of `mesh` calls it."""
    return _own_group(mesh, _groups_here(mesh, axes), timeout, name)


def nested_groups(
    mesh: Mesh, axes: tuple[str, ...], within: int, timeout: timedelta | None, name: str
) -> tuple[Any, Any]:
    """Two process groups of this rank in its group along `axes`: its unit of `within` consecutive ranks, and the ranks
    at its place in all units; every rank of `mesh` calls it."""
    groups = _groups_here(mesh, axes)
    units = [ranks[i : i + within] for ranks in groups for i in range(0, len(ranks), within)]
    across = [ranks[i::within] for ranks in groups for i in range(within)]
    return (
        _own_group(mesh, units, timeout, f"{name} in units of {within}"),
        _own_group(mesh, across, timeout, f"{name} between units of {within}"),
    )


def _groups_here(mesh: Mesh, axes: tuple[str, ...]) -> Sequence[tuple[int, ...]]:
    """The groups along `axes`, in ranks of the job: all, or of a part of a job this rank's own."""
    return [mesh.processes(dist.get_rank(), *axes)] if mesh.is_part else mesh.groups(*axes)


def _own_group(mesh: Mesh, groups: Sequence[Sequence[int]], timeout: timedelta | None, name: str) -> Any:
    """This rank's process group, of those of `groups`."""
    own = dist.get_rank()
    if mesh.is_part:
        return next(new_group(ranks, timeout, name, members_only=True) for ranks in groups if own in ranks)
    made = [new_group(ranks, timeout, name) for ranks in groups]
    return next(group for ranks, group in zip(groups, made, strict=True) if own in ranks)


def own_rank(mesh: Mesh) -> int:
    """The rank of this process on `mesh`. Raises StrategyError if the mesh lacks it, and as `check_ranks` does."""
    check_ranks(mesh, dist.get_world_size())
    return mesh.own_rank(dist.get_rank())


def check_ranks(mesh: Mesh, ranks: int) -> None:
    """Raise RuntimeStateError unless `mesh` has as many devices as there are `ranks`, or names some of these."""
    if mesh.is_part:
        if outside := [rank for rank in mesh.ranks if rank >= ranks]:
            raise RuntimeStateError(
                f"the mesh ({mesh}) names rank {outside[0]}, and the job has the ranks 0 to {ranks - 1}"
            )
    elif mesh.device_num != ranks:
        raise RuntimeStateError(
            f"the mesh ({mesh}) has {mesh.device_num} devices, but there are {ranks} ranks; "
            f"start {mesh.device_num} processes or use a mesh of {ranks} devices"
        )


def from_device_mesh(device_mesh: DeviceMesh) -> Mesh:
    """Our mesh with the axis names, sizes and ranks of `device_mesh`; axes without names are d0, d1, ...

    Raises StrategyError if it is not a DeviceMesh, or if its ranks do not ascend in row-major order.
    """
    if not isinstance(device_mesh, DeviceMesh):
        raise StrategyError(f"{device_mesh!r} is not a DeviceMesh")
    ranks = device_mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise StrategyError(f"the DeviceMesh holds the ranks {ranks}; give one whose ranks ascend in row-major order")
    mesh = mesh_like(device_mesh)
    is_all = not dist.is_initialized() or len(ranks) == dist.get_world_size()
    return mesh if is_all else Mesh(dict(zip(mesh.axes, mesh.sizes, strict=True)), ranks)


def mesh_like(device_mesh: DeviceMesh) -> Mesh:
    """A mesh with the axis names and sizes of `device_mesh`, of any ranks: it may be a part of another mesh."""
    sizes, names = tuple(device_mesh.mesh.shape), device_mesh.mesh_dim_names
    return Mesh.of_sizes(sizes) if names is None else Mesh(dict(zip(names, sizes, strict=True)))
