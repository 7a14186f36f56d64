"""Ways to train one model in a group of processes, timed beside each other: each a `Contender`.

All contenders start from the same weights and the same batch. Their results are compared with one device
(`disagreements`) before anything is timed; then all take turns in the same processes, a step each (`turns`).
"""

from __future__ import annotations

import contextlib
import datetime
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from partway import auto_parallel_context, shard
from partway.measure.clock import wait_for
from partway.measure.workloads import Workload
from partway.runtime.launching import gpus

LEARNING_RATE = 1e-4
SECONDS = 300  # the timeout of a collective; other ranks may be planning or profiling


@dataclass(frozen=True)
class Contender:
    """One way to train a model.

    forward    the loss of this rank's part, or of the whole batch
    backward   gradients of the loss of the whole batch, in the parameters
    split      for plain parameters that are split over the ranks of `group`: the dim that is split
    parts      the loss is the mean over so many parts of the batch, each with its own batch statistics
    context    the context that every step runs in
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
        """The parameters by their names in the plain model."""
        return {name.removeprefix("module."): p for name, p in self.module.named_parameters()}

    def optimizer(self) -> torch.optim.Optimizer:
        """SGD that updates many parameters at once, in a group for each mesh: PyTorch cannot mix meshes."""
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


def ours(
    name: str,
    work: Workload,
    split: int,
    dtype: torch.dtype,
    options: Mapping[str, Any],
    arguments: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> Contender:
    """Partway with these options of the context and arguments of `shard`, for a batch in `split` parts.

    Unless `batch_norm_parts` says otherwise, each part has its own batch statistics, as with DDP."""
    if work.own_statistics:
        options = {"batch_norm_parts": split, **options}
    given: dict[str, Any] = {**(arguments or {})}
    whole = work.tensors(work.each * split, dtype, device)
    with auto_parallel_context(**options):
        model: Any = shard(work.model(dtype, device), **given)
    return Contender(
        name,
        model,
        lambda: model(*whole),
        parts=options.get("batch_norm_parts", 1),
        context=lambda: auto_parallel_context(**options),
    )


def ddp(work: Workload, split: int, dtype: torch.dtype, device: str = "cpu") -> Contender:
    """DistributedDataParallel with its default buckets, for a batch in `split` parts, one for each rank."""
    # no step reads the buffers of another rank: positions are constant, batch statistics each rank's own
    model = DistributedDataParallel(work.model(dtype, device), forward_sync_buffers=False)
    mine = part(work, split, dist.get_rank(), dtype, device)
    return Contender("DDP", model, lambda: model(*mine), parts=split if work.own_statistics else 1)


def part(work: Workload, split: int, index: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
    """Part `index` of a batch in `split` parts."""
    whole = work.tensors(work.each * split, dtype, device)
    return tuple(t.chunk(split)[index].contiguous() for t in whole)


# -- Comparison with one device
# -----------------------------------------------------------------------------------------


def one_device(
    work: Workload, samples: int, parts: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss of `parts` parts of a batch, and its gradients, without splitting anything."""
    model = work.model(dtype, device)
    chunks = zip(*(t.chunk(parts) for t in work.tensors(samples, dtype, device)), strict=True)
    loss = torch.stack([model(*chunk) for chunk in chunks]).mean()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def disagreements(
    contender: Contender, work: Workload, split: int, dtype: torch.dtype, device: str = "cpu"
) -> Iterator[str]:
    """The differences between `contender` and one device, for a batch in `split` parts. Every rank calls it, and
    consumes all of it."""
    with contender.context():
        loss = contender.forward()
        contender.backward(loss)
    own = contender.gradients()
    contender.module.zero_grad()
    whole = (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach().clone()
    dist.all_reduce(whole)
    whole /= dist.get_world_size()
    expected, gradients = one_device(work, work.each * split, contender.parts, dtype, device)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-3
    if not torch.allclose(whole, expected, rtol=tolerance):
        yield f"{contender.name}: the loss of {work.name} is {whole:.9g}, on one device {expected:.9g}"
    if own.keys() != gradients.keys():
        yield f"{contender.name}: gradients of {sorted(own.keys() ^ gradients.keys())} only on one side"
    for name in gradients.keys() & own.keys():
        scale = max(gradients[name].abs().max().item(), 1e-3)
        error = (gradients[name] - own[name]).abs().max().item() / scale
        if error > tolerance:
            yield f"{contender.name}: the gradient of {name} is off by {error:.1e} of its largest element on one device"


# -- Taking turns ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def one_rank(rank: int, ranks: int, folder: str, threads: int = 1, device: str = "cpu") -> Iterator[None]:
    """This process as one rank: with `threads` threads on gloo, or with a GPU on NCCL."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # gloo prints a line for each new group
    torch.set_num_threads(threads)
    backend = "gloo"
    if device == "cuda":
        gpus.take_of(rank, ranks)
        backend = "nccl"
    limit = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=limit)
    yield
    dist.barrier()
    dist.destroy_process_group()


def timed_step(contender: Contender, device: str = "cpu") -> Callable[[], tuple[float, float]]:
    """A function that runs a step of `contender` and returns its seconds, and those of forward and backward alone."""
    optimizers: list[torch.optim.Optimizer] = []  # made after the first call, which settles the parameters' layouts

    def run() -> tuple[float, float]:
        with contender.context():
            dist.barrier()
            wait_for(device)
            start = time.perf_counter()
            contender.backward(contender.forward())
            wait_for(device)
            computed = time.perf_counter()
            if not optimizers:
                optimizers.append(contender.optimizer())
            optimizers[0].step()
            optimizers[0].zero_grad()
            wait_for(device)
            return time.perf_counter() - start, computed - start

    return run


def turns(
    contenders: Mapping[str, Callable[[], tuple[float, float]]], rounds: int, warm: int = 3
) -> tuple[dict[str, tuple[float, ...]], dict[str, tuple[float, ...]]]:
    """The seconds of each contender: of whole steps, and of their first parts. They take turns, after `warm` rounds."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for i in range(rounds + warm):
        for name, run in contenders.items():
            seconds = run()
            if i >= warm:
                times[name].append(seconds)
    whole = {name: tuple(w for w, _ in pairs) for name, pairs in times.items()}
    return whole, {name: tuple(p for _, p in pairs) for name, pairs in times.items()}


# -- Figures as text ---------------------------------------------------------------------------------------------------


def spread(seconds: Sequence[float]) -> str:
    """The median in ms, with the minimum and the maximum."""
    middle, low, high = (1e3 * of(seconds) for of in (statistics.median, min, max))
    digits = 1 if middle >= 10 else 3
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def quartiles(ratios: Sequence[float]) -> str:
    """The median, with the first and the third quartile."""
    low, middle, high = three_quartiles(ratios)
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def three_quartiles(values: Sequence[float]) -> list[float]:
    """The first quartile, the median and the third quartile of one value or more."""
    return statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
