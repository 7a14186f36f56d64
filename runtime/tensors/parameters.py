"""Parameters as DTensors, for one rank of a process group: optimizers and torch.distributed.checkpoint take them.

An optimizer holds parameters as objects, so these must stay the same once it exists. `distribute` makes the parameters
split tensors (`split_tensor.py`) when a module is sharded, before there is a plan: whole on every rank. `redistribute`
splits them when there is one: the same objects, with other parts. An optimizer that is even older holds the old
objects, which from then on stand for the new ones (`replaced.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...propagation.torch_internals import buffers_in, parameters_in
from ...strategy.errors import RuntimeStateError, StrategyError
from ...strategy.layout import Layout
from ...strategy.mesh import Mesh
from ...strategy.notation import to_dtensor
from ...strategy.torch_mesh import own_rank
from ..code.slices import part_of
from ..executors.execute import device_mesh
from ..torch_internals import dtensor_spec, give_hooks, local_part_of, refer_anew, set_part, spec_of, take_hooks
from . import optimizers, replaced
from .own_parts import taken
from .split_tensor import SplitTensor, as_split, joined, split_tensor


def distribute(module: nn.Module, mesh: Mesh | None = None) -> None:
    """Make the parameters of `module` split tensors that are whole on every rank, on `mesh` (None: all ranks on one
    axis). Their values must agree on all ranks. DTensors keep their placements, and are the same objects.

    The old objects stand for the new ones, which get their hooks. A gradient that still reaches an old one raises
    RuntimeStateError.
    """
    for held in module.parameters():
        as_split(held)
    layout = Layout.replicated(mesh or Mesh.of_sizes((dist.get_world_size(),)))
    old = {id(held): (name, held) for name, held in module.named_parameters() if not isinstance(held, DTensor)}
    new = {key: _parameter(held, layout) for key, (_, held) in old.items()}
    for owner in module.modules():
        for name, held in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if id(held) in new:
                setattr(owner, name, new[id(held)])
        refer_anew(owner)
    for key, (name, held) in old.items():
        give_hooks(new[key], take_hooks(held, functools.partial(replaced.carried, name)))
        replaced.replace(held, new[key], name)
    if old:
        optimizers.changed(module)


def redistribute(module: nn.Module, layouts: Mapping[str, Layout]) -> None:
    """Give the parameters of `module` the layouts in `layouts`, by name, in place: they stay the same objects, and so
    do their gradients and optimizer states. (A state is laid out like its parameter when its optimizer next steps.)
    Every rank calls it.

    Raises RuntimeStateError for a name that `module` does not have, two layouts for one parameter, or a parameter that
    is not a DTensor.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    wanted: dict[int, tuple[str, Layout]] = {}
    for name, layout in layouts.items():
        if not isinstance(parameters.get(name), DTensor):
            known = ", ".join(other for other, held in parameters.items() if isinstance(held, DTensor))
            raise RuntimeStateError(
                f"there is no parameter {name} that is a DTensor; there are: {known or 'none'}. What a module gets "
                "after shard is not split: change the module first, and shard it then"
            )
        other, before = wanted.setdefault(id(parameters[name]), (name, layout))
        if before != layout:
            raise RuntimeStateError(
                f"{other} and {name} are one parameter, but their layouts are {before} and {layout}; give them one"
            )
    moved = []
    for name, layout in wanted.values():
        parameter = parameters[name]
        if _is_placed(parameter, layout):
            continue
        moved.append(parameter)
        with torch.inference_mode(parameter.is_inference()), torch.no_grad():  # this call may have another mode
            new, gradient = shard_tensor(parameter, layout), parameter.grad
            set_part(parameter, local_part_of(new), spec_of(new))
            if gradient is not None:
                parameter.grad = shard_tensor(gradient, layout)
    replaced.let_go(moved)
    if wanted:
        optimizers.changed(module)


def _is_placed(tensor: Tensor, layout: Layout) -> bool:
    """Whether `tensor` is a DTensor that is laid out as `layout` already."""
    if not isinstance(tensor, DTensor):
        return False
    return tensor.device_mesh == device_mesh(layout.mesh) and tensor.placements == to_dtensor(layout)


