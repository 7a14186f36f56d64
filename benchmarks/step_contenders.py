"""The contenders of `step_overhead.py`: ways to train a model on several processes: ours, by hand, PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from partway.measure import contenders
from partway.measure.contenders import Contender, part
from partway.measure.workloads import Workload, attention

FASTEST = "partway, searched for speed"
COLUMNS, ROWS = ("q", "k", "v", "up"), ("out", "down")  # Megatron's two kinds of linear layers


# -- Layouts: how many ranks the batch is split over, and the weights --------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """`data` ranks that split the batch, times `tensor` ranks that split the linear layers."""

    name: str
    data: int
    tensor: int

    @property
    def mesh(self) -> dict[str, int]:
        return {axis: n for axis, n in (("dp", self.data), ("tp", self.tensor)) if n > 1}


def layout(name: str, ranks: int) -> Layout:
    """The layout `name` of `ranks` ranks: data, tensor or mixed (two ranks along the weights)."""
    match name:
        case "data":
            return Layout(name, ranks, 1)
        case "tensor":
            return Layout(name, 1, ranks)
        case "mixed" if ranks % 2 == 0 and ranks > 2:
            return Layout(name, ranks // 2, 2)
    raise ValueError(f"there is no layout {name!r} of {ranks} ranks; take data, tensor or (from 4 ranks) mixed")


# -- Contenders --------------------------------------------------------------------------------------------------------


Build = Callable[[Workload, Layout, torch.dtype], Contender]


def ours(work: Workload, how: Layout, dtype: torch.dtype) -> Contender:
    """Partway with the same layouts as the others by annotation: the batch, and Megatron's split of the weights."""
    plan: dict[str, Any] = {}
    if how.tensor > 1:
        whole = {
            "wte.weight": 2,
            "wpe.weight": 2,
            "*norm*.weight": 1,
            "*norm*.bias": 1,
            "*.out.bias": 1,
            "*.down.bias": 1,
        }
        plan = {name: (None,) * dims for name, dims in whole.items()}
        for name in COLUMNS:
            plan |= {f"blocks.*.{name}.weight": ("tp", None), f"blocks.*.{name}.bias": ("tp",)}
        plan |= {f"blocks.*.{name}.weight": (None, "tp") for name in ROWS}
        arguments = {"in_strategy": work.by("dp" if how.data > 1 else None), "parameter_plan": plan, "mesh": how.mesh}
        return contenders.ours("partway", work, how.data, dtype, {}, arguments)
    return contenders.ours("partway", work, how.data, dtype, {"parallel_mode": "data_parallel", "full_batch": True})


def ours_searched(work: Workload, how: Layout, dtype: torch.dtype) -> Contender:
    """Partway with only the batch annotated: the plan that sends least."""
    arguments = {"in_strategy": work.by("dp"), "mesh": how.mesh}
    return contenders.ours("partway, searched", work, how.data, dtype, {}, arguments)


def ours_fastest(work: Workload, how: Layout, dtype: torch.dtype) -> Contender:
    """Partway with only the batch annotated, over the first axis: the plan whose step is predicted to end first."""
    arguments = {"in_strategy": work.by(next(iter(how.mesh))), "mesh": how.mesh, "level": 2}
    return contenders.ours(FASTEST, work, how.data, dtype, {}, arguments)


def ours_jointly(work: Workload, how: Layout, dtype: torch.dtype) -> Contender:
    """Partway with the batch statistics of one device, those of the whole batch: its default."""
    options = {"parallel_mode": "data_parallel", "full_batch": True, "batch_norm_parts": 1}
    return contenders.ours("partway, joint statistics", work, how.data, dtype, options)


def by_hand(work: Workload, how: Layout, dtype: torch.dtype) -> Contender:
    """The program of one rank with its collectives written out: one flat AllReduce of all gradients."""
    model, mine = work.model(dtype), _mine(work, how, dtype)
    groups = _groups(how)
    split = _split_by_hand(model, groups["tp"]) if how.tensor > 1 else {}

    def backward(loss: Tensor) -> None:
        loss.backward()
        if how.data > 1:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            flat = _flatten_dense_tensors(gradients)
            dist.all_reduce(flat, group=groups["dp"])
            flat.div_(how.data)
            torch._foreach_copy_(gradients, list(_unflatten_dense_tensors(flat, gradients)))

    return Contender(
        "by hand",
        model,
        lambda: model(*mine),
        backward,
        split,
        groups.get("tp"),
        how.data if work.own_statistics else 1,
    )


def ddp(work: Workload, how: Layout, dtype: torch.dtype) -> Contender:
    """DistributedDataParallel with its default buckets."""
    return contenders.ddp(work, how.data, dtype)


