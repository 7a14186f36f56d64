"""Several ranks over NCCL: with a GPU each where there are as many, else sharing one. (The tests of `on_ranks` run over
NCCL too with `pytest --device cuda`.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

BEGIN = """
import sys, time
import torch
import torch.distributed as dist
from torch import nn
import partway as pw

pw.init(backend="nccl", timeout=90)
rank = pw.get_rank()
torch.manual_seed(0)
model = pw.shard(nn.Linear(8, 8, dtype=torch.float64).cuda(), mesh={"dp": 2}, in_strategy=(("dp", None),))
x = torch.randn(8, 8, dtype=torch.float64, device="cuda")
loss = model(x).square().mean()
loss.backward()
first = loss.item()
"""


def ranks(tmp_path: Path, body: str) -> list[Any]:
    (tmp_path / "run.py").write_text(BEGIN + body)
    return run_ranks(["run.py"], tmp_path, {"PARTWAY_SHARE_GPU": "1"})


def test_two_ranks_train(tmp_path: Path) -> None:
    for each in ranks(tmp_path, "print(type(model.weight.grad).__name__, model.weight.device.type)\npw.shutdown()"):
        assert (each.returncode, each.stdout) == (0, "SplitTensor cuda\n"), each.stderr


def test_groups_are_connected_when_they_are_made_in_whatever_order_they_are_used(tmp_path: Path) -> None:
    body = """
from partway.strategy.torch_mesh import new_group
groups = [new_group([0, 1], None, f"group {i}") for i in range(3)]
backends = [group._get_backend(torch.device("cuda")) for group in groups]
assert all(backend._is_initialized() for backend in backends)
works, sums = [], [torch.ones(1, device="cuda") * i for i in range(3)]
for i in (range(3) if rank == 0 else reversed(range(3))):
    works.append(dist.all_reduce(sums[i], group=groups[i], async_op=True))
for work in works:
    work.wait()
print([each.item() for each in sums])
pw.shutdown()
"""
    for each in ranks(tmp_path, body):
        assert (each.returncode, each.stdout) == (0, "[0.0, 2.0, 4.0]\n"), each.stderr


def test_a_rank_whose_gpu_waits_for_one_that_has_ended_says_so(tmp_path: Path) -> None:
    body = """
if rank == 1:
    raise ValueError("no more data")
loss = model(x).square().mean()
loss.backward()
print(loss.item(), model.weight.grad.full_tensor().sum().item())
"""
    first, second = ranks(tmp_path, body)
    assert first.returncode == second.returncode == 1
    assert "rank 1" in first.stderr
    assert "partway: the GPU of rank 0 waits in " in first.stderr or "RuntimeStateError" in first.stderr


def test_a_rank_that_saves_while_the_other_trains_is_told(tmp_path: Path) -> None:
    body = """
if rank == 0:
    pw.save("checkpoint", model, step=1)
loss = model(x).square().mean()
loss.backward()
print(loss.item())
"""
    ended = ranks(tmp_path, body)
    assert all(each.returncode for each in ended)
    assert any("waits for all ranks elsewhere" in each.stderr or "cannot come" in each.stderr for each in ended)
