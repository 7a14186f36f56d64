"""A mesh may be a part of a job: its ranks plan and run by themselves, and the others hear nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checks import whole
from torch import Tensor, nn

import partway as pw
from partway.strategy.torch_mesh import own_rank

pytestmark = pytest.mark.gloo

Ranks = Callable[..., list[Any]]
HALVES = ((0, 1), (2, 3))
WIDTHS = (8, 12)  # of the model of each half


def model(half: int) -> nn.Sequential:
    torch.manual_seed(half)
    return nn.Sequential(nn.Linear(8, WIDTHS[half]), nn.Tanh(), nn.Linear(WIDTHS[half], 4)).double()


def curve(net: nn.Module, half: int, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(10 + half)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        loss = net(torch.randn(6, 8, dtype=torch.float64)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, whole(dict(net.named_parameters()))


def each_trains_its_own() -> None:
    half = dist.get_rank() // 2
    steps = 3 + 2 * half  # nothing that one half does waits for the other
    expected, weights = curve(model(half), half, steps)
    mesh = pw.Mesh({"tp": 2}, ranks=HALVES[half])
    net: Any = pw.shard(model(half), mesh=mesh, parameter_plan={"0.weight": ("tp", None), "2.weight": (None, "tp")})
    losses, found = curve(net, half, steps)
    assert losses == pytest.approx(expected, rel=1e-12)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name].detach(), weight.detach(), rtol=1e-10, atol=1e-12)
    assert net.plan.mesh == mesh
    assert pw.Plan.model_validate_json(net.plan.model_dump_json()).mesh == mesh
    assert net[0].weight.device_mesh.mesh.tolist() == list(HALVES[half])
    assert net[0].weight.to_local().shape == (WIDTHS[half] // 2, 8)


def test_two_halves_of_a_job_train_models_of_their_own(on_ranks: Ranks) -> None:
    on_ranks(4, each_trains_its_own)


def one_half_differs() -> list[str]:
    half, rank = dist.get_rank() // 2, dist.get_rank()
    net: Any = pw.shard(model(half), mesh=pw.Mesh({"tp": 2}, ranks=HALVES[half]))
    x = torch.ones(6, 8, dtype=torch.float64) * (rank == 3)
    net.eval()
    try:
        net(x)
    except pw.RuntimeStateError as error:
        return [str(error)]
    return []


def test_a_half_whose_ranks_differ_is_told_and_the_other_goes_on(on_ranks: Ranks) -> None:
    first, second, third, fourth = on_ranks(4, one_half_differs)
    assert first == second == []
    assert third == fourth
    assert "input 'input' has other values on rank 3 than on rank 2" in third[0]


def of_a_device_mesh() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "tp"))["tp"]
    net: Any = pw.shard(model(0).eval(), mesh=mesh)
    half = dist.get_rank() // 2
    x = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(half))
    torch.testing.assert_close(net(x), model(0).eval()(x), rtol=1e-12, atol=0)
    assert net.plan.mesh == pw.Mesh({"tp": 2}, ranks=HALVES[half])


def test_a_part_of_a_device_mesh_is_one_of_the_job(on_ranks: Ranks) -> None:
    on_ranks(4, of_a_device_mesh)


def refused() -> list[str]:
    said = []
    for mesh in (pw.Mesh({"tp": 2}, ranks=(1, 4)), pw.Mesh({"tp": 2}, ranks=(0, 1)), pw.Mesh({"tp": 2})):
        if dist.get_rank() > 1 or not mesh.is_part or 4 in mesh.ranks:  # those that are on the mesh go on
            with pytest.raises(pw.PartwayError) as error:
                pw.shard(model(0), mesh=mesh)
            said.append(str(error.value))
    with pytest.raises(pw.PartwayError) as error:
        own_rank(pw.Mesh({"tp": 2}))  # before any process group is made, as for the parts of a model that was sent here
    return [*said, str(error.value)]


def test_ranks_that_cannot_be_on_a_mesh_are_refused(on_ranks: Ranks) -> None:
    outside, other, fewer, before = on_ranks(4, refused)[2]
    assert outside == "the mesh (tp=2 on ranks 1, 4) names rank 4, and the job has the ranks 0 to 3"
    assert other == ("rank 2 of the job is not on the mesh tp=2 on ranks 0, 1; let only its ranks make this call")
    assert fewer.startswith("the mesh (tp=2) has 2 devices, but there are 4 ranks; start 2 processes")
    assert before == fewer