def hold(module: nn.Module, name: str, part: Tensor) -> None:
    """Give the parameter or buffer `name` of `module`, which is on the meta device or has values to discard, this
    rank's values `part`. A parameter stays the same object, so that an optimizer may have it already."""
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    if attribute in buffers_in(owner):
        buffers_in(owner)[attribute] = part
        return
    parameter: nn.Parameter | None = parameters_in(owner)[attribute]
    assert parameter is not None
    held = split_tensor(part, spec_of(parameter)) if isinstance(parameter, DTensor) else part
    new = nn.Parameter(held, requires_grad=parameter.requires_grad)
    for key, value in vars(parameter).items():
        setattr(new, key, value)
    _swap(parameter, new)


def _swap(parameter: nn.Parameter, new: nn.Parameter) -> None:
    """Give `parameter` the content of `new`; its hooks stay with it. (PyTorch leaves the code that runs them with the
    old tensor.)"""
    hooks = take_hooks(parameter)
    try:
        torch.utils.swap_tensors(parameter, new)
    finally:
        give_hooks(parameter, hooks)


def _parameter(parameter: nn.Parameter, layout: Layout) -> nn.Parameter:
    """A DTensor parameter of the same value and gradient, with the attributes that people set on `parameter`."""
    with torch.inference_mode(parameter.is_inference()), torch.no_grad():  # this call may have another mode
        new = nn.Parameter(shard_tensor(parameter, layout), requires_grad=parameter.requires_grad)
        if parameter.grad is not None:
            new.grad = shard_tensor(parameter.grad, layout)
    for name, attribute in vars(parameter).items():
        setattr(new, name, attribute)
    return new


# -- Between tensors and the parts that a program takes ---------------------------------------------------------------


def shard_tensor(tensor: Tensor, layout: Layout) -> SplitTensor:
    """A tensor that every rank holds whole (no communication), or a DTensor, as a detached tensor with `layout`.

    If a rank's part is the whole, it shares the tensor's memory. Raises StrategyError if `layout` cuts the tensor in a
    way that no DTensor is cut or has a Broadcast, which DTensor lacks.
    """
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    if not layout.chunks(tuple(whole.shape)):
        raise StrategyError(f"the layout {layout} cuts the shape {list(whole.shape)} as no DTensor is cut")
    part = whole[layout.slices(tuple(whole.shape), own_rank(layout.mesh))]
    # A copy of a smaller part, so that the whole can be freed.
    part = part.contiguous() if part.shape == whole.shape else part.clone(memory_format=torch.contiguous_format)
    spec = dtensor_spec(device_mesh(layout.mesh), to_dtensor(layout), tuple(whole.shape), part.dtype)
    return split_tensor(part, spec)


def placed_part(tensor: Tensor, layout: Layout, whole: bool = True) -> Tensor:
    """The holder of this rank's part under `layout` of a DTensor or of a plain tensor: a DTensor placed so, or the
    plain part; with `whole` false, a plain tensor is that part already. Gradients propagate back to `tensor`.

    Raises RuntimeStateError for a DTensor on another mesh.
    """
    if not isinstance(tensor, DTensor):
        if not whole or not layout.cuts:
            return tensor
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return part_of(tensor, layout, own_rank(layout.mesh))
        return taken(tensor, layout)
    placements = to_dtensor(layout)
    if tensor.placements == placements:
        return tensor
    mesh = device_mesh(layout.mesh)
    if tensor.device_mesh != mesh:
        raise RuntimeStateError(
            f"a DTensor on the mesh {tensor.device_mesh} was given where the plan has {layout} on {mesh}; give "
            "the whole tensor, or a DTensor on the plan's mesh"
        )
    return tensor.redistribute(mesh, placements)


def gradient_of(tensor: Tensor, part: Tensor) -> Tensor:
    """The gradient of `tensor` from this rank's `part` of it: placed like `tensor` if it is split, with the strides of
    its part, as autograd promises of gradients."""
    if not isinstance(tensor, DTensor):
        return part
    held = local_part_of(tensor)
    if part.shape != held.shape:  # a short slice
        part = part[tuple(slice(0, size) for size in held.shape)]
    if part.stride() != held.stride():
        part = torch.empty_like(held).copy_(part)
    return split_tensor(part, spec_of(tensor))


def as_dtensor(part: Tensor, layout: Layout, shape: tuple[int, ...], mesh: DeviceMesh) -> SplitTensor:
    """The tensor of global `shape` on `mesh` whose part on this rank is `part`; its gradient comes back as a part.

    Raises StrategyError if `layout` has a Broadcast, which DTensor lacks.
    """
    return joined(part, dtensor_spec(mesh, to_dtensor(layout), tuple(shape), part.dtype))
