"""On CUDA: simulated ranks, one NCCL process and gloo on CUDA tensors compute what one device computes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import assert_same_gradients, assert_same_loss, assert_sends_as_planned, gradients
from torch import Tensor
from zoo import CASES

import partway as pw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

Ranks = Callable[..., list[Any]]
RELATIVE = 1e-9  # float64; CUDA adds in another order each time


def check(name: str, arguments: dict[str, Any]) -> None:
    """One step of a model on CUDA, split as `arguments` say, is that of one CUDA device."""
    pw.reset_auto_parallel_context()
    case = CASES[name]
    batch = {key: value.cuda() for key, value in case.batch().items()}
    expected_loss, expected = gradients(case.build().cuda(), batch)
    model: Any = pw.shard(case.build().cuda(), **arguments)
    loss, found = gradients(model, batch)
    assert loss.is_cuda
    assert all(p.is_cuda for p in model.parameters())
    assert_same_loss(loss, expected_loss, RELATIVE)
    assert_same_gradients(found, expected, RELATIVE)
    assert_sends_as_planned(model, batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.step()
    assert gradients(model, batch)[0] < loss


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_simulated_ranks_on_cuda_compute_what_one_device_computes(name: str) -> None:
    case = CASES[name]
    check(
        name,
        {
            "mesh": {"dp": 2, "tp": 4},
            "in_strategy": case.batch_split("dp"),
            "parameter_plan": case.block_split("tp"),
            "device": "cuda",
        },
    )


def test_dropout_on_cuda_draws_the_numbers_of_one_device() -> None:
    pw.reset_auto_parallel_context()

    def dropped(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5).square().sum()

    x = torch.randn(8, 64, device="cuda")
    torch.manual_seed(1)
    expected = dropped(x)
    torch.manual_seed(1)
    with pw.auto_parallel_context(random_numbers="torch"):
        found = pw.shard(dropped, mesh={"dp": 8}, in_strategy=(("dp", None),))(x)
    torch.testing.assert_close(found, expected)


NCCL = """
import torch
import partway as pw

assert pw.init() == 1 and torch.distributed.get_backend() == "nccl"
torch.manual_seed(0)
plain = torch.nn.Linear(8, 4).cuda()
torch.manual_seed(0)
model = pw.shard(torch.nn.Linear(8, 4).cuda(), mesh={"dp": 1}, in_strategy=(("dp", None),))
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(8, 8, device="cuda")
for _ in range(3):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
print(loss.item() < plain(x).square().mean().item(), model.weight.device, type(model.weight).__name__)
pw.shutdown()
"""


def test_one_process_runs_on_nccl(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NCCL)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(script)],
        env={**os.environ, "PYTHONWARNINGS": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "cuda:0", "SplitTensor"]


@pytest.mark.parametrize("mesh", [{"dp": 1}, {"tp": 2}])
def test_a_compiled_step_on_cuda_has_the_numbers_of_one_device(mesh: dict[str, int]) -> None:
    """A loss of 1,003 classes, of which the second of two devices has one less."""
    torch.manual_seed(0)
    x, head = torch.randn(4, 6, 16).cuda(), torch.randn(1003, 16).cuda()
    target = torch.randint(1003, (4, 6)).cuda()
    target[0, :4] = -100
    split = "tp" if "tp" in mesh else None

    def loss(x: Tensor, head: Tensor) -> Tensor:
        logits = (x.half() @ head.half().T).float()
        return torch.nn.functional.cross_entropy(logits.view(-1, 1003), target.view(-1))

    with pw.auto_parallel_context(backend="inductor"):
        planned = pw.shard(loss, mesh=mesh, in_strategy=((None, None, None), (split, None)), device="cuda")
        found = torch.autograd.grad(planned(x, head.requires_grad_()), head)
    expected = torch.autograd.grad(loss(x, head), head)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def multiplies() -> None:
    pw.reset_auto_parallel_context()
    torch.manual_seed(0)
    x, w = torch.randn(4, 8).cuda(), torch.randn(8, 6).cuda()
    product = pw.shard(torch.mm, mesh={"tp": 2}, in_strategy=((None, "tp"), ("tp", None)))
    with pw.record_collectives() as events:
        found = product(x, w)
    assert found.is_cuda
    torch.testing.assert_close(found, x @ w)
    assert [str(event.kind) for event in events] == ["all_reduce"]


@pytest.mark.gloo
def test_gloo_processes_share_a_cuda_device(on_ranks: Ranks) -> None:
    on_ranks(2, multiplies)