def fsdp2(work: Workload, how: Layout, dtype: torch.dtype) -> Contender:
    """fully_shard on every block and on the rest."""
    model, mesh, mine = work.model(dtype), _device_mesh(how), _mine(work, how, dtype)
    if how.tensor > 1:
        _megatron(model, mesh["tp"])
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh["dp"])  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh["dp"])
    name = "DTensor + FSDP2" if how.tensor > 1 else "FSDP2"
    return Contender(name, model, lambda: model(*mine), parts=how.data if work.own_statistics else 1)


def dtensor(work: Workload, how: Layout, dtype: torch.dtype) -> Contender:
    """DTensor: parallelize_module for weights, or whole weights and a batch that is split."""
    model, mesh = work.model(dtype), _device_mesh(how)
    if how.tensor > 1:
        mine = _mine(work, how, dtype)
        _megatron(model, mesh["tp"])
        return Contender("DTensor", model, lambda: model(*mine))
    distribute_module(model, mesh)
    blocks: Any = model.blocks
    for block in blocks:  # on the CPU PyTorch has no strategy for attention
        block.attention = local_map(attention, [Shard(0)], ([Shard(0)],) * 3, device_mesh=mesh)
    split = tuple(DTensor.from_local(t, mesh, [Shard(0)]) for t in _mine(work, how, dtype))

    def backward(loss: Tensor) -> None:
        loss.backward()
        for p in model.parameters():  # those of the parts, still to be added up
            if isinstance(p.grad, DTensor):
                p.grad = p.grad.redistribute(placements=[Replicate()])

    return Contender("DTensor", model, lambda: model(*split), backward)


def builds(work: Workload, how: Layout) -> tuple[Build, ...]:
    """The contenders of a layout; the first is the one that is compared with the others."""
    match how.name:
        case "data":
            # PyTorch's DTensor cannot split a batch norm over the batch
            others = (ours_jointly,) if work.own_statistics else (dtensor,)
            return (ours, ours_searched, ours_fastest, by_hand, ddp, fsdp2, *others)
        case "tensor":
            return (ours, ours_fastest, by_hand, dtensor)
    return (ours, ours_fastest, by_hand, fsdp2)


def _mine(work: Workload, how: Layout, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """This rank's part of the batch."""
    return part(work, how.data, dist.get_rank() // how.tensor, dtype)


_meshes: dict[Layout, DeviceMesh] = {}


def _device_mesh(how: Layout) -> DeviceMesh:
    """The DeviceMesh of a layout, made once."""
    if how not in _meshes:
        _meshes[how] = init_device_mesh("cpu", tuple(how.mesh.values()), mesh_dim_names=tuple(how.mesh))
    return _meshes[how]


def _groups(how: Layout) -> dict[str, Any]:
    return {axis: _device_mesh(how).get_group(axis) for axis in how.mesh}


# -- Tensor parallelism by PyTorch, and by hand ------------------------------------------------------------------------


def _megatron(model: nn.Module, mesh: DeviceMesh) -> None:
    """PyTorch's tensor parallelism; what the column-split layers read is one DTensor, so that its gradient is summed
    once."""
    blocks: Any = model.blocks
    for block in blocks:
        block.heads //= mesh.size()
        enter = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Replicate(), use_local_output=False
        )
        columns = {name: ColwiseParallel() for name in COLUMNS}
        parallelize_module(block, mesh, {"enter": enter, **columns, **{name: RowwiseParallel() for name in ROWS}})


class _Enter(torch.autograd.Function):
    """What the split layers read: the same on every rank, its gradient a sum over them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Leave(torch.autograd.Function):
    """What the split layers give: a sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Enter(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Enter.apply(x, self.group)  # type: ignore[no-untyped-call]
        return result


class RowLinear(nn.Module):
    """A linear layer with a part of its columns of weights, whose bias is added once."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter, group: Any) -> None:
        super().__init__()
        self.weight, self.bias, self.group = weight, bias, group

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = _Leave.apply(F.linear(x, self.weight), self.group)  # type: ignore[no-untyped-call]
        return product + self.bias


def _split_by_hand(model: nn.Module, group: Any) -> dict[str, int]:
    """Megatron's split of the blocks of `model`, in place; the dim that each split parameter is split by."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    split: dict[str, int] = {}

    def part(tensor: Tensor, dim: int) -> nn.Parameter:
        return nn.Parameter(tensor.detach().chunk(ranks, dim)[rank].clone())

    blocks: Any = model.blocks
    for i, block in enumerate(blocks):
        block.heads //= ranks
        block.enter = Enter(group)
        for name in COLUMNS:
            layer = getattr(block, name)
            layer.weight, layer.bias = part(layer.weight, 0), part(layer.bias, 0)
            split |= {f"blocks.{i}.{name}.weight": 0, f"blocks.{i}.{name}.bias": 0}
        for name in ROWS:
            layer = getattr(block, name)
            setattr(block, name, RowLinear(part(layer.weight, 1), layer.bias, group))
            split[f"blocks.{i}.{name}.weight"] = 1
    return split
