"""DTensors of the user, as parameters or inputs: their layouts are annotations.

They are made with `distribute_tensor`, `parallelize_module` or `fully_shard`, on a mesh of all ranks or on some
axes of one, which are matched with those of the plan by name. The hooks by which torch.distributed communicates are
removed: the plan does that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from partway.propagation.graph.structure import Call
from partway.propagation.torch_internals import remove_hooks, tree_map
from partway.requests.request import engine_of
from partway.runtime.tensors.tracked import TRACKED
from partway.strategy import Layout, Mesh, Problem, StrategyError, from_dtensor, raise_problems
from partway.strategy.placement import REPLICATE

T = TypeVar("T")


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "placements")


def whole(values: T) -> T:
    """`values`, lists, tuples and dicts of tensors, with DTensors gathered; every rank calls it."""
    gathered: T = tree_map(lambda value: value.full_tensor() if is_dtensor(value) else value, values)
    return gathered


def own_dtensors(module: nn.Module) -> frozenset[str]:
    """The names of the parameters of `module` that the user made DTensors. (In an inner module that is sharded already,
    only those that were DTensors before that.)"""
    sharded = {path: engine for path, child in module.named_modules() if (engine := engine_of(child))}
    names = {f"{path}.{name}" for path, engine in sharded.items() for name in engine.own_dtensors}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if is_dtensor(parameter) and not any(name.startswith(f"{path}.") for path in sharded):
            names.add(name)
    return frozenset(names)


def parameters_on(module: nn.Module, names: Collection[str], mesh: Mesh | None) -> dict[str, Layout]:
    """The layouts of the parameters `names`, which are DTensors, on `mesh` (None: their own). Raises StrategyError for
    those on another mesh, or with a layout that a parameter cannot have."""
    held = {
        f"parameter {name!r}": (name, tensor)
        for name, tensor in module.named_parameters(remove_duplicate=False)
        if name in names
    }
    buffers = [f"buffer {name!r}" for name, tensor in module.named_buffers() if is_dtensor(tensor)]
    problems = [Problem(words, "is a DTensor", "keep buffers plain, alike on every rank") for words in buffers]
    layouts = _layouts({words: tensor for words, (_, tensor) in held.items()}, mesh, problems)
    fix = "redistribute it to Shard or Replicate"
    problems += [
        Problem(words, f"holds partial sums, {layout}", fix) for words, layout in layouts.items() if layout.adds
    ]
    raise_problems("the DTensors of the module cannot be taken:", problems)
    return {held[words][0]: layout for words, layout in layouts.items()}


def noted(tensor: Tensor, layout: Layout) -> Tensor:
    """`tensor`, with a note that a call on simulated ranks left it split by `layout`; in processes it would be a
    DTensor."""
    TRACKED.left[tensor] = layout, tuple(tensor.shape)
    return tensor


def _left_as(tensor: Tensor) -> Layout | None:
    layout, shape = TRACKED.left.get(tensor, (None, None))
    return layout if shape == tuple(tensor.shape) else None  # a tensor of another shape was changed in place


def inputs_on(call: Call, mesh: Mesh | None) -> dict[str, Layout]:
    """The layouts of the inputs of a call that are DTensors, likewise, or that simulated ranks left split; without
    those that hold addends."""
    problems: list[Problem] = []
    names = {f"input {name!r}": name for name in call.names}
    given = {words: t for words, t in zip(names, call.tensors, strict=True) if is_dtensor(t)}
    layouts = _layouts(given, mesh, problems)
    raise_problems("the DTensors of the call cannot be taken:", problems)
    found = {names[words]: layout for words, layout in layouts.items() if not layout.adds}
    for name, tensor in zip(call.names, call.tensors, strict=True):
        if (left := _left_as(tensor)) is not None and mesh in (None, left.mesh):
            found[name] = left
    return found


def plain(tensor: Tensor) -> Tensor:
    """A plain tensor of the same global shape, of which only metadata may be read."""
    if not is_dtensor(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad)


def placed_as(tensor: Any) -> tuple[Any, ...]:
    """The placements and mesh of a DTensor, or the layout that simulated ranks left a tensor in; () for others."""
    if is_dtensor(tensor):
        return tensor.placements, tensor.device_mesh
    left = _left_as(tensor)
    return () if left is None else (left,)


def layout_now(tensor: Any) -> tuple[Layout, tuple[int, ...]] | None:
    """The layout of a DTensor, or that in which simulated ranks left a tensor, and the devices of its mesh; None for
    others."""
    if not is_dtensor(tensor):
        left = _left_as(tensor)
        return None if left is None else (left, tuple(range(left.mesh.device_num)))
    from partway.strategy.torch_mesh import mesh_like

    layout = from_dtensor(tensor.placements, mesh_like(tensor.device_mesh), tensor.ndim)
    return layout, tuple(tensor.device_mesh.mesh.flatten().tolist())


def drop_hooks(module: nn.Module) -> None:
    """Remove the hooks of `module` by which torch.distributed gathers parameters and redistributes activations."""
    for inner in module.modules():
        remove_hooks(inner, _is_distributed)


def _is_distributed(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def _layouts(held: Mapping[str, Any], mesh: Mesh | None, problems: list[Problem]) -> dict[str, Layout]:
    if not held:
        return {}
    import torch.distributed as dist

    from partway.strategy.torch_mesh import from_device_mesh

    if mesh is None:
        every = [t.device_mesh for t in held.values() if t.device_mesh.size() == dist.get_world_size()]
        if not every:
            words, tensor = next(iter(held.items()))
            fix = f"pass the whole mesh, {dist.get_world_size()} devices, to shard"
            problems.append(Problem(words, f"is a DTensor on {tensor.device_mesh}, a part of a mesh", fix))
            return {}
        mesh = from_device_mesh(every[0])
    layouts = {}
    for words, tensor in held.items():
        try:
            layouts[words] = _layout(tensor, mesh)
        except StrategyError as error:
            what = f"is a DTensor {tensor.placements} on {tensor.device_mesh}: {error}"
            problems.append(
                Problem(words, what, "distribute it over axes of the mesh, by name, or pass the whole tensor")
            )
    return layouts


def _layout(tensor: Any, mesh: Mesh) -> Layout:
    """The layout on `mesh` of a DTensor on some or all of its axes, replicated over the others."""
    import torch.distributed as dist

    own, sizes = tensor.device_mesh, tuple(tensor.device_mesh.mesh.shape)
    axes = own.mesh_dim_names or (mesh.axes if sizes == mesh.sizes else ())
    known = set(axes) <= set(mesh.axes) and tuple(axis for axis in mesh.axes if axis in axes) == tuple(axes)
    if not axes or not known or sizes != tuple(mesh.size(axis) for axis in axes):
        raise StrategyError(f"its axes are not those of the mesh {mesh}")
    group = list(mesh.processes(dist.get_rank(), *axes))
    ranks = own.mesh.flatten().tolist()
    if ranks != group:
        raise StrategyError(f"its ranks are {ranks}, and on the mesh {mesh} they are {group}")
    placements = from_dtensor(tensor.placements, _part(mesh, axes), tensor.ndim).placements
    by_axis = dict(zip(axes, placements, strict=True))
    return Layout(mesh, tuple(by_axis.get(axis, REPLICATE) for axis in mesh.axes))


def _part(mesh: Mesh, axes: tuple[str, ...]) -> Mesh:
    return Mesh({axis: mesh.size(axis) for axis in axes})
