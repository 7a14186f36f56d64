"""The models of `step_overhead.py`, and every way to train them on several processes: ours, by hand, and PyTorch's own.

A `Workload` is a plain PyTorch model with its batch, a `Contender` one way to run it. Every contender of a group starts
from the same weights and is given the same batch; what each computes is compared with one device (`disagreements`)
before anything is timed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peer_models import ResNet50
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
from torch.nn.parallel import DistributedDataParallel

import partway as pw

LEARNING_RATE = 1e-4
COLUMNS, ROWS = ("q", "k", "v", "up"), ("out", "down")  # Megatron's two kinds of linear layers


# -- Models ------------------------------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every token attends to those before it."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class DecoderBlock(nn.Module):
    """Attention and `down(gelu(up(x)))`, each after a norm. `enter` does nothing: it stands where tensor parallelism
    by hand sums the gradients of what the column-split layers read."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm1, self.norm2, self.enter = nn.LayerNorm(width), nn.LayerNorm(width), nn.Identity()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.enter(self.norm1(x))
        q, k, v = (part(normal).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = self.attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        hidden = F.gelu(self.up(self.enter(self.norm2(x))), approximate="tanh")
        result: Tensor = x + self.down(hidden)
        return result


class Decoder(nn.Module):
    """The shapes of GPT-2: learned positions, a head tied to the token embedding, and the mean cross-entropy."""

    def __init__(self, layers: int, width: int, heads: int, sequence: int, vocabulary: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        nn.init.normal_(self.wte.weight, std=0.02)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("positions", torch.arange(sequence), persistent=False)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(self.positions)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Workload:
    """A model and its batch.

    build   the model; its forward takes what `batch` gives and returns the loss
    batch   the tensors of a batch of a number of samples, all of them split by their first dim
    each    samples for each rank that the batch is split over
    dims    how many dims each tensor of the batch has
    own_statistics  whether the model has batch norms: DDP, FSDP2 and the program by hand give each rank the statistics
            of its part of the batch, Partway and one device have those of the whole of it
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    each: int
    dims: tuple[int, ...]
    own_statistics: bool = False

    def model(self, dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        return self.build().to(dtype)

    def tensors(self, samples: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        return tuple(t.to(dtype) if t.is_floating_point() else t for t in self.batch(samples))

    def by(self, axis: str | None) -> tuple[tuple[str | None, ...], ...]:
        """`in_strategy` for a batch split over `axis`, or whole."""
        return tuple((axis, *(None,) * (dims - 1)) for dims in self.dims)


def gpt2(layers: int, sequence: int, width: int = 768, vocabulary: int = 50257, each: int = 4) -> Workload:
    """A decoder with heads of 64 (four heads where it is narrower than that)."""

    def build() -> nn.Module:
        return Decoder(layers, width, max(4, width // 64), sequence, vocabulary)

    def batch(samples: int) -> tuple[Tensor, ...]:
        tokens = torch.randint(vocabulary, (samples, sequence + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Workload("gpt2", build, batch, each, (2, 2))


def resnet50(pixels: int, width: int = 64, classes: int = 1000, each: int = 4) -> Workload:
    def batch(samples: int) -> tuple[Tensor, ...]:
        return torch.randn(samples, 3, pixels, pixels), torch.randint(classes, (samples,))

    return Workload("resnet50", lambda: ResNet50(width, classes), batch, each, (4, 1), own_statistics=True)


class Perceptron(nn.Module):
    """Linear layers with ReLU between, and the mean squared error."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return F.mse_loss(x, target)


def mlp(width: int, layers: int, each: int = 4) -> Workload:
    def batch(samples: int) -> tuple[Tensor, ...]:
        return torch.randn(samples, width), torch.randn(samples, width)

    return Workload("mlp", lambda: Perceptron(width, layers), batch, each, (2, 2))


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


@dataclass(frozen=True)
class Contender:
    """One way to train a model.

    forward    the loss of this rank's part, or of the whole batch
    backward   gradients of the loss of the whole batch, in the parameters
    split      the dim that this rank has a part of, over the ranks of `group`, for plain parameters that are split
    parts      of how many parts of the batch the loss is the mean, each with its own batch statistics
    context    what is around every step
    """

    name: str
    module: nn.Module
    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], None] = Tensor.backward
    split: Mapping[str, int] = field(default_factory=dict)
    group: Any = None
    parts: int = 1
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name.removeprefix("module."): p for name, p in self.module.named_parameters()}

    def optimizer(self) -> torch.optim.Optimizer:
        """SGD that updates many parameters at once: all of one mesh, since PyTorch cannot mix them."""
        groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
        for parameter in self.module.parameters():
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
        return torch.optim.SGD([{"params": held} for held in groups.values()], lr=LEARNING_RATE, foreach=True)

    def gradients(self) -> dict[str, Tensor]:
        """The whole gradients. Every rank calls it."""
        return {name: self._whole(name, p.grad) for name, p in self.parameters().items() if p.grad is not None}

    def _whole(self, name: str, gradient: Tensor) -> Tensor:
        if isinstance(gradient, DTensor):
            return gradient.full_tensor()
        if name not in self.split:
            return gradient.clone()
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, gradient.contiguous(), group=self.group)
        return torch.cat(parts, self.split[name])


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
        return _ours("partway", work, how, dtype, arguments, {})
    return _ours("partway", work, how, dtype, {}, {"parallel_mode": "data_parallel"})


