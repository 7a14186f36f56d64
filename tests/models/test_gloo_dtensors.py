"""DTensors that come in: parameters and inputs keep the placements that a person gave them, on 2 gloo processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Partial as Addends
from torch.distributed.tensor import Replicate as Whole
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import partway as pw

pytestmark = pytest.mark.gloo

Ranks = Callable[..., list[Any]]
EXACT = 1e-10


def net() -> nn.Sequential:
    """The same on every rank, after a start as that of a new process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).double()


def assert_trains(plain: nn.Module, model: Any, given: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    """Two steps of Adam are those of one device."""
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (plain, model)]
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(8, 16, dtype=torch.float64)
        expected, found = plain(x), model(given(x))
        torch.testing.assert_close(whole(found), expected, rtol=EXACT, atol=EXACT)
        expected.square().sum().backward()
        whole(found).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(one), other, rtol=EXACT, atol=EXACT)


def _distributed() -> str:
    plain = net()
    model, mesh = copy.deepcopy(plain), init_device_mesh(torch.get_default_device().type, (2,), mesh_dim_names=("tp",))
    for i, placement in ((0, Split(0)), (2, Split(1))):
        weight = nn.Parameter(distribute_tensor(model[i].weight.detach(), mesh, [placement]))
        model[i].weight = weight
    pw.shard(model)
    assert_trains(plain, model)
    assert model[2].weight is weight
    assert model[0].weight.placements == (Split(0),)
    assert model.plan.mesh == pw.Mesh({"tp": 2})
    return " ".join(str(model.plan.parameters[name].placements[0]) for name in ("0.weight", "2.weight"))


def test_parameters_that_were_distributed_keep_their_placements(on_ranks: Ranks) -> None:
    assert on_ranks(2, _distributed) == ["S0 S1"] * 2


def _on_an_axis_of_one() -> bool:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1)).double()
    model, mesh = (
        copy.deepcopy(plain),
        init_device_mesh(torch.get_default_device().type, (1, 2), mesh_dim_names=("dp", "tp")),
    )
    weight = nn.Parameter(distribute_tensor(model[1].weight.detach(), mesh, [Split(0), Split(1)]))
    model[1].weight = weight
    pw.shard(model)
    assert_trains(plain, model)
    return model[1].weight is weight


def test_a_parameter_of_one_row_lies_on_an_axis_of_one_device(on_ranks: Ranks) -> None:
    assert on_ranks(2, _on_an_axis_of_one) == [True] * 2


