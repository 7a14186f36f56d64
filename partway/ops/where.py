"""The mesh and the rank of a running program, for `axis_index` and the collectives of `partway.ops`."""

from __future__ import annotations

from typing import Any

from partway.options.context import current
from partway.propagation.capture.export.tracing import capturing
from partway.requests.request import given_mesh
from partway.runtime import groups
from partway.runtime.launching.job import JOB
from partway.runtime.launching.launchers import simulated
from partway.runtime.launching.process import get_group_size, launched
from partway.strategy import CaptureError, Mesh, RuntimeStateError, StrategyError
from partway.strategy import place as places
from partway.strategy.place import Group, Place, manual_place


def set_mesh(mesh: Any) -> None:
    """Let this process name the axes of a mesh in `axis_index`, `axis_size` and the collectives of `partway.ops`.

    mesh    a Mesh, a dict of axis sizes or a DeviceMesh, with one device for each process; None: no names, only the
            group of all ranks

    Every rank calls it, with the same mesh. A manual function has its own mesh. Raises StrategyError for an invalid
    mesh and for an axis with the name of a group, RuntimeStateError if the mesh does not have one device for each
    process, and if ranks pass different meshes.
    """
    try:
        wanted = given_mesh(mesh)
    except StrategyError as error:
        raise StrategyError(f"set_mesh cannot use this mesh: {error}") from None
    if launched():
        get_group_size()  # raises before init()
        groups.set_mesh(wanted)
        return
    JOB.mesh = wanted


def axis_index(group: Group = None) -> int:
    """The position of this rank along a mesh axis (several axes: major to minor in the order of the mesh; None: all).

    In a manual function it is a plain int, on which the rank may branch between collectives; the function is then
    traced for each position. Raises as `partway.ops.all_reduce` does.
    """
    return here("axis_index").index(group)


def axis_size(group: Group = None) -> int:
    """The number of ranks along a mesh axis, or several (None: all). Raises as `partway.ops.all_reduce` does."""
    return here("axis_size").size(group)


def here(call: str) -> Place:
    """The place of the rank that makes `call`: in a traced manual function, or of this process."""
    inside = manual_place()
    if inside is not None:
        return inside
    if capturing():
        raise CaptureError(
            f"{call} is for the program of one rank, and is called in a function that is planned as a whole; put what "
            "calls it into a manual function, pw.manual(fn, in_strategy, out_strategy)"
        )
    if launched():
        get_group_size()
        import partway.runtime.by_hand  # noqa: F401 - the kernels of the operators

        return groups.place()
    mesh = JOB.mesh or Mesh({"world": 1})
    devices = max(mesh.device_num, simulated() or 1, current().device_num if current().device_num_was_set else 1)
    if devices > 1:
        raise RuntimeStateError(
            f"{call} is for the program of one rank, and this process stands for {devices} virtual devices; put what "
            "calls it into a manual function, pw.manual(fn, in_strategy, out_strategy), or start a process for each "
            "device"
        )
    return Place(mesh, 0, groups=groups.members_of)


def check_group(group: object) -> None:
    """Raise StrategyError if `group` cannot be a group."""
    if groups.process_group_of(group) is None:
        places.check_group(group)