def ours_searched(work: Workload, how: Layout, dtype: torch.dtype) -> Contender:
    """Partway with only the batch annotated."""
    return _ours("partway, searched", work, how, dtype, {"in_strategy": work.by("dp"), "mesh": how.mesh}, {})


def _ours(
    name: str, work: Workload, how: Layout, dtype: torch.dtype, arguments: dict[str, Any], options: dict[str, Any]
) -> Contender:
    options = {"comm_fusion": {"allreduce": {"mode": "auto", "config": None}}, **options}
    whole = work.tensors(work.each * how.data, dtype)
    with pw.auto_parallel_context(**options):
        model: Any = pw.shard(work.model(dtype), **arguments)
    return Contender(name, model, lambda: model(*whole), context=lambda: pw.auto_parallel_context(**options))


def by_hand(work: Workload, how: Layout, dtype: torch.dtype) -> Contender:
    """The program of one rank with its collectives written out: one flat AllReduce of all gradients."""
    model, part = work.model(dtype), _part(work, how, dtype)
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
        lambda: model(*part),
        backward,
        split,
        groups.get("tp"),
        how.data if work.own_statistics else 1,
    )


def ddp(work: Workload, how: Layout, dtype: torch.dtype) -> Contender:
    """DistributedDataParallel with its default buckets."""
    # no step reads the buffers of another rank: positions are constant, batch statistics each rank's own, as by hand
    model = DistributedDataParallel(work.model(dtype), forward_sync_buffers=False)
    part = _part(work, how, dtype)
    return Contender("DDP", model, lambda: model(*part), parts=how.data if work.own_statistics else 1)


def fsdp2(work: Workload, how: Layout, dtype: torch.dtype) -> Contender:
    """fully_shard on every block and on the rest."""
    model, mesh, part = work.model(dtype), _device_mesh(how), _part(work, how, dtype)
    if how.tensor > 1:
        _megatron(model, mesh["tp"])
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh["dp"])  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh["dp"])
    name = "DTensor + FSDP2" if how.tensor > 1 else "FSDP2"
    return Contender(name, model, lambda: model(*part), parts=how.data if work.own_statistics else 1)


def dtensor(work: Workload, how: Layout, dtype: torch.dtype) -> Contender:
    """DTensor: parallelize_module for weights, or whole weights and a batch that is split."""
    model, mesh = work.model(dtype), _device_mesh(how)
    if how.tensor > 1:
        part = _part(work, how, dtype)
        _megatron(model, mesh["tp"])
        return Contender("DTensor", model, lambda: model(*part))
    distribute_module(model, mesh)
    blocks: Any = model.blocks
    for block in blocks:  # on the CPU PyTorch has no strategy for attention
        block.attention = local_map(attention, [Shard(0)], ([Shard(0)],) * 3, device_mesh=mesh)
    split = tuple(DTensor.from_local(t, mesh, [Shard(0)]) for t in _part(work, how, dtype))

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
            plain = () if work.own_statistics else (dtensor,)
            return (ours, ours_searched, by_hand, ddp, fsdp2, *plain)
        case "tensor":
            return (ours, by_hand, dtensor)
    return (ours, by_hand, fsdp2)


def _part(work: Workload, how: Layout, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """This rank's part of the batch."""
    mine = dist.get_rank() // how.tensor
    return tuple(t.chunk(how.data)[mine].contiguous() for t in work.tensors(work.each * how.data, dtype))


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


# -- Do they compute the same? -----------------------------------------------------------------------------------------


def one_device(work: Workload, samples: int, parts: int, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss of `parts` parts of a batch, and its gradients, without splitting anything."""
    model = work.model(dtype)
    chunks = zip(*(t.chunk(parts) for t in work.tensors(samples, dtype)), strict=True)
    loss = torch.stack([model(*chunk) for chunk in chunks]).mean()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def disagreements(contender: Contender, work: Workload, how: Layout, dtype: torch.dtype) -> Iterator[str]:
    """What `contender` computes otherwise than one device does. Every rank calls it, and reads all of it."""
    with contender.context():
        loss = contender.forward()
        contender.backward(loss)
    found = contender.gradients()
    contender.module.zero_grad()
    whole = loss.detach().full_tensor() if isinstance(loss, DTensor) else loss.detach().clone()
    dist.all_reduce(whole)
    whole /= dist.get_world_size()
    expected, gradients = one_device(work, work.each * how.data, contender.parts, dtype)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-3
    if not torch.allclose(whole, expected, rtol=tolerance):
        yield f"{contender.name}: the loss of {work.name} is {whole:.9g}, on one device {expected:.9g}"
    if found.keys() != gradients.keys():
        yield f"{contender.name}: gradients of {sorted(found.keys() ^ gradients.keys())} only on one side"
    for name in gradients.keys() & found.keys():
        scale = max(gradients[name].abs().max().item(), 1e-3)
        error = (gradients[name] - found[name]).abs().max().item() / scale
        if error > tolerance:
            yield f"{contender.name}: the gradient of {name} is off by {error:.1e} of its largest element on one device"
