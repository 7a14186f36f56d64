"""Ranks that share a GPU: each kind of collective, and a step of training, against what they have to give.

python tests/gpu/probe.py cuda 2      (with PARTWAY_SHARE_GPU=1; "cpu": over gloo)
"""

from __future__ import annotations

import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn

import partway as pw
from partway.runtime.executors.issue import all_gather, reduce_scatter
from partway.strategy.torch_mesh import has_nccl


def collectives(device: str) -> None:
    """Each of PyTorch's, by hand."""
    rank, n = dist.get_rank(), dist.get_world_size()

    def same(name: str, found: torch.Tensor, expected: list[float]) -> None:
        assert found.tolist() == expected, f"rank {rank}, {name}: {found.tolist()}, not {expected}"

    x = torch.arange(4.0, device=device) + rank
    dist.all_reduce(x)
    same("all_reduce", x, [n * i + n * (n - 1) / 2 for i in range(4)])
    every = torch.empty(n, device=device)
    all_gather(every, torch.full((1,), float(rank), device=device))
    same("all_gather", every, [float(r) for r in range(n)])
    part = torch.empty(1, device=device)
    reduce_scatter(part, torch.arange(float(n), device=device))
    same("reduce_scatter", part, [float(rank * n)])
    came = torch.empty(n, device=device)
    dist.all_to_all_single(came, torch.arange(float(n), device=device) + n * rank)
    same("all_to_all", came, [float(n * r + rank) for r in range(n)])
    got = torch.empty(1, device=device)
    to, source = (rank + 1) % n, (rank - 1) % n
    sent = torch.full((1,), float(rank), device=device)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, got, source)]):
        work.wait()
    same("send and receive", got, [float(source)])


def step(device: str, mesh: dict[str, int]) -> None:
    """A step of a small model, split over the ranks, has the numbers of one device."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).to(device, torch.float64)

    torch.manual_seed(1)
    x = torch.randn(8, 8, dtype=torch.float64).to(device)
    plain, axis = made(), next(iter(mesh))
    plain(x).square().mean().backward()
    model = pw.shard(made(), mesh=mesh, in_strategy=((axis, None),))
    model(x).square().mean().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad.full_tensor(), one.grad, rtol=1e-12, atol=1e-12)


def rank_of(device: str) -> None:
    """One of the ranks."""
    n = pw.init(backend="nccl" if device == "cuda" else "gloo", timeout=60)
    assert has_nccl() == (device == "cuda")
    collectives(device)
    step(device, {"dp": n})
    if pw.get_rank() == 0:
        sys.stdout.write(f"{n} ranks on {device}: every collective and a step have the right numbers\n")
    pw.shutdown()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", sys.argv[2]]
        sys.exit(subprocess.run([sys.executable, *launcher, __file__, sys.argv[1]], check=False).returncode)
    rank_of(sys.argv[1])
