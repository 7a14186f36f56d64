"""Our mesh as torch's DeviceMesh and back. The only module of this stage whose import imports torch."""

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
    """The DeviceMesh of all ranks with the axes of `mesh`; every rank calls it. `timeout`: how long collectives along
    an axis wait (None: PyTorch's default).

    Raises RuntimeStateError without a process group, or with one that does not have one rank per device.
    """
    if not dist.is_initialized():
        raise RuntimeStateError("there is no process group; call torch.distributed.init_process_group first")
    check_ranks(mesh, dist.get_world_size())
    every = {axis: mesh.groups(axis) for axis in mesh.axes}
    # made here, because init_device_mesh takes no timeout
    world: Any = dist.group.WORLD
    groups = [
        own_group(ranks, timeout, f"DeviceMesh {axis}") if len(ranks) > 1 else world for axis, ranks in every.items()
    ]
    with torch.device("cpu"):  # the default may be meta, where a model is made that is larger than a device
        ranks = torch.arange(mesh.device_num).view(mesh.sizes)
        return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=mesh.axes)


def has_nccl(group: Any = None) -> bool:
    """Whether ranks of a process group (None: the default one) talk by NCCL: also where it has gloo for the CPU beside
    it, or was made without the name of a backend."""
    return "nccl" in str(dist.get_backend_config(group))


def new_group(ranks: Sequence[int], timeout: timedelta | None, name: str) -> Any:
    """A process group of `ranks`, called "partway: name" where PyTorch and NCCL speak of it; every rank calls it.

    NCCL connects its ranks here, by the current GPU, and not when they first send something: they may come to that in
    another order. (To bind the GPU to the default group would do so for every group; but then `new_group` splits NCCL's
    default one, and waits forever for the ranks of a group of gloo that others are not in: pytorch#145376.)
    """
    device = torch.device("cuda", torch.cuda.current_device()) if has_nccl() else None
    return dist.new_group(list(ranks), timeout=timeout, group_desc=f"partway: {name}", device_id=device)


def own_group(groups: Sequence[Sequence[int]], timeout: timedelta | None, name: str) -> Any:
    """This rank's process group, of a new one for each of `groups` (see `new_group`); every rank calls it."""
    made = [new_group(ranks, timeout, name) for ranks in groups]
    return next(group for ranks, group in zip(groups, made, strict=True) if dist.get_rank() in ranks)


def check_ranks(mesh: Mesh, ranks: int) -> None:
    """Raise RuntimeStateError unless `mesh` has a device for each of `ranks`."""
    if mesh.device_num != ranks:
        raise RuntimeStateError(
            f"the mesh ({mesh}) has {mesh.device_num} devices, but there are {ranks} ranks; "
            f"start {mesh.device_num} processes or use a mesh of {ranks} devices"
        )


def from_device_mesh(device_mesh: DeviceMesh) -> Mesh:
    """Our mesh with the axis names and sizes of `device_mesh`; axes without names are d0, d1, ...

    Raises StrategyError if it is not a DeviceMesh, or if its ranks are not 0, 1, 2, ... in row-major order, as they
    are on our meshes.
    """
    if not isinstance(device_mesh, DeviceMesh):
        raise StrategyError(f"{device_mesh!r} is not a DeviceMesh")
    ranks = device_mesh.mesh.flatten().tolist()
    if ranks != list(range(len(ranks))):
        raise StrategyError(
            f"the DeviceMesh holds the ranks {ranks}; a mesh of {len(ranks)} devices has the ranks "
            f"0 to {len(ranks) - 1} in row-major order"
        )
    return mesh_like(device_mesh)


def mesh_like(device_mesh: DeviceMesh) -> Mesh:
    """A mesh with the axis names and sizes of `device_mesh`, whatever ranks it holds: it may be a part of another."""
    sizes, names = tuple(device_mesh.mesh.shape), device_mesh.mesh_dim_names
    return Mesh.of_sizes(sizes) if names is None else Mesh(dict(zip(names, sizes, strict=True)))