def _parallelized(mesh: Any) -> str:
    plain = net()
    model, whole_mesh = (
        copy.deepcopy(plain),
        init_device_mesh(torch.get_default_device().type, (1, 2), mesh_dim_names=("dp", "tp")),
    )
    parallelize_module(model, whole_mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    pw.shard(model, mesh=mesh or whole_mesh, in_strategy=(("dp", None),))
    assert_trains(plain, model)
    assert not model[0]._forward_pre_hooks
    return " ".join(str(found) for found in model.plan.parameters.values())


@pytest.mark.parametrize("mesh", [None, {"dp": 1, "tp": 2}], ids=["DeviceMesh", "names"])
def test_tensor_parallel_modules_on_an_axis_of_the_mesh(on_ranks: Ranks, mesh: Any) -> None:
    assert on_ranks(2, _parallelized, mesh) == ["[dp:R tp:S0] [dp:R tp:S0] [dp:R tp:S1] [dp:R tp:R]"] * 2


def _fully_sharded() -> str:
    plain = net()
    model = copy.deepcopy(plain)
    mesh = init_device_mesh(torch.get_default_device().type, (2,), mesh_dim_names=("dp",))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    pw.shard(model, in_strategy=(("dp", None),))
    assert_trains(plain, model)
    kinds = sorted({str(c.kind) for c in model.plan.collectives})
    return " ".join(str(found) for found in model.plan.parameters.values()) + f" {kinds}"


def test_fully_shard_is_an_annotation(on_ranks: Ranks) -> None:
    (found, other) = on_ranks(2, _fully_sharded)
    assert found == other
    assert found.startswith("[dp:S0] [dp:S0] [dp:S0] [dp:S0] ['all_gather'")


def _inputs() -> list[str]:
    plain = net()
    model: Any = pw.shard(copy.deepcopy(plain))
    mesh = init_device_mesh(torch.get_default_device().type, (2,), mesh_dim_names=("dp",))
    assert_trains(plain, model, lambda x: distribute_tensor(x, mesh, [Split(0)]))
    found = [next(" ".join(t.codes) for t in model.plan.inputs if t.name == "input")]
    x = torch.randn(8, 16, dtype=torch.float64)
    for placements in ([Split(1)], [Whole()], [Split(0)]):
        given = distribute_tensor(x, mesh, placements).requires_grad_()
        again = x.clone().requires_grad_()
        whole(model(given)).square().sum().backward()
        plain(again).square().sum().backward()
        torch.testing.assert_close(whole(given.grad), again.grad, rtol=EXACT, atol=EXACT)
        assert given.grad.placements == tuple(placements)
        found.append(next(" ".join(t.codes) for t in model.plan.inputs if t.name == "input"))
    addends = DTensor.from_local(x / 2, mesh, [Addends()])
    torch.testing.assert_close(whole(model(addends)), plain(x), rtol=EXACT, atol=EXACT)
    return found


def test_inputs_keep_their_placements(on_ranks: Ranks) -> None:
    assert on_ranks(2, _inputs) == [["S0", "S1", "R", "S0"]] * 2


def _refused(case: str) -> str:
    plain = net()
    mesh = init_device_mesh(torch.get_default_device().type, (2,), mesh_dim_names=("tp",))
    model: Any = copy.deepcopy(plain)
    x = torch.ones(8, 16, dtype=torch.float64)
    options: dict[str, Any] = {}
    if case == "addends":
        model[0].weight = nn.Parameter(DTensor.from_local(model[0].weight.detach(), mesh, [Addends()]))
    elif case != "input":
        model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Split(0)]))
    if case in ("mesh", "input"):
        options["mesh"] = {"dp": 2}
    if case == "plan":
        options["parameter_plan"] = {"0.weight": (None, "tp")}
    if case == "buffer":
        model.register_buffer("seen", distribute_tensor(x, mesh, [Whole()]))
    given = distribute_tensor(x, mesh, [Split(0)]) if case == "input" else x
    with pytest.raises(pw.StrategyError) as found:
        pw.shard(model, **options)(given)
    if case == "plan":  # what failed has changed nothing
        pw.shard(model, parameter_plan={"0.weight": ("tp", None)})
        torch.testing.assert_close(whole(model(x)), plain(x), rtol=EXACT, atol=EXACT)
    return str(found.value)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("mesh", "parameter '0.weight': is a DTensor (Shard(dim=0),) on DeviceMesh((tp=2)"),
        ("mesh", "its axes are not those of the mesh dp=2; distribute it over axes of the mesh, by name"),
        ("plan", "parameter '0.weight': is already split as [tp:S0], which (None, 'tp') does not allow"),
        ("addends", "parameter '0.weight': holds partial sums, [tp:P]; redistribute it to Shard or Replicate"),
        ("buffer", "buffer 'seen': is a DTensor; keep buffers plain, alike on every rank"),
        ("input", "input 'input': is a DTensor (Shard(dim=0),) on DeviceMesh((tp=2)"),
    ],
)
def test_dtensors_that_do_not_fit_are_refused(on_ranks: Ranks, case: str, words: str) -> None:
    for text in on_ranks(2, _refused, case):
        assert words in text


def _given_other_data(after: bool) -> None:
    plain = net()
    model = pw.shard(copy.deepcopy(plain), mesh={"dp": 2}, parameter_plan={"0.weight": ("dp", None)})
    x = torch.ones(8, 16, dtype=torch.float64)
    if after:
        model(x)
    for one in (plain, model):
        one[0].weight.data = torch.arange(512.0, dtype=torch.float64).reshape(32, 16)
    assert isinstance(model[0].weight, DTensor)
    assert_trains(plain, model)


@pytest.mark.parametrize("after", [False, True])
def test_a_parameter_takes_the_data_that_are_set(on_ranks: Ranks, after: bool) -> None:
    on_ranks(2, _given_other_data, after)
